"""The same constraints on a model that writes one gene after another.

What is about one gene of one cell is known when that gene is written, so the logits of other
counts are masked. Everything else is known only when the cell, or the population, is finished: it
is met by drawing again (reject) or by the best of several draws.
N cells, G genes, V bins of counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import Bound, conjuncts
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
        for bound in conjuncts(bounds):
            if not (isinstance(bound, Bounds) and bound.per == "cell" and bound.separate):
                rest.append(bound)
                continue
            low, high = bound.counts(cells)
            if bound.exact:
                low, high = torch.minimum(low, high), torch.maximum(low, high)
            genes = bound.genes
            least[:, genes] = torch.maximum(least[:, genes], low.expand(n_cells, -1))
            most[:, genes] = torch.minimum(most[:, genes], high.expand(n_cells, -1))
        return cls(least=least, most=most, rest=tuple(rest))

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
        device = logits.device
        first = first_count.to(device, torch.float64)
        last = torch.cat([first[1:] - 1, first.new_full((1,), torch.inf)])
        low = self.least.to(device)[cell, gene][:, None]
        high = self.most.to(device)[cell, gene][:, None]
        return logits.masked_fill((last < low) | (first > high), -torch.inf)

    def clamped(self, counts: Int[Tensor, "cells genes"]) -> Int[Tensor, "cells genes"]:
        """Counts drawn from allowed bins, moved to the allowed part of their bin."""
        return torch.minimum(torch.maximum(counts.double(), self.least), self.most).long()


def best_draw(
    bounds: Sequence[Bound], draws: Sequence[CellValues]
) -> tuple[int, Float[Tensor, " draws"]]:
    """The first draw of a set that obeys, as rejection would take; else the least violating.

    Parameters
    ----------
    bounds
        What shall hold of the set.
    draws
        Finished sets, one for each draw.

    Returns
    -------
    Its number, and the energy of every draw.
    """
    energy = torch.stack(
        [torch.stack([bound.energy(one) for bound in bounds]).sum(0) for one in draws]
    ).double()
    obeys = torch.tensor([all(bool(b.holds(one).all()) for b in bounds) for one in draws])
    return int(torch.where(obeys, -1.0, energy).argmin()), energy
