"""A small regression that all genes share, and the baseline made of nothing else.

G genes, F features, C donors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.prior._baselines import Baseline
from perturbdiff.prior._donors import (
    Donors,
    find_donors,
    likeness,
    member_features,
    normalised,
    number_shares,
    soft_shares,
)
from perturbdiff.prior._response import apply_log_ratio, log_ratio
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion

Group = TypeVar("Group", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Example:
    """One training condition: features, what they should add up to, and how sure that is."""

    features: Float[np.ndarray, "genes features"]
    target: Float[np.ndarray, " genes"]
    weight: float


def condition_weight(condition: ConditionSummary) -> float:
    """Conditions count alike, except that noise makes them count less."""
    shift = condition.mean - condition.context.mean
    return float(1 / max((shift**2).sum() + 3 * condition.noise.sum(), 1e-12))


def shared_ridge(
    examples: Iterable[Example], penalty_F: Float[np.ndarray, " features"]
) -> Float[np.ndarray, " features"]:
    """Coefficients of the weighted ridge; the penalty is relative to each feature's own size."""
    gram = np.zeros((len(penalty_F), len(penalty_F)))
    right = np.zeros(len(penalty_F))
    for example in examples:
        gram += example.weight * example.features.T @ example.features
        right += example.weight * example.features.T @ example.target
    size = np.sqrt(np.diag(gram))
    used = size > 1e-12
    unit = np.where(used, size, 1.0)
    system = gram / np.outer(unit, unit) + np.diag(np.where(used, penalty_F, 1.0))
    return np.where(used, np.linalg.solve(system, right / unit) / unit, 0.0)


def deal(keys: Iterable[Group], *, seed: int, limit: int) -> dict[Group, int]:
    """Number of the fold of each group: its own up to a limit, one of ten beyond."""
    groups = sorted(set(keys))
    if len(groups) <= limit:
        return dict(zip(groups, range(len(groups)), strict=True))
    shuffled = np.random.default_rng(seed).permutation(len(groups))
    return {group: int(place) % 10 for group, place in zip(groups, shuffled, strict=True)}


def split_groups(
    conditions: Sequence[ConditionSummary], *, axis: str, seed: int, limit: int
) -> list[tuple[list[ConditionSummary], list[ConditionSummary]]]:
    """Training conditions split into (left out, kept), a group at a time, or in ten folds.

    Along ``context`` a group is a perturbation in one context, at all doses; along ``perturbation``
    it is a perturbation everywhere. Groups that leave nothing to learn from are not left out.
    """
    keys = [
        (c.members, c.context.covariates) if axis == "context" else (c.members, ())
        for c in conditions
    ]
    fold = deal(keys, seed=seed, limit=limit)
    places = [fold[key] for key in keys]
    splits = []
    for place in sorted(set(places)):
        out = [c for c, p in zip(conditions, places, strict=True) if p == place]
        kept = [c for c, p in zip(conditions, places, strict=True) if p != place]
        if kept:
            splits.append((out, kept))
    return splits


def split_levels(
    conditions: Sequence[ConditionSummary], new: Sequence[int], *, seed: int, limit: int
) -> list[tuple[list[ConditionSummary], list[ConditionSummary]]]:
    """Training conditions split into (left out, kept) as a question does whose levels are new.

    A perturbation is left out at some levels of the covariates at these places, and nothing that
    shares one of them with what is left out is kept of it.
    """
    keys = [(c.members, tuple(c.context.covariates[i] for i in new)) for c in conditions]
    fold = deal(keys, seed=seed, limit=limit)
    splits = []
    for place in sorted(set(fold.values())):
        gone = {key for key, own in fold.items() if own == place}
        shared = {(members, i, at) for members, levels in gone for i, at in enumerate(levels)}
        kept = [
            c for c, (members, levels) in zip(conditions, keys, strict=True)
            if not any((members, i, at) in shared for i, at in enumerate(levels))
        ]  # fmt: skip
        if kept:
            out = [c for c, key in zip(conditions, keys, strict=True) if key in gone]
            splits.append((out, kept))
    return splits


class GeneRidge(Baseline):
    """Ridge shared by all genes over simple features, learned by leaving conditions out.

    Features are the plain and the weighted shift, the plain and the weighted log-ratio, the carried
    log-ratio, the control level here and there, and the spread of the shifts. Weights follow the
    likeness of control means for a perturbation seen elsewhere, and of features for a new one.
    """

    name = "gene_ridge"
    sharpness = 3.0
    penalty = 0.01

    def _learn(self) -> None:
        self._coefficients: dict[str, Float[np.ndarray, " features"]] = {}

    def _coefficients_for(self, axis: str) -> Float[np.ndarray, " features"]:
        if axis not in self._coefficients:
            examples = []
            for out, kept in split_groups(self.conditions, axis=axis, seed=self._seed, limit=30):
                for condition in out:
                    donors = find_donors(kept, condition.question)
                    if donors.axis == axis:
                        examples.append(self._example(condition, donors))
            if not examples:
                msg = "no training condition can be left out to learn the coefficients from"
                raise UndefinedBaselineError(msg)
            width = examples[0].features.shape[1]
            self._coefficients[axis] = shared_ridge(examples, np.full(width, self.penalty))
        return self._coefficients[axis]

    def _example(self, condition: ConditionSummary, donors: Donors) -> Example:
        return Example(
            self._describe(condition.question, donors),
            condition.mean - condition.context.mean,
            condition_weight(condition),
        )

    def _shares(self, question: PriorQuestion, donors: Donors) -> Float[np.ndarray, " donors"]:
        if donors.axis == "context":
            score = likeness(question, donors.conditions)
        else:
            score = self._feature_likeness(question, donors.conditions)
        return normalised(
            soft_shares(score, sharpness=self.sharpness)
            * number_shares(donors.conditions, question)
        )

    def _feature_likeness(
        self, question: PriorQuestion, donors: Sequence[ConditionSummary]
    ) -> Float[np.ndarray, " donors"]:
        own = member_features(question.members, self._features)
        others = [member_features(donor.members, self._features) for donor in donors]
        known = [value for value in others if value is not None]
        if own is None or not known:
            return np.zeros(len(donors))
        middle = np.mean(known, axis=0)
        own = own - middle
        scores = []
        for value in others:
            side = np.zeros_like(own) if value is None else value - middle
            norm = float(np.linalg.norm(own) * np.linalg.norm(side))
            scores.append(float(own @ side) / norm if norm > 0 else 0.0)
        return np.array(scores)

    def _describe(
        self, question: PriorQuestion, donors: Donors
    ) -> Float[np.ndarray, "genes features"]:
        treated, control = donors.stack()
        shift, ratio = treated - control, log_ratio(treated, control)
        share = self._shares(question, donors)
        here = question.context.mean
        columns = [
            shift.mean(0),
            share @ shift,
            ratio.mean(0),
            share @ ratio,
            apply_log_ratio(here, share @ ratio) - here,
            here,
            control.mean(0),
            shift.std(0),
            np.ones_like(here),
        ]
        return np.stack(columns, axis=1)

    def predict_mean(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Control mean plus what the ridge makes of the features, never below zero."""
        donors = find_donors(self.conditions, question)
        features = self._describe(question, donors)
        shift = features @ self._coefficients_for(donors.axis)
        return np.asarray(np.maximum(question.context.mean + shift, 0.0))
