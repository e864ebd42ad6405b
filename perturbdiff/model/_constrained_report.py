"""What became of each constraint: required, reached, what is left, what it cost.

N cells, G genes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.spatial.distance import cdist
from torch import Tensor

from perturbdiff._errors import VerifierError
from perturbdiff.data import Condition
from perturbdiff.guidance import CellValues
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import Bound, InState, Sized
from perturbdiff.guidance._search import Node
from perturbdiff.model._constrained_course import Passing
from perturbdiff.prior import ConditionSummary

_N_AXES = 30
_MOST_CELLS = 1000  # the rest adds time and no precision
_WHOLE_SCOPE: Final = "population"
COLUMNS: Final = (
    "condition", "constraint", "unit", "per", "method", "promised", "required_lower",
    "required_upper", "reached_before", "reached", "violation_before", "violation",
    "satisfied_before", "satisfied", "satisfied_sets", "set_evaluations", "cost",
    "effective_particles", "energy_distance", "energy_distance_to_truth", "supported", "outside",
)  # fmt: skip


@contextmanager
def naming(condition: Condition) -> Iterator[None]:
    """Say of which condition the cells were when the user's own code failed."""
    try:
        yield
    except VerifierError as error:
        msg = f"Cells of {condition}: {error}"
        raise VerifierError(msg) from error.__cause__


def row_of(bound: Bound, before: CellValues, after: CellValues, *, set_size: int) -> dict[str, Any]:
    """Required, reached, and what is left of one constraint."""
    lower, upper = _required(bound)
    per = bound.per if isinstance(bound, Bounds) else _WHOLE_SCOPE
    per = "cell" if isinstance(bound, Sized) else per
    return {
        "constraint": bound.text,
        "unit": _unit(bound),
        "per": per,
        "required_lower": lower,
        "required_upper": upper,
        "reached_before": bound.reached(before),
        "reached": bound.reached(after),
        "violation_before": bound.violation(before),
        "violation": bound.violation(after),
        "satisfied_before": bool(bound.holds(before).all()),
        "satisfied": bool(bound.holds(after).all()),
        "satisfied_sets": _share_of_sets(bound, after, set_size),
    }


def _required(bound: Bound) -> tuple[float, float]:
    if isinstance(bound, Bounds):
        return float(bound.lower.mean()), float(bound.upper.mean())
    if isinstance(bound, InState | Sized):
        return bound.lower, bound.upper
    return 1.0, 1.0  # share that holds


def _unit(bound: Bound) -> str:
    if isinstance(bound, Bounds):
        return bound.unit
    return "counts" if isinstance(bound, Sized) else "share"


def _share_of_sets(bound: Bound, cells: CellValues, size: int) -> float:
    """Share of the full sets that obey by themselves."""
    n_sets = len(cells.log1p) // size
    if n_sets == 0:
        return float("nan")
    return float(bound.holds(in_sets(cells, size)).all(-1).double().mean())


def in_sets(cells: CellValues, size: int) -> CellValues:
    """The cells of full sets, set by set."""
    n = len(cells.log1p) // size
    return CellValues(
        log1p=cells.log1p[: n * size].view(n, size, -1),
        library_size=cells.library_size[: n * size].view(n, size),
        number=cells.number[: n * size].view(n, size),
    )


def moved_by(
    before: CellValues, after: CellValues, loadings: Float[np.ndarray, "genes axes"]
) -> float:
    """Energy distance between unconstrained and constrained cells along principal axes.

    A constrained cell has the partner and the noise of the unconstrained cell of its number, so
    such pairs, like self-distances, are left out: they would make the distance negative.
    """
    now, then = (
        cells.log1p.numpy()[:_MOST_CELLS] @ loadings[:, :_N_AXES] for cells in (after, before)
    )
    n = len(now)
    if n < 2:
        return float("nan")
    across = cdist(now, then)
    total = 2 * (across.sum() - across.trace()) - cdist(now, now).sum() - cdist(then, then).sum()
    return float(total / (n * (n - 1)))


def support(
    bound: Bound,
    before: CellValues,
    *,
    control: Float[Tensor, "controls genes"],
    known: Sequence[ConditionSummary],
    set_size: int,
) -> tuple[bool, float]:
    """Whether what is asked was ever seen, and how far outside it lies.

    Means are compared with the means of the training conditions and their control cells, what
    cells must obey with control and unconstrained cells; the distance is in standard deviations of
    these. Other constraints are within support when some unconstrained set obeys; their distance
    is the least violation of any.
    """
    if isinstance(bound, Bounds):
        return _bounds_support(bound, before, control=control, known=known)
    if isinstance(bound, InState):
        inside = bound.inside(before).double().mean()
        missing = (bound.lower > 0 and inside == 0) or (bound.upper < 1 and inside == 1)
        return not missing, 1.0 if missing else 0.0
    sets = in_sets(before, min(set_size, len(before.log1p)))
    least = float(bound.distance(sets).flatten().amin().clamp_min(0))
    return bool(bound.holds(sets).any()), least


def _bounds_support(
    bound: Bounds, before: CellValues, *, control: Tensor, known: Sequence[ConditionSummary]
) -> tuple[bool, float]:
    weights = bound.weights
    if bound.per == "population":
        means = [m for summary in known for m in (summary.mean, summary.context.mean)]
        seen = torch.from_numpy(np.stack([control.mean(0).numpy(), *means]))[:, bound.genes]
        if bound.unit != "log1p":  # means of counts were not kept: those of log values stand in
            seen = torch.expm1(seen)
            if bound.unit == "counts":
                seen = seen / before.depth.mean()
        now = bound.rows(before).flatten(0, -2)
        rows = torch.cat([seen @ weights.mT, now])
    else:
        own = CellValues(
            log1p=control,
            library_size=before.library_size.mean().expand(len(control)),
            number=torch.zeros(len(control), dtype=torch.int64),
        )
        rows = torch.cat([bound.rows(own), bound.rows(before)])
    least, most = rows.amin(0), rows.amax(0)
    gap = torch.maximum(bound.lower - most, least - bound.upper).clamp_min(0)
    outside = gap / rows.std(0, correction=0).clamp_min(1e-3)
    return bool((outside <= 0).all()), float(outside.amax())


def course_table(passed: Sequence[Passing], texts: Sequence[str]) -> pd.DataFrame:
    """Satisfaction through the run: one row a constraint and step, over all candidates."""
    columns = ["constraint", "step", "sigma", "energy", "satisfied"]
    if not passed:
        return pd.DataFrame({name: [] for name in columns})
    table = pd.DataFrame([asdict(one) for one in passed])
    for name in ("energy", "satisfied"):
        table[name] *= table["n_sets"]
    summed = table.groupby(["constraint", "step"], sort=True).agg(
        {"sigma": "first", "energy": "sum", "satisfied": "sum", "n_sets": "sum"}
    )
    for name in ("energy", "satisfied"):
        summed[name] /= summed["n_sets"]
    summed = summed.reset_index()
    summed["constraint"] = [texts[number] for number in summed["constraint"]]
    return summed[columns]


def tree_table(tree: Sequence[Node]) -> pd.DataFrame:
    """Every stretch that a search ran, and what it cost."""
    names = ["owner", "node", "parent", "first", "last", "calls", "energy", "satisfied", "kept"]
    nodes = [asdict(node) for node in tree]
    table = pd.DataFrame(nodes) if nodes else pd.DataFrame({name: [] for name in names})
    return table[names].rename(columns={"owner": "set"})
