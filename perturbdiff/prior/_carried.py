"""Baselines that carry a response over with weights: by similarity, or by mixtures of contexts.

C donors, G genes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from perturbdiff.prior._baselines import Baseline
from perturbdiff.prior._donors import (
    ContextClassifier,
    likeness,
    normalised,
    number_shares,
    require_context_donors,
    size_shares,
    soft_shares,
)
from perturbdiff.prior._response import apply_log_ratio, log_ratio
from perturbdiff.prior._summary import ConditionSummary, ContextSummary, PriorQuestion

SHARPNESS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0)
"""Candidates for how sharply weights fall with dissimilarity; 0 is the plain average."""


class SimilarityShift(Baseline):
    """Shifts weighted by similarity of control means, as sharply as leaving one out finds best."""

    name = "similarity_shift"

    def _learn(self) -> None:
        self.sharpness = self._best_sharpness()

    def _best_sharpness(self) -> float:
        """Smallest squared error over conditions that have another context to borrow from."""
        error = np.zeros(len(SHARPNESS))
        for left_out in self.conditions:
            donors = [
                c
                for c in self.conditions
                if c.members == left_out.members
                and c.context.covariates != left_out.context.covariates
            ]
            if len(donors) < 2:
                continue
            for i, sharpness in enumerate(SHARPNESS):
                mean = self._carry(left_out.question, donors, sharpness=sharpness)
                error[i] += float(np.mean((mean - left_out.mean) ** 2))
        return SHARPNESS[int(np.argmin(error))]

    def _weights(
        self, question: PriorQuestion, donors: Sequence[ConditionSummary], *, sharpness: float
    ) -> Float[np.ndarray, " donors"]:
        weight = soft_shares(likeness(question, donors), sharpness=sharpness)
        return normalised(weight * number_shares(donors, question))

    def _carry(
        self, question: PriorQuestion, donors: Sequence[ConditionSummary], *, sharpness: float
    ) -> Float[np.ndarray, " genes"]:
        share = self._weights(question, donors, sharpness=sharpness)
        shift = np.stack([donor.mean - donor.context.mean for donor in donors])
        return np.asarray(np.maximum(question.context.mean + share @ shift, 0.0))

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Control mean plus the weighted shift, never below zero."""
        donors = require_context_donors(self.conditions, question)
        return self._carry(question, donors, sharpness=self.sharpness)


class CarriedLogRatio(SimilarityShift):
    """As :class:`SimilarityShift`, but with a log-ratio, re-applied at the new base level."""

    name = "carried_log_ratio"

    def _carry(
        self, question: PriorQuestion, donors: Sequence[ConditionSummary], *, sharpness: float
    ) -> Float[np.ndarray, " genes"]:
        share = self._weights(question, donors, sharpness=sharpness)
        ratio = np.stack([log_ratio(donor.mean, donor.context.mean) for donor in donors])
        return apply_log_ratio(question.context.mean, share @ ratio)


class ClassifierCache:
    """Classifiers by the contexts they tell apart, since many questions ask for the same ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], ...], ContextClassifier] = {}

    def shares(
        self, context: ContextSummary, others: Sequence[ContextSummary]
    ) -> dict[tuple[str, ...], float]:
        """Average probability of each of the other contexts for the cells of this one."""
        return self._among(others).shares(context)

    def _among(self, contexts: Sequence[ContextSummary]) -> ContextClassifier:
        distinct = {context.covariates: context for context in contexts}
        key = tuple(sorted(distinct))
        if key not in self._known:
            self._known[key] = ContextClassifier([distinct[name] for name in key])
        return self._known[key]

    def state(self, conditions: Sequence[ConditionSummary]) -> list[dict[str, Any]]:
        """The classifier of every group of donors that these conditions can be, without cells."""
        donors: dict[tuple[str, ...], list[ContextSummary]] = {}
        for condition in conditions:
            donors.setdefault(condition.members, []).append(condition.context)
        used = {id(found): found for found in map(self._among, donors.values())}
        return sorted((found.state() for found in used.values()), key=lambda s: s["contexts"])

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Self:
        """The classifiers that :meth:`state` was taken from."""
        cache = cls()
        for entry in state:
            key = tuple(tuple(name) for name in entry["contexts"])
            cache._known[key] = ContextClassifier.from_state(entry)
        return cache


class MixtureLogRatio(Baseline):
    """Log-ratios weighted by seeing the context as a mixture of known ones.

    Shares are the mean class probabilities of the context's control cells under a classifier of the
    known contexts' control cells, times n / (n + 50) so that small donors count less.
    """

    name = "mixture_log_ratio"

    def __init__(self, *, classifiers: ClassifierCache | None = None) -> None:
        super().__init__()
        self._given = classifiers

    def _learn(self) -> None:
        self.classifiers = self._given if self._given is not None else ClassifierCache()

    def shares(
        self, question: PriorQuestion, donors: Sequence[ConditionSummary]
    ) -> Float[np.ndarray, " donors"]:
        """Weights of the donors, summing to one."""
        share = self.classifiers.shares(question.context, [donor.context for donor in donors])
        weight = np.array([share[donor.context.covariates] for donor in donors])
        return normalised(weight * size_shares(donors) * number_shares(donors, question))

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """The mixture of the donors' log-ratios, applied to the control mean."""
        donors = require_context_donors(self.conditions, question)
        ratio = np.stack([log_ratio(donor.mean, donor.context.mean) for donor in donors])
        return apply_log_ratio(question.context.mean, self.shares(question, donors) @ ratio)
