"""Expression codec: genes to axes, and the latent response of a cell back to every gene.

Everything is looked up by gene: permuting genes together with the buffers permutes the response.
N cells, G genes, A cell axes, K latent axes.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn


class ExpressionCodec(nn.Module):
    """Linear maps between genes and two sets of axes.

    Control cells are told apart along *cell axes*. Treated cells of one population differ along
    *response axes*; a cell's place on them is the latent value that the diffusion model generates.

    Parameters
    ----------
    cell_axes
        Weight of each gene in each cell axis.
    encoder
        Weight of each gene in each latent axis.
    decoder
        What each latent axis says about each gene, up to a scale per gene.
    """

    cell_axes: Tensor
    encoder: Tensor
    decoder: Tensor

    def __init__(
        self,
        cell_axes: Float[Tensor, "genes axes"],
        *,
        encoder: Float[Tensor, "genes latent"],
        decoder: Float[Tensor, "genes latent"],
    ) -> None:
        super().__init__()
        self.register_buffer("cell_axes", cell_axes)
        self.register_buffer("encoder", encoder)
        self.register_buffer("decoder", decoder)

    def cells(
        self,
        log1p: Float[Tensor, "*cells genes"],
        centre: Float[Tensor, " genes"],
        *,
        present: Bool[Tensor, " genes"] | None = None,
    ) -> Float[Tensor, "*cells axes"]:
        """Cells along the cell axes.

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
        Values along each axis.
        """
        return (log1p - centre) @ _of_present(self.cell_axes, present)

    def to_latent(
        self,
        log1p: Float[Tensor, "*cells genes"],
        centre: Float[Tensor, " genes"],
        *,
        present: Bool[Tensor, " genes"] | None = None,
    ) -> Float[Tensor, "*cells latent"]:
        """Treated cells along the response axes; arguments as in :meth:`cells`."""
        return (log1p - centre) @ _of_present(self.encoder, present)

    def deviation(
        self, x0: Float[Tensor, "*cells latent"], genes: slice = slice(None)
    ) -> Float[Tensor, "*cells genes"]:
        """What a latent value says of some of the genes, up to a scale for each gene."""
        return x0 @ self.decoder[genes].mT


def _of_present(weights: Tensor, present: Tensor | None) -> Tensor:
    if present is None:
        return weights
    kept = weights * present[:, None]
    return kept * (weights.square().sum(0) / kept.square().sum(0).clamp(min=1e-12))
