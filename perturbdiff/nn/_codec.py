"""Expression codec: genes to latent axes, latent axes to a response of every gene.

Everything is looked up by gene: permuting genes together with the buffers permutes the response.
N cells, G genes, K latent axes.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn


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
