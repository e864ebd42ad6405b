"""One interface for whatever predicts a mean response, and the baselines that need no fitting.

C donors, G genes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
from jaxtyping import Float

from perturbdiff._errors import NotFittedError, UndefinedBaselineError
from perturbdiff.prior._donors import (
    context_donors,
    find_donors,
    in_order,
    likeness,
    normalised,
    number_shares,
    require_context_donors,
)
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion


class Baseline(ABC):
    """Predicts the mean log1p value per gene after a perturbation, from other conditions' means.

    Every baseline answers the same whatever the order of conditions; permuting genes permutes its
    answer.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._conditions: tuple[ConditionSummary, ...] | None = None
        self._features: dict[str, np.ndarray] = {}
        self._seed = 0

    @property
    def conditions(self) -> tuple[ConditionSummary, ...]:
        """Training conditions in canonical order."""
        if self._conditions is None:
            msg = f"{type(self).__name__} has no training conditions yet: call fit first."
            raise NotFittedError(msg)
        return self._conditions

    def fit(
        self,
        conditions: Sequence[ConditionSummary],
        *,
        features: Mapping[str, np.ndarray] | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn from training conditions.

        Parameters
        ----------
        conditions
            What was measured, one summary per condition.
        features
            Numbers that describe each single perturbation, by name.
        seed
            For baselines that draw anything; the others ignore it.

        Returns
        -------
        The baseline itself.
        """
        self._conditions = in_order(conditions)
        self._features = {name: np.asarray(value) for name, value in (features or {}).items()}
        self._seed = seed
        self._learn()
        return self

    def _learn(self) -> None:  # noqa: B027
        """Estimate whatever is to be estimated once; nothing by default."""

    @abstractmethod
    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Mean log1p value per gene after treatment.

        Raises
        ------
        UndefinedBaselineError
            Where the baseline has no answer; the message is the reason.
        """


class CopyControl(Baseline):
    """Nothing happens."""

    name = "copy_control"

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """The control mean itself."""
        return np.array(question.context.mean, dtype=np.float64)


class MeanShift(Baseline):
    """The average shift of the same perturbation elsewhere, or of all where it is new."""

    name = "mean_shift"

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Control mean plus the average shift of the donors, never below zero."""
        donors = find_donors(self.conditions, question)
        treated, control = donors.stack()
        share = normalised(number_shares(donors.conditions, question))
        return np.asarray(np.maximum(question.context.mean + share @ (treated - control), 0.0))


class NearestContext(Baseline):
    """The shift of the context whose control cells are most alike."""

    name = "nearest_context"

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Control mean plus the shift of the nearest donor, never below zero."""
        donors = require_context_donors(self.conditions, question)
        score = likeness(question, donors)
        closest = np.isclose(score, score.max(), rtol=0, atol=1e-12)
        share = normalised(number_shares(donors, question) * closest)
        shift = np.stack([donor.mean - donor.context.mean for donor in donors])
        return np.asarray(np.maximum(question.context.mean + share @ shift, 0.0))


class Additive(Baseline):
    """For combinations: the sum of the shifts of the members, each as measured alone."""

    name = "additive"

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Control mean plus the sum of the members' shifts, never below zero."""
        if len(question.members) < 2:
            msg = "a single perturbation has no parts to add up"
            raise UndefinedBaselineError(msg)
        shift = sum(single_shift(self.conditions, question, member) for member in question.members)
        return np.asarray(np.maximum(question.context.mean + shift, 0.0))


def single_shift(
    conditions: Sequence[ConditionSummary], question: PriorQuestion, member: str
) -> Float[np.ndarray, " genes"]:
    """Shift of one member alone: as measured in this context, or averaged over others."""
    alone = PriorQuestion(members=(member,), context=question.context, numbers=question.numbers)
    donors = context_donors(conditions, alone)
    if not donors:
        msg = f"{member!r} was never measured alone, so its shift cannot be added"
        raise UndefinedBaselineError(msg)
    here = tuple(d for d in donors if d.context.covariates == question.context.covariates)
    donors = here or donors
    share = normalised(number_shares(donors, alone))
    return np.asarray(share @ np.stack([donor.mean - donor.context.mean for donor in donors]))
