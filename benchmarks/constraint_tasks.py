"""Wishes from easy to rare, and how well cells meet them.

N cells, S cells a set, G genes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

import perturbdiff as ptd
from perturbdiff.guidance import Constraint
from perturbdiff.metrics import energy_distance

SET_SIZE = 32
Statistic = Callable[[np.ndarray], float]  # of one set, cells × genes; more is rarer


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of constraint on a set, by a threshold on a statistic of it."""

    name: str
    statistic: Statistic
    make: Callable[[float], Constraint]
    masks: bool = False  # a model that writes gene after gene can meet it by masking


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
            statistic=lambda x: float(x[:, top[4]].min()),
            make=lambda t: ptd.AtLeast(names[4], max(t, 0.0)),
            masks=True,
        ),
    ]


def tasks(found: Sequence[Kind], sets_NSG: np.ndarray, rates: Sequence[float]) -> list[Task]:
    """Thresholds that the given shares of unconstrained sets reach."""
    out = []
    for kind in found:
        values = np.array([kind.statistic(one) for one in sets_NSG])
        if kind.masks:  # no set has it in every cell: the rate is that of a cell
            out.append(Task(kind=kind, rate=0.0, threshold=1e-3))
            continue
        for rate in rates:
            threshold = float(np.quantile(values, 1 - rate))
            if rate < 1 / len(values) or threshold <= values.min():
                continue
            out.append(
                Task(kind=kind, rate=float((values >= threshold).mean()), threshold=threshold)
            )
    return out


def conditional(task: Task, sets_NSG: np.ndarray) -> np.ndarray | None:
    """Cells of the true sets that obey, by rejection; None where fewer than three do."""
    obeys = task.obeys(sets_NSG)
    if obeys.sum() < 3:
        return None
    return sets_NSG[obeys].reshape(-1, sets_NSG.shape[2])


def distance(cells_NG: np.ndarray, truth_NG: np.ndarray | None, axes: np.ndarray) -> float | None:
    """Energy distance along principal axes."""
    if truth_NG is None or len(cells_NG) < 2:
        return None
    return float(energy_distance(cells_NG @ axes, truth_NG @ axes))


def best_of(obeys: np.ndarray, n: int) -> float:
    """Share of wanted sets of which one of n candidates obeys."""
    whole = len(obeys) // n * n
    return float(obeys[:whole].reshape(-1, n).any(1).mean())


def ways() -> dict[str, Any]:
    """Ways of enforcing at about four trajectories, and the cheap ones at one."""
    return {
        "soft": ptd.Soft(),
        "soft, through the network": ptd.Soft(through_network=True),
        "hard": ptd.Hard(),
        "soft and hard": [ptd.Soft(), ptd.Hard()],
        "particles": ptd.Particles(n=4),
        "branching": ptd.Branch(k=7, share=9),
        "depth first": ptd.DepthFirst(budget=72),
        "best of 4": ptd.BestOf(n=4),
        "best of 4, 16 draws each": ptd.BestOf(n=4, redraws=16),
        "soft, best of 4": [ptd.Soft(), ptd.BestOf(n=4, redraws=16)],
    }
