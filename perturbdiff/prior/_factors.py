"""By how much a cell's response differs from the average response of its population.

N cells, G genes, Q nodes.
"""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from scipy.interpolate import CubicSpline
from torch import Tensor

_REACH = 6.0
_NODES = 193
_LEAST = -30.0
_NONE = 1e-6  # dispersion that changes nothing
_MOST = 1e4
_DISPERSIONS = 600


class ResponseFactors:
    """Per gene, by how much a cell's response differs from the average response.

    Factors are Gamma distributed with mean 1 and variance D (the response dispersion), so that
    Poisson counts become negative binomial. A standard normal score z picks the quantile:

        F(z) = D · γ⁻¹(1/D, Φ(z)),

    with γ⁻¹ the inverse of the regularised lower incomplete gamma function. Scores that depend on
    each other make responses that depend on each other and leave each gene's distribution as it
    is: a Gaussian copula (Nelsen, 2006, section 2.3).

    Parameters
    ----------
    dispersion
        D of each gene, at least 0.
    """

    def __init__(self, dispersion: Float[Tensor, " genes"]) -> None:
        self.dispersion = dispersion
        spread = dispersion.detach().cpu().double().numpy()
        table = _log_quantiles()(np.log(spread.clip(_NONE, _MOST))).clip(min=_LEAST)
        table[spread <= _NONE] = 0.0
        self.table = torch.from_numpy(table).to(dispersion)

    def log(self, score: Float[Tensor, "cells genes"]) -> Float[Tensor, "cells genes"]:
        """Log of the factor at each score; differentiable, linear between nodes."""
        place = (score.clamp(-_REACH, _REACH) + _REACH) * ((_NODES - 1) / (2 * _REACH))
        left = place.detach().long().clamp_max(_NODES - 2)
        gene = torch.arange(score.shape[-1], device=score.device)
        at = left + gene * _NODES
        return torch.lerp(self.table.take(at), self.table.take(at + 1), place - left)


@cache
def _log_quantiles() -> CubicSpline:
    """Log of the factor at every node of the score, as a function of log dispersion.

    The incomplete gamma function is inverted once for all genes: between dispersions, quantiles are
    smooth. Where they are too small for a number, ``P(a, x) → x^a / Γ(a + 1)`` says what they are.
    """
    node = np.linspace(-_REACH, _REACH, _NODES)
    log_spread = np.linspace(np.log(_NONE), np.log(_MOST), _DISPERSIONS)
    spread = np.exp(log_spread)[:, None]
    low = special.gammaincinv(1 / spread, special.ndtr(node))
    high = special.gammainccinv(1 / spread, special.ndtr(-node))
    quantile = np.where(node < 0, low, high)
    tiny = (special.log_ndtr(node) + special.gammaln(1 + 1 / spread)) * spread
    exact = quantile > 1e-30
    log = np.where(exact, np.log(np.where(exact, quantile, 1.0)), tiny)
    return CubicSpline(log_spread, log + log_spread[:, None])


def copula_scores(
    deviation: Float[Tensor, "cells genes"],
    noise: Float[Tensor, "cells genes"],
    *,
    dependence: Float[Tensor, " genes"],
) -> Float[Tensor, "cells genes"]:
    """Normal scores of responses: a part that the cell's genes share, and a part of their own.

    Parameters
    ----------
    deviation
        Deviations of each gene, with mean 0 and variance 1 over the population.
    noise
        Standard normal, independent over cells and genes.
    dependence
        Correlation between score and deviation of each gene, from 0 to 1.

    Returns
    -------
    ``dependence · deviation + √(1 − dependence²) · noise``.
    """
    return dependence * deviation + (1 - dependence.square()).sqrt() * noise
