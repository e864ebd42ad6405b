"""Training conditions in latent space: where treated cells lie, and who their partners are.

N cells, G genes, A cell axes, K latent axes, C conditions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff.data import Condition, Registry
from perturbdiff.data._sets import Population
from perturbdiff.model._training_data import TrainingData
from perturbdiff.nn import ExpressionCodec
from perturbdiff.prior import optimal_partners

_SMALL = 50.0
_RESPONDS = 0.1
_LEAST_SPREAD = 0.05
_TINY = 1e-6


@dataclass(frozen=True)
class Vocabulary:
    """Codes and numbers by which the network knows a condition.

    A level or perturbation without treated training cells has code 0, as if unknown: its weights
    would be what they were before training.
    """

    registry: Registry
    features: Mapping[str, np.ndarray]
    known_members: frozenset[str]
    known_levels: tuple[frozenset[str], ...]
    n_numbers: int

    @classmethod
    def of(
        cls,
        registry: Registry,
        conditions: Sequence[Condition],
        features: Mapping[str, np.ndarray],
    ) -> "Vocabulary":
        """Vocabulary of these training conditions."""
        return cls(
            registry=registry,
            features=features,
            known_members=frozenset(m for c in conditions for m in c.members),
            known_levels=tuple(
                frozenset(c.context[i] for c in conditions)
                for i in range(len(registry.covariate_keys))
            ),
            n_numbers=int(registry.dose_key is not None) + int(registry.time_key is not None),
        )

    @property
    def n_features(self) -> int:
        """Numbers that describe a condition: features of its members, dose and time."""
        width = len(next(iter(self.features.values()))) if self.features else 0
        return width + self.n_numbers

    def members(self, condition: Condition) -> Tensor:
        """Codes of the members."""
        known = [m if m in self.known_members else "" for m in condition.members]
        return torch.from_numpy(self.registry.perturbations.encode(known, unknown="zero"))

    def covariates(self, condition: Condition) -> Tensor:
        """Code of the level of each covariate."""
        codes = [
            int(vocabulary.encode([level], unknown="zero")[0]) if level in known else 0
            for vocabulary, level, known in zip(
                self.registry.covariates, condition.context, self.known_levels, strict=True
            )
        ]
        return torch.tensor(codes, dtype=torch.int64)

    def numbers(self, condition: Condition) -> Float[Tensor, " features"]:
        """Sum of the members' features, log1p of the mean dose, log1p of the time."""
        parts = [self.features[m] for m in condition.members if m in self.features]
        width = self.n_features - self.n_numbers
        described = np.sum(parts, axis=0) if parts else np.zeros(width)
        extra = []
        if self.registry.dose_key is not None:
            extra.append(np.log1p(np.mean(condition.doses)) if condition.doses else 0.0)
        if self.registry.time_key is not None:
            extra.append(0.0 if condition.time is None else np.log1p(condition.time))
        return torch.tensor([*described, *extra], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class ResponseAxes:
    """Axes along which treated cells of one population differ, and the way there and back."""

    encoder: Float[np.ndarray, "genes latent"]
    decoder: Float[np.ndarray, "genes latent"]


def response_axes(data: TrainingData, n_axes: int) -> ResponseAxes:
    """Principal axes of treated cells around the mean of their own condition.

    Genes count by their spread (correlations, not covariances) and by how much they respond:
    ``w = s² / (s² + 0.1²) / spread`` with ``s`` the root mean square shift over the conditions,
    corrected for its noise. Conditions count by n / (n + 50).

    Parameters
    ----------
    data
        Training cells.
    n_axes
        Axes wanted; fewer come back where there are fewer genes or cells.

    Returns
    -------
    Encoder (unit variance along each axis) and decoder.
    """
    rows = data.cells.conditions()
    n_genes = len(data.registry.genes)
    covariance, square, total = np.zeros((n_genes, n_genes)), np.zeros(n_genes), 0.0
    for condition, summary in zip(data.conditions, data.summaries, strict=True):
        values = data.cells.log1p[rows[condition]].astype(np.float64)
        weight = summary.n_cells / (summary.n_cells + _SMALL)
        gram = (values.T @ values).toarray() / summary.n_cells
        covariance += weight * (gram - np.outer(summary.mean, summary.mean))
        shift = summary.mean - summary.context.mean
        square += weight * np.maximum(shift**2 - summary.noise, 0.0)
        total += weight
    covariance, square = covariance / total, square / total
    spread = np.sqrt(np.maximum(covariance.diagonal(), 0.0)) + _LEAST_SPREAD
    weight_G = square / (square + _RESPONDS**2) / spread
    n_axes = min(n_axes, n_genes, max(sum(s.n_cells - 1 for s in data.summaries), 1))
    value, axes = scipy.linalg.eigh(
        covariance * np.outer(weight_G, weight_G), subset_by_index=[n_genes - n_axes, n_genes - 1]
    )
    axes = axes[:, ::-1] * np.where((axes[:, ::-1] ** 3).sum(0) < 0, -1.0, 1.0)
    size = np.sqrt(np.maximum(value[::-1], _TINY * max(value[-1], _TINY)))
    return ResponseAxes(encoder=weight_G[:, None] * axes / size, decoder=axes * size)


def latent_populations(
    data: TrainingData,
    left_out_means: Float[np.ndarray, "conditions genes"],
    vocabulary: Vocabulary,
    *,
    n_latent: int,
) -> tuple[ExpressionCodec, list[Population]]:
    """The codec, and every training condition in its latent space.

    Parameters
    ----------
    data
        Training cells.
    left_out_means
        Effect prior of each condition, predicted without it.
    vocabulary
        Codes of conditions.
    n_latent
        Response axes.

    Returns
    -------
    Codec and populations, in the order of ``data.conditions``. Partners come from optimal
    transport between the centred populations in principal axes.
    """
    rows, controls = data.cells.conditions(), data.cells.controls()
    axes = response_axes(data, n_latent)
    control = {context: data.axes(cells) for context, cells in controls.items()}
    control = {context: cells - cells.mean(0) for context, cells in control.items()}
    square = np.sum([(cells**2).sum(0) for cells in control.values()], axis=0)
    spread = np.sqrt(square / sum(map(len, control.values())))
    spread = np.maximum(spread, _TINY + _LEAST_SPREAD * spread.max())
    populations = []
    for condition, summary, mean in zip(
        data.conditions, data.summaries, left_out_means, strict=True
    ):
        own, treated = control[condition.context], data.axes(rows[condition])
        partner = optimal_partners(treated - treated.mean(0), own)
        x0 = data.cells.log1p[rows[condition]] @ axes.encoder
        populations.append(
            Population(
                name=condition.name,
                x0=_float32(x0 - x0.mean(0)),
                partner=torch.from_numpy(partner.astype(np.int64)),
                control=_float32(own / spread),
                shift=_float32((mean - summary.context.mean) @ axes.encoder),
                members=vocabulary.members(condition),
                features=vocabulary.numbers(condition),
                covariates=vocabulary.covariates(condition),
            )
        )
    codec = ExpressionCodec(
        _float32(data.loadings / spread),
        encoder=_float32(axes.encoder),
        decoder=_float32(axes.decoder),
    )
    return codec, populations


def _float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
