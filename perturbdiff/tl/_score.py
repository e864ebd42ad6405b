"""Score predicted cells beside the baselines and the ceiling.

N cells, G genes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._constants import DEPTH, UNS_KEY
from perturbdiff._errors import MetricError
from perturbdiff.config._checks import seed_number
from perturbdiff.data import Condition
from perturbdiff.data._comparison import Comparison, compare
from perturbdiff.data._target import table_key, target_of
from perturbdiff.metrics import (
    CONDITION_METRICS,
    Projection,
    discrimination,
    discrimination_ceiling,
    score_condition,
    split_half_ceiling,
)
from perturbdiff.model._cells import moved_cells, transported_cells
from perturbdiff.tl._labels import condition_labels

CEILING: Final = "split_half_ceiling"
TRANSPORTED: Final = ("mixture_log_ratio", "effect_prior")
"""Baselines that are brought to cells by count transport too; the first is the one to beat."""

_N_AXES = 30
_ORDER: Final = (
    "copy_control",
    "mean_shift",
    "nearest_context",
    "similarity_shift",
    "carried_log_ratio",
    "gene_ridge",
    "additive",
    "mixture_log_ratio",
    "effect_prior",
)
_LAST: Final = (
    "discrimination", "n_pred", "n_true", "n_control", "n_genes", "n_genes_pred", "undefined",
)  # fmt: skip
_OF_MEANS = ("pearson_shift", "mae_shift")
_NO_COUNTS = "the reference has neither counts nor library sizes"
_ALONE = "only one condition was predicted, so there is nothing to tell it apart from"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One method's answer for one condition: cells, a mean, or the reason why there is none."""

    method: str
    made_by: str  # generated, shifted, transported
    cells: Float[np.ndarray, "cells genes"] | None = None
    mean: Float[np.ndarray, " genes"] | None = None  # stated, where it is not that of the cells
    reason: str = ""


def score(
    pred: AnnData,
    *,
    reference: AnnData,
    key_added: str = "score",
    seed: int = 0,
    copy: bool = False,
) -> AnnData | None:
    """Compare predicted with measured cells, beside every baseline and the replicate ceiling.

    Distances are taken in 30 principal axes of the reference without the cells that were predicted.
    A baseline states a mean; its cells are control cells shifted to it (``cells="shifted"``), for
    the strongest ones also control cells brought there by count transport
    (``cells="transported"``), from the control partners that the model has for the same seed.
    Where cells are shifted, Pearson and MAE are those of the stated mean.

    Parameters
    ----------
    pred
        Prediction of :func:`~perturbdiff.tl.predict`.
    reference
        File with the measured cells, control and treated; read as the model's own data was.
    key_added
        Where in ``uns`` the table is written.
    seed
        Seed of subsampling and of the baselines' cells.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: a table with one row
    per method and condition. Columns: ``method`` (the model first, ``split_half_ceiling`` last),
    ``cells`` (``generated``, ``shifted``, ``transported``, ``measured``), the labels by their
    names in ``obs``, one column per metric (see ``perturbdiff.metrics.METRICS`` for units and
    directions; ``discrimination`` is per condition), ``n_pred``, ``n_true``, ``n_control``,
    ``n_genes`` that were compared, ``n_genes_pred`` of them that the method answers for, and
    ``undefined`` with the reason for every value that is missing. All genes of the model are
    compared: those that ``pred`` lacks count as unchanged from control.

    Raises
    ------
    ConfigError
        When ``key_added`` is empty, holds a slash, or is the name of something else.
    UnknownKeyError
        When ``pred`` is no prediction, or the reference lacks a column.
    LabelError
        When the reference is a prediction, or lacks cells of a predicted condition.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file.
    """
    key_added = table_key(key_added, pred, usual="score")
    seed = seed_number(seed)
    table = _table(compare(pred, reference), str(pred.uns[UNS_KEY].get("model", "model")), seed)
    target = target_of(pred, copy=copy)
    target.uns[key_added] = table
    return target if copy else None


