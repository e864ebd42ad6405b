"""Everything that is learnt from training cells before any network: genes, axes, summaries.

N cells, G genes, K principal axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._errors import SplitError, counted, listed
from perturbdiff._logging import logger
from perturbdiff.data import Cells, Condition, Registry
from perturbdiff.data._genes import principal_axes, variable_genes
from perturbdiff.data._splits import Holdout
from perturbdiff.data._training_cells import training_cells
from perturbdiff.prior import (
    ConditionSummary,
    ContextSummary,
    PriorQuestion,
    summarise_condition,
    summarise_context,
)

_LEAST_CELLS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingData:
    """Training cells on the selected genes, and what every predictor is fitted from.

    ``summaries`` stand in the order of ``conditions``, which is sorted.
    """

    registry: Registry  # with genes
    cells: Cells
    mean: Float[np.ndarray, " genes"]
    loadings: Float[np.ndarray, "genes axes"]
    conditions: tuple[Condition, ...]
    summaries: tuple[ConditionSummary, ...]
    split_hash: str

    def axes(self, rows: Int[np.ndarray, " cells"]) -> Float[np.ndarray, "cells axes"]:
        """Cells in principal axes."""
        return np.asarray(self.cells.log1p[rows] @ self.loadings - self.mean @ self.loadings)


def prepare(
    adata: AnnData,
    registry: Registry,
    *,
    holdout: Holdout | None,
    n_top_genes: int | None,
    n_axes: int,
) -> TrainingData:
    """Read training cells, choose genes and axes, summarise conditions.

    Parameters
    ----------
    adata
        Cells with labels.
    registry
        What its columns mean.
    holdout
        What to leave out, as in :func:`~perturbdiff.data.split`; ``None`` for nothing.
    n_top_genes
        Highly variable genes to work on, chosen from training cells; ``None`` for all.
    n_axes
        Principal axes.

    Returns
    -------
    Training data in which no held-out cell has left a trace.

    Raises
    ------
    SplitError
        When nothing is left to learn from, or no treated population has controls.
    ExpressionError
        When the expression is zero in all cells.
    """
    # A model that is fitted again chooses its genes again: the last choice saw other cells.
    registry = registry.with_genes(())
    cells, split_hash = training_cells(adata, registry, holdout=holdout)
    n_threads = torch.get_num_threads()
    genes = cells.genes if n_top_genes is None else variable_genes(cells, n_top_genes)
    # Numba, inside scanpy, sets the number of threads of the whole process.
    torch.set_num_threads(n_threads)
    cells = cells.select(genes)
    mean, loadings = principal_axes(cells.log1p, n_axes)
    scale = np.sqrt(
        np.maximum(np.asarray(cells.log1p.multiply(cells.log1p).mean(0)).ravel() - mean**2, 0)
    )
    fitted = registry.with_genes(genes, mean=mean, scale=scale)
    data = TrainingData(
        registry=fitted, cells=cells, mean=mean, loadings=loadings, conditions=(), summaries=(),
        split_hash=split_hash,
    )  # fmt: skip
    return _with_summaries(data)


def _with_summaries(data: TrainingData) -> TrainingData:
    """The same with one summary per treated condition that has control cells."""
    controls = {
        context: context_summary(data, rows, context)
        for context, rows in data.cells.controls().items()
    }
    found: dict[Condition, ConditionSummary] = {}
    alone, small = [], []
    for condition, rows in data.cells.conditions().items():
        if condition.context not in controls:
            alone.append(str(condition))
        elif len(rows) < _LEAST_CELLS:
            small.append(str(condition))
        else:
            found[condition] = summarise_condition(
                data.cells.log1p[rows],
                controls[condition.context],
                members=condition.members,
                numbers=numbers_of(condition),
            )
    if alone:
        left = counted(len(alone), "condition")
        logger.warning("left out %s without control cells: %s", left, listed(alone))
    if small:
        left = counted(len(small), "condition")
        logger.warning("left out %s of one cell: %s", left, listed(small))
    if not found:
        msg = "No treated condition with control cells in its context is left to learn from."
        raise SplitError(msg)
    return TrainingData(
        registry=data.registry, cells=data.cells, mean=data.mean, loadings=data.loadings,
        conditions=tuple(found), summaries=tuple(found.values()), split_hash=data.split_hash,
    )  # fmt: skip


def context_summary(
    data: TrainingData, rows: Int[np.ndarray, " cells"], context: tuple[str, ...]
) -> ContextSummary:
    """Summary of control cells, with as many axes as the priors look at."""
    return summarise_context(data.cells.log1p[rows], data.axes(rows), covariates=context)


def numbers_of(condition: Condition) -> tuple[float, ...]:
    """Doses and time of a condition."""
    return condition.doses + (() if condition.time is None else (condition.time,))


def question_of(condition: Condition, context: ContextSummary) -> PriorQuestion:
    """What the priors are asked about a condition."""
    return PriorQuestion(members=condition.members, context=context, numbers=numbers_of(condition))


def prior_features(features: Mapping[str, tuple[float, ...]]) -> dict[str, np.ndarray]:
    """Perturbation features as arrays, each number standardised over perturbations."""
    if not features:
        return {}
    table = np.array([features[name] for name in sorted(features)], dtype=np.float64)
    spread = table.std(0)
    table = (table - table.mean(0)) / np.where(spread > 0, spread, 1.0)
    return dict(zip(sorted(features), table, strict=True))
