"""Counts from one uniform number per (cell, gene), by inverse distribution.

The same uniform gives the same count whatever else is drawn beside it, and nearby rates give nearby
counts.
E entries, N cells, G genes.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff.prior._transport import TransportPlan

_AHEAD = 16  # counts that are looked at together
_SPREADS = 9.0  # standard deviations below the mean at which the search starts: 1e-19 of the mass


def _quantile(
    uniform_E: Tensor,
    log_mass: Callable[[Tensor, Tensor], Tensor],
    *,
    first_E: Tensor,
    last_E: Tensor,
) -> Int[Tensor, " entries"]:
    """Smallest k with P(Y ≤ k) ≥ u, adding up masses from ``first`` on, at most to ``last``.

    The fewer entries are still going, the more counts of each are looked at together.
    """
    k = first_E.clone()
    below = log_mass(k, torch.arange(len(k), device=k.device)).exp()
    active = ((below < uniform_E) & (k < last_E)).nonzero()[:, 0]
    below, ahead = below[active], 1
    while len(active):
        more = torch.arange(1, ahead + 1, dtype=k.dtype, device=k.device)
        next_AK, index = k[active, None] + more, active[:, None]
        mass = log_mass(next_AK, index).exp()
        total_AK = torch.cat([below[:, None], mass], dim=1).cumsum(1)[:, 1:]
        going_AK = (total_AK < uniform_E[index]) & (next_AK < last_E[index])
        k[active] += (going_AK.sum(1) + 1).clamp_max(ahead)
        going = going_AK[:, -1]
        active, below = active[going], total_AK[going, -1]
        ahead = min(2 * ahead, _AHEAD)
    return k.long()


def _binomial(uniform_E: Tensor, trials_E: Tensor, share_E: Tensor) -> Int[Tensor, " entries"]:
    share = share_E.clamp(0, 1)
    log_on, log_off = share.clamp_min(1e-300).log(), (1 - share).clamp_min(1e-300).log()

    def log_mass(k: Tensor, index: Tensor) -> Tensor:
        n = trials_E[index]
        ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        return ways + k * log_on[index] + (n - k) * log_off[index]

    spread = (trials_E * share * (1 - share)).sqrt()
    first = (trials_E * share - _SPREADS * spread - 2).floor().clamp_min(0)
    return _quantile(uniform_E, log_mass, first_E=first, last_E=trials_E)


def _negative_binomial(
    uniform_NG: Tensor, mean_NG: Tensor, dispersion_G: Tensor
) -> Int[Tensor, "cells genes"]:
    """Negative binomial; Poisson where the dispersion is zero. Most are 0, and seen at once."""
    spread = torch.where(dispersion_G > 0, dispersion_G, 1.0)
    mixed = torch.log1p(spread * mean_NG) / spread
    none = torch.exp(-torch.where(dispersion_G > 0, mixed, mean_NG))
    some = (uniform_NG > none).nonzero(as_tuple=True)
    out = torch.zeros_like(uniform_NG, dtype=torch.int64)
    out[some] = _some(uniform_NG[some], mean_NG[some], dispersion_G[some[1]])
    return out


def _some(uniform_E: Tensor, mean_E: Tensor, dispersion_E: Tensor) -> Int[Tensor, " entries"]:
    log_mean = mean_E.clamp_min(1e-300).log()
    poisson = dispersion_E <= 0
    shape = 1 / torch.where(poisson, 1.0, dispersion_E)

    def log_mass(k: Tensor, index: Tensor) -> Tensor:
        mean, r = mean_E[index], shape[index]
        simple = k * log_mean[index] - mean
        log_total = (r + mean).log()
        mixed = torch.lgamma(r + k) - torch.lgamma(r) + r * (r.log() - log_total)
        mixed = mixed + k * (log_mean[index] - log_total)
        return torch.where(poisson[index], simple, mixed) - torch.lgamma(k + 1)

    spread = (mean_E + dispersion_E * mean_E**2).sqrt()
    first = torch.where(poisson, (mean_E - _SPREADS * spread - 2).floor().clamp_min(0), 0.0)
    last = (mean_E + 60 * spread + 60).ceil()
    return _quantile(uniform_E, log_mass, first_E=first, last_E=last)


def draw_counts(
    counts_NG: Int[Tensor, "cells genes"],
    library_size_N: Tensor,
    plan: TransportPlan,
    *,
    uniform_NG: Float[Tensor, "cells genes"],
    deviation_NG: Float[Tensor, "cells genes"] | None = None,
) -> Int[Tensor, "cells genes"]:
    """Counts of the generated cells.

    Parameters
    ----------
    counts_NG, library_size_N, deviation_NG
        As in :func:`solve_transport`; they may be other cells than the plan was solved on.
    plan
        Direction and scale per gene.
    uniform_NG
        One number in the open interval (0, 1) per cell and gene.

    Returns
    -------
    Integer counts, as many rows as ``counts_NG``.
    """
    size_N = library_size_N.to(counts_NG.device, torch.float64) / DEPTH
    out = counts_NG.long().clone()
    scale, uniform = plan.scale.double(), uniform_NG.double()
    lift_NG = None if deviation_NG is None else deviation_NG.double().exp()

    row, column = (counts_NG * ~plan.adds).nonzero(as_tuple=True)
    share = scale[column] * (1.0 if lift_NG is None else lift_NG[row, column])
    out[row, column] = _binomial(uniform[row, column], counts_NG[row, column].double(), share)

    up = plan.adds.nonzero()[:, 0]
    mean = scale[up] * size_N[:, None] * (1.0 if lift_NG is None else lift_NG[:, up])
    out[:, up] += _negative_binomial(uniform[:, up], mean, plan.dispersion.double()[up])
    return out