def _table(comparison: Comparison, model: str, seed: int) -> pd.DataFrame:
    mean, loadings = comparison.axes(_N_AXES)
    project = Projection(mean, loadings.T)
    rows: list[dict[str, Any]] = []
    shifts: dict[tuple[str, str], list[np.ndarray]] = {}
    true_shifts = []
    for condition in comparison.conditions:
        control = comparison.controls(condition).log1p.toarray().astype(np.float64)
        truth = comparison.measured(condition)
        true_shifts.append(truth.mean(0, dtype=np.float64) - control.mean(0))
        labels = condition_labels(comparison.registry, condition)
        for candidate in _candidates(comparison, condition, model=model, seed=seed):
            row = _scored(candidate, truth, control=control, project=project, seed=seed)
            row |= _genes_compared(comparison, candidate)
            rows.append({**_named(candidate.method, candidate.made_by, labels), **row})
            shifts.setdefault((candidate.method, candidate.made_by), []).append(
                _shift(candidate, control)
            )
        row = _ceiling(truth, control, project=project, seed=seed)
        row |= {"n_genes": truth.shape[1], "n_genes_pred": truth.shape[1]}
        rows.append({**_named(CEILING, "measured", labels), **row})
    apart = _told_apart(shifts, np.stack(true_shifts))
    apart[CEILING, "measured"] = _ceiling_apart(comparison, seed=seed)
    return _assembled(rows, apart)


def _named(method: str, made_by: str, labels: Mapping[str, str | float]) -> dict[str, Any]:
    """First columns of a row; a label column whose name is taken gets ``obs_`` before it."""
    taken = {"method", "cells", *_LAST, *CONDITION_METRICS}
    free = {f"obs_{key}" if key in taken else key: value for key, value in labels.items()}
    return {"method": method, "cells": made_by, **free}


def _candidates(
    comparison: Comparison, condition: Condition, *, model: str, seed: int
) -> Iterator[Candidate]:
    """The model's cells, then the baselines'."""
    yield Candidate(
        method=model,
        made_by="generated",
        cells=comparison.predicted(condition),
        mean=None if comparison.there.all() else comparison.predicted_mean(condition),
    )
    for name, answers in sorted(comparison.stated.items(), key=lambda item: _place(item[0])):
        mean = answers[condition.name]
        for made_by in ("shifted", *(["transported"] if name in TRANSPORTED else [])):
            if isinstance(mean, str):
                yield Candidate(method=name, made_by=made_by, reason=mean)
            elif made_by == "shifted":
                cells = _shifted(comparison, condition, mean, seed=seed)
                yield Candidate(method=name, made_by=made_by, cells=cells, mean=mean)
            elif (moved := _transported(comparison, condition, mean, seed=seed)) is None:
                yield Candidate(method=name, made_by=made_by, reason=_NO_COUNTS)
            else:
                yield Candidate(method=name, made_by=made_by, cells=moved)


def _place(name: str) -> tuple[int, str]:
    """From the simplest baseline to the strongest, unknown ones last: files forget the order."""
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name


def _shifted(
    comparison: Comparison, condition: Condition, mean: Float[np.ndarray, " genes"], *, seed: int
) -> Float[np.ndarray, "cells genes"]:
    """As many control cells as were predicted, plus the shift, never below zero."""
    control = comparison.partners(condition).log1p
    moved = moved_cells(
        control,
        mean - np.asarray(control.mean(0, dtype=np.float64)).ravel(),
        condition=condition.name,
        n_cells=len(comparison.pred.conditions()[condition]),
        seed=seed,
    )
    return np.asarray(moved.toarray())


def _transported(
    comparison: Comparison, condition: Condition, mean: Float[np.ndarray, " genes"], *, seed: int
) -> Float[np.ndarray, "cells genes"] | None:
    """As many control cells as were predicted, counts thinned or added to; None without counts."""
    controls = comparison.partners(condition)
    if controls.counts is None or controls.library_size is None:
        return None
    counts, size = transported_cells(
        controls.counts,
        controls.library_size,
        mean,
        genes=controls.genes,
        condition=condition.name,
        n_cells=len(comparison.pred.conditions()[condition]),
        seed=seed,
    )
    return np.asarray(np.log1p(counts.toarray() / size[:, None] * DEPTH))


