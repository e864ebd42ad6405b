"""The plan of a population, moved so that what must hold on average holds on average.

N cells, G genes, M bounded rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.model._response import ResponseCells, ResponsePlan
from perturbdiff.prior import TransportPlan, solve_transport
from perturbdiff.prior._factors import ResponseFactors

_HALVINGS = 30
_MOST_LOG1P = float(np.log1p(DEPTH))
_FAR = 1 - 1e-15


def of_genes(plan: ResponsePlan, genes: Int[Tensor, " kept"]) -> ResponsePlan:
    """The same plan on some of the genes."""
    transport = plan.transport
    return ResponsePlan(
        centre=plan.centre[genes],
        spread=plan.spread[genes],
        factors=ResponseFactors(plan.factors.dispersion[genes]),
        dependence=plan.dependence[genes],
        transport=TransportPlan(
            adds=transport.adds[genes],
            scale=transport.scale[genes],
            dispersion=transport.dispersion[genes],
        ),
    )


def expected(cells: ResponseCells, plan: ResponsePlan, unit: str) -> Float[Tensor, "cells genes"]:
    """Expected values of every cell in log1p, counts, or counts per 10,000."""
    if unit == "log1p":
        return plan.expected_log1p(cells)
    size = cells.library_size[:, None] / DEPTH
    rate = plan.transport.scale * plan.log_factor(cells).exp()
    added = cells.counts + rate * size
    counts = torch.where(plan.transport.adds, added, cells.counts * rate.clamp_max(1.0))
    return counts if unit == "counts" else counts / size


def retarget(
    plan: ResponsePlan,
    pilot: ResponseCells,
    bounds: Sequence[Bounds],
    *,
    target: Float[Tensor, " genes"],
) -> ResponsePlan:
    """The plan under which the pilot's expected means obey the bounds on means.

    Parameters
    ----------
    plan, pilot
        As solved without constraints.
    bounds
        Those per population.
    target
        Mean log1p values that the plan has.

    Returns
    -------
    A plan that differs in the genes of violated bounds only.
    """
    wanted = target.clone()
    for bound in bounds:
        if bound.per != "population":
            continue
        if bound.separate and bound.unit == "log1p":
            lower, upper = bound.lower[0].to(wanted), bound.upper[0].to(wanted)
            wanted[bound.genes] = wanted[bound.genes].clamp(lower, upper)
        elif bound.separate:
            wanted[bound.genes] = _mean_for(plan, pilot, bound, now=wanted[bound.genes])
        else:
            wanted = _set_moved(wanted, pilot, bound)
    return with_target(plan, pilot, old=target, new=wanted)


def with_target(
    plan: ResponsePlan,
    pilot: ResponseCells,
    *,
    old: Float[Tensor, " genes"],
    new: Float[Tensor, " genes"],
) -> ResponsePlan:
    """The plan solved again for the genes whose mean shall be another."""
    moved = (new - old).abs() > 1e-9
    if not bool(moved.any()):
        return plan
    genes = moved.nonzero()[:, 0]
    part = solved(of_genes(plan, genes), pilot.of_genes(moved), new[genes])
    whole = plan.transport
    return replace(
        plan,
        transport=TransportPlan(
            adds=whole.adds.index_copy(0, genes, part.transport.adds),
            scale=whole.scale.index_copy(0, genes, part.transport.scale),
            dispersion=whole.dispersion,
        ),
    )


def solved(
    plan: ResponsePlan, pilot: ResponseCells, target: Float[Tensor, " genes"]
) -> ResponsePlan:
    """The plan under which the pilot's expected means are the target."""
    transport = solve_transport(
        pilot.counts, pilot.library_size, target, deviation_NG=plan.log_factor(pilot)
    )
    return replace(plan, transport=transport)


def _mean_for(plan: ResponsePlan, pilot: ResponseCells, bound: Bounds, *, now: Tensor) -> Tensor:
    """Mean log1p values at which mean counts obey, by halving intervals."""
    chosen = torch.zeros(len(plan.centre), dtype=torch.bool)
    chosen[bound.genes] = True
    order = bound.genes.argsort()
    genes, back = bound.genes[order], order.argsort()
    cells, part = pilot.of_genes(chosen), of_genes(plan, genes)

    def level(target: Tensor) -> Tensor:
        return expected(cells, solved(part, cells, target), bound.unit).mean(0)

    start = now[order]
    reached = level(start)
    lower, upper = bound.lower[0][order].to(start), bound.upper[0][order].to(start)
    goal = reached.clamp(lower, upper)
    low = torch.where(goal < reached, 0.0, start)
    high = torch.where(goal > reached, _MOST_LOG1P, start)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = level(middle) >= goal
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.where(goal == reached, start, high)[back]


def _set_moved(target: Tensor, pilot: ResponseCells, bound: Bounds) -> Tensor:
    """Means of a set moved into range, each gene by its share of the set's variance."""
    moved = target.clone()
    size = pilot.library_size[:, None] / DEPTH
    spread = torch.log1p(pilot.counts / size).var(0, correction=0) + 1e-4
    for row, weight in enumerate(bound.weights.to(target)):
        share = weight.square() * spread[bound.genes]
        for _ in range(20):  # clamping at zero leaves something over
            level = float(weight @ moved[bound.genes])
            low, high = float(bound.lower[0, row]), float(bound.upper[0, row])
            gap = max(low - level, 0.0) - max(level - high, 0.0)
            if abs(gap) < 1e-9:
                break
            step = gap * weight * spread[bound.genes] / share.sum()
            moved[bound.genes] = (moved[bound.genes] + step).clamp_min(0)
    return moved


def truncated_uniform(
    cells: ResponseCells,
    plan: ResponsePlan,
    *,
    low: Float[Tensor, "cells genes"],
    high: Float[Tensor, "cells genes"],
) -> Float[Tensor, "cells genes"]:
    """Uniform numbers that draw counts within a range: draws of the truncated distribution.

    ``u' = F(low - 1) + u (F(high) - F(low - 1))`` with F the distribution of each count. Where the
    range has no mass, u' is its end and the count is clamped later.
    """
    transport = plan.transport
    size = cells.library_size[:, None] / DEPTH
    rate = (transport.scale * plan.log_factor(cells).exp()).numpy()
    counts = cells.counts.double().numpy()

    def below(limit: Float[Tensor, "cells genes"]) -> np.ndarray:
        k = limit.numpy()
        added = np.where(
            k - counts < 0, 0.0, special.pdtr(np.maximum(k - counts, 0), rate * size.numpy())
        )
        kept = special.betainc(  # that a binomial count is at most k
            np.maximum(counts - k, 1e-9), np.maximum(k, 0) + 1, 1 - np.clip(rate, 0, 1)
        )
        kept = np.where(k < 0, 0.0, np.where(k >= counts, 1.0, kept))
        found: np.ndarray = np.where(transport.adds.numpy(), added, kept)
        return np.where(np.isinf(k), 1.0, found)

    first, last = below(low - 1), below(high)
    moved = torch.from_numpy(first + cells.uniform.numpy() * (last - first))
    return moved.clamp(1 - _FAR, _FAR)


def bounded_genes(bounds: Sequence[Bounds], n_genes: int) -> Bool[Tensor, " genes"]:
    """Genes whose counts have a range in every cell."""
    chosen = torch.zeros(n_genes, dtype=torch.bool)
    for bound in bounds:
        if bound.per == "cell" and bound.separate and not bound.exact:
            chosen[bound.genes] = True
    return chosen
