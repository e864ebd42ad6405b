"""What is known about the genes of a cell, and what a causal decoder goes on from.

B cells, G genes, L blocks, P prefix, H heads, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from perturbdiff._batch import Sets


@dataclass(frozen=True, kw_only=True)
class GeneInputs(Sets):
    """What is known about each gene of a cell before the cell is made, in the model's gene order.

    ``level`` and ``shift`` are the control mean of log1p values and how far the effect prior moves
    it; ``partner`` is the log1p value of the cell's control partner less the level, 0 where there
    is none; ``log_mean`` is the log of the mean count that the prior states at the cell's own
    library size. ``dispersion`` is the log of how much more unevenly the gene is counted in control
    cells of the context than in all cells; none means nowhere.
    """

    level: Float[Tensor, "cells genes"]
    shift: Float[Tensor, "cells genes"]
    partner: Float[Tensor, "cells genes"]
    log_mean: Float[Tensor, "cells genes"]
    dispersion: Float[Tensor, "cells genes"] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is given."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True, kw_only=True)
class KeyValueCache(Sets):
    """Everything that decoding goes on from; rows are cells, and may be picked and joined.

    Keys and values are allocated once: 2 · L · B · (P + G) · D numbers, or 2 · L · B · P · D where
    the cache only travels. Places of a head lie side by side, so that looking back reads memory in
    order. ``length`` counts the positions of each cell that are filled behind the prefix; further
    ones are never looked at.
    """

    keys: Float[Tensor, "cells blocks heads places key"]
    values: Float[Tensor, "cells blocks heads places key"]
    prefix: Bool[Tensor, "cells prefix"]  # True: there is something to look at
    length: Int[Tensor, " cells"]
    modulation: Float[Tensor, "cells blocks six_widths"]
    asked: Float[Tensor, "cells genes width"]
    expected: Float[Tensor, "cells genes_and_none 2"]  # mean count, 1 / standard deviation
    genes: GeneInputs

    @property
    def bytes(self) -> int:
        """Memory of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def put(self, rows: Int[Tensor, " slots"], other: Self) -> None:
        """Overwrite some cells by those of another cache, in place: slots are used again.

        The other cache may have fewer control cells and less room.
        """
        self.prefix[rows] = False
        self.prefix[rows, : other.prefix.shape[1]] = other.prefix
        for name in ("keys", "values"):
            new = getattr(other, name)
            getattr(self, name)[rows, :, :, : new.shape[3]] = new
        for name in ("length", "modulation", "asked", "expected"):
            getattr(self, name)[rows] = getattr(other, name)
        for name in self.genes.names:
            getattr(self.genes, name)[rows] = getattr(other.genes, name)

    def with_room(self, n_prefix: int, n_genes: int) -> Self:
        """The same cells at length 0, with room for so many control cells and genes."""
        more = n_prefix - self.prefix.shape[1]
        room = n_prefix + n_genes - self.keys.shape[3]
        return replace(
            self,
            keys=functional.pad(self.keys, (0, 0, 0, room)),
            values=functional.pad(self.values, (0, 0, 0, room)),
            prefix=functional.pad(self.prefix, (0, more)),
            length=torch.zeros_like(self.length),
        )

    def state(self) -> dict[str, Tensor]:
        """Tensors that :meth:`from_state` reads, to be sent to where cells are decoded."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "genes"}
        return own | {f"genes.{name}": getattr(self.genes, name) for name in self.genes.names}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The cache that this is the state of."""
        start = "genes."
        known = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        genes = GeneInputs(**known)
        own = {name: value for name, value in state.items() if "." not in name}
        return cls(**own, genes=genes)
