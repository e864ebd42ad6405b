"""What constraints are read against, and the cells they judge.

N cells, G genes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import GeneError, counted, listed, nearest


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Genes of a model, and the control cells of the context that is asked about."""

    genes: tuple[str, ...]
    control_log1p: Float[Tensor, " genes"]  # mean over control cells
    control_depth: Float[Tensor, " genes"]  # mean counts per 10,000 over control cells
    library_size: Float[Tensor, " controls"]

    def columns(self, names: Sequence[str], *, who: str) -> Int[Tensor, " named"]:
        """Places of named genes.

        Raises
        ------
        GeneError
            When a gene is named twice, or is none of the model's; the message has the nearest name.
        """
        place = {gene: number for number, gene in enumerate(self.genes)}
        if unknown := [name for name in names if name not in place]:
            msg = (
                f"{who} names {counted(len(unknown), 'gene')} that the model does not have: "
                f"{listed(unknown)}. {nearest(unknown[0], self.genes)}"
            )
            raise GeneError(msg)
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            msg = f"{who} names genes twice: {listed(twice)}. Name each once."
            raise GeneError(msg)
        return torch.tensor([place[name] for name in names], dtype=torch.int64)

    def of_genes(self, columns: Int[Tensor, " kept"]) -> Self:
        """The same controls on some of the genes."""
        return replace(
            self,
            genes=tuple(self.genes[number] for number in columns.tolist()),
            control_log1p=self.control_log1p[columns],
            control_depth=self.control_depth[columns],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CellValues:
    """Cells in user space: log1p of counts per 10,000, with their denominators."""

    log1p: Float[Tensor, "*sets cells genes"]
    library_size: Float[Tensor, "*sets cells"]
    number: Int[Tensor, "*sets cells"]  # of each cell within its condition

    def take(self, columns: Int[Tensor, " kept"]) -> Float[Tensor, "*sets cells kept"]:
        """Values of some genes."""
        return self.log1p[..., columns]

    @property
    def depth(self) -> Float[Tensor, "*sets cells 1"]:
        """Counts per 10,000 that one count makes."""
        return DEPTH / self.library_size[..., None]
