"""The raw network of the autoregressive sibling: one gene of a cell after another.

The sequence of a cell is a prefix (a learned vector and the encoded control cells) and one position
a gene. A position is told which gene is asked next and everything known about it beforehand, and
what was said last; it answers with a distribution over bins of counts. That distribution starts as
the negative binomial that the effect prior states, and the network learns what to change about it.

B cells, T positions, G genes, D width, L blocks, H heads, V bins, Q nodes, P prefix, R control
cells, A cell axes.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from perturbdiff._batch import Context
from perturbdiff._typing import PrecisionName
from perturbdiff.config import DecoderConfig
from perturbdiff.nn._blocks import ControlBlock, FeedForward
from perturbdiff.nn._causal_block import CausalBlock
from perturbdiff.nn._cell_cache import GeneInputs, KeyValueCache
from perturbdiff.nn._conditioning import Conditioning
from perturbdiff.nn._precision import Int8Linear, with_linear_layers

_LEAST_MASS = 1e-6  # of a bin, before the network has spoken: a surprise costs no more than this
_RESIDUAL = (-3.0, 6.0)
_KNOWN = 5  # numbers that are known about a gene of a cell beforehand


class CausalDecoder(nn.Module):
    """Writes a cell gene by gene, in an order that somebody chose.

    Parameters
    ----------
    config
        Shape.
    axes
        Weight of each gene in the axes of control cells: what is known of a gene's company.
    log_dispersion
        Log over-dispersion of each gene's counts, to start from.
    first_count
        Smallest count of each bin, rising from 0; the last bin ends at ``last_count``.
    last_count
        Largest count that is told apart.
    n_perturbations, n_features, covariate_sizes
        As in :class:`~perturbdiff.nn._conditioning.Conditioning`.
    """

    axes: Tensor
    places: Tensor
    node: Tensor
    node_mass: Tensor
    node_ways: Tensor
    bin_count: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        *,
        axes: Float[Tensor, "genes axes"],
        log_dispersion: Float[Tensor, " genes"],
        first_count: Int[Tensor, " bins"],
        last_count: int,
        n_perturbations: int,
        n_features: int = 0,
        covariate_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.config = config
        width, (self.n_genes, n_axes), self.n_bins = config.width, axes.shape, len(first_count)
        nodes, mass, middle = _nodes(first_count, last_count)
        self.register_buffer("axes", axes)
        self.register_buffer("places", torch.arange(self.n_genes), persistent=False)
        self.register_buffer("node", nodes)
        self.register_buffer("node_mass", mass)
        self.register_buffer("node_ways", torch.lgamma(nodes + 1), persistent=False)
        self.register_buffer("bin_count", middle)
        # What a gene is, beyond the known axes; the last row is "nothing was said yet".
        self.table = nn.Parameter(torch.randn(self.n_genes + 1, config.gene_width) * 0.1)
        self.ask = nn.Linear(n_axes + config.gene_width, width)
        self.known = nn.Linear(_KNOWN, width)
        self.said = nn.Linear(n_axes + config.gene_width, 2 * width)
        self.said_bin = nn.Embedding(self.n_bins + 1, width)
        self.partner_slope = nn.Parameter(torch.zeros(self.n_genes))
        self.log_dispersion = nn.Parameter(log_dispersion.clone())
        # The prefix: control cells, and one vector that is always there.
        self.control = nn.Linear(n_axes, width)
        self.no_control = nn.Parameter(torch.zeros(width))
        self.control_blocks = nn.ModuleList(
            ControlBlock(width, config.n_heads, expansion=config.control_expansion)
            for _ in range(config.n_blocks)
        )
        # The condition of a cell, its partner among it.
        self.summary = nn.Linear(n_axes, width)
        self.partner = nn.Linear(n_axes + 1, width)
        self.conditioning = Conditioning(
            width,
            n_latent=config.n_response_axes,
            n_perturbations=n_perturbations,
            n_features=n_features,
            covariate_sizes=covariate_sizes,
        )
        self.blocks = nn.ModuleList(
            CausalBlock(width, config.n_heads, hidden=config.hidden) for _ in range(config.n_blocks)
        )
        self.final_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 2 + self.n_bins)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.descending = config.order == "descending"
        if self.descending:  # the gene is not asked for but drawn: this part draws it
            self.progress = nn.Linear(3, width)
            self.choose = nn.Linear(width, n_axes + config.gene_width + 1)
            self.given_gene = FeedForward(width, 1)
            nn.init.zeros_(self.choose.weight)
            nn.init.zeros_(self.choose.bias)

    def lowered(self, precision: PrecisionName) -> Self:
        """The network with its blocks, and what they look back on, in another precision.

        Between the layers of a block numbers stay in float32, and so does all that a choice hangs
        on: what is said and asked, the head with its rates, and sums over what was said.

        Parameters
        ----------
        precision
            ``"bfloat16"``, or ``"int8"``, which keeps keys and values in bfloat16 and has the
            layers of the blocks in 8 bits.

        Returns
        -------
        A copy, for decoding. ``"float32"`` gives one without a change.
        """
        other = deepcopy(self)
        if precision == "float32":
            return other
        for part in (other.control, other.control_blocks, other.blocks):
            part.to(torch.bfloat16)
        if precision == "int8":
            for blocks in (other.control_blocks, other.blocks):
                with_linear_layers(blocks, Int8Linear.of)
        return other

    @property
    def kept(self) -> torch.dtype:
        """Numbers that keys, values and questions are kept in."""
        return self.control.weight.dtype

    # Before the first gene

    def prefill(self, context: Context, genes: GeneInputs, *, room: bool = True) -> KeyValueCache:
        """All that does not depend on what will be said, and room for what will be.

        Parameters
        ----------
        context
            Sets of cells; a set shares its control cells, which are encoded once.
        genes
            One row a cell, sets one after another.
        room
            Whether to leave room for the genes; without, the cache is smaller to send, and gets
            its room from :meth:`KeyValueCache.with_room` or ``put``.

        Returns
        -------
        A cache of length 0 for every cell.
        """
        condition_BD, n_cells = self._condition(context), context.partner.shape[1]
        prefix = self._prefix(context)
        visible = _with_none(context).repeat_interleave(n_cells, 0)
        n_prefix, n_heads = visible.shape[1], self.config.n_heads
        shape = (
            len(condition_BD), len(prefix), n_heads, n_prefix + self.n_genes * room,
            self.config.width // n_heads,
        )  # fmt: skip
        keys, values = (condition_BD.new_zeros(shape, dtype=self.kept) for _ in range(2))
        for number, (key, value) in enumerate(prefix):
            for into, new in ((keys, key), (values, value)):
                into[:, number, :, :n_prefix] = new.transpose(1, 2).repeat_interleave(n_cells, 0)
        return KeyValueCache(
            keys=keys,
            values=values,
            prefix=visible,
            length=torch.zeros(len(keys), dtype=torch.int64, device=keys.device),
            modulation=self._modulation(condition_BD),
            asked=self._asked(genes, context.has_partner.repeat_interleave(n_cells)),
            expected=self._expected(genes),
            genes=genes,
        )

    # One gene after another

    def decode(
        self,
        cache: KeyValueCache,
        said_gene: Int[Tensor, "cells positions"],
        said_bin: Int[Tensor, "cells positions"],
        *,
        next_gene: Int[Tensor, "cells positions"] | None = None,
        progress: Float[Tensor, "cells positions 3"] | None = None,
        reach: int | None = None,
    ) -> tuple[Float[Tensor, "cells positions width"], KeyValueCache]:
        """What the network makes of some further positions of each cell.

        Parameters
        ----------
        cache
            Filled up to some length, which may differ between cells. Its keys and values are
            written to in place.
        said_gene, said_bin
            What was said before each position; G and V at the first, where nothing was.
        next_gene
            Gene that each position is asked for; ``None`` where the network draws it.
        progress
            From :meth:`progress_of`, where the network draws the gene.
        reach
            No cell gets longer than this; where the caller does not say, the device is asked.

        Returns
        -------
        Hidden values for :meth:`bin_logits`, and the cache with its new length.
        """
        rows = torch.arange(len(said_gene), device=said_gene.device)[:, None]
        n_new, n_prefix = said_gene.shape[1], cache.prefix.shape[1]
        place_BT = cache.length[:, None] + self.places[:n_new]
        most = n_prefix + (int(place_BT.max()) + 1 if reach is None else reach)
        behind = self.places[: most - n_prefix] <= place_BT[..., None]
        visible = torch.cat([cache.prefix[:, None].expand(-1, n_new, -1), behind], dim=-1)
        at = n_prefix + place_BT
        x = self._positions(cache.expected, said_gene, said_bin) + self._next(
            cache.asked, next_gene, progress
        )
        for number, block in enumerate(self.blocks):
            assert isinstance(block, CausalBlock)
            shift, scale, gate, *rest = cache.modulation[:, number, None].chunk(6, dim=-1)
            normed = torch.addcmul(shift, block.norm(x), scale)
            query, key, value = block.projected(normed)
            keys, values = cache.keys[:, number], cache.values[:, number]
            keys[rows, :, at] = key
            values[rows, :, at] = value
            seen = block.attend(query, keys[:, :, :most], values[:, :, :most], visible=visible)
            x = block.fed(torch.addcmul(x, gate, seen), rest)
        return self.final_norm(x), replace(cache, length=cache.length + n_new)

    def bin_logits(
        self,
        hidden: Float[Tensor, "cells positions width"],
        gene: Int[Tensor, "cells positions"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "cells positions bins"]:
        """Logits of the bin of a gene.

        Parameters
        ----------
        hidden
            From :meth:`decode`.
        gene
            The gene that was asked for, or drawn.
        cache
            Of the same cells.

        Returns
        -------
        Unnormalised.
        """
        hidden = self.told(hidden, gene, cache)
        log_mean, log_dispersion, free = self.rates(hidden, gene, cache.genes)
        mass = self.log_mass(log_mean, log_dispersion)
        return mass + free if self.config.likelihood == "bins" else mass

    def told(
        self,
        hidden: Float[Tensor, "cells positions width"],
        gene: Int[Tensor, "cells positions"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "cells positions width"]:
        """Hidden values once the gene is known: where it is drawn, the network was not told it."""
        if not self.descending:
            return hidden
        out: Tensor = hidden + self.given_gene(hidden + _picked(cache.asked, gene))
        return out

    def gene_logits(
        self, hidden: Float[Tensor, "cells positions width"], cache: KeyValueCache
    ) -> Float[Tensor, "cells positions genes_and_stop"]:
        """Logits of the gene that is said next, and of stopping, where the network draws genes.

        Genes that were said already are not yet left out.
        """
        query = self.choose(hidden)
        logits = query[..., :-1] @ self._identity()[:-1].mT + self.log_present(cache.genes)[:, None]
        return torch.cat([logits, query[..., -1:]], dim=-1)

    def progress_of(
        self,
        genes: GeneInputs,
        said_gene: Int[Tensor, "cells positions"],
        said_before: Float[Tensor, "cells 2"] | None = None,
    ) -> tuple[Float[Tensor, "cells positions 3"], Float[Tensor, "cells 2"]]:
        """How many genes were said, how many the prior expects in all and still expects.

        Parameters
        ----------
        genes
            Of the cells.
        said_gene
            As in :meth:`decode`.
        said_before
            Second value of an earlier call, where positions follow on others.

        Returns
        -------
        Numbers for :meth:`decode`, and what to hand to the next call.
        """
        present = self.log_present(genes).exp()
        mass = torch.cat([present, torch.zeros_like(present[:, :1])], dim=1).gather(1, said_gene)
        said = torch.stack([(said_gene < self.n_genes).to(mass), mass], dim=-1).cumsum(1)
        said = said if said_before is None else said + said_before[:, None]
        total = present.sum(1)[:, None].expand_as(mass)
        numbers = torch.stack([said[..., 0], total, total - said[..., 1]], dim=-1)
        return numbers.clamp_min(0).log1p(), said[:, -1]

    # All genes at once, for training

    def forward(
        self,
        context: Context,
        genes: GeneInputs,
        *,
        said_gene: Int[Tensor, "cells positions"],
        said_bin: Int[Tensor, "cells positions"],
        next_gene: Int[Tensor, "cells positions"] | None = None,
    ) -> tuple[Float[Tensor, "cells positions width"], KeyValueCache]:
        """Hidden values of whole sequences, as :meth:`prefill` and :meth:`decode` would give them.

        Parameters
        ----------
        context, genes
            As in :meth:`prefill`.
        said_gene, said_bin, next_gene
            As in :meth:`decode`.

        Returns
        -------
        Hidden values, and a cache without keys for :meth:`bin_logits` and :meth:`gene_logits`.
        """
        condition_BD, n_cells = self._condition(context), context.partner.shape[1]
        visible_BP = _with_none(context).repeat_interleave(n_cells, 0)
        asked = self._asked(genes, context.has_partner.repeat_interleave(n_cells))
        modulation = self._modulation(condition_BD)
        progress = self.progress_of(genes, said_gene)[0] if self.descending else None
        n_new = said_gene.shape[1]
        before = torch.ones(n_new, n_new, dtype=torch.bool, device=said_gene.device).tril()
        visible = torch.cat(
            [
                visible_BP[:, None].expand(-1, n_new, -1),
                before.expand(len(visible_BP), -1, -1),
            ],
            dim=-1,
        )
        expected = self._expected(genes)
        x = self._positions(expected, said_gene, said_bin) + self._next(asked, next_gene, progress)
        for number, (block, prefix) in enumerate(
            zip(self.blocks, self._prefix(context), strict=True)
        ):
            assert isinstance(block, CausalBlock)
            shift, scale, gate, *rest = modulation[:, number, None].chunk(6, dim=-1)
            normed = torch.addcmul(shift, block.norm(x), scale)
            query, *own = block.projected(normed)
            keys, values = (
                torch.cat([first.repeat_interleave(n_cells, 0), said], dim=1).transpose(1, 2)
                for first, said in zip(prefix, own, strict=True)
            )
            seen = block.attend(query, keys, values, visible=visible)
            x = block.fed(torch.addcmul(x, gate, seen), rest)
        empty = x.new_zeros(len(x), len(self.blocks), 0, 1, 1)
        return self.final_norm(x), KeyValueCache(
            keys=empty,
            values=empty,
            prefix=visible_BP,
            length=torch.full((len(x),), n_new, device=x.device),
            modulation=modulation,
            asked=asked,
            expected=expected,
            genes=genes,
        )

    # Counts

    def rates(
        self,
        hidden: Float[Tensor, "cells positions width"],
        gene: Int[Tensor, "cells positions"],
        genes: GeneInputs,
    ) -> tuple[Tensor, Tensor, Float[Tensor, "cells positions bins"]]:
        """Log mean and log dispersion of the count of a gene, and what bins have beyond these."""
        change = self.out(hidden)
        log_mean = genes.log_mean.gather(1, gene) + change[..., 0]
        log_mean = log_mean + self.partner_slope[gene] * genes.partner.gather(1, gene)
        log_dispersion = self._log_dispersion(genes).expand_as(genes.log_mean).gather(1, gene)
        return log_mean, log_dispersion + change[..., 1], change[..., 2:]

    def log_mass(
        self,
        log_mean: Float[Tensor, "*cells genes"],
        log_dispersion: Float[Tensor, "*cells genes"],
    ) -> Float[Tensor, "*cells genes bins"]:
        """Log probability of each bin under a negative binomial."""
        shape, log_odds = (-log_dispersion).exp()[..., None], (log_mean + log_dispersion)[..., None]
        total = shape + self.node
        log = torch.lgamma(total) - torch.lgamma(shape) - self.node_ways
        log = log + self.node * log_odds - total * functional.softplus(log_odds)
        return (log.exp() @ self.node_mass + _LEAST_MASS).log()

    def log_present(self, genes: GeneInputs) -> Float[Tensor, "cells genes"]:
        """Log of the probability that the prior gives to a gene's being there at all."""
        shape = (-self._log_dispersion(genes)).exp()
        none = -shape * torch.log1p(genes.log_mean.exp() / shape)
        return (-torch.expm1(none)).clamp_min(_LEAST_MASS).log()

    def _log_dispersion(self, genes: GeneInputs) -> Float[Tensor, "cells_or_one genes"]:
        """What is learned of each gene, and how the context differs."""
        own = self.log_dispersion[None]
        return own if genes.dispersion is None else own + genes.dispersion

    # Parts

    def _identity(self) -> Float[Tensor, "genes_and_none gene_width"]:
        none = torch.zeros_like(self.axes[:1])
        return torch.cat([torch.cat([self.axes, none]), self.table], dim=-1)

    def _asked(self, genes: GeneInputs, has_partner: Tensor) -> Float[Tensor, "cells genes width"]:
        """Each gene as a question: who it is, and what is known about it in this cell."""
        known = has_partner[:, None].to(genes.level.dtype).expand_as(genes.level)
        numbers = torch.stack(
            [genes.level, genes.shift, genes.log_mean / 4, genes.partner * known, known], dim=-1
        )
        out: Tensor = self.ask(self._identity()[:-1]) + self.known(numbers)
        return out.to(self.kept)

    def _expected(self, genes: GeneInputs) -> Float[Tensor, "cells genes_and_none 2"]:
        """What the prior expects of each gene; of none, nothing that could surprise."""
        mean = genes.log_mean.exp()
        spread = (mean + self._log_dispersion(genes).exp() * mean.square()).sqrt().clamp_min(1e-3)
        return functional.pad(torch.stack([mean, 1 / spread], dim=-1), (0, 0, 0, 1))

    def _positions(
        self, expected: Tensor, said_gene: Tensor, said_bin: Tensor
    ) -> Float[Tensor, "cells positions width"]:
        """What was said last: which gene, which bin, and how surprising that was."""
        mean, per_spread = _picked(expected, said_gene).unbind(-1)
        count = self.bin_count[said_bin.clamp_max(self.n_bins - 1)]
        surprise = ((count - mean) * per_spread).clamp(*_RESIDUAL)
        if said_gene.numel() < self.n_genes:  # decoding: not worth a table of all genes
            nothing = said_gene[..., None] == self.n_genes
            known = self.axes[said_gene.clamp_max(self.n_genes - 1)].masked_fill(nothing, 0)
            said = self.said(torch.cat([known, self.table[said_gene]], dim=-1))
        else:
            said = functional.embedding(said_gene, self.said(self._identity()))
        who, times = said.chunk(2, dim=-1)
        out: Tensor = who + self.said_bin(said_bin) + times * surprise[..., None]
        return out

    def _next(self, asked: Tensor, next_gene: Tensor | None, progress: Tensor | None) -> Tensor:
        if next_gene is not None:
            return _picked(asked, next_gene)
        out: Tensor = self.progress(progress)
        return out

    def _condition(self, context: Context) -> Float[Tensor, "cells width"]:
        """One vector a cell: perturbation, covariates, shift, spread of the controls, partner."""
        real = context.control_mask[:, :, None]
        count = context.control_mask.sum(1, keepdim=True).clamp(min=1)
        spread = torch.where(real, context.control.square(), 0).sum(1) / count
        seen = context.has_partner[:, None, None].to(spread.dtype)
        n_cells = context.partner.shape[1]
        known = seen.expand(-1, n_cells, 1)
        partner = self.partner(torch.cat([context.partner * seen, known], dim=-1))
        summary = (self.summary(spread.log1p())[:, None] + partner).flatten(0, 1)
        each = replace(context, memory=None).repeat(n_cells)
        out: Tensor = self.conditioning(summary.new_zeros(len(summary)), each, summary)
        return out

    def _modulation(self, condition_BD: Tensor) -> Float[Tensor, "cells blocks six_widths"]:
        """Shift, scale and gate of attention, then of the hidden layer; plain is 0, 1 and 1."""
        parts = []
        for block in self.blocks:
            assert isinstance(block, CausalBlock)
            parts.append(block.modulated_by(condition_BD))
        plain = parts[0].new_tensor([0.0, 1.0, 1.0] * 2).repeat_interleave(self.config.width)
        out: Tensor = torch.stack(parts, dim=1) + plain
        return out

    def _prefix(self, context: Context) -> list[tuple[Tensor, ...]]:
        """Keys and values of the control cells for each block, ``[sets, prefix, heads, key]``."""
        token = self.control(context.control.to(self.kept))
        none = self.no_control.to(token.dtype).expand(len(token), 1, -1)
        stream = torch.cat([none, token], dim=1)
        visible, found = _with_none(context), []
        for control_block, block in zip(self.control_blocks, self.blocks, strict=True):
            assert isinstance(block, CausalBlock)
            found.append(block.remember(stream))
            stream = control_block(stream, visible)
        return found


def _picked(values_BGD: Tensor, gene_BT: Tensor) -> Float[Tensor, "cells positions width"]:
    rows = torch.arange(len(gene_BT), device=gene_BT.device)[:, None]
    return values_BGD[rows, gene_BT]


def _with_none(context: Context) -> Bool[Tensor, "sets prefix"]:
    """Mask of control cells behind the vector that is always there."""
    always = torch.ones_like(context.control_mask[:, :1])
    return torch.cat([always, context.control_mask], dim=1)


def _nodes(first: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts at which a distribution is looked at, their weight in each bin, and bins' middles."""
    edge = [*first.tolist(), last + 1]
    node, mass, middle = [], [], []
    for number, (low, high) in enumerate(pairwise(edge)):
        width = max(high - low, 1)
        n_nodes = min(width, 4)
        for i in range(n_nodes):
            node.append(low + (i + 0.5) * width / n_nodes - 0.5)
            mass.append((number, width / n_nodes))
        middle.append(low + (width - 1) / 2)
    weight = torch.zeros(len(node), len(middle))
    for i, (number, share) in enumerate(mass):
        weight[i, number] = share
    return torch.tensor(node), weight, torch.tensor(middle)
