"""Scores of many conditions: each one, their averages, and how well they are told apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perturbdiff._errors import MetricError, listed
from perturbdiff.metrics._condition import ConditionScores, Project, score_condition
from perturbdiff.metrics._discrimination import Discrimination, discrimination
from perturbdiff.metrics._intake import Cells
from perturbdiff.metrics._response import mean_shift

_TOLD_APART: Final = 2  # conditions that discrimination needs


@dataclass(frozen=True, kw_only=True)
class TableScores:
    """Scores of every condition asked for, and their averages."""

    conditions: dict[str, ConditionScores]
    discrimination: Discrimination | None  # None with a single condition
    averages: dict[str, float]
    n_averaged: dict[str, int]  # conditions behind each average: those where it is defined
    missing: tuple[str, ...]  # not predicted, scored as no effect


def score_conditions(
    pred_cells: Mapping[str, Cells],
    true_cells: Mapping[str, Cells],
    control_cells: Mapping[str, Cells],
    *,
    project: Project | Mapping[str, Project] | None,
    metrics: Sequence[str] | None = None,
    n_top: int = 100,
    scale: str = "log1p_cp10k",
    seed: int = 0,
) -> TableScores:
    """Score predictions of several conditions against the truth.

    The truth says which conditions count. One that was not predicted is scored as if its control
    cells had been predicted (no effect) and named in ``missing``, so that leaving out hard
    conditions cannot raise an average.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, by name of condition.
    project
        Axes for all conditions, or for each by name.
    metrics, n_top, scale, seed
        As in :func:`score_condition`.

    Returns
    -------
    Scores by condition in the order of ``true_cells``, averages over the conditions where a score
    is defined (with their number), and discrimination between conditions.

    Raises
    ------
    MetricError
        When there is no condition, one has no control cells, or a predicted one has no truth.
    """
    if not true_cells:
        msg = "There is no true condition to score. Check the names and the split."
        raise MetricError(msg)
    for have, want, what in (
        (true_cells, pred_cells, "true cells"),
        (control_cells, true_cells, "control cells"),
    ):
        if lacking := [name for name in want if name not in have]:
            msg = (
                f"Conditions without {what}: {listed(lacking)}. Give them, or leave these "
                "conditions out."
            )
            raise MetricError(msg)
    missing = tuple(name for name in true_cells if name not in pred_cells)
    guesses = {name: pred_cells.get(name, control_cells[name]) for name in true_cells}
    scores = {
        name: score_condition(
            guesses[name],
            cells,
            control_cells[name],
            project=project[name] if isinstance(project, Mapping) else project,
            metrics=metrics,
            n_top=n_top,
            scale=scale,
            seed=seed,
        )
        for name, cells in true_cells.items()
    }
    apart = _apart(guesses, true_cells, control_cells) if len(true_cells) >= _TOLD_APART else None
    averages, numbers = average_scores(scores)
    if apart is not None:
        averages |= {"discrimination": apart.score, "ranked_first": apart.ranked_first}
        numbers |= dict.fromkeys(("discrimination", "ranked_first"), len(true_cells))
    return TableScores(
        conditions=scores,
        discrimination=apart,
        averages=averages,
        n_averaged=numbers,
        missing=missing,
    )


def average_scores(
    scores: Mapping[str, ConditionScores],
) -> tuple[dict[str, float], dict[str, int]]:
    """Mean of each score over the conditions where it is defined, and the number of those.

    Parameters
    ----------
    scores
        Scores by name of condition, all with the same metrics.

    Returns
    -------
    Averages (NaN where a score is defined nowhere) and numbers of conditions, by metric.

    Raises
    ------
    MetricError
        When there is no condition, or they were scored with different metrics.
    """
    if len({tuple(score.values) for score in scores.values()}) != 1:
        msg = (
            "Averages need one or more conditions, all scored with the same metrics. Score them "
            "again."
        )
        raise MetricError(msg)
    averages, numbers = {}, {}
    for metric in next(iter(scores.values())).values:
        column = np.array([score.values[metric] for score in scores.values()])
        column = column[~np.isnan(column)]
        averages[metric] = float(column.mean()) if len(column) else float("nan")
        numbers[metric] = len(column)
    return averages, numbers


def _apart(
    guesses: Mapping[str, Cells], truths: Mapping[str, Cells], controls: Mapping[str, Cells]
) -> Discrimination:
    def shifts(cells: Mapping[str, Cells]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.stack([mean_shift(cells[name], controls[name]) for name in truths])

    return discrimination(shifts(guesses), shifts(truths))
