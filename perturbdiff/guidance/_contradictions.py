"""Finding wishes that cannot hold together, before anything is sampled.

What must hold is compared interval by interval: every gene has a range of counts that a cell may
have, and ranges for its mean in each unit. N control cells, G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log1p

import torch
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConstraintError
from perturbdiff.guidance._bounds import TOLERANCE, Bounds
from perturbdiff.guidance._logic import AllOf, AnyOf, Bound, InState, Sized, conjuncts
from perturbdiff.guidance._reference import CellValues, Reference


@dataclass
class _Range:
    """What is known of one number, and who says so."""

    lower: float = 0.0
    upper: float = float("inf")
    says_lower: str = "no value is below zero"
    says_upper: str = ""

    def meet(self, lower: float, upper: float, text: str) -> None:
        """Take in another range; a tolerance keeps rounding from making contradictions."""
        slack = TOLERANCE * max(1.0, abs(lower) if abs(lower) < float("inf") else 1.0)
        if lower > self.upper + slack:
            raise ConstraintError(_together(text, self.says_upper))
        if upper < self.lower - slack:
            raise ConstraintError(_together(text, self.says_lower))
        if lower > self.lower:
            self.lower, self.says_lower = lower, text
        if upper < self.upper:
            self.upper, self.says_upper = upper, text


def _together(text: str, other: str) -> str:
    return f"These cannot hold together: {text}; {other}. Drop or loosen one of them."


@dataclass
class _Known:
    """Ranges by (unit, scope, gene), each only on request."""

    largest: float  # library size
    ranges: dict[tuple[str, str, int], _Range] = field(default_factory=dict)

    def of(self, unit: str, scope: str, gene: int) -> _Range:
        most = {"log1p": log1p(DEPTH), "cp10k": DEPTH}.get(unit, self.largest)
        says = f"no gene has more than all counts of a cell, which is {most:.5g} {unit}"
        return self.ranges.setdefault((unit, scope, gene), _Range(upper=most, says_upper=says))


def check_together(bounds: Sequence[Bound], reference: Reference, *, n_cells: int) -> None:
    """Refuse wishes that contradict each other, and name two that do.

    Parameters
    ----------
    bounds
        Everything that is asked.
    reference
        Genes and library sizes.
    n_cells
        Cells that are asked for.

    Raises
    ------
    ConstraintError
        When something cannot hold, alone or beside another.
    """
    for bound in bounds:
        _check_any(bound, reference, n_cells=n_cells)
    every = conjuncts(bounds)
    single = [b for b in every if isinstance(b, Bounds) and b.separate]
    for bound in single:
        _check_cells_known(bound, n_cells=n_cells)
    for sized in [b for b in every if isinstance(b, Sized)]:
        reference = replace(reference, library_size=sized.clamped(reference.library_size))
    known = _Known(largest=float(reference.library_size.max()))
    for bound in sorted(single, key=lambda b: b.per):  # what each cell must be comes first
        _meet_genes(bound, known, reference)
    for joint in every:
        if isinstance(joint, Bounds) and not joint.separate:
            _meet_set(joint, known)
    _check_whole([b for b in every if isinstance(b, Sized)], unit="library size")
    _check_whole([b for b in every if isinstance(b, InState)], unit="share")


def _check_any(bound: Bound, reference: Reference, *, n_cells: int) -> None:
    """At least one member of every *any* can hold by itself."""
    if isinstance(bound, AllOf):
        for member in bound.members:
            _check_any(member, reference, n_cells=n_cells)
    if not isinstance(bound, AnyOf):
        return
    reasons = []
    for member in bound.members:
        try:
            check_together([member], reference, n_cells=n_cells)
        except ConstraintError as error:
            reasons.append(str(error))
    if len(reasons) == len(bound.members):
        msg = f"No member of {bound.text} can hold. {reasons[0]}"
        raise ConstraintError(msg)


def _check_cells_known(bound: Bounds, *, n_cells: int) -> None:
    if 1 < len(bound.lower) < n_cells:
        msg = (
            f"{bound.text}: values of {len(bound.lower)} cells for {n_cells} cells asked. "
            "Ask for no more cells than were observed, or give one row for all."
        )
        raise ConstraintError(msg)


def _meet_genes(bound: Bounds, known: _Known, reference: Reference) -> None:
    """Ranges of single genes; of what differs between cells, the extremes."""
    low, high = bound.lower.amin(0).tolist(), bound.upper.amax(0).tolist()
    if bound.per == "cell" and not bound.exact:
        _check_counts(bound, reference)
    for gene, lower, upper in zip(bound.genes.tolist(), low, high, strict=True):
        known.of(bound.unit, bound.per, gene).meet(lower, upper, bound.text)
        if bound.unit == "cp10k" and bound.per == "population":
            # the mean of logs is at most the log of the mean
            most = float(torch.tensor(upper, dtype=torch.float64).log1p())
            known.of("log1p", "population", gene).meet(0.0, most, bound.text)
        if bound.per == "cell":
            known.of(bound.unit, "population", gene).meet(lower, upper, bound.text)
            counts = _in_counts((lower, upper), bound.unit, reference.library_size)
            if bound.unit != "counts":
                known.of("counts", "cell", gene).meet(*counts, bound.text)
            for unit in {"log1p", "cp10k"} - {bound.unit}:
                wide = _from_counts(counts, unit, reference.library_size)
                known.of(unit, "population", gene).meet(*wide, bound.text)


def _check_counts(bound: Bounds, reference: Reference) -> None:
    """There is a count between the bounds for every library size."""
    size = reference.library_size.double()
    cells = CellValues(
        log1p=size.new_zeros(len(size), len(reference.genes)),
        library_size=size,
        number=torch.zeros(len(size), dtype=torch.int64),
    )
    low, high = bound.counts(cells)
    if bool((low > high).any()):
        gene = reference.genes[int(bound.genes[(low > high).any(0).nonzero()[0, 0]])]
        msg = (
            f"{bound.text}: no whole number of counts of {gene!r} lies in that range for some "
            "library sizes. Widen the range, or fix the value, which makes the gene real-valued."
        )
        raise ConstraintError(msg)


def _in_counts(ends: tuple[float, float], unit: str, size: Tensor) -> tuple[float, float]:
    """The widest range of counts that this can mean."""
    lower, upper = ends
    if unit == "counts":
        return lower, upper
    small, large = float(size.min()) / 1e4, float(size.max()) / 1e4
    if unit == "log1p":
        lower, upper = torch.expm1(torch.tensor([lower, upper], dtype=torch.float64)).tolist()
    return max(lower, 0.0) * small, upper * large


def _from_counts(counts: tuple[float, float], unit: str, size: Tensor) -> tuple[float, float]:
    depth = torch.tensor(
        [max(counts[0], 0.0) / float(size.max()) * 1e4, counts[1] / float(size.min()) * 1e4],
        dtype=torch.float64,
    )
    ends = (torch.log1p(depth) if unit == "log1p" else depth).tolist()
    return ends[0], ends[1]


def _meet_set(bound: Bounds, known: _Known) -> None:
    """The mean of a set lies between the means of what its genes may be."""
    scopes = ("cell",) if bound.per == "cell" else ("population",)
    ranges = [
        known.of(bound.unit, scope, gene) for scope in scopes for gene in bound.genes.tolist()
    ]
    weight = bound.weights[0].tolist()
    least = sum(w * r.lower for w, r in zip(weight, ranges, strict=True))
    most = sum(w * r.upper for w, r in zip(weight, ranges, strict=True))
    lower, upper = float(bound.lower.max()), float(bound.upper.min())
    if lower > most + TOLERANCE:
        raise ConstraintError(_together(bound.text, next(r.says_upper for r in ranges)))
    if upper < least - TOLERANCE:
        tight = max(ranges, key=lambda r: r.lower)
        raise ConstraintError(_together(bound.text, tight.says_lower))


def _check_whole(bounds: Sequence[Sized | InState], *, unit: str) -> None:
    """Library sizes, and shares of one state, must overlap."""
    ranges: dict[str, _Range] = {}
    for bound in bounds:
        of_state = bound.text.split(" = ")[0].split(" >= ")[0].split(" <= ")[0]
        key = unit if isinstance(bound, Sized) else of_state
        ranges.setdefault(key, _Range()).meet(bound.lower, bound.upper, bound.text)
