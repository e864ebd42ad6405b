"""The end of a constrained run: counts are drawn, and brought to obey what was promised.

N cells, G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConstraintError
from perturbdiff._random import forked_keys, stream_key, uniform
from perturbdiff.guidance import CellValues
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import Bound, InState, Sized
from perturbdiff.guidance._settling import Draft, settle
from perturbdiff.model._constrained_plan import bounded_genes, of_genes, truncated_uniform
from perturbdiff.model._response import ResponseCells, ResponsePlan

_SETTLE, _SCALE, _POOL = 2, 3, 16  # steps of uniform numbers; turns of the pool


def as_values(counts: Float[Tensor, "cells genes"], size: Tensor) -> CellValues:
    """Cells as constraints see them, after the cast to float32."""
    log1p = torch.log1p(counts * (DEPTH / size[:, None])).float().double()
    return CellValues(log1p=log1p, library_size=size, number=torch.arange(len(counts)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Finish:
    """Draws the counts of finished cells, and projects them where that was asked.

    Parameters
    ----------
    name, seed
        Seed of the condition, and of all draws.
    plan
        Of the population, its means already moved.
    pilot
        Cells that others can be made like, where cells are exchanged.
    hard
        What is promised.
    keys
        Noise stream of each cell.
    lanes
        Noise lane of each gene.
    """

    name: str
    seed: int
    plan: ResponsePlan
    pilot: ResponseCells
    hard: Sequence[Bound]
    keys: Int[Tensor, " cells"]
    lanes: Int[Tensor, " genes"]

    def __call__(self, cells: ResponseCells) -> tuple[Tensor, Tensor, Bool[Tensor, " genes"]]:
        """Counts, library sizes, and the genes that became real-valued."""
        bounds = [bound for bound in self.hard if isinstance(bound, Bounds)]
        counts = drawn_within(cells, self.plan, bounds).double()
        size = cells.library_size
        if not self.hard:
            return counts.long(), size, torch.zeros(counts.shape[1], dtype=torch.bool)
        rate = torch.expm1(self.plan.expected_log1p(cells)) * size[:, None] / DEPTH
        draft = Draft(
            counts=counts,
            library_size=size,
            rate=rate,
            chance=uniform(self.keys, self.lanes, step=_SETTLE),
            number=torch.arange(len(counts)),
        )
        for sized in self.hard:
            if isinstance(sized, Sized):
                _resize(draft, sized, chance=uniform(self.keys, self.lanes, step=_SCALE))
        states = [bound for bound in self.hard if isinstance(bound, InState)]
        for state in states:
            self._exchange(draft, state)
        real = settle(draft, bounds)
        for state in states:
            if not bool(state.holds(draft.values).all()):
                msg = f"{state.text}: does not hold together with the constraints on its genes."
                raise ConstraintError(msg)
        counts = draft.counts if bool(real.any()) else draft.counts.round().long()
        return counts, draft.library_size, real

    def _exchange(self, draft: Draft, bound: InState) -> None:
        """Cells of the wrong state exchanged for others that the model makes, one by one."""
        inside = bound.inside(draft.values)
        least, most = bound.allowed(len(inside))
        surplus = int(inside.sum()) - most
        wanted = surplus < 0 and int(inside.sum()) < least
        number = least - int(inside.sum()) if wanted else surplus
        if number <= 0:
            return
        out = (inside != wanted).nonzero()[:, 0]
        order = draft.chance[out, 0].argsort(stable=True)
        place = out[order][:number]
        key = torch.tensor(stream_key(self.seed, "pool", self.name))
        keys = forked_keys(
            key.expand(len(self.pilot.counts)), torch.arange(len(self.pilot.counts)) + 1
        )
        filled = 0
        for turn in range(_POOL):
            again = replace(
                self.pilot,
                uniform=uniform(keys, self.lanes, step=2 * turn),
                noise=torch.special.ndtri(uniform(keys, self.lanes, step=2 * turn + 1)),
            )
            counts = self.plan.draw(again).double()
            fits = bound.inside(as_values(counts, again.library_size)) == wanted
            rows = fits.nonzero()[:, 0][: number - filled]
            into = place[filled : filled + len(rows)]
            draft.counts[into] = counts[rows]
            draft.library_size = draft.library_size.index_copy(0, into, again.library_size[rows])
            filled += len(rows)
            if filled == number:
                return
        msg = (
            f"{bound.text}: of {_POOL * len(self.pilot.counts)} cells that the model makes, only "
            f"{filled} would help and {number} are needed. Ask for a share nearer to "
            f"{float(inside.double().mean()):.3g}."
        )
        raise ConstraintError(msg)


def drawn_within(
    cells: ResponseCells, plan: ResponsePlan, bounds: Sequence[Bounds]
) -> Int[Tensor, "cells genes"]:
    """Counts; those that must lie in a range are drawn from their distribution within it."""
    chosen = bounded_genes(bounds, cells.counts.shape[1])
    if not bool(chosen.any()):
        return plan.draw(cells)
    genes = chosen.nonzero()[:, 0]
    place = torch.full((len(chosen),), -1)
    place[genes] = torch.arange(len(genes))
    low = torch.zeros(len(cells.counts), len(genes), dtype=torch.float64)
    high = torch.full_like(low, torch.inf)
    values = as_values(cells.counts.double(), cells.library_size)
    for bound in bounds:
        if bound.per == "cell" and bound.separate and not bound.exact:
            least, most = bound.counts(values)
            columns = place[bound.genes]
            low[:, columns] = torch.maximum(low[:, columns], least.expand(len(low), -1))
            high[:, columns] = torch.minimum(high[:, columns], most.expand(len(low), -1))
    part = of_genes(plan, genes)
    moved = truncated_uniform(cells.of_genes(chosen), part, low=low, high=high)
    within = cells.uniform.index_copy(1, genes, moved)
    return plan.draw(replace(cells, uniform=within))


def _resize(draft: Draft, bound: Sized, *, chance: Float[Tensor, "cells genes"]) -> None:
    """Library sizes into range, counts with them; rounding is random and right on average."""
    size = bound.clamped(draft.library_size)
    counts = draft.counts * (size / draft.library_size)[:, None]
    draft.counts = (counts + chance).floor()
    draft.library_size = size
