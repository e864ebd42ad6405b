"""What the autoregressive sibling learns from: the same cells and priors, as counts in bins.

N cells, G genes, C training conditions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from perturbdiff._constants import DEPTH
from perturbdiff._random import gene_lanes
from perturbdiff.autoregressive import ExpressionBins, GeneOrder
from perturbdiff.config import DecoderConfig, NetworkConfig, TrainConfig
from perturbdiff.data._counts import CountDataModule, CountPopulation
from perturbdiff.model._latent import Vocabulary
from perturbdiff.model._learning import Lesson, prepare_lesson
from perturbdiff.model._training_data import TrainingData
from perturbdiff.nn import CausalDecoder, ExpressionCodec, SetDenoiser
from perturbdiff.prior import solve_transport
from perturbdiff.train import CausalTask
from perturbdiff.train._seeding import seeded

_RATE_CELLS = 128  # that the rate of a population is solved on
_LEAST_RATE = 1e-9
_DISPERSION = (0.01, 10.0)
_POOLED = 10.0  # squared counts of control cells that the dispersion over all cells is worth


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalLesson:
    """Cells as counts, bins, an order and everything that the two siblings share."""

    shared: Lesson
    populations: list[CountPopulation]
    network: DecoderConfig
    bins: ExpressionBins
    order: GeneOrder
    log_dispersion: Float[Tensor, " genes"]

    @property
    def data(self) -> TrainingData:
        """Cells to learn from."""
        return self.shared.data

    @property
    def seed(self) -> int:
        """Seed of first weights and all draws."""
        return self.shared.seed

    @property
    def config(self) -> TrainConfig:
        """How training goes."""
        return self.shared.config

    def new_task(self) -> CausalTask:
        """A task with first weights."""
        fitted = self.shared.fitted
        return causal_task(
            fitted.vocabulary,
            fitted.codec,
            self.network,
            config=self.config,
            bins=self.bins,
            order=self.order,
            log_dispersion=self.log_dispersion,
            seed=self.seed,
        )

    def data_module(
        self, train: Sequence[CountPopulation], validation: Sequence[CountPopulation] = ()
    ) -> CountDataModule:
        """Some of the populations to learn from, some to check on."""
        return CountDataModule(train, validation, config=self.config, seed=self.seed)


def causal_task(
    vocabulary: Vocabulary,
    codec: ExpressionCodec,
    network: DecoderConfig,
    *,
    config: TrainConfig,
    bins: ExpressionBins,
    order: GeneOrder,
    log_dispersion: Float[Tensor, " genes"],
    seed: int,
) -> CausalTask:
    """A task with first weights."""
    registry = vocabulary.registry
    genes = {
        "axes": codec.cell_axes,
        "log_dispersion": log_dispersion,
        "lanes": gene_lanes(registry.genes),
    }
    return CausalTask(
        network, config, bins=bins, order=order, gene_tensors=genes,
        sizes=vocabulary_sizes(vocabulary), seed=seed,
    )  # fmt: skip


def prepare_causal(
    data: TrainingData, network: DecoderConfig, config: TrainConfig, *, seed: int
) -> CausalLesson:
    """Fit what the siblings share; then bins, dispersions, the order and the rates of the prior."""
    shape = NetworkConfig(n_axes=network.n_axes, n_response_axes=network.n_response_axes)
    shared = prepare_lesson(data, shape, config, seed=seed)
    codec = shared.fitted.codec
    network = replace(
        network, n_axes=codec.cell_axes.shape[1], n_response_axes=codec.encoder.shape[1]
    )
    rows = data.cells.conditions()
    treated = np.concatenate([rows[condition] for condition in data.conditions])
    counts = data.cells.counts
    assert counts is not None  # the shared lesson refuses cells without
    bins = ExpressionBins.fit(torch.from_numpy(counts[treated].data).long(), network.n_bins)
    log_dispersion = count_dispersion(data)
    lesson = CausalLesson(
        shared=shared,
        populations=[],
        network=within_budget(
            replace(network, n_bins=max(len(bins), 6)),
            shared.fitted.vocabulary,
            len(data.registry.genes),
        ),
        bins=bins,
        order=gene_order(data, network),
        log_dispersion=log_dispersion,
    )
    lesson.populations.extend(_populations(lesson))
    return lesson


def within_budget(network: DecoderConfig, vocabulary: Vocabulary, n_genes: int) -> DecoderConfig:
    """The decoder with hidden layers that bring it to as many parameters as the set denoiser.

    The set denoiser is the one of the same width, depth and number of axes.

    Parameters
    ----------
    network
        Shape; hidden layers whose width is given stay.
    vocabulary
        Sizes.
    n_genes
        Genes of the model.

    Returns
    -------
    A shape without open questions.
    """
    if network.hidden:
        return network
    shape = NetworkConfig(
        n_axes=network.n_axes,
        n_response_axes=network.n_response_axes,
        width=network.width,
        n_blocks=network.n_blocks,
        n_heads=network.n_heads,
        expansion=network.control_expansion,
    )
    sizes = vocabulary_sizes(vocabulary)

    def decoder(hidden: int) -> int:
        with seeded(0):
            return n_parameters(
                CausalDecoder(
                    replace(network, hidden=hidden),
                    axes=torch.zeros(n_genes, network.n_axes),
                    log_dispersion=torch.zeros(n_genes),
                    first_count=torch.arange(network.n_bins),
                    last_count=network.n_bins,
                    **sizes,
                )
            )

    with seeded(0):
        budget = n_parameters(SetDenoiser(shape, **sizes))
    least, each = decoder(1), decoder(2) - decoder(1)
    return replace(network, hidden=max(1, 1 + round((budget - least) / each)))


def vocabulary_sizes(vocabulary: Vocabulary) -> dict[str, Any]:
    """What networks are told of the vocabulary."""
    registry = vocabulary.registry
    return {
        "n_perturbations": len(registry.perturbations),
        "n_features": vocabulary.n_features,
        "covariate_sizes": [len(v) for v in registry.covariates],
    }


def n_parameters(network: nn.Module) -> int:
    """Trained numbers of a network."""
    return sum(parameter.numel() for parameter in network.parameters())


def prior_log_rate(
    library_size: Float[Tensor, " cells"],
    mean: Float[Tensor, " genes"],
    log_dispersion: Float[Tensor, " genes"],
) -> Float[Tensor, " genes"]:
    """Log of the mean count per count of the library at which cells have a mean log1p value.

    Parameters
    ----------
    library_size
        Of cells that stand for the population; the first few are enough.
    mean
        Mean log1p value per gene.
    log_dispersion
        Of the negative binomial that the counts are drawn from.

    Returns
    -------
    One value per gene.
    """
    size = library_size[:_RATE_CELLS].double()
    plan = solve_transport(
        torch.zeros(len(size), len(mean), dtype=torch.int64),
        size,
        mean.double().clamp_min(1e-6),
        dispersion_G=log_dispersion.double().exp(),
    )
    return (plan.scale / DEPTH).clamp_min(_LEAST_RATE).log().float()


def count_dispersion(data: TrainingData) -> Float[Tensor, " genes"]:
    """Log over-dispersion of each gene within treated populations, by moments.

    ``Σ ((y - m)² - m) / Σ m²`` with m = size · rate of the population, over all treated cells.
    """
    rows = data.cells.conditions()
    assert data.cells.counts is not None
    assert data.cells.library_size is not None
    n_genes = len(data.registry.genes)
    extra, square = np.zeros(n_genes), np.zeros(n_genes)
    for condition in data.conditions:
        own = rows[condition]
        parts = _moments(data.cells.counts[own], data.cells.library_size[own])
        extra, square = extra + parts[0], square + parts[1]
    value = np.divide(extra, square, out=np.zeros_like(extra), where=square > 0)
    return torch.from_numpy(np.log(np.clip(value, *_DISPERSION))).float()


def context_dispersion(
    counts: sp.csr_array,
    library_size: Float[np.ndarray, " cells"],
    log_dispersion: Float[Tensor, " genes"],
) -> Float[Tensor, " genes"]:
    """Log of the over-dispersion among control cells of a context, less that over all cells.

    A gene that marks some types of cells varies much over all of them and little within one. By
    moments, shrunk towards no difference where the gene is rare.

    Parameters
    ----------
    counts, library_size
        Control cells.
    log_dispersion
        Over all cells, from :func:`count_dispersion`.

    Returns
    -------
    One value per gene.
    """
    extra, square = _moments(counts, library_size)
    pooled = log_dispersion.double().exp().numpy()
    value = (np.maximum(extra, 0) + _POOLED * pooled) / (square + _POOLED)
    return torch.from_numpy(np.log(np.clip(value, *_DISPERSION) / pooled)).float()


def _moments(
    counts: sp.csr_array, library_size: Float[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, " genes"]]:
    """``Σ ((y - m)² - m)`` and ``Σ m²`` of each gene, with m = size · rate."""
    counts, size = counts.astype(np.float64), library_size.astype(np.float64)
    total = np.asarray(counts.sum(0)).ravel()
    rate, weighted = total / size.sum(), np.asarray(counts.T @ size).ravel()
    squares = np.asarray(counts.multiply(counts).sum(0)).ravel()
    square = rate**2 * float((size**2).sum())
    return squares - 2 * rate * weighted + square - total, square


def gene_order(data: TrainingData, network: DecoderConfig) -> GeneOrder:
    """The order that the settings ask for."""
    n_genes = len(data.registry.genes)
    if network.order == "random":
        return GeneOrder.random(data.registry.genes, network.order_seed)
    if network.order == "descending":
        return GeneOrder.descending(n_genes)
    if network.order == "vocabulary":
        return GeneOrder.vocabulary(n_genes)
    values = data.axes(np.arange(len(data.cells)))
    loadings = data.loadings * values.std(0)
    variance = np.asarray(data.cells.log1p.multiply(data.cells.log1p).mean(0)).ravel()
    left = variance - data.mean**2 - (loadings**2).sum(1)
    return GeneOrder.coexpression(torch.from_numpy(loadings), torch.from_numpy(left))


def _populations(lesson: CausalLesson) -> list[CountPopulation]:
    data, shared = lesson.shared.data, lesson.shared
    cells, rows, controls = data.cells, data.cells.conditions(), data.cells.controls()
    assert cells.counts is not None
    assert cells.library_size is not None
    out = []
    for population, condition, summary, mean in zip(
        shared.populations, data.conditions, data.summaries, shared.left_out_means, strict=True
    ):
        own, control = rows[condition], controls[condition.context]
        size = torch.from_numpy(cells.library_size[own].astype(np.float64))
        level = summary.context.mean
        control_size = cells.library_size[control]
        change = context_dispersion(cells.counts[control], control_size, lesson.log_dispersion)
        log_rate = prior_log_rate(size, torch.from_numpy(mean), lesson.log_dispersion + change)
        out.append(
            CountPopulation(
                **vars(population),
                counts=cells.counts[own],
                library_size=size,
                control_counts=cells.counts[control],
                control_size=torch.from_numpy(control_size.astype(np.float64)),
                level=_float32(level),
                rise=_float32(mean - level),
                log_rate=log_rate,
                dispersion=change,
            )
        )
    return out


def _float32(values: Float[np.ndarray, " genes"] | Int[np.ndarray, " genes"]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
