"""The same constraints on a model that writes one gene after another.

What is about one gene of one cell is known when that gene is written, so the logits of other
counts are masked. Everything else is known only when the cell, or the population, is finished: it
is met by drawing again, and by the least violating draw where none obeys.
N cells, G genes, V bins of counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff.autoregressive._protocol import Network
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import AllOf, Bound, NotOf
from perturbdiff.guidance._reference import CellValues


@dataclass(frozen=True, kw_only=True, eq=False)
class CountMask:
    """Counts that each gene of each cell may have, and the mask that they put on logits of bins.

    Parameters
    ----------
    least, most
        Smallest and largest count.
    rest
        Constraints that no mask can meet.
    """

    least: Float[Tensor, "cells genes"]
    most: Float[Tensor, "cells genes"]
    rest: tuple[Bound, ...]

    @classmethod
    def of(
        cls, bounds: Sequence[Bound], library_size: Float[Tensor, " cells"], *, n_genes: int
    ) -> Self:
        """Mask for cells of these library sizes.

        Parameters
        ----------
        bounds
            Constraints, bound to the genes of the model.
        library_size
            Denominator of each cell, known before it is written.
        n_genes
            Genes of the model.

        Returns
        -------
        The mask; an exact log1p value stands for the nearest counts, one bin.
        """
        n_cells = len(library_size)
        least = torch.zeros(n_cells, n_genes, dtype=torch.float64)
        most = torch.full_like(least, torch.inf)
        cells = CellValues(
            log1p=torch.zeros(n_cells, n_genes, dtype=torch.float64),
            library_size=library_size.double(),
            number=torch.arange(n_cells),
        )
        rest = []
        for bound in opened(bounds):
            if not (isinstance(bound, Bounds) and bound.masks):
                rest.append(bound)
                continue
            low, high = bound.counts(cells)
            if bound.exact:
                low, high = torch.minimum(low, high), torch.maximum(low, high)
            genes = bound.genes
            least[:, genes] = torch.maximum(least[:, genes], low.expand(n_cells, -1))
            most[:, genes] = torch.minimum(most[:, genes], high.expand(n_cells, -1))
        return cls(least=least, most=most, rest=tuple(rest))

    def __getitem__(self, cells: Int[Tensor, " some"]) -> Self:
        """The mask of some of the cells."""
        return type(self)(least=self.least[cells], most=self.most[cells], rest=self.rest)

    @classmethod
    def join(cls, masks: Sequence[Self]) -> Self:
        """The cells of several masks, one after the other."""
        return cls(
            least=torch.cat([mask.least for mask in masks]),
            most=torch.cat([mask.most for mask in masks]),
            rest=masks[0].rest,
        )

    @property
    def idle(self) -> bool:
        """Whether every count is allowed."""
        return bool((self.least <= 0).all() and self.most.isinf().all())

    def to(self, device: torch.device | str) -> Self:
        """The same mask on another device."""
        return type(self)(least=self.least.to(device), most=self.most.to(device), rest=self.rest)

    def __call__(
        self,
        logits: Float[Tensor, "cells bins"],
        gene: Int[Tensor, " cells"],
        *,
        cell: Int[Tensor, " cells"],
        first_count: Int[Tensor, " bins"],
    ) -> Float[Tensor, "cells bins"]:
        """Logits of the bins of the gene that each cell writes next.

        Parameters
        ----------
        logits
            Of the network.
        gene
            Gene at this position.
        cell
            Which cell each row is.
        first_count
            Smallest count of each bin; the last bin has no end.

        Returns
        -------
        Minus infinity for bins that hold no count that is allowed.
        """
        first = first_count.double()
        last = torch.cat([first[1:] - 1, first.new_full((1,), torch.inf)])
        low = self.least[cell, gene][:, None]
        high = self.most[cell, gene][:, None]
        return logits.masked_fill((last < low) | (first > high), -torch.inf)

    def clamped(self, counts: Int[Tensor, "cells genes"]) -> Int[Tensor, "cells genes"]:
        """Counts drawn from allowed bins, moved to the allowed part of their bin."""
        return torch.minimum(torch.maximum(counts.double(), self.least), self.most).long()


@dataclass(frozen=True, kw_only=True, eq=False)
class Masked:
    """A network that says one gene after another, its logits under a mask.

    Parameters
    ----------
    network
        What it is put around; row i of what it is asked is cell i of the mask.
    mask
        Counts that are allowed.
    first_count
        Smallest count of each bin.
    """

    network: Network
    mask: CountMask
    first_count: Int[Tensor, " bins"]

    @property
    def n_genes(self) -> int:
        """G."""
        return self.network.n_genes

    @property
    def n_bins(self) -> int:
        """V."""
        return self.network.n_bins

    def decode(
        self,
        cache: Any,
        said_gene: Int[Tensor, "cells positions"],
        said_bin: Int[Tensor, "cells positions"],
        *,
        next_gene: Int[Tensor, "cells positions"] | None = None,
        progress: Float[Tensor, "cells positions 3"] | None = None,
        reach: int | None = None,
    ) -> tuple[Float[Tensor, "cells positions width"], Any]:
        """As the network inside."""
        return self.network.decode(
            cache, said_gene, said_bin, next_gene=next_gene, progress=progress, reach=reach
        )

    def bin_logits(
        self,
        hidden: Float[Tensor, "cells positions width"],
        gene: Int[Tensor, "cells positions"],
        cache: Any,
    ) -> Float[Tensor, "cells positions bins"]:
        """Logits of the bin of a gene; minus infinity where no count is allowed."""
        logits = self.network.bin_logits(hidden, gene, cache)
        cell = torch.arange(len(gene), device=gene.device).repeat_interleave(gene.shape[1])
        masked = self.mask(
            logits.flatten(0, 1), gene.flatten(), cell=cell, first_count=self.first_count
        )
        return masked.view_as(logits)


def opened(bounds: Sequence[Bound]) -> list[Bound]:
    """Everything that must hold, one by one; *not* is the opposite range where there is one."""
    out: list[Bound] = []
    for bound in bounds:
        if isinstance(bound, AllOf):
            out += opened(bound.members)
        else:
            opposite = bound.complement if isinstance(bound, NotOf) else None
            out.append(bound if opposite is None else opposite)
    return out


def judged(
    bounds: Sequence[Bound], cells: CellValues
) -> tuple[Float[Tensor, " sets"], Bool[Tensor, " sets"]]:
    """Energy of finished sets, and whether each obeys.

    Parameters
    ----------
    bounds
        What shall hold of each set.
    cells
        Sets.

    Returns
    -------
    The sum of the energies of all bounds, and whether all hold.
    """
    energy = torch.stack([bound.energy(cells) for bound in bounds]).sum(0).double()
    return energy, torch.stack([bound.holds(cells).all(-1) for bound in bounds]).all(0)
