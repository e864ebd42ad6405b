"""The effect prior: what a perturbation does on average to a context where nobody measured it.

A Gaussian process over conditions gives an expected log-ratio; a ridge shared by all genes, learned
by leaving training conditions out, corrects its strength, mixes in other answers and removes what
is common to all responses. Perturbations and combinations that were measured nowhere start from the
average response and from the sum of their members; see ``_unmeasured``.

C conditions, G genes, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.prior._baselines import Additive, Baseline
from perturbdiff.prior._carried import ClassifierCache, MixtureLogRatio
from perturbdiff.prior._donors import context_donors, novelty
from perturbdiff.prior._process import (
    KernelSettings,
    ResponseProcess,
    choose_settings,
    level,
    mean_at,
)
from perturbdiff.prior._ridge import (
    Example,
    condition_weight,
    shared_ridge,
    split_groups,
    split_levels,
)
from perturbdiff.prior._state import State, summaries_from_state, summaries_to_state
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion
from perturbdiff.prior._unmeasured import (
    all_alone,
    describe_combination,
    describe_new,
    split_unmeasured,
    trusted_share,
    without_features,
)

LEAVE_ONE_OUT_LIMIT = 30
"""Groups of conditions up to which each is left out in turn; beyond, ten folds of groups."""
_INNER_LIMIT = 12
_DENOISING = 5.0  # cells' worth of what other contexts say about a control level
# Relative penalty of the ridge, in the order of features, over a power of the number of examples:
# from two or three contexts little can be learned about how responses differ between contexts, and
# from a pair or two even less about how combinations do, which interact or do not.
_PENALTY = {
    "context": np.array([15.0, 15.0, 15.0, 15.0, 15.0, 15.0, 150.0]),
    "combination": np.full(3, 15.0),
}
_POWER = {"context": 3, "combination": 4}
_AXES = ("context", "combination", "perturbation")


class EffectPrior(Baseline):
    """Predicts the mean response from other conditions; also tells how wrong that is when left out.

    Features of the shared ridge for a perturbation known in other contexts: the base answer itself
    (strength); mixture against process, and the same for expressed genes; additive against process;
    what changes if the control level is denoised; the expressed part of the gene (a dilution common
    to all genes); and saturation, the base answer times how far the control cells already lie along
    the response.
    """

    name = "effect_prior"

    def __init__(self, *, classifiers: ClassifierCache | None = None) -> None:
        super().__init__()
        self._given = classifiers

    def _learn(self) -> None:
        if not self.conditions:
            msg = "the effect prior needs at least one training condition"
            raise UndefinedBaselineError(msg)
        self._prepare(choose_settings(self.conditions, self._features))

    def _prepare(self, settings: KernelSettings) -> None:
        self.settings = settings
        self._classifiers = self._given if self._given is not None else ClassifierCache()
        self._coefficients: dict[str, Float[np.ndarray, " features"]] = {}
        self._left_out: Float[np.ndarray, "conditions genes"] | None = None
        self._answers = self._answer_from(self.conditions)

    def _answer_from(self, conditions: Sequence[ConditionSummary]) -> "Answers":
        process = ResponseProcess.fit(conditions, features=self._features, settings=self.settings)
        return Answers(conditions, process, self._classifiers)

    def coefficients(self, axis: str, new: tuple[int, ...] = ()) -> Float[np.ndarray, " features"]:
        """Coefficients of the ridge.

        Parameters
        ----------
        axis
            ``context`` for perturbations that are known elsewhere, ``combination`` for those of
            which every member is known alone, ``perturbation`` for other new ones.
        new
            Places of the covariates whose level no known context has, among several. Training
            conditions are left out as the question is: with all that shares such a level.

        Returns
        -------
        One number per feature; all zero where no training condition can be left out.
        """
        new = self._alike(new) if axis == "context" else ()
        name = _name(axis, new)
        if name not in self._coefficients:
            self._coefficients[name] = self._learned(axis, new)
        return self._coefficients[name]

    def _alike(self, new: tuple[int, ...]) -> tuple[int, ...]:
        """Where several levels are new, all are taken to be: few data can tell such cases apart."""
        return new if len(new) < 2 else tuple(range(self._n_covariates))

    @property
    def _n_covariates(self) -> int:
        return len(self.conditions[0].context.covariates)

    def _cases(self) -> list[tuple[str, tuple[int, ...]]]:
        """All that there are coefficients for."""
        n = self._n_covariates
        single = [(place,) for place in range(n)] if n > 1 else []
        several = [tuple(range(n))] if n > 1 else []
        return [*((axis, ()) for axis in _AXES), *(("context", new) for new in single + several)]

    def _learned(self, axis: str, new: tuple[int, ...]) -> Float[np.ndarray, " features"]:
        if axis == "perturbation" and not self.settings.by_features:
            return np.zeros(1)
        examples: dict[object, list[Example]] = {}
        for out, kept in self._splits(axis, new):
            answers = self._answer_from(kept)
            for condition in out:
                if answers.axis(condition.question) == axis:
                    group = _group(condition, axis, new)
                    examples.setdefault(group, []).append(answers.example(condition))
        if axis == "perturbation":
            return np.array([trusted_share([_gain(group) for group in examples.values()])])
        penalty = _PENALTY[axis] / max(len(examples), 1) ** _POWER[axis]
        return shared_ridge([one for group in examples.values() for one in group], penalty)

    def _splits(
        self, axis: str, new: tuple[int, ...]
    ) -> list[tuple[list[ConditionSummary], list[ConditionSummary]]]:
        if new:
            return split_levels(self.conditions, new, seed=self._seed, limit=_INNER_LIMIT)
        if axis == "context":
            return split_groups(self.conditions, axis=axis, seed=self._seed, limit=_INNER_LIMIT)
        return split_unmeasured(
            self.conditions, combinations=axis == "combination", seed=self._seed, limit=_INNER_LIMIT
        )

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Mean log1p value per gene after treatment."""
        base, features = self._answers.describe(question)
        new = novelty(self.conditions, question)
        shift = base + features @ self.coefficients(self._answers.axis(question), new)
        return np.asarray(np.maximum(question.context.mean + shift, 0.0))

    def leave_one_out(
        self, conditions: Sequence[ConditionSummary] | None = None
    ) -> Float[np.ndarray, "conditions genes"]:
        """Answer for each training condition by a prior that never saw it.

        Conditions of the same perturbation and context, at other doses or times, are left out too.

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
        if self._left_out is None:
            self._left_out = self._leave_out()
        if conditions is None:
            return self._left_out
        rows = {c.key: row for c, row in zip(self.conditions, self._left_out, strict=True)}
        return np.stack([rows[c.key] for c in conditions])

    def left_out_errors(self) -> Float[np.ndarray, "conditions genes"]:
        """Measured minus predicted mean of every training condition, each left out in turn."""
        measured = np.stack([c.mean for c in self.conditions])
        return np.asarray(measured - self.leave_one_out())

    def _leave_out(self) -> Float[np.ndarray, "conditions genes"]:
        answers: dict[object, Float[np.ndarray, " genes"]] = {}
        splits = split_groups(
            self.conditions, axis="context", seed=self._seed, limit=LEAVE_ONE_OUT_LIMIT
        )
        for out, kept in splits:
            prior = EffectPrior(classifiers=self._classifiers)
            prior.fit(kept, features=self._features, seed=self._seed)
            answers |= {c.key: prior.predict_mean(c.question) for c in out}
        if len(answers) < len(self.conditions):
            msg = "without this condition there is no other one to learn from"
            raise UndefinedBaselineError(msg)
        return np.stack([answers[c.key] for c in self.conditions])

    @property
    def classifiers(self) -> ClassifierCache:
        """What tells contexts apart."""
        return self._classifiers

    def state(self) -> State:
        """Everything that answers depend on, as arrays and plain values."""
        state = summaries_to_state(self.conditions)
        state["seed"] = self._seed
        state["settings"] = asdict(self.settings)
        state["features"] = sorted(self._features)
        for i, name in enumerate(sorted(self._features)):
            state[f"feature.{i}"] = self._features[name]
        for case in self._cases():
            state[f"coefficients.{_name(*case)}"] = self.coefficients(*case)
        state["process"] = self._answers.process.weights
        if self.settings.by_features:
            state["plain"] = self._answers.plain.weights
        if self._left_out is not None:
            state["left_out"] = self._left_out
        return state

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, classifiers: ClassifierCache | None = None
    ) -> Self:
        """The prior that :meth:`state` was taken from; nothing is fitted again."""
        prior = cls(classifiers=classifiers)
        prior._restore(state)
        return prior

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._conditions = summaries_from_state(state)
        self._seed = int(state["seed"])
        known: Sequence[str] = state["features"]
        self._features = {name: np.asarray(state[f"feature.{i}"]) for i, name in enumerate(known)}
        self._prepare(KernelSettings(**state["settings"]))
        fitted = self._answers
        process = replace(fitted.process, weights=np.asarray(state["process"]))
        self._answers = Answers(self.conditions, process, self._classifiers)
        if "plain" in state:
            self._answers.plain = replace(fitted.plain, weights=np.asarray(state["plain"]))
        names = [_name(*case) for case in self._cases()]
        self._coefficients = {name: np.asarray(state[f"coefficients.{name}"]) for name in names}
        if "left_out" in state:
            self._left_out = np.asarray(state["left_out"])


class Answers:
    """The simple answers that the ridge combines, all from the same training conditions."""

    def __init__(
        self,
        conditions: Sequence[ConditionSummary],
        process: ResponseProcess,
        classifiers: ClassifierCache,
    ) -> None:
        self.process = process
        self._conditions = tuple(conditions)
        self._mixture = MixtureLogRatio(classifiers=classifiers).fit(conditions)
        self._additive = Additive().fit(conditions)

    @cached_property
    def plain(self) -> ResponseProcess:
        """The process without features; fitted where it is asked for, since few questions do."""
        return without_features(self._conditions, self.process)

    def axis(self, question: PriorQuestion) -> str:
        """Whether the perturbation is known elsewhere, in parts, or not at all."""
        if context_donors(self._conditions, question):
            return _AXES[0]
        return _AXES[1 if all_alone(self._conditions, question.members) else 2]

    def example(self, condition: ConditionSummary) -> Example:
        """What the ridge is to learn from a condition that is not among these."""
        base, features = self.describe(condition.question)
        shift = condition.mean - condition.context.mean
        return Example(features, shift - base, condition_weight(condition))

    def describe(
        self, question: PriorQuestion
    ) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes features"]]:
        """The base shift, and features of what may have to be added to it."""
        axis = self.axis(question)
        if axis == "perturbation":
            return describe_new(question, self.process, self.plain)
        if axis == "combination":
            added = self._additive.predict_mean(question) - question.context.mean
            return describe_combination(question, self.process, self.plain, added=added)
        return self._describe_elsewhere(question)

    def _describe_elsewhere(
        self, question: PriorQuestion
    ) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes features"]]:
        here = question.context.mean
        ratio = self.process.log_ratio(question)
        process = mean_at(level(here) + ratio) - here
        donors = context_donors(self._conditions, question)
        mixture = self._mixture.predict_mean(question) - here
        share = self._mixture.shares(question, donors)
        controls = np.stack([donor.context.mean for donor in donors])
        n = question.context.n_cells
        quiet = (n * here + _DENOISING * (share @ controls)) / (n + _DENOISING)
        denoised = mean_at(level(quiet) + ratio) - here
        saturation = _saturation(here, controls, np.stack([d.mean for d in donors]))
        added = self._added(question, process)
        base = 0.5 * (process + mixture)
        expressed = 1 - np.exp(-here)
        columns = [
            base,
            mixture - process,
            (mixture - process) * expressed,
            added - process,
            denoised - process,
            expressed,
            base * saturation,
        ]
        return base, np.stack(columns, axis=1)

    def _added(
        self, question: PriorQuestion, otherwise: Float[np.ndarray, " genes"]
    ) -> Float[np.ndarray, " genes"]:
        try:
            mean = self._additive.predict_mean(question)
        except UndefinedBaselineError:
            return otherwise
        return np.asarray(mean - question.context.mean)


def _name(axis: str, new: tuple[int, ...]) -> str:
    """What coefficients are kept under."""
    return ".".join([axis, *map(str, new)])


def _group(condition: ConditionSummary, axis: str, new: tuple[int, ...]) -> object:
    """What training conditions tell together, and no two of them apart."""
    if new:
        return tuple(condition.context.covariates[place] for place in new)
    return condition.key if axis == "context" else condition.members


def _gain(examples: Sequence[Example]) -> tuple[float, float]:
    """Average of ``d·r`` and ``d·d`` over the conditions of one perturbation."""
    gains = [
        (one.weight * one.features[:, 0] @ one.target, one.weight * (one.features[:, 0] ** 2).sum())
        for one in examples
    ]
    agreement, size = np.mean(gains, axis=0)
    return float(agreement), float(size)


def _saturation(
    here: Float[np.ndarray, " genes"],
    controls: Float[np.ndarray, "donors genes"],
    treated: Float[np.ndarray, "donors genes"],
) -> float:
    """How far control cells lie along the response already, in units of the response."""
    shift = (treated - controls).mean(0)
    size = float(shift @ shift)
    return float(np.clip((here - controls.mean(0)) @ shift / size, -1, 1)) if size > 0 else 0.0
