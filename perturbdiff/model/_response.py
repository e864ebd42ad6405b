"""From latent responses to counts: one plan per population, applied to any of its cells.

N cells, G genes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._random import uniform
from perturbdiff.prior import TransportPlan, draw_counts, expected_log1p, solve_transport
from perturbdiff.prior._factors import ResponseFactors, copula_scores

_OWN_NOISE = 1  # uniform draws of a cell: 0 for its counts, 1 for its own part of the response
_FLAT = 1e-6


@dataclass(frozen=True, kw_only=True)
class ExpectedCells:
    """Cells whose counts are expected, not drawn: latent responses decoded, and their partners."""

    deviation: Float[Tensor, "cells genes"]
    counts: Int[Tensor, "cells genes"]  # of the partners
    library_size: Float[Tensor, " cells"]
    noise: Float[Tensor, "cells genes"]  # standard normal

    @classmethod
    def make(
        cls,
        deviation: Float[Tensor, "cells genes"],
        counts: Int[Tensor, "cells genes"],
        library_size: Float[Tensor, " cells"],
        *,
        keys: Int[Tensor, " cells"],
        lanes: Int[Tensor, " genes"],
    ) -> Self:
        """Cells whose random numbers belong to their keys and to the names of the genes."""
        return cls(
            deviation=deviation,
            counts=counts,
            library_size=library_size,
            **cls._numbers(keys, lanes),
        )

    @staticmethod
    def _numbers(keys: Tensor, lanes: Tensor) -> dict[str, Tensor]:
        """Random numbers of each cell and gene."""
        return {"noise": torch.special.ndtri(uniform(keys, lanes, step=_OWN_NOISE))}

    def of_genes(self, genes: Bool[Tensor, " genes"]) -> Self:
        """The same cells on some of the genes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: v[:, genes] for k, v in values.items() if v.dim() == 2})


@dataclass(frozen=True, kw_only=True)
class ResponseCells(ExpectedCells):
    """Cells whose counts can be drawn too."""

    uniform: Float[Tensor, "cells genes"]

    @staticmethod
    def _numbers(keys: Tensor, lanes: Tensor) -> dict[str, Tensor]:
        return {**ExpectedCells._numbers(keys, lanes), "uniform": uniform(keys, lanes)}


@dataclass(frozen=True, kw_only=True)
class ResponsePlan:
    """What is solved once for a population: standardisation, factors, and scales of transport."""

    centre: Float[Tensor, " genes"]
    spread: Float[Tensor, " genes"]
    factors: ResponseFactors
    dependence: Float[Tensor, " genes"]
    transport: TransportPlan

    @classmethod
    def of_parts(cls, parts: Sequence[Self]) -> Self:
        """The plan of all genes from those of some after others."""

        def joined(pick: Callable[[Self], Tensor]) -> Tensor:
            return torch.cat([pick(part) for part in parts])

        return cls(
            centre=joined(lambda part: part.centre),
            spread=joined(lambda part: part.spread),
            factors=ResponseFactors(joined(lambda part: part.factors.dispersion)),
            dependence=joined(lambda part: part.dependence),
            transport=TransportPlan(
                adds=joined(lambda part: part.transport.adds),
                scale=joined(lambda part: part.transport.scale),
                dispersion=joined(lambda part: part.transport.dispersion),
            ),
        )

    def log_factor(self, cells: ExpectedCells) -> Float[Tensor, "cells genes"]:
        """Log of what each cell's rate is multiplied by."""
        standard = (cells.deviation - self.centre) / self.spread
        return self.factors.log(copula_scores(standard, cells.noise, dependence=self.dependence))

    def expected_log1p(self, cells: ExpectedCells) -> Float[Tensor, "cells genes"]:
        """Expected log1p value of every cell and gene, before any count is drawn."""
        return expected_log1p(
            cells.counts,
            cells.library_size,
            self.transport,
            deviation_NG=self.log_factor(cells),
        )

    def draw(self, cells: ResponseCells) -> Int[Tensor, "cells genes"]:
        """Counts of generated cells, from the counts of their partners."""
        return draw_counts(
            cells.counts,
            cells.library_size,
            self.transport,
            uniform_NG=cells.uniform,
            deviation_NG=self.log_factor(cells),
        )


def solve_response(
    pilot: ExpectedCells,
    *,
    target: Float[Tensor, " genes"],
    dispersion: Float[Tensor, " genes"],
    dependence: Float[Tensor, " genes"],
) -> ResponsePlan:
    """Plan of a population, from its pilot cells.

    Parameters
    ----------
    pilot
        Cells that stand for the population.
    target
        Mean log1p value to reach per gene.
    dispersion
        Response dispersion per gene.
    dependence
        How closely each gene follows the cell's latent response, from 0 to 1.

    Returns
    -------
    A plan under which the mean of the pilot's expected log1p values is the target.
    """
    spread = pilot.deviation.std(0, correction=0)
    flat = spread <= _FLAT * pilot.deviation.abs().amax(0)
    plan = ResponsePlan(
        centre=pilot.deviation.mean(0),
        spread=torch.where(flat, 1.0, spread),
        factors=ResponseFactors(dispersion),
        dependence=torch.where(flat, 0.0, dependence),
        transport=TransportPlan(
            adds=torch.zeros_like(target, dtype=torch.bool),
            scale=torch.ones_like(target),
            dispersion=torch.zeros_like(target),
        ),
    )
    transport = solve_transport(
        pilot.counts, pilot.library_size, target, deviation_NG=plan.log_factor(pilot)
    )
    return replace(plan, transport=transport)


class PlanCache:
    """Plans of the populations asked about last, at most ``size`` of them."""

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self._plans: OrderedDict[tuple[object, ...], tuple[Tensor, ResponsePlan]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forget all of them."""
        self._plans.clear()

    def get(self, key: tuple[object, ...]) -> tuple[Tensor, ResponsePlan] | None:
        """Pilot's latent responses and plan, if they are still there."""
        if key in self._plans:
            self._plans.move_to_end(key)
        return self._plans.get(key)

    def put(self, key: tuple[object, ...], latent: Tensor, plan: ResponsePlan) -> None:
        """Keep a plan, and forget the one not used for longest."""
        self._plans[key] = latent, plan
        while len(self._plans) > self.size:
            self._plans.popitem(last=False)
