"""Every simple answer to a held-out condition, as a mean and as cells."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.held_out import N_CELLS, HeldOut
from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.model._training_data import TrainingData, prior_features
from perturbdiff.prior import (
    Additive,
    Baseline,
    CarriedLogRatio,
    CopyControl,
    EffectPrior,
    GeneRidge,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    PriorQuestion,
    SimilarityShift,
)

KINDS: tuple[type[Baseline], ...] = (
    CopyControl, MeanShift, NearestContext, SimilarityShift, CarriedLogRatio, MixtureLogRatio,
    GeneRidge, Additive, EffectPrior,
)  # fmt: skip
SHIFTED, TRANSPORTED = "shifted", "transported"
ONCE, ALL_CELLS = "transported, partners once", "transported, all control cells"
TO_BEAT = f"mixture_log_ratio, {TRANSPORTED}"


def fitted_baselines(data: TrainingData, *, seed: int = 0) -> list[Baseline | tuple[str, str]]:
    """Baselines fitted on training conditions, or name and reason of one that cannot be."""
    features = prior_features(data.registry.features)
    fitted: list[Baseline | tuple[str, str]] = []
    for kind in KINDS:
        try:
            fitted.append(kind().fit(data.summaries, features=features, seed=seed))
        except UndefinedBaselineError as error:
            fitted.append((kind.name, str(error)))
    return fitted


def means_of(
    baselines: Sequence[Baseline | tuple[str, str]], question: PriorQuestion
) -> dict[str, np.ndarray | str]:
    """Mean that each baseline predicts, or the reason why it predicts none."""
    found: dict[str, np.ndarray | str] = {}
    for baseline in baselines:
        if isinstance(baseline, tuple):
            found[baseline[0]] = baseline[1]
            continue
        try:
            found[baseline.name] = np.asarray(baseline.predict_mean(question), dtype=np.float64)
        except UndefinedBaselineError as error:
            found[baseline.name] = str(error)
    return found


def answers(
    baselines: Sequence[Baseline | tuple[str, str]], held: HeldOut
) -> dict[str, np.ndarray | str]:
    """What baselines say of a held-out condition."""
    return means_of(baselines, held.controls.question(held.condition))


def score_simple(
    means: Mapping[str, np.ndarray | str],
    held: HeldOut,
    *,
    transported: Sequence[str],
    whole: Sequence[str] = (),
) -> dict[str, Any]:
    """Scores of every baseline, as a mean and as cells.

    Parameters
    ----------
    means
        From :func:`answers`.
    held
        What was held out.
    transported
        Baselines of which count-transported control cells are scored too.
    whole
        Those of which this is done with every control cell once as well.

    Returns
    -------
    ``cells``: rows by method; ``means``: scores of the means alone; ``undefined``: reasons.
    """
    rows: dict[str, Any] = {}
    alone: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, mean in means.items():
        if isinstance(mean, str):
            reasons[name] = mean
            continue
        alone[name] = held.score_mean(mean)
        shown = name if name == CopyControl.name else f"{name}, {SHIFTED}"
        rows[shown] = held.score(held.shifted(mean))
        if name in transported:
            many = held.score(held.transported(mean))
            same = held.n_once == N_CELLS
            once = many if same else held.score(held.transported(mean, n_cells=held.n_once))
            rows[f"{name}, {TRANSPORTED}"], rows[f"{name}, {ONCE}"] = many, once
        if name in whole:
            rows[f"{name}, {ALL_CELLS}"] = held.score(held.transported(mean, n_cells=None))
    return {"cells": rows, "means": alone, "undefined": reasons}
