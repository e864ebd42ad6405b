"""From latent responses to counts: one plan per population, applied to any of its cells.

N cells, G genes.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._random import uniform
from perturbdiff.prior import TransportPlan, draw_counts, expected_log1p, solve_transport
from perturbdiff.prior._factors import ResponseFactors, copula_scores

_OWN_NOISE = 1  # uniform draws of a cell: 0 for its counts, 1 for its own part of the response
_FLAT = 1e-6


@dataclass(frozen=True, kw_only=True)
class CellDraws:
    """The random numbers of some cells, by gene."""

    count: Float[Tensor, "cells genes"]  # uniform
    own: Float[Tensor, "cells genes"]  # standard normal

    @classmethod
    def of(cls, keys: Int[Tensor, " cells"], lanes: Int[Tensor, " genes"]) -> "CellDraws":
        """Draws that belong to the cells and to the names of the genes."""
        own = torch.special.ndtri(uniform(keys, lanes, step=_OWN_NOISE))
        return cls(count=uniform(keys, lanes), own=own)


@dataclass(frozen=True, kw_only=True)
class ResponsePlan:
    """What is solved once for a population: standardisation, factors, and scales of transport."""

    centre: Float[Tensor, " genes"]
    spread: Float[Tensor, " genes"]
    factors: ResponseFactors
    dependence: Float[Tensor, " genes"]
    transport: TransportPlan

    def log_factor(
        self, deviation: Float[Tensor, "cells genes"], draws: CellDraws
    ) -> Float[Tensor, "cells genes"]:
        """Log of what each cell's rate is multiplied by."""
        standard = (deviation - self.centre) / self.spread
        return self.factors.log(copula_scores(standard, draws.own, dependence=self.dependence))

    def expected_log1p(
        self,
        deviation: Float[Tensor, "cells genes"],
        draws: CellDraws,
        *,
        counts: Int[Tensor, "cells genes"],
        library_size: Float[Tensor, " cells"],
    ) -> Float[Tensor, "cells genes"]:
        """Expected log1p value of every cell and gene, before any count is drawn."""
        log_factor = self.log_factor(deviation, draws)
        return expected_log1p(counts, library_size, self.transport, deviation_NG=log_factor)

    def draw(
        self,
        deviation: Float[Tensor, "cells genes"],
        draws: CellDraws,
        *,
        counts: Int[Tensor, "cells genes"],
        library_size: Float[Tensor, " cells"],
    ) -> Int[Tensor, "cells genes"]:
        """Counts of generated cells, from the counts of their partners."""
        log_factor = self.log_factor(deviation, draws)
        return draw_counts(
            counts, library_size, self.transport, uniform_NG=draws.count, deviation_NG=log_factor
        )


def solve_response(
    deviation: Float[Tensor, "cells genes"],
    draws: CellDraws,
    *,
    counts: Int[Tensor, "cells genes"],
    library_size: Float[Tensor, " cells"],
    target: Float[Tensor, " genes"],
    dispersion: Float[Tensor, " genes"],
    dependence: Float[Tensor, " genes"],
) -> ResponsePlan:
    """Plan of a population, from its pilot cells.

    Parameters
    ----------
    deviation, draws, counts, library_size
        Pilot cells: decoded latent responses, random numbers, partners.
    target
        Mean log1p value to reach per gene.
    dispersion
        Response dispersion per gene.
    dependence
        How closely each gene of a cell follows the cell's latent response, from 0 to 1.

    Returns
    -------
    A plan under which the mean of the pilot's expected log1p values is the target.
    """
    spread = deviation.std(0, correction=0)
    plan = ResponsePlan(
        centre=deviation.mean(0),
        spread=torch.where(spread > _FLAT, spread, 1.0),
        factors=ResponseFactors(dispersion),
        dependence=torch.where(spread > _FLAT, dependence, 0.0),
        transport=TransportPlan(
            adds=torch.zeros_like(target, dtype=torch.bool),
            scale=torch.ones_like(target),
            dispersion=torch.zeros_like(target),
        ),
    )
    transport = solve_transport(
        counts, library_size, target, deviation_NG=plan.log_factor(deviation, draws)
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
