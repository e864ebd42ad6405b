"""What decoding asks of a network, of its cache, and of a draft.

B cells, T positions, P prefix, G genes, D width, V bins.
"""

from typing import Any, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class Cache(Protocol):
    """What decoding goes on from, one row a cell.

    ``length`` counts the positions behind the prefix that are filled. Decoding sets it in place, so
    that a cell may also go back.
    """

    @property
    def keys(self) -> Tensor:
        """Keys of attention, one row a cell; values are like them."""
        ...

    @property
    def prefix(self) -> Bool[Tensor, "cells prefix"]:
        """True where there is something to look at."""
        ...

    @property
    def length(self) -> Int[Tensor, " cells"]:
        """Positions behind the prefix that are filled."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        ...

    def __getitem__(self, index: Tensor | slice) -> Self:
        """The picked cells."""
        ...

    def put(self, rows: Int[Tensor, " slots"], other: Self) -> None:
        """Overwrite some cells by others, which may have less room, in place."""
        ...

    def with_room(self, n_prefix: int, n_genes: int) -> Self:
        """The same at length 0, with room for so many places."""
        ...


@runtime_checkable
class Network(Protocol):
    """Says one gene after another; gene G and bin V stand for nothing said yet."""

    @property
    def n_genes(self) -> int:
        """G."""
        ...

    @property
    def n_bins(self) -> int:
        """V."""
        ...

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
        """Hidden values of further positions of each cell; ``reach`` bounds every length."""
        ...

    def bin_logits(
        self,
        hidden: Float[Tensor, "cells positions width"],
        gene: Int[Tensor, "cells positions"],
        cache: Any,
    ) -> Float[Tensor, "cells positions bins"]:
        """Logits of the bin of a gene."""
        ...


@runtime_checkable
class GeneDrawing(Network, Protocol):
    """Draws the gene that it says next among those left, or stops."""

    def gene_logits(
        self, hidden: Float[Tensor, "cells positions width"], cache: Any
    ) -> Float[Tensor, "cells positions genes_and_stop"]:
        """Logits of each gene, and last of stopping."""
        ...

    def progress_of(
        self,
        genes: Any,
        said_gene: Int[Tensor, "cells positions"],
        said_before: Float[Tensor, "cells 2"] | None = None,
    ) -> tuple[Float[Tensor, "cells positions 3"], Float[Tensor, "cells 2"]]:
        """Numbers for ``decode``, and what to hand to the next call."""
        ...


@runtime_checkable
class Draft(Protocol):
    """Guesses, without looking at what is said in between, what the network will make of genes."""

    @property
    def width(self) -> int:
        """D."""
        ...

    def __call__(
        self,
        hidden: Float[Tensor, "cells sources width"],
        said_bin: Int[Tensor, "cells sources"],
        gene: Int[Tensor, "cells positions"],
        *,
        cache: Any,
    ) -> Float[Tensor, "cells positions width"]:
        """Hidden values at ``gene``, from that of an earlier position and the bin said there."""
        ...
