"""Expected log1p values of counts that were thinned or added to, without a random draw.

In general, with y the count and s a library size in units of 10,000,

    E log(1 + y/s) = ∫ (1 - E exp(-t y/s)) exp(-t) / t dt,

and the generating functions of the binomial, Poisson and negative binomial distributions are known:
one quadrature serves all. Most entries need less. A single count is kept or is not. And of a rate
λ ≤ 0.3, few counts k have any weight, so that the sum over them is taken itself, n being there
already:

    E log(1 + (n + k)/s) = log(1 + n/s) + e^-λ Σ_k λ^k/k! · log(1 + k/(s + n)),

whose derivative in λ has the differences of those logarithms in their place.

N cells, G genes, E entries, Q nodes.
"""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

_STEP = 0.6
_FIRST = -14.0
_N_NODES = 30
_LOW = 0.3
_MOST_COUNTS = 8  # what more of them add at such rates is below 1e-9
CHUNK = 60_000  # elements of the largest work array, so that it stays in a core's own cache

Pair = tuple[Tensor, Tensor]


def thinned(
    counts_E: Float[Tensor, " entries"],
    size_E: Float[Tensor, " entries"],
    keep_E: Float[Tensor, " entries"],
) -> Pair:
    """Expected log1p after thinning counts above 0, and its derivative in the share kept."""
    single = torch.log1p(1 / size_E)
    mean, slope = keep_E * single, single
    (more,) = (counts_E > 1).nonzero(as_tuple=True)
    parts = zip(
        *(torch.split(x[more], CHUNK // _N_NODES) for x in (counts_E, size_E, keep_E)), strict=True
    )
    return _placed((mean, slope), (more,), [_thinned(*part) for part in parts])


def added(
    counts_NG: Float[Tensor, "cells genes"],
    size_N: Float[Tensor, " cells"],
    rate_NG: Float[Tensor, "cells genes"],
    *,
    dispersion_G: Float[Tensor, " genes"],
) -> Pair:
    """Expected log1p after addition, and its derivative in the rate."""
    low = (rate_NG <= _LOW) & (dispersion_G <= 0)
    found = _few(size_N[:, None], rate_NG.clamp_max(_LOW))
    row, gene = place = (low & (counts_NG > 0)).nonzero(as_tuple=True)
    counts, size = counts_NG[place], size_N[row]
    mean, slope = _few(size + counts, rate_NG[place])
    found = _placed(found, place, [(mean + torch.log1p(counts / size), slope)])
    row, gene = place = (~low).nonzero(as_tuple=True)
    entries = (counts_NG[place], size_N[row], rate_NG[place], dispersion_G[gene])
    parts = zip(*(torch.split(x, CHUNK // _N_NODES) for x in entries), strict=True)
    return _placed(found, place, [_added(*part, dispersion_E=spread) for *part, spread in parts])


def _placed(into: Pair, place: tuple[Tensor, ...], parts: list[Pair]) -> Pair:
    if not len(place[0]):
        return into
    new = (torch.cat(x) for x in zip(*parts, strict=True))
    mean, slope = (old.index_put(place, x) for old, x in zip(into, new, strict=True))
    return mean, slope


def _few(level: Tensor, rate: Tensor) -> Pair:
    """Sum over Poisson counts by Horner's rule, and its derivative in the rate."""
    logs = [torch.log1p(k / level) for k in range(1, _MOST_COUNTS + 2)]
    steps = [logs[0], *(high - low for low, high in pairwise(logs))]
    mean, slope = torch.zeros_like(rate), torch.zeros_like(rate)
    for k in range(_MOST_COUNTS, 0, -1):
        ways = math.factorial(k)
        mean = torch.addcmul(logs[k - 1] / ways, mean, rate)
        slope = torch.addcmul(steps[k] / ways, slope, rate)
    none = torch.exp(-rate)
    return mean * rate * none, torch.addcmul(steps[0], slope, rate) * none


def _nodes(like: Tensor) -> tuple[Tensor, Tensor, float]:
    """Nodes t, weights of the trapezium rule in log t, and the weight of the mean for t → 0."""
    log_t = _FIRST + _STEP * torch.arange(_N_NODES, dtype=like.dtype, device=like.device)
    t = log_t.exp()
    return t, _STEP * (-t).exp(), float(_STEP * t[0] / (torch.e**_STEP - 1))


def _thinned(counts_E: Tensor, size_E: Tensor, keep_E: Tensor) -> Pair:
    t, weight, tail = _nodes(size_E)
    miss = -torch.expm1(-t / size_E[:, None])
    left = 1 - keep_E[:, None] * miss
    power = left.clamp_min(1e-300 if left.dtype == torch.float64 else 1e-30).log()
    power = (counts_E[:, None] * power).exp()
    slope = counts_E[:, None] * miss * power / left.clamp_min(1e-12)
    mean = counts_E / size_E
    return (1 - power) @ weight + tail * keep_E * mean, slope @ weight + tail * mean


def _added(counts_E: Tensor, size_E: Tensor, rate_E: Tensor, *, dispersion_E: Tensor) -> Pair:
    t, weight, tail = _nodes(size_E)
    fall = t / size_E[:, None]
    miss = -torch.expm1(-fall)
    thrown = rate_E[:, None] * miss
    lost, kept = thrown, miss
    if bool((dispersion_E > 0).any()):
        spread = dispersion_E[:, None]
        mixed = torch.log1p(spread * thrown) / torch.where(spread > 0, spread, 1.0)
        lost, kept = torch.where(spread > 0, mixed, thrown), miss / (1 + spread * thrown)
    power = torch.exp(-torch.addcmul(lost, counts_E[:, None], fall))
    mean = (counts_E + rate_E) / size_E
    return (1 - power) @ weight + tail * mean, (power * kept) @ weight + tail / size_E
