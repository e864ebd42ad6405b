"""From which training conditions an answer is borrowed, and in what shares.

C donors, G genes, K principal axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float
from sklearn.linear_model import LogisticRegression

from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.prior._summary import ConditionSummary, ContextSummary, PriorQuestion

SMALL = 50.0
"""Cells at which a donor counts for half: shares are multiplied by n / (n + SMALL)."""
_LOOSENESS = 2.5  # inverse penalty, for cells whose total variance is one

Features = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Donors:
    """Training conditions to borrow from, and along which axis they differ from the question."""

    axis: Literal["context", "perturbation"]
    conditions: tuple[ConditionSummary, ...]

    def stack(self) -> tuple[Float[np.ndarray, "donors genes"], Float[np.ndarray, "donors genes"]]:
        """Mean log1p of treated and of control cells of every donor."""
        treated = np.stack([condition.mean for condition in self.conditions])
        return treated, np.stack([condition.context.mean for condition in self.conditions])


def in_order(conditions: Sequence[ConditionSummary]) -> tuple[ConditionSummary, ...]:
    """Conditions in an order that does not depend on how they were listed."""
    return tuple(sorted(conditions, key=lambda condition: condition.key))


def context_donors(
    conditions: Sequence[ConditionSummary], question: PriorQuestion
) -> tuple[ConditionSummary, ...]:
    """Conditions with the same perturbation."""
    return tuple(c for c in conditions if c.members == question.members)


def novelty(conditions: Sequence[ConditionSummary], question: PriorQuestion) -> tuple[int, ...]:
    """Places of the covariates whose level is held by no context that an answer is borrowed from.

    A type of which another donor was measured is asked for otherwise than one that nobody saw.
    Where there is but one covariate its level is new whenever the condition is, which goes without
    saying: then, and where no single level is new, there are none.
    """
    own = question.context.covariates
    donors = [c.context.covariates for c in context_donors(conditions, question)]
    new = tuple(i for i, level in enumerate(own) if all(them[i] != level for them in donors))
    return new if len(own) > 1 else ()


def find_donors(conditions: Sequence[ConditionSummary], question: PriorQuestion) -> Donors:
    """The same perturbation elsewhere; failing that, others here; failing that, anything."""
    if same := context_donors(conditions, question):
        return Donors("context", same)
    here = tuple(c for c in conditions if c.context.covariates == question.context.covariates)
    if not (here or conditions):
        msg = "there is no training condition to learn from"
        raise UndefinedBaselineError(msg)
    return Donors("perturbation", here or tuple(conditions))


def require_context_donors(
    conditions: Sequence[ConditionSummary], question: PriorQuestion
) -> tuple[ConditionSummary, ...]:
    """Conditions with the same perturbation, or the reason why there is no answer."""
    if same := context_donors(conditions, question):
        return same
    label = "+".join(question.members)
    msg = f"perturbation {label!r} was measured in no training context: nothing to carry over"
    raise UndefinedBaselineError(msg)


def number_shares(
    donors: Sequence[ConditionSummary], question: PriorQuestion
) -> Float[np.ndarray, " donors"]:
    """Weights by closeness in dose and time: inverse squared distance of log1p; matches alone."""
    wanted = np.log1p(np.abs(np.asarray(question.numbers, dtype=np.float64)))
    if not wanted.size or any(len(donor.numbers) != wanted.size for donor in donors):
        return np.ones(len(donors))
    known = np.log1p(np.abs(np.array([donor.numbers for donor in donors], dtype=np.float64)))
    distance = ((known - wanted) ** 2).sum(1)
    if (distance < 1e-12).any():
        return np.asarray(distance < 1e-12, dtype=np.float64)
    return np.asarray(distance.min() / distance)


def size_shares(donors: Sequence[ConditionSummary]) -> Float[np.ndarray, " donors"]:
    """Weights that distrust donors with few cells."""
    size = np.array([donor.size for donor in donors], dtype=np.float64)
    return np.asarray(size / (size + SMALL))


def normalised(weight: Float[np.ndarray, " donors"]) -> Float[np.ndarray, " donors"]:
    """Weights that sum to one; equal ones where all are zero."""
    total = weight.sum()
    return np.asarray(weight / total if total > 0 else np.full(len(weight), 1 / len(weight)))


def likeness(
    question: PriorQuestion, donors: Sequence[ConditionSummary]
) -> Float[np.ndarray, " donors"]:
    """Correlation over genes of control means, each less the average over the contexts in play."""
    means = np.stack([donor.context.mean for donor in donors])
    middle = means.mean(0)
    own, others = question.context.mean - middle, means - middle
    own, others = own - own.mean(), others - others.mean(1, keepdims=True)
    norm = np.linalg.norm(own) * np.linalg.norm(others, axis=1)
    return np.where(norm > 0, others @ own / np.where(norm > 0, norm, 1), 0.0)


def soft_shares(
    score: Float[np.ndarray, " donors"], *, sharpness: float
) -> Float[np.ndarray, " donors"]:
    """Softmax of ``sharpness · score``."""
    weight = np.exp(sharpness * (score - score.max()))
    return np.asarray(weight / weight.sum())


def member_features(
    members: Sequence[str], features: Features
) -> Float[np.ndarray, " features"] | None:
    """Sum of the features of the members, or None where one is unknown."""
    if any(member not in features for member in members) or not members:
        return None
    parts = [np.asarray(features[member], dtype=np.float64) for member in members]
    return np.asarray(np.sum(parts, axis=0))


class ContextClassifier:
    """Tells contexts apart by their control cells, to see a new context as a mixture of known ones.

    Multinomial logistic regression on principal axes, strongly regularised, classes balanced.
    """

    def __init__(self, contexts: Sequence[ContextSummary]) -> None:
        self._names = [context.covariates for context in contexts]
        self._model: LogisticRegression | None = None
        if len(contexts) > 1:
            cells = np.concatenate([context.axes for context in contexts])
            labels = np.repeat(np.arange(len(contexts)), [len(c.axes) for c in contexts])
            self._scale = float(np.sqrt(cells.var(0).sum())) or 1.0
            # Newton steps converge in a dozen iterations whatever the shape of the cloud.
            self._model = LogisticRegression(
                C=_LOOSENESS, max_iter=300, class_weight="balanced", solver="newton-cg"
            )
            self._model.fit(cells / self._scale, labels)

    def state(self) -> dict[str, Any]:
        """Names of the contexts, and coefficients where there is more than one."""
        state: dict[str, Any] = {"contexts": [list(name) for name in self._names]}
        if self._model is not None:
            state["scale"] = self._scale
            state["coefficients"] = self._model.coef_
            state["intercepts"] = self._model.intercept_
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The classifier that :meth:`state` was taken from; it needs no cells."""
        found = cls([])
        found._names = [tuple(name) for name in state["contexts"]]
        if "coefficients" in state:
            model = LogisticRegression()
            model.coef_ = np.asarray(state["coefficients"])
            model.intercept_ = np.asarray(state["intercepts"])
            model.classes_ = np.arange(len(found._names))
            model.n_features_in_ = model.coef_.shape[1]
            found._model, found._scale = model, float(state["scale"])
        return found

    def shares(self, context: ContextSummary) -> dict[tuple[str, ...], float]:
        """Average class probability of the control cells, by context."""
        if self._model is None:
            return dict.fromkeys(self._names, 1.0)
        chance = self._model.predict_proba(context.axes / self._scale).mean(0)
        return {self._names[i]: float(p) for i, p in zip(self._model.classes_, chance, strict=True)}
