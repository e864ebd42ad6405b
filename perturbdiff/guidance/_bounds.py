"""Lower and upper bounds on linear functions of a cell's values, or of a population's mean.

Most constraints are one of these. N cells, G genes, M bounded rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff.guidance._reference import CellValues

UnitName = Literal["log1p", "counts", "cp10k"]
Scope = Literal["cell", "population"]

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounds:
    """``lower <= weights @ values <= upper`` for every cell, or for the mean over a population.

    Values are log1p of counts per 10,000, counts, or counts per 10,000.
    """

    text: str
    genes: Int[Tensor, " genes"]
    weights: Float[Tensor, "rows genes"]
    lower: Float[Tensor, "#cells rows"]
    upper: Float[Tensor, "#cells rows"]
    unit: UnitName
    per: Scope
    spread: Float[Tensor, " rows"] | None = None  # what violations are measured in by ``energy``

    @cached_property
    def separate(self) -> bool:
        """Whether each row is one gene."""
        return self.weights.shape[0] == self.weights.shape[1] and bool(
            (self.weights == torch.eye(len(self.weights))).all()
        )

    @cached_property
    def exact(self) -> bool:
        """Whether a value is named and not a range."""
        return bool((self.lower == self.upper).all())

    @property
    def masks(self) -> bool:
        """Whether it is about single genes of single cells."""
        return self.per == "cell" and self.separate

    @property
    def projects(self) -> bool:
        """Whether cells can be made to obey."""
        return True

    @property
    def differentiable(self) -> bool:
        """Whether the energy has a gradient in the values."""
        return True

    @property
    def needed(self) -> Int[Tensor, " genes"]:
        """Columns that are looked at."""
        return self.genes

    def scaled(self, cells: CellValues) -> Self:
        """Bounds that measure violations by how the rows spread over these sets of cells."""
        rows = self.rows(cells)
        spread = rows.flatten(0, -2).std(0, correction=0)
        level = rows.abs().flatten(0, -2).mean(0)
        return replace(self, spread=spread.clamp_min(1e-3 + 1e-2 * level))

    def tightened(self, margin: Float[Tensor, " rows"]) -> Self:
        """Ranges smaller by a margin on each side, or their middle where they are narrower."""
        lower, upper = self.lower + margin, self.upper - margin
        middle = torch.where(lower > upper, (self.lower + self.upper) / 2, lower)
        return replace(self, lower=middle, upper=torch.where(lower > upper, middle, upper))

    def values(self, cells: CellValues) -> Float[Tensor, "*sets cells genes"]:
        """Values of the genes in the unit of the bounds."""
        log1p = cells.take(self.genes)
        if self.unit == "log1p":
            return log1p
        depth = torch.expm1(log1p)
        return depth if self.unit == "cp10k" else depth / cells.depth

    def rows(self, cells: CellValues) -> Float[Tensor, "*sets n rows"]:
        """Bounded rows, one line a cell, or one line for the population."""
        values = self.values(cells)
        values = values if self.per == "cell" else values.mean(-2, keepdim=True)
        return values if self.separate else values @ self.weights.mT.to(values)

    def limits(self, cells: CellValues) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of every line of :meth:`rows`."""
        if len(self.lower) == 1:
            return self.lower, self.upper
        number = cells.number.clamp_max(len(self.lower) - 1)  # cells that only fill up a set
        return self.lower[number], self.upper[number]

    def excess(self, cells: CellValues) -> Float[Tensor, "*sets n rows"]:
        """Signed distance to the allowed range; positive outside, in the unit of the bounds."""
        rows = self.rows(cells)
        lower, upper = self.limits(cells)
        return torch.maximum(lower - rows, rows - upper)

    def distance(self, cells: CellValues) -> Float[Tensor, "*sets n"]:
        """Largest excess, in units of the spread."""
        excess = self.excess(cells)
        return (excess if self.spread is None else excess / self.spread).amax(-1)

    def energy(self, cells: CellValues) -> Float[Tensor, "*sets"]:
        """Mean violation over rows and cells, in units of the spread; 0 where all hold."""
        excess = self.excess(cells).clamp_min(0)
        return (excess if self.spread is None else excess / self.spread).mean((-2, -1))

    def holds(self, cells: CellValues) -> Bool[Tensor, "*sets n"]:
        """Whether each cell, or the population, obeys within the tolerance."""
        lower, upper = self.limits(cells)
        size = torch.maximum(_finite(lower), _finite(upper))
        tolerance = TOLERANCE if self.unit == "log1p" else TOLERANCE * size.clamp_min(1.0)
        if self.per == "population":
            narrow = (upper - lower) < self._one_count(cells)
            tolerance = torch.where(narrow, self._one_count(cells), tolerance)
        return (self.excess(cells) <= tolerance).all(-1)

    def violation(self, cells: CellValues) -> float:
        """Largest excess beyond the range, in the unit of the bounds; 0 where all hold."""
        if bool(self.holds(cells).all()):
            return 0.0
        return float(self.excess(cells).amax().clamp_min(0))

    def reached(self, cells: CellValues) -> float:
        """Mean of the rows over everything."""
        return float(self.rows(cells).mean())

    def _one_count(self, cells: CellValues) -> Tensor:
        """What one count more in one cell changes the mean by, at most."""
        step = {"log1p": torch.log1p(cells.depth), "cp10k": cells.depth}.get(
            self.unit, torch.ones_like(cells.depth)
        )
        return step.amax((-2, -1))[..., None, None] / step.shape[-2] * self.weights.amax()

    def clamped(self, cells: CellValues) -> Float[Tensor, "*sets cells genes"]:
        """Log1p values of all genes with those of the rows moved into range, cell by cell."""
        lower, upper = self.limits(cells)
        if not self.separate or self.per == "population":
            rows = self.rows(cells)
            gap = (lower - rows).clamp_min(0) - (rows - upper).clamp_min(0)
            share = self.weights / self.weights.square().sum(1, keepdim=True)
            values = (self.values(cells) + gap @ share.to(gap)).clamp_min(0)
        else:
            values = torch.minimum(torch.maximum(self.values(cells), lower), upper)
        return cells.log1p.index_copy(-1, self.genes, self._as_log1p(values, cells))

    def _as_log1p(self, values: Tensor, cells: CellValues) -> Tensor:
        if self.unit == "log1p":
            return values
        return torch.log1p(values if self.unit == "cp10k" else values * cells.depth)

    def counts(self, cells: CellValues) -> tuple[Tensor, Tensor]:
        """Smallest and largest count of each cell and gene; a smallest above means none."""
        size = 1 / cells.depth
        lower, upper = self.limits(cells)
        if self.unit == "log1p":
            lower, upper = torch.expm1(lower) * size, torch.expm1(upper) * size
        elif self.unit == "cp10k":
            lower, upper = lower * size, upper * size
        slack = TOLERANCE * 1e-1
        return (lower * (1 - slack) - slack).ceil().clamp_min(0), (upper * (1 + slack)).floor()


def _finite(bound: Tensor) -> Tensor:
    return torch.where(bound.isfinite(), bound.abs(), 0.0)
