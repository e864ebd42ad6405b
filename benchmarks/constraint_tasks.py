"""Wishes from easy to rare, and how well cells meet them.

N cells, S cells a set, G genes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

import perturbdiff as ptd
from perturbdiff.guidance import Constraint
from perturbdiff.metrics import energy_distance

SET_SIZE = 32
MOST_CELLS = 3200  # of the truth under a constraint, for distances
Statistic = Callable[[np.ndarray], float]  # of one set, cells × genes; more is rarer


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of constraint on a set, by a threshold on a statistic of it."""

    name: str
    statistic: Statistic
    make: Callable[[float], Constraint]
    gene: int | None = None  # every cell shall obey by this gene alone: a mask can meet it


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind at one threshold."""

    kind: Kind
    rate: float
    threshold: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.kind.name}, {self.rate:.0%}"

    def obeys(self, sets_NSG: np.ndarray) -> np.ndarray:
        """Whether each set obeys."""
        found = [self.kind.statistic(one) for one in sets_NSG]
        return np.array(found) >= self.threshold - 1e-6

    def conditional(self, sets_NSG: np.ndarray) -> np.ndarray | None:
        """Cells under the constraint, by rejection; None where fewer than three sets obey.

        Sets are rejected, or single cells where every cell shall obey by itself.
        """
        if self.kind.gene is not None:
            cells = sets_NSG.reshape(-1, sets_NSG.shape[2])
            kept = cells[cells[:, self.kind.gene] >= self.threshold - 1e-6]
        else:
            kept = sets_NSG[self.obeys(sets_NSG)].reshape(-1, sets_NSG.shape[2])
        return kept[:MOST_CELLS] if len(kept) >= 3 * SET_SIZE else None

    def share(self, sets_NSG: np.ndarray) -> float:
        """Share of sets that obey, or of cells where every cell shall."""
        if self.kind.gene is None:
            return float(self.obeys(sets_NSG).mean())
        return float((sets_NSG[..., self.kind.gene] >= self.threshold - 1e-6).mean())


def kinds(genes: Sequence[str], cells_NG: np.ndarray, control_RG: np.ndarray) -> list[Kind]:
    """Kinds of constraints on the genes that respond most, from unconstrained cells."""
    shift = cells_NG.mean(0) - control_RG.mean(0)
    order = np.argsort(-np.abs(shift) * cells_NG.std(0))
    top = [int(number) for number in order[:12]]
    names = [genes[number] for number in top]
    one, other = top[0], top[1]
    members = sorted(top[2:10])
    base = float(control_RG[:, members].mean())
    seen = np.concatenate([control_RG, cells_NG[: len(control_RG)]])
    label = np.repeat(["rest", "treated"], [len(control_RG), len(seen) - len(control_RG)])
    classifier = LogisticRegression(max_iter=500, C=0.01).fit(seen[:, top], label)
    spread = [
        float(cells_NG.reshape(-1, SET_SIZE, cells_NG.shape[1])[:, :, g].mean(1).std())
        for g in (one, other)
    ]
    middle = [float(cells_NG[:, g].mean()) for g in (one, other)]

    def both(z: float) -> Constraint:
        pairs = zip(names[:2], middle, spread, strict=True)
        return ptd.All(
            [ptd.AtLeast(name, max(m + z * s, 0.0), per="population") for name, m, s in pairs]
        )

    def together(cells: np.ndarray) -> float:
        return float(((cells[:, top[2]] > 0) & (cells[:, top[3]] > 0)).mean())

    def of_threshold(threshold: float) -> Constraint:
        return ptd.Verifier(
            lambda log1p, _: max(threshold - together_named(log1p), 0.0),
            genes=[names[2], names[3]],
            name=f"{names[2]} with {names[3]}",
        )

    def together_named(log1p: np.ndarray) -> float:
        return float(((log1p[:, 0] > 0) & (log1p[:, 1] > 0)).mean())

    return [
        Kind(
            name="mean of a gene at least",
            statistic=lambda x: float(x[:, one].mean()),
            make=lambda t: ptd.AtLeast(names[0], t, per="population"),
        ),
        Kind(
            name="mean of a gene at most",
            statistic=lambda x: -float(x[:, other].mean()),
            make=lambda t: ptd.AtMost(names[1], -t, per="population"),
        ),
        Kind(
            name="mean of a gene set",
            statistic=lambda x: float(x[:, members].mean()),
            make=lambda t: ptd.GeneSetShift(
                [genes[number] for number in members], t - base, relation="at_least"
            ),
        ),
        Kind(
            name="share in a state",
            statistic=lambda x: float((classifier.predict(x[:, top]) == "treated").mean()),
            make=lambda t: ptd.StateFraction(
                classifier, "treated", min(t, 1.0), relation="at_least", genes=names
            ),
        ),
        Kind(
            name="all of two",
            statistic=lambda x: min(
                (float(x[:, g].mean()) - m) / s
                for g, m, s in zip((one, other), middle, spread, strict=True)
            ),
            make=both,
        ),
        Kind(name="two genes together (a function)", statistic=together, make=of_threshold),
        Kind(
            name="a gene in every cell",
            statistic=lambda x: float(x[:, top[0]].min()),
            make=lambda t: ptd.AtLeast(names[0], t),
            gene=top[0],
        ),
    ]


def tasks(found: Sequence[Kind], sets_NSG: np.ndarray, rates: Sequence[float]) -> list[Task]:
    """Thresholds that the given shares of unconstrained sets, or cells, reach."""
    out = []
    for kind in found:
        if kind.gene is None:
            values = np.array([kind.statistic(one) for one in sets_NSG])
        else:
            values = sets_NSG[..., kind.gene].ravel()
        for rate in rates:
            threshold = float(np.quantile(values, 1 - rate))
            if rate >= 1 / len(values) and threshold > values.min():
                out.append(Task(kind=kind, rate=rate, threshold=threshold))
    return out


def distance(cells_NG: np.ndarray, truth_NG: np.ndarray | None, axes: np.ndarray) -> float | None:
    """Energy distance along principal axes."""
    if truth_NG is None or len(cells_NG) < 2:
        return None
    return float(energy_distance(cells_NG @ axes, truth_NG @ axes))


def best_of(n_obeying: int, n_drawn: int, n: int) -> float:
    """Chance that one of n draws obeys, from all choices of n of those that were drawn."""
    return 1 - comb(n_drawn - n_obeying, n) / comb(n_drawn, n)


def first_that_obey(task: Task, sets_NSG: np.ndarray, n: int) -> np.ndarray:
    """Of every n sets the first that obeys, else the one that comes nearest."""
    values = np.array([task.kind.statistic(one) for one in sets_NSG])
    obeys, kept = task.obeys(sets_NSG), []
    for start in range(0, len(sets_NSG) - n + 1, n):
        own = slice(start, start + n)
        found = obeys[own].argmax() if obeys[own].any() else values[own].argmax()
        kept.append(sets_NSG[start + int(found)])
    return np.stack(kept)


STEERED = ("soft", "soft, best of 4")
SEARCHES = ("particles", "branching", "depth first", "best of 16, 16 draws each")


def ways() -> dict[str, Any]:
    """Ways of enforcing: searches of 8 to 16 trajectories, the others of one to four."""
    return {
        "soft": ptd.Soft(),
        "hard": ptd.Hard(),
        "particles": ptd.Particles(n=8),
        "branching": ptd.Branch(k=16, share=6),
        "depth first": ptd.DepthFirst(budget=144, redraws=32),
        "best of 16, 16 draws each": ptd.BestOf(n=16, redraws=16),
        "soft, best of 4": [ptd.Soft(), ptd.BestOf(n=4, redraws=16)],
    }
