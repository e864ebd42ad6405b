"""The effect prior: what a perturbation does on average to a context where nobody measured it.

A Gaussian process over conditions gives an expected log-ratio; a ridge shared by all genes, learned by
leaving training conditions out, then corrects its strength, mixes in other answers and removes what is
common to all responses.

C conditions, G genes, F features.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.prior._baselines import Additive, Baseline
from perturbdiff.prior._carried import ClassifierCache, MixtureLogRatio
from perturbdiff.prior._donors import context_donors
from perturbdiff.prior._process import (
    ResponseProcess,
    choose_settings,
    level,
    mean_at,
)
from perturbdiff.prior._ridge import Example, condition_weight, shared_ridge, split_groups
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion

LEAVE_ONE_OUT_LIMIT = 30
"""Groups of conditions up to which each is left out in turn; beyond, ten folds of groups."""
_INNER_LIMIT = 12
_DENOISING = 5.0  # cells' worth of what other contexts say about a control level
_PENALTY = np.array(
    [0.1, 0.1, 0.1, 0.1, 0.1, 1.0]
)  # in conditions' worth, in the order of features


class EffectPrior(Baseline):
    """Predicts the mean response from other conditions; also tells how wrong that is when left out.

    Features of the shared ridge, all zero where they do not apply: the base answer itself (strength);
    mixture against process; additive against process; what changes if the control level is denoised;
    the expressed part of the gene (a dilution common to all genes); and saturation, the base answer
    times how far the control cells already lie along the response.
    """

    name = "effect_prior"

    def __init__(self, *, classifiers: ClassifierCache | None = None) -> None:
        super().__init__()
        self._given = classifiers

    def _learn(self) -> None:
        if not self.conditions:
            msg = "the effect prior needs at least one training condition"
            raise UndefinedBaselineError(msg)
        self._classifiers = self._given if self._given is not None else ClassifierCache()
        self.settings = choose_settings(self.conditions, self._features)
        self._answers = _Answers(self.conditions, self._features, self)
        self._coefficients: dict[str, Float[np.ndarray, " features"]] = {}

    def coefficients(self, axis: str) -> Float[np.ndarray, " features"]:
        """Coefficients for questions whose perturbation is known elsewhere, or known nowhere."""
        if axis not in self._coefficients:
            examples: list[Example] = []
            splits = split_groups(self.conditions, axis=axis, seed=self._seed, limit=_INNER_LIMIT)
            for out, kept in splits:
                answers = _Answers(kept, self._features, self)
                examples += [
                    answers.example(condition)
                    for condition in out
                    if answers.axis(condition.question) == axis
                ]
            self._coefficients[axis] = shared_ridge(examples, _PENALTY / max(len(examples), 1))
        return self._coefficients[axis]

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Mean log1p value per gene after treatment."""
        base, features = self._answers.describe(question)
        shift = base + features @ self.coefficients(self._answers.axis(question))
        return np.asarray(np.maximum(question.context.mean + shift, 0.0))

    def leave_one_out(
        self, conditions: Sequence[ConditionSummary] | None = None
    ) -> Float[np.ndarray, "conditions genes"]:
        """Answer for each training condition by a prior that never saw it.

        Conditions of the same perturbation and context, at other doses or times, are left out with it.

        Parameters
        ----------
        conditions
            Training conditions in the order of the rows to return; by default the canonical order.

        Returns
        -------
        Mean log1p values.

        Raises
        ------
        UndefinedBaselineError
            Where nothing would be left to learn from.
        """
        wanted = self.conditions if conditions is None else tuple(conditions)
        answers: dict[object, Float[np.ndarray, " genes"]] = {}
        splits = split_groups(
            self.conditions, axis="context", seed=self._seed, limit=LEAVE_ONE_OUT_LIMIT
        )
        for out, kept in splits:
            prior = EffectPrior(classifiers=self._classifiers)
            prior.fit(kept, features=self._features, seed=self._seed)
            answers |= {c.key: prior.predict_mean(c.question) for c in out}
        if any(c.key not in answers for c in wanted):
            msg = "a prior without the condition has no other condition to learn from"
            raise UndefinedBaselineError(msg)
        return np.stack([answers[c.key] for c in wanted])


class _Answers:
    """The simple answers that the ridge combines, all from the same training conditions."""

    def __init__(
        self,
        conditions: Sequence[ConditionSummary],
        features: dict[str, np.ndarray],
        prior: EffectPrior,
    ) -> None:
        self._conditions = tuple(conditions)
        self._process = ResponseProcess.fit(conditions, features=features, settings=prior.settings)
        self._mixture = MixtureLogRatio(classifiers=prior._classifiers).fit(conditions)
        self._additive = Additive().fit(conditions)

    def axis(self, question: PriorQuestion) -> str:
        """Whether the perturbation is known elsewhere."""
        return "context" if context_donors(self._conditions, question) else "perturbation"

    def example(self, condition: ConditionSummary) -> Example:
        base, features = self.describe(condition.question)
        shift = condition.mean - condition.context.mean
        return Example(features, shift - base, condition_weight(condition))

    def describe(
        self, question: PriorQuestion
    ) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes features"]]:
        """The base shift, and features of what may have to be added to it."""
        here = question.context.mean
        ratio = self._process.log_ratio(question)
        process = mean_at(level(here) + ratio) - here
        mixture, denoised, saturation = process, process, 0.0
        donors = context_donors(self._conditions, question)
        if donors:
            mixture = self._mixture.predict_mean(question) - here
            share = self._mixture.shares(question, donors)
            controls = np.stack([donor.context.mean for donor in donors])
            n = question.context.n_cells
            quiet = (n * here + _DENOISING * (share @ controls)) / (n + _DENOISING)
            denoised = mean_at(level(quiet) + ratio) - here
            saturation = _saturation(here, controls, np.stack([d.mean for d in donors]))
        added = self._added(question, process)
        base = 0.5 * (process + mixture) if donors else 0.5 * (process + added)
        columns = [
            base,
            mixture - process,
            added - process,
            denoised - process,
            1 - np.exp(-here),
            base * saturation,
        ]
        return base, np.stack(columns, axis=1)

    def _added(
        self, question: PriorQuestion, otherwise: Float[np.ndarray, " genes"]
    ) -> Float[np.ndarray, " genes"]:
        try:
            return self._additive.predict_mean(question) - question.context.mean
        except UndefinedBaselineError:
            return otherwise


def _saturation(
    here: Float[np.ndarray, " genes"],
    controls: Float[np.ndarray, "donors genes"],
    treated: Float[np.ndarray, "donors genes"],
) -> float:
    """How far control cells lie along the response already, in units of the response."""
    shift = (treated - controls).mean(0)
    size = float(shift @ shift)
    return float(np.clip((here - controls.mean(0)) @ shift / size, -1, 1)) if size > 0 else 0.0
