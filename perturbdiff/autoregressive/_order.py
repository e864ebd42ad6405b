"""Orders in which the genes of a cell are said, and cells as sequences in such an order.

B cells, T positions, G genes, V bins, A axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._batch import Sets
from perturbdiff._random import gene_lanes, stream_key, uniform
from perturbdiff._typing import OrderName

_IMPOSSIBLE = -1e4


@dataclass(frozen=True, kw_only=True)
class Said(Sets):
    """Cells as sequences: what was said before each position, and what is said there.

    At the first position nothing was said: gene G, bin V. Where genes are drawn, the gene that is
    said last is G, which stands for stopping; what is behind that is masked.
    """

    said_gene: Int[Tensor, "cells positions"]
    said_bin: Int[Tensor, "cells positions"]
    gene: Int[Tensor, "cells positions"]
    bin: Int[Tensor, "cells positions"]
    mask: Bool[Tensor, "cells positions"]


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneOrder:
    """An order of genes: fixed beforehand, or that of the counts of each cell.

    Under ``"descending"`` a cell is a list of pairs of a gene and its bin, from the highest bin
    down, genes of one bin in any order; genes that are not said are zero.
    """

    name: OrderName
    genes: Int[Tensor, " genes"]  # in the order in which they are said

    @classmethod
    def vocabulary(cls, n_genes: int) -> Self:
        """As the model's genes stand."""
        return cls(name="vocabulary", genes=torch.arange(n_genes))

    @classmethod
    def random(cls, names: Sequence[str], seed: int) -> Self:
        """Shuffled once; the order of names does not depend on how they stood before."""
        key = torch.tensor([stream_key(seed, "gene order")])
        return cls(name="random", genes=uniform(key, gene_lanes(names))[0].argsort(stable=True))

    @classmethod
    def descending(cls, n_genes: int) -> Self:
        """From the highest count of each cell down."""
        return cls(name="descending", genes=torch.arange(n_genes))

    @classmethod
    def coexpression(
        cls, loadings: Float[Tensor, "genes axes"], noise: Float[Tensor, " genes"]
    ) -> Self:
        """First the gene that tells most about the state of the cell, then what tells most of it.

        The state is a standard normal vector z, and a gene's value is loadings · z + noise. The
        next gene is the one with the largest information gain ``log(1 + lᵀ P l / ψ)``, where P is
        what is left of the covariance of z given the genes that were said (Kalman's update).

        Parameters
        ----------
        loadings
            Of each gene, per standard deviation of the axis.
        noise
            Variance ψ of each gene that the axes leave.

        Returns
        -------
        The order.
        """
        loadings, noise = loadings.double(), noise.double().clamp_min(1e-9)
        left = torch.eye(loadings.shape[1], dtype=torch.float64)
        said = torch.zeros(len(loadings), dtype=torch.bool)
        order = []
        for _ in range(len(loadings)):
            seen = loadings @ left
            power = (seen * loadings).sum(1)
            gene = int((power / noise).masked_fill(said, -1.0).argmax())
            left = left - torch.outer(seen[gene], seen[gene]) / (noise[gene] + power[gene])
            said[gene] = True
            order.append(gene)
        return cls(name="coexpression", genes=torch.tensor(order))

    @property
    def drawn(self) -> bool:
        """Whether the next gene is drawn and not known beforehand."""
        return self.name == "descending"

    def sequences(
        self, bins: Int[Tensor, "cells genes"], n_bins: int, *, ties: Tensor | None = None
    ) -> Said:
        """Cells as sequences.

        Parameters
        ----------
        bins
            Bin of every gene of each cell.
        n_bins
            V.
        ties
            One number in (0, 1) per cell and gene: how genes of one bin follow each other, where
            the cell itself gives the order.

        Returns
        -------
        One row a cell.
        """
        n_genes = bins.shape[1]
        if self.drawn:
            assert ties is not None  # the order within a bin is not a property of the cell
            score = (bins + ties).masked_fill(bins == 0, -1.0)
            n_said = int((bins > 0).sum(1).max())
            gene = score.argsort(1, descending=True)[:, : n_said + 1]
            own = bins.gather(1, gene)
            gene = gene.masked_fill(own == 0, n_genes)
            if gene.shape[1] == n_said:  # a cell that says every gene stops behind the last
                gene = torch.nn.functional.pad(gene, (0, 1), value=n_genes)
                own = torch.nn.functional.pad(own, (0, 1))
            place = torch.arange(gene.shape[1], device=bins.device)
            mask = place <= (bins > 0).sum(1, keepdim=True)
        else:
            gene = self.genes.to(bins.device).expand(len(bins), -1)
            own = bins.gather(1, gene)
            mask = torch.ones_like(gene, dtype=torch.bool)
        return Said(
            said_gene=_behind(gene, n_genes),
            said_bin=_behind(own, n_bins).masked_fill(_behind(gene, n_genes) == n_genes, n_bins),
            gene=gene,
            bin=own,
            mask=mask,
        )


def possible_bins(
    logits: Float[Tensor, "cells positions bins"],
    said_bin: Int[Tensor, "cells positions"],
    *,
    impossible: float = _IMPOSSIBLE,
) -> Float[Tensor, "cells positions bins"]:
    """Logits where a gene that is drawn is not zero, and no higher than the one before it.

    Other bins get ``impossible``: minus infinity for a choice at any temperature, a number for a
    loss, in which they have weight 0.
    """
    number = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill((number == 0) | (number > said_bin[..., None]), impossible)


def possible_genes(
    logits: Float[Tensor, "cells positions genes_and_stop"],
    said_gene: Int[Tensor, "cells positions"],
) -> Float[Tensor, "cells positions genes_and_stop"]:
    """Logits without the genes that were said before; sequences start at the first position."""
    gone = torch.zeros_like(logits, dtype=torch.bool)
    gone = gone.scatter(-1, said_gene[..., None], value=True).cumsum(1, dtype=torch.int32) > 0
    gone[..., -1] = False
    return logits.masked_fill(gone, _IMPOSSIBLE)


def _behind(values: Tensor, first: int) -> Tensor:
    """One place later, with ``first`` before all."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0), value=first)
