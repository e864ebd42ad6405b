"""Count transport: control counts thinned or added to until the mean log1p value meets a target.

A gene that goes down is thinned, ``y ~ Binomial(n, min(1, a exp(w)))``; one that goes up is added
to, ``y = n + NegBin(mean = a s exp(w), dispersion)``, a Poisson draw where the dispersion is 0.
Here n is the count of a control cell, s its library size in units of 10,000, w the cell's own
log-rate deviation and a one number per gene. The expected value of ``log1p(y / s)`` is known
without a random draw, and concave in a, so that Newton's method climbs to the solution from below
without ever passing it, after its first step. It starts from the solution for expected counts,
which is simpler, put right by the variance of the counts (the second order of Jensen's inequality).

N cells, G genes, E entries that are not zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff.prior._expectations import CHUNK, Pair, added, thinned

_MOST_STEPS = 60
_CLOSE = 5e-4  # of the target, before a step after which 1e-7 is left, since steps square it
_LEAST = 1e-9
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class TransportPlan:
    """Per gene: whether counts are added (else thinned), and the scale a of the rate."""

    adds: Bool[Tensor, " genes"]
    scale: Float[Tensor, " genes"]
    dispersion: Float[Tensor, " genes"]


def _width(n_cells: int) -> int:
    """Genes that fit into one work array."""
    return max(1, CHUNK // max(n_cells, 1))


def _sizes(library_size_N: Tensor, counts_NG: Tensor) -> Tensor:
    dtype = library_size_N.dtype if library_size_N.is_floating_point() else torch.float64
    return library_size_N.to(counts_NG.device, dtype) / DEPTH


Value = Callable[[Tensor], Pair]


def _climb(value: Value, target_G: Tensor, *, start_G: Tensor, upper: float) -> Tensor:
    """Newton on a concave increasing function of one number per gene."""
    scale = start_G
    for _ in range(_MOST_STEPS):
        mean, slope = value(scale)
        gap = target_G - mean
        step = gap / slope.clamp_min(_TINY)
        scale = (scale + step).clamp(0, upper)
        if bool(((gap.abs() <= _CLOSE * target_G + _LEAST) | (step.abs() <= _TINY * scale)).all()):
            break
    return scale


def _mean_by_gene(values: Tensor, genes: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.zeros(shape[1]).to(values).index_add(0, genes, values) / shape[0]


def _solve_thinning(
    counts_NG: Tensor, size_N: Tensor, target_G: Tensor, *, deviation_NG: Tensor | None
) -> Tensor:
    """Zeros stay zero, so only the other entries are looked at."""
    row, gene = counts_NG.nonzero(as_tuple=True)
    entries, size = counts_NG[row, gene].to(size_N), size_N[row]
    lift = torch.ones_like(entries) if deviation_NG is None else deviation_NG[row, gene].exp()
    shape = (counts_NG.shape[0], counts_NG.shape[1])

    def averaged(scale_G: Tensor, expect: Value) -> Pair:
        share = scale_G[gene] * lift
        expected, change = expect(share.clamp_max(1.0))
        change = torch.where(share < 1, change * lift, 0.0)
        return _mean_by_gene(expected, gene, shape), _mean_by_gene(change, gene, shape)

    def rough(share: Tensor) -> Pair:
        return torch.log1p(share * entries / size), entries / (size + share * entries)

    def lacking(share: Tensor) -> Pair:
        level = size + share * entries
        return share * (1 - share) * entries / level.square() / 2, entries / level

    def exact(share: Tensor) -> Pair:
        return thinned(entries, size, share)

    if not len(entries):
        return torch.ones_like(target_G)
    upper = 1.0 if deviation_NG is None else float("inf")
    start = torch.zeros_like(target_G)
    start = _climb(lambda a: averaged(a, rough), target_G, start_G=start, upper=upper)
    short, slope = averaged(start, lacking)
    start = start + short / slope.clamp_min(_TINY)
    return _climb(lambda a: averaged(a, exact), target_G, start_G=start, upper=upper)


def _solve_addition(
    counts_NG: Tensor, size_N: Tensor, target_G: Tensor, *, lift_NG: Tensor, spread_G: Tensor
) -> Tensor:
    counts, size = counts_NG.to(size_N), size_N[:, None]

    def rough(scale_G: Tensor) -> Pair:
        level = size + counts + scale_G * lift_NG
        return (level / size).log().mean(0), (lift_NG / level).mean(0)

    def exact(scale_G: Tensor) -> Pair:
        expected, change = added(counts, size_N, scale_G * lift_NG, dispersion_G=spread_G)
        return expected.mean(0), (change * lift_NG).mean(0)

    start = torch.zeros_like(target_G)
    start = _climb(rough, target_G, start_G=start, upper=float("inf"))
    level = size + counts + start * lift_NG
    short = (start * lift_NG / level.square()).mean(0) / 2
    start = start + short / (lift_NG / level).mean(0).clamp_min(_TINY)
    return _climb(exact, target_G, start_G=start, upper=float("inf"))


def solve_transport(
    counts_NG: Int[Tensor, "cells genes"],
    library_size_N: Tensor,
    target_G: Float[Tensor, " genes"],
    *,
    deviation_NG: Float[Tensor, "cells genes"] | None = None,
    dispersion_G: Float[Tensor, " genes"] | None = None,
) -> TransportPlan:
    """Find per gene the scale at which the mean of expected log1p values meets the target.

    Parameters
    ----------
    counts_NG
        Counts of control cells, each the partner of one generated cell.
    library_size_N
        Counts of each cell over all measured genes.
    target_G
        Mean of ``log1p(counts / library_size * 10^4)`` to reach; negative values count as zero.
    deviation_NG
        Log of what each cell's own rate is multiplied by; none means the same rate in all cells.
    dispersion_G
        Over-dispersion of what is added: variance = mean + dispersion · mean².

    Returns
    -------
    The plan, in the floating type of ``library_size_N`` (float64 where it holds integers).
    """
    size_N = _sizes(library_size_N, counts_NG)
    target = target_G.to(size_N).clamp_min(0)
    deviation = None if deviation_NG is None else deviation_NG.to(size_N)
    spread = torch.zeros_like(target) if dispersion_G is None else dispersion_G.to(size_N)
    now = torch.log1p(counts_NG.to(size_N.dtype) / size_N[:, None]).mean(0)
    adds = target > now
    scale = torch.zeros_like(target)
    down = (~adds).nonzero()[:, 0]
    scale[down] = _solve_thinning(
        counts_NG[:, down],
        size_N,
        target[down],
        deviation_NG=None if deviation is None else deviation[:, down],
    )
    for part in torch.split(adds.nonzero()[:, 0], _width(len(size_N))):
        lift = size_N[:, None].expand(-1, len(part))
        scale[part] = _solve_addition(
            counts_NG[:, part],
            size_N,
            target[part],
            lift_NG=lift if deviation is None else lift * deviation[:, part].exp(),
            spread_G=spread[part],
        )
    return TransportPlan(adds=adds, scale=scale, dispersion=spread)


def expected_log1p(
    counts_NG: Int[Tensor, "cells genes"],
    library_size_N: Tensor,
    plan: TransportPlan,
    *,
    deviation_NG: Float[Tensor, "cells genes"] | None = None,
) -> Float[Tensor, "cells genes"]:
    """Expected log1p value of every cell and gene under the plan, without a draw."""
    size_N = _sizes(library_size_N, counts_NG)
    lift = plan.scale.to(size_N).expand(len(size_N), -1)
    if deviation_NG is not None:
        lift = lift * deviation_NG.to(size_N).exp()
    row, gene = (counts_NG * ~plan.adds).nonzero(as_tuple=True)
    entries = counts_NG[row, gene].to(size_N), size_N[row], lift[row, gene].clamp_max(1.0)
    kept, _ = thinned(*entries)
    out = torch.zeros_like(lift).index_put((row, gene), kept)
    for part in torch.split(plan.adds.nonzero()[:, 0], _width(len(size_N))):
        rate, counts = lift[:, part] * size_N[:, None], counts_NG[:, part].to(size_N)
        made, _ = added(counts, size_N, rate, dispersion_G=plan.dispersion[part].to(size_N))
        out = out.index_copy(1, part, made)
    return out
