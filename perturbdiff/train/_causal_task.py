"""Lightning task of the autoregressive sibling.

B cells, T positions, G genes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from perturbdiff._random import cell_keys, uniform
from perturbdiff.autoregressive import (
    ExpressionBins,
    GeneOrder,
    bin_loss,
    count_loss,
    possible_bins,
    possible_genes,
    smoothed_targets,
)
from perturbdiff.config import DecoderConfig, TrainConfig
from perturbdiff.data._counts import CountBatch
from perturbdiff.nn import CausalDecoder, GeneInputs
from perturbdiff.train._averaged import AveragedTask
from perturbdiff.train._seeding import seeded


class CausalTask(AveragedTask):
    """Decoder, its averaged weights, loss and optimiser.

    Parameters
    ----------
    network
        Shape of the decoder.
    config
        Optimiser.
    bins
        Bins of counts.
    order
        In which genes are said.
    gene_tensors
        ``axes``, ``log_dispersion`` and ``lanes`` of the genes.
    sizes
        ``n_perturbations``, ``n_features``, ``covariate_sizes``.
    seed
        Of the first weights and of all draws.
    """

    averaged: CausalDecoder
    targets: Tensor
    lanes: Tensor

    def __init__(
        self,
        network: DecoderConfig,
        config: TrainConfig,
        *,
        bins: ExpressionBins,
        order: GeneOrder,
        gene_tensors: Mapping[str, Tensor],
        sizes: Mapping[str, int | Sequence[int]],
        seed: int = 0,
    ) -> None:
        settings = {
            **{f"network.{name}": value for name, value in asdict(network).items()},
            **{f"train.{name}": value for name, value in asdict(config).items()},
            **{k: list(v) if isinstance(v, Sequence) else v for k, v in sizes.items()},
            "seed": seed,
        }
        super().__init__(config, seed=seed, settings=settings)
        self.bins, self.order, self.likelihood = bins, order, network.likelihood
        # A drawn order rules out bins above the last one, and nothing is lent to these.
        targets = smoothed_targets(len(bins), 0.0 if order.drawn else network.smoothing)
        self.register_buffer("targets", targets, persistent=False)
        self.register_buffer("lanes", gene_tensors["lanes"], persistent=False)
        with seeded(seed):
            self.decoder = CausalDecoder(
                network,
                axes=gene_tensors["axes"],
                log_dispersion=gene_tensors["log_dispersion"],
                first_count=bins.first_count,
                last_count=bins.last_count,
                **sizes,  # type: ignore[arg-type]
            )
        # Nothing reads what the last one writes; several devices would wait for its gradient.
        self.decoder.control_blocks[-1].requires_grad_(requires_grad=False)
        self.averaged = self.average()

    @property
    def learner(self) -> CausalDecoder:
        """The decoder."""
        return self.decoder

    def total_loss(self, network: nn.Module, batch: CountBatch, stream: str) -> Tensor:
        """Mean loss per gene of the cells of a batch."""
        assert isinstance(network, CausalDecoder)
        counts, real = batch.counts.flatten(0, 1), batch.context.mask.flatten()
        bins = self.bins.to(counts.device).encode(counts)
        ties = None
        if self.order.drawn:
            keys = cell_keys(self.seed, stream, 0, n_cells=len(counts), device=counts.device)
            ties = uniform(keys, self.lanes, dtype=torch.float32)
        said = self.order.sequences(bins, len(self.bins), ties=ties)
        genes = gene_inputs(batch)
        hidden, cache = network(
            batch.context,
            genes,
            said_gene=said.said_gene,
            said_bin=said.said_bin,
            next_gene=None if self.order.drawn else said.gene,
        )
        asked = said.gene.clamp_max(counts.shape[1] - 1)
        if self.likelihood == "negative_binomial":
            told = network.told(hidden, asked, cache)
            log_mean, log_dispersion, _ = network.rates(told, asked, genes)
            loss = count_loss(log_mean, log_dispersion, counts.gather(1, asked))
            if self.order.drawn:
                mass = network.log_mass(log_mean, log_dispersion)
                loss = loss + possible_bins(mass, said.said_bin).logsumexp(-1)
        else:
            logits = network.bin_logits(hidden, asked, cache)
            if self.order.drawn:
                logits = possible_bins(logits, said.said_bin)
            loss = bin_loss(logits, said.bin, self.targets)
        if self.order.drawn:
            loss = loss.masked_fill(said.gene == counts.shape[1], 0.0)
            logits = possible_genes(network.gene_logits(hidden, cache), said.said_gene)
            loss = loss - logits.log_softmax(-1).gather(-1, said.gene[..., None])[..., 0]
        loss = (loss * said.mask).sum(1) / counts.shape[1]
        return (loss * real).sum() / real.sum().clamp_min(1)


def gene_inputs(batch: CountBatch) -> GeneInputs:
    """What is known about the genes of each cell of a batch, cells in one row."""
    n_cells = batch.counts.shape[1]
    seen = batch.context.has_partner[:, None, None]
    each = {
        name: getattr(batch, name)[:, None].expand(-1, n_cells, -1).flatten(0, 1)
        for name in ("level", "rise", "dispersion")
        if getattr(batch, name) is not None
    }
    return GeneInputs(
        level=each["level"],
        shift=each["rise"],
        partner=((batch.partner - batch.level[:, None]) * seen).flatten(0, 1),
        log_mean=(batch.log_rate[:, None] + batch.log_size[..., None]).flatten(0, 1),
        dispersion=each.get("dispersion"),
    )
