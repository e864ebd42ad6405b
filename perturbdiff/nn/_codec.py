"""Expression codec: genes to latent axes, latent axes to a response of every gene.

Everything is looked up by gene: permuting genes together with the buffers permutes the response.
N cells, G genes, K latent axes, Q nodes.
"""


import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import special
from torch import Tensor, nn

_REACH = 6.0
_NODES = 193
_LEAST = -30.0


class ExpressionCodec(nn.Module):
    """Linear maps between genes and latent axes.

    Parameters
    ----------
    loadings
        Principal axes, orthonormal columns.
    cell_scale
        Spread of control cells along each axis.
    residual_scale
        Spread of differences between treated cells and their partners.
    """

    loadings: Tensor
    cell_scale: Tensor
    residual_scale: Tensor

    def __init__(
        self,
        loadings: Float[Tensor, "genes latent"],
        *,
        cell_scale: Float[Tensor, " latent"],
        residual_scale: Float[Tensor, " latent"],
    ) -> None:
        super().__init__()
        self.register_buffer("loadings", loadings)
        self.register_buffer("cell_scale", cell_scale)
        self.register_buffer("residual_scale", residual_scale)

    def to_latent(
        self,
        log1p: Float[Tensor, "*cells genes"],
        centre: Float[Tensor, " genes"],
        *,
        present: Bool[Tensor, " genes"] | None = None,
    ) -> Float[Tensor, "*cells latent"]:
        """Cells in latent axes, in units of the spread of control cells.

        Parameters
        ----------
        log1p
            Values per gene.
        centre
            Mean of the population.
        present
            Genes that were measured; the sum runs over these alone, and is scaled so that each
            axis keeps its length.

        Returns
        -------
        Latent values.
        """
        loadings = self.loadings
        if present is not None:
            loadings = loadings * present[:, None]
            loadings = loadings / loadings.square().sum(0).clamp(min=1e-6)
        return (log1p - centre) @ loadings / self.cell_scale

    def deviation(self, x0: Float[Tensor, "*cells latent"]) -> Float[Tensor, "*cells genes"]:
        """Difference from the partner that a latent value stands for, in log1p units."""
        return (x0 * self.residual_scale) @ self.loadings.mT


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
        node = np.linspace(-_REACH, _REACH, _NODES)
        spread = dispersion.detach().cpu().double().numpy()[:, None].clip(min=1e-8)
        low = special.gammaincinv(1 / spread, special.ndtr(node))
        high = special.gammainccinv(1 / spread, special.ndtr(-node))
        quantile = np.where(node < 0, low, high) * spread
        table = np.log(np.maximum(quantile, np.exp(_LEAST)))
        table = np.where(spread > 1e-6, table, 0.0)
        self.table = torch.from_numpy(table).to(dispersion)

    def log(self, score: Float[Tensor, "cells genes"]) -> Float[Tensor, "cells genes"]:
        """Log of the factor at each score; differentiable, linear between nodes."""
        place = (score.clamp(-_REACH, _REACH) + _REACH) * ((_NODES - 1) / (2 * _REACH))
        left = place.detach().floor().clamp(0, _NODES - 2).long()
        gene = torch.arange(score.shape[-1], device=score.device)
        low, high = self.table[gene, left], self.table[gene, left + 1]
        return low + (place - left) * (high - low)


def copula_scores(
    deviation: Float[Tensor, "cells genes"],
    noise: Float[Tensor, "cells genes"],
    *,
    dependence: float,
) -> Float[Tensor, "cells genes"]:
    """Normal scores of responses: a part that the cell's genes share, and a part of their own.

    Parameters
    ----------
    deviation
        Deviations of each gene, with mean 0 and variance 1 over the population.
    noise
        Standard normal, independent over cells and genes.
    dependence
        Correlation between score and deviation, from 0 to 1.

    Returns
    -------
    ``dependence · deviation + √(1 − dependence²) · noise``.
    """
    return dependence * deviation + (1 - dependence**2) ** 0.5 * noise
