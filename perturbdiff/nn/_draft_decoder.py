"""A small network that guesses what the causal decoder will make of the next few genes.

It starts from the decoder's own hidden value at the gene that was said last and looks at nothing
that is said in between, so any number of genes is guessed in one call. Its guesses are hidden
values, which the decoder's own head turns into bins (as features are drafted by Li et al., 2024,
"EAGLE").

B cells, S sources, T positions, G genes, D width, V bins.
"""

from copy import deepcopy
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from perturbdiff._typing import PrecisionName
from perturbdiff.nn._cell_cache import KeyValueCache


class DraftDecoder(nn.Module):
    """Guesses hidden values of a causal decoder.

    Parameters
    ----------
    width
        Of the decoder.
    n_bins
        Bins that the decoder says.
    """

    def __init__(self, width: int, n_bins: int) -> None:
        super().__init__()
        self.width = width
        self.last = nn.Linear(width, width)
        self.said_bin = nn.Embedding(n_bins + 1, width)
        self.ask = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def lowered(self, precision: PrecisionName) -> Self:
        """The draft with its linear layers in another precision.

        Parameters
        ----------
        precision
            As of the decoder.

        Returns
        -------
        A copy.
        """
        other = deepcopy(self)
        if precision != "float32":
            for part in (other.last, other.ask, other.out):
                part.to(torch.bfloat16)
        return other

    def forward(
        self,
        hidden: Float[Tensor, "cells sources width"],
        said_bin: Int[Tensor, "cells sources"],
        gene: Int[Tensor, "cells positions"],
        *,
        cache: KeyValueCache,
    ) -> Float[Tensor, "cells positions width"]:
        """Guess hidden values.

        Parameters
        ----------
        hidden
            Of the decoder where it said its last gene, 0 where it said none; one for all positions
            or one each.
        said_bin
            What it said there; V where nothing was said.
        gene
            Genes that it will be asked for.
        cache
            Of the same cells.

        Returns
        -------
        What its hidden values there may be.
        """
        rows = torch.arange(len(gene), device=gene.device)[:, None]
        numbers = self.ask.weight.dtype
        known = self.last(hidden.to(numbers)) + self.said_bin(said_bin)
        asked = self.ask(cache.asked[rows, gene].to(numbers))
        mixed = nn.functional.gelu(known + asked, approximate="tanh")
        out: Tensor = hidden + self.out(mixed.to(numbers))
        return out
