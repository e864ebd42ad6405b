"""Moving generated counts into range, with as few counts as it takes.

What every cell must obey is a clamp. What a mean must obey is reached count by count: counts are
added as a Poisson process would add them (cells in proportion to their rates) and taken away as
thinning would (every count alike), until the bound holds. N cells, G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConstraintError
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._reference import CellValues

_ROUNDS = 12
_LEAST_RATE = 1e-6


@dataclass(kw_only=True)
class Draft:
    """Cells on their way to obeying: counts (whole except where an exact value was asked)."""

    counts: Float[Tensor, "cells genes"]
    library_size: Float[Tensor, " cells"]
    rate: Float[Tensor, "cells genes"]  # expected counts, where added counts go
    chance: Float[Tensor, "cells genes"]  # uniform numbers that decide the order
    number: Tensor

    def __post_init__(self) -> None:
        self.least = torch.zeros_like(self.counts)
        self.most = torch.full_like(self.counts, torch.inf)
        self.real = torch.zeros(self.counts.shape[1], dtype=torch.bool)

    @property
    def values(self) -> CellValues:
        """The cells as constraints see them, after the cast to float32."""
        log1p = torch.log1p(self.counts * (DEPTH / self.library_size[:, None]))
        return CellValues(
            log1p=log1p.float().double(), library_size=self.library_size, number=self.number
        )


def settle(draft: Draft, bounds: Sequence[Bounds]) -> Bool[Tensor, " genes"]:
    """Make counts obey all of the bounds, in place.

    Parameters
    ----------
    draft
        Cells.
    bounds
        What must hold.

    Returns
    -------
    Genes that became real-valued.

    Raises
    ------
    ConstraintError
        When they do not hold together after several rounds; names one that does not.
    """
    cellwise = [bound for bound in bounds if bound.per == "cell" and bound.separate]
    for bound in cellwise:
        _clamp(draft, bound)
    joint = [bound for bound in bounds if bound not in cellwise]
    for _ in range(_ROUNDS):
        waiting = [bound for bound in joint if not bool(bound.holds(draft.values).all())]
        if not waiting:
            break
        for bound in waiting:
            _reach(draft, bound)
    left = [bound for bound in bounds if not bool(bound.holds(draft.values).all())]
    if left:
        msg = (
            f"{left[0].text}: does not hold together with the other constraints for these cells. "
            "Ask for more cells, or loosen it."
        )
        raise ConstraintError(msg)
    return draft.real


def _clamp(draft: Draft, bound: Bounds) -> None:
    """Every cell into range; an exact value that is no count makes the gene real-valued."""
    genes = bound.genes
    if bound.exact and bound.unit != "counts":
        exact = torch.expm1(bound.clamped(draft.values)[:, genes]) / draft.values.depth
        draft.counts[:, genes] = exact
        draft.least[:, genes] = draft.most[:, genes] = exact
        draft.real[genes] = True
        return
    low, high = bound.counts(draft.values)
    low = torch.maximum(draft.least[:, genes], low.expand(len(draft.counts), -1))
    high = torch.minimum(draft.most[:, genes], high.expand(len(draft.counts), -1))
    draft.least[:, genes], draft.most[:, genes] = low, high
    draft.counts[:, genes] = torch.minimum(torch.maximum(draft.counts[:, genes], low), high)


def _reach(draft: Draft, bound: Bounds) -> None:
    """Counts added to or taken from the genes of each row until its mean is in range."""
    lower, upper = bound.limits(draft.values)
    for row, weight in enumerate(bound.weights.to(draft.counts)):
        columns = weight.nonzero()[:, 0]
        one = _Row(draft, bound, columns, weight[columns])
        for low, high in [(lower[..., row], upper[..., row])]:
            one.move(low, up=True)
            one.move(high, up=False)


@dataclass
class _Row:
    """One bounded row: the cells and genes whose weighted mean it is."""

    draft: Draft
    bound: Bounds
    columns: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        self.genes = self.bound.genes[self.columns]

    def move(self, limit: Tensor, *, up: bool) -> None:
        """Single counts, in passes of at most one count an entry."""
        for _ in range(200):
            if not self._pass(limit, up=up):
                return

    def _pass(self, limit: Tensor, *, up: bool) -> bool:
        draft, genes = self.draft, self.genes
        counts = draft.counts[:, genes]
        size = draft.library_size[:, None] / DEPTH
        step = 1.0 if up else -1.0
        free = (counts + step <= draft.most[:, genes]) & (counts + step >= draft.least[:, genes])
        free &= ~draft.real[genes] & (counts + step >= 0)
        share = self.weight / (len(counts) if self.bound.per == "population" else 1)
        gain = share * (self._unit(counts + step, size) - self._unit(counts, size)).abs()
        now = (
            (share * self._unit(counts, size)).flatten() if self.bound.per == "population" else None
        )
        rate = draft.rate[:, genes].clamp_min(_LEAST_RATE) if up else counts.clamp_min(_LEAST_RATE)
        arrival = torch.where(free, -draft.chance[:, genes].log() / rate, torch.inf)
        shape = (1, -1) if now is not None else counts.shape
        gain, arrival, free = (x.reshape(shape) for x in (gain, arrival, free))
        level = (share * self._unit(counts, size)).reshape(shape).sum(1)
        gap = (limit - level) if up else (level - limit)
        gap = torch.where(gap.isfinite(), gap, -1.0) - 1e-9
        order = arrival.argsort(dim=1, stable=True)
        sorted_gain = torch.where(free, gain, 0.0).gather(1, order)
        before = sorted_gain.cumsum(1) - sorted_gain
        chosen = (before < gap[:, None]) & free.gather(1, order)
        if not bool(chosen.any()):
            return False
        picked = torch.zeros_like(free).scatter(1, order, chosen).reshape(counts.shape)
        draft.counts[:, genes] = torch.where(picked, counts + step, counts)
        return True

    def _unit(self, counts: Tensor, size: Tensor) -> Tensor:
        if self.bound.unit == "counts":
            return counts
        depth = counts / size
        return torch.log1p(depth) if self.bound.unit == "log1p" else depth
