"""Training conditions in latent space: partners, differences from them, and priors to go with.

N cells, G genes, K latent axes, C conditions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff.data import Condition, Registry
from perturbdiff.data._sets import Population
from perturbdiff.model._training_data import TrainingData
from perturbdiff.nn import ExpressionCodec
from perturbdiff.prior import optimal_partners

_FLOOR = 1e-3


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


@dataclass(frozen=True)
class _Pairs:
    """One condition in principal axes, centred."""

    control: Float[np.ndarray, "controls axes"]
    partner: np.ndarray
    difference: Float[np.ndarray, "treated axes"]


def _pairs(data: TrainingData) -> list[_Pairs]:
    rows, controls = data.cells.conditions(), data.cells.controls()
    found = []
    for condition in data.conditions:
        control = data.axes(controls[condition.context])
        treated = data.axes(rows[condition])
        control, treated = control - control.mean(0), treated - treated.mean(0)
        partner = optimal_partners(treated, control)
        difference = treated - control[partner]
        found.append(_Pairs(control, partner, difference - difference.mean(0)))
    return found


def _spread(parts: Sequence[np.ndarray]) -> Float[np.ndarray, " axes"]:
    """Root mean square over centred parts, never zero."""
    square = np.sum([(part**2).sum(0) for part in parts], axis=0) / sum(map(len, parts))
    spread = np.sqrt(square)
    return np.asarray(np.maximum(spread, _FLOOR * max(float(spread.max()), 1e-12)))


def latent_populations(
    data: TrainingData,
    left_out_means: Float[np.ndarray, "conditions genes"],
    vocabulary: Vocabulary,
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

    Returns
    -------
    Codec and populations, in the order of ``data.conditions``.
    """
    pairs = _pairs(data)
    contexts = {c.context: pair.control for c, pair in zip(data.conditions, pairs, strict=True)}
    cell_scale = _spread([contexts[context] for context in sorted(contexts)])
    residual_scale = _spread([pair.difference for pair in pairs])
    codec = ExpressionCodec(
        _float32(data.loadings),
        cell_scale=_float32(cell_scale),
        residual_scale=_float32(residual_scale),
    )
    populations = [
        Population(
            name=condition.name,
            x0=_float32(pair.difference / residual_scale),
            partner=torch.from_numpy(pair.partner.astype(np.int64)),
            control=_float32(pair.control / cell_scale),
            shift=_float32((mean - summary.context.mean) @ data.loadings / cell_scale),
            members=vocabulary.members(condition),
            features=vocabulary.numbers(condition),
            covariates=vocabulary.covariates(condition),
        )
        for condition, summary, pair, mean in zip(
            data.conditions, data.summaries, pairs, left_out_means, strict=True
        )
    ]
    return codec, populations


def _float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
