"""Cells in the making, and how they advance by a gene: in a known order, or one that they draw.

A cell goes through two functions, which may run on two machines. ``network.prefill`` encodes its
condition and control cells; the cache that it returns travels without room for genes
(``room=False``, ``state``) and gets room where it arrives. :func:`decode` then says every gene.

B cells, G genes, V bins.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._random import stream_key, uniform
from perturbdiff.autoregressive._order import GeneOrder, possible_bins
from perturbdiff.autoregressive._protocol import Cache, GeneDrawing, Network
from perturbdiff.autoregressive._sampling import Sampling

# What numbers are drawn for: apart from each other, and from what else is drawn for a cell's genes.
_BIN = 1 << 20
_GENE = 1 << 21
_STOP = stream_key(0, "no further gene")
_LOOK_EVERY = 8  # calls, where to look whether all cells are done is to wait for the device


@dataclass(kw_only=True)
class Cells:
    """Cells in the making, one a slot; everything is allocated once and written in place."""

    cache: Any  # Cache
    keys: Int[Tensor, " cells"]
    uniform: Float[Tensor, "cells draws genes"]
    bins: Int[Tensor, "cells genes"]  # by gene, not by position; 0 until said
    said_gene: Int[Tensor, "cells 1"]
    said_bin: Int[Tensor, "cells 1"]
    position: Int[Tensor, " cells"]  # genes said
    done: Bool[Tensor, " cells"]

    def put(self, rows: Int[Tensor, " slots"], other: Self) -> None:
        """Overwrite the cells in some slots by others."""
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Tensor):
                mine[rows] = new
            else:
                mine.put(rows, new)


class Decoding(ABC):
    """A way in which cells advance.

    Parameters
    ----------
    network
        Says bins.
    order
        Of the genes.
    lanes
        Lane of each gene, from :func:`~perturbdiff._random.gene_lanes`.
    sampling
        How a choice is made.
    """

    stride = 1  # most genes that one call says
    n_draws = 1  # uniform numbers a gene
    ends_on_time = True  # whether each cell takes G calls

    def __init__(
        self,
        network: Network,
        order: GeneOrder,
        lanes: Int[Tensor, " genes"],
        *,
        sampling: Sampling | None = None,
    ) -> None:
        self.network = network
        self.order = order.genes.to(lanes.device)
        self.lanes = lanes
        self.sampling = sampling or Sampling()
        self.n_genes = len(lanes)

    def begin(self, cache: Cache, keys: Int[Tensor, " cells"]) -> Cells:
        """Cells of which nothing was said.

        Parameters
        ----------
        cache
            From ``prefill``.
        keys
            Key of each cell, from :func:`~perturbdiff._random.cell_keys`.

        Returns
        -------
        Cells for :meth:`advance`.
        """
        return Cells(**self._fresh(cache, keys))

    @abstractmethod
    def advance(self, cells: Cells, *, reach: int) -> None:
        """Say the next gene, or genes, of each cell, in place.

        Parameters
        ----------
        cells
            From :meth:`begin`.
        reach
            No cell that is not done gets longer than this.
        """

    def _fresh(self, cache: Cache, keys: Tensor) -> dict[str, Any]:
        n_cells, full = len(keys), keys.new_full
        draws = [uniform(keys, self.lanes, step=_BIN + kind) for kind in range(self.n_draws)]
        return {
            "cache": cache,
            "keys": keys,
            "uniform": torch.stack(draws, dim=1),
            "bins": full((n_cells, self.n_genes), 0),
            "said_gene": full((n_cells, 1), self.n_genes),
            "said_bin": full((n_cells, 1), self.network.n_bins),
            "position": full((n_cells,), 0),
            "done": torch.zeros_like(keys, dtype=torch.bool),
        }


class KnownOrder(Decoding):
    """One gene a call, in an order that is known beforehand; nothing waits for the device."""

    def advance(self, cells: Cells, *, reach: int) -> None:
        """Say the next gene of each cell."""
        place = cells.position.clamp_max(reach - 1)
        gene = self.order[place, None]
        cells.cache.length.copy_(place)
        hidden, _ = self.network.decode(
            cells.cache, cells.said_gene, cells.said_bin, next_gene=gene, reach=reach
        )
        logits = self.network.bin_logits(hidden, gene, cells.cache)
        said = self.sampling.choose(logits, cells.uniform[:, 0].gather(1, gene))
        cells.bins.scatter_(1, gene, said)
        cells.said_gene.copy_(gene)
        cells.said_bin.copy_(said)
        cells.position += 1
        torch.ge(cells.position, self.n_genes, out=cells.done)


@dataclass(kw_only=True)
class DrawingCells(Cells):
    """Cells that draw their genes."""

    tally: Float[Tensor, "cells 2"]  # genes said, and how many of them were expected


class DrawnOrder(Decoding):
    """One gene a call, drawn among those left, until the cell stops; unsaid genes are zero.

    A gene that is said is there, and none is higher than the one before: other bins are left out.
    """

    ends_on_time = False
    network: GeneDrawing

    def __init__(
        self,
        network: GeneDrawing,
        order: GeneOrder,
        lanes: Int[Tensor, " genes"],
        *,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(network, order, lanes, sampling=sampling)
        self.choices = torch.cat([lanes, lanes.new_tensor([_STOP])])

    def begin(self, cache: Cache, keys: Int[Tensor, " cells"]) -> DrawingCells:
        """Cells of which nothing was said; arguments as for every decoding."""
        tally = cache.keys.new_zeros(len(keys), 2, dtype=summed_in(cache))
        return DrawingCells(**self._fresh(cache, keys), tally=tally)

    def advance(self, cells: Cells, *, reach: int) -> None:
        """Draw the next gene of each cell that has not stopped, and say its bin."""
        assert isinstance(cells, DrawingCells)  # made by `begin`
        cache, n_genes = cells.cache, self.n_genes
        cache.length.copy_(cells.position.clamp_max(reach - 1))
        progress, tally = self.network.progress_of(cache.genes, cells.said_gene, cells.tally)
        hidden, _ = self.network.decode(
            cache, cells.said_gene, cells.said_bin, progress=progress, reach=reach
        )
        gone = torch.nn.functional.pad(cells.bins > 0, (0, 1))
        logits = self.network.gene_logits(hidden, cache)[:, 0].masked_fill(gone, -torch.inf)
        noise = uniform(cells.keys, self.choices, step=_GENE + cells.position)
        drawn = self.sampling.choose_named(logits, noise)[:, None]
        on = ~cells.done & (drawn[:, 0] < n_genes)
        gene = drawn.clamp_max(n_genes - 1)
        logits = self.network.bin_logits(hidden, gene, cache)
        logits = possible_bins(logits, cells.said_bin, impossible=-torch.inf)
        said = self.sampling.choose(logits, cells.uniform[:, 0].gather(1, gene))
        old, where = cells.bins.gather(1, gene), on[:, None]
        cells.bins.scatter_(1, gene, torch.where(where, said, old))
        cells.said_gene.copy_(torch.where(where, gene, cells.said_gene))
        cells.said_bin.copy_(torch.where(where, said, cells.said_bin))
        cells.tally.copy_(torch.where(where, tally, cells.tally))
        cells.position += on
        torch.logical_or(~on, cells.position >= n_genes, out=cells.done)


def summed_in(cache: Cache) -> torch.dtype:
    """Numbers for what goes on beside keys and values: of these, but float32 at least."""
    return torch.promote_types(cache.keys.dtype, torch.float32)


@torch.inference_mode()
def decode(
    decoding: Decoding, cache: Cache, keys: Int[Tensor, " cells"]
) -> tuple[Int[Tensor, "cells genes"], int]:
    """Make cells, all from the first gene to the last.

    Parameters
    ----------
    decoding
        How they advance.
    cache
        From ``prefill``, with room for every gene; it is used up.
    keys
        Key of each cell: what is said depends on it and on nothing else in the call.

    Returns
    -------
    Bin of every gene, and how often the network was called.
    """
    cells, n_calls, reach = decoding.begin(cache, keys), 0, 0
    every = 1 if keys.device.type == "cpu" else _LOOK_EVERY
    while True:
        reach = min(reach + decoding.stride, decoding.n_genes)
        decoding.advance(cells, reach=reach)
        n_calls += 1
        if decoding.ends_on_time:
            if n_calls == decoding.n_genes:
                break
        elif (n_calls % every == 0 or reach == decoding.n_genes) and bool(cells.done.all()):
            break
    return cells.bins, n_calls