def _scored(
    candidate: Candidate,
    truth: Float[np.ndarray, "cells genes"],
    *,
    control: Float[np.ndarray, "controls genes"],
    project: Projection,
    seed: int,
) -> dict[str, Any]:
    if candidate.cells is None:
        values = dict.fromkeys(CONDITION_METRICS, np.nan)
        sizes = {"n_pred": 0, "n_true": len(truth), "n_control": len(control)}
        return {**values, **sizes, "undefined": candidate.reason}
    found = score_condition(candidate.cells, truth, control, project=project, seed=seed)
    values = {**found.values}
    if candidate.mean is not None:
        stated = score_condition(
            candidate.mean[None], truth, control, project=None, metrics=_OF_MEANS
        )
        values |= stated.values
    return {
        **values,
        "n_pred": found.n_pred,
        "n_true": found.n_true,
        "n_control": found.n_control,
        "undefined": _reasons(found.undefined),
    }


def _shift(
    candidate: Candidate, control: Float[np.ndarray, "controls genes"]
) -> Float[np.ndarray, " genes"]:
    if candidate.mean is not None:
        return np.asarray(candidate.mean - control.mean(0))
    if candidate.cells is not None:
        return np.asarray(candidate.cells.mean(0, dtype=np.float64) - control.mean(0))
    return np.full(control.shape[1], np.nan)


def _genes_compared(comparison: Comparison, candidate: Candidate) -> dict[str, int]:
    n_genes = len(comparison.there)
    n_held = int(comparison.there.sum()) if candidate.made_by == "generated" else n_genes
    return {"n_genes": n_genes, "n_genes_pred": 0 if candidate.cells is None else n_held}


def _ceiling(
    truth: Float[np.ndarray, "cells genes"],
    control: Float[np.ndarray, "controls genes"],
    *,
    project: Projection,
    seed: int,
) -> dict[str, Any]:
    sizes = {"n_pred": len(truth) // 2, "n_true": len(truth) // 2, "n_control": len(control)}
    try:
        found = split_half_ceiling(truth, control, project=project, seed=seed)
    except MetricError as error:
        return {**dict.fromkeys(CONDITION_METRICS, np.nan), **sizes, "undefined": str(error)}
    return {**found.values, **sizes, "undefined": _reasons(found.undefined)}


def _reasons(undefined: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in undefined.items())


def _told_apart(
    shifts: Mapping[tuple[str, str], list[np.ndarray]],
    true_shifts_CG: Float[np.ndarray, "conditions genes"],
) -> dict[tuple[str, str], np.ndarray | str]:
    """Discrimination of every condition by method, or why there is none."""
    found: dict[tuple[str, str], np.ndarray | str] = {}
    for key, rows in shifts.items():
        try:
            found[key] = (
                discrimination(np.stack(rows), true_shifts_CG).scores if len(rows) > 1 else _ALONE
            )
        except MetricError as error:
            found[key] = str(error)
    return found


def _ceiling_apart(comparison: Comparison, *, seed: int) -> np.ndarray | str:
    if len(comparison.conditions) < 2:
        return _ALONE
    true = {c.name: comparison.measured(c) for c in comparison.conditions}
    control = {c.name: comparison.controls(c).log1p.toarray() for c in comparison.conditions}
    try:
        return discrimination_ceiling(true, control, seed=seed).scores
    except MetricError as error:
        return str(error)


def _assembled(
    rows: list[dict[str, Any]], apart: Mapping[tuple[str, str], np.ndarray | str]
) -> pd.DataFrame:
    """The rows as a table, methods together, with discrimination beside the other metrics."""
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["method"], row["cells"]
        number = seen[key] = seen.get(key, -1) + 1
        found = apart[key]
        row["discrimination"] = np.nan if isinstance(found, str) else float(found[number])
        if isinstance(found, str) and not np.isnan(row["pearson_shift"]):
            reasons = [row["undefined"], f"discrimination: {found}"]
            row["undefined"] = "; ".join(reason for reason in reasons if reason)
    order = list(seen)
    rows = sorted(rows, key=lambda row: order.index((row["method"], row["cells"])))
    table = pd.DataFrame(rows)
    table = table[[*(name for name in table.columns if name not in _LAST), *_LAST]]
    table.index = pd.Index([str(number) for number in range(len(table))], dtype=object)
    return table
