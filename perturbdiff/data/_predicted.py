"""Predicted cells as they are read again: only as they were written."""

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Bool

from perturbdiff._errors import ExpressionError, ScaleError, counted
from perturbdiff.data._cells import Cells, pick_columns
from perturbdiff.data._checks import declared_scale, warn_logged_twice
from perturbdiff.data._conditions import Rows
from perturbdiff.data._labels import column_of
from perturbdiff.data._library import LIBRARY_SIZE
from perturbdiff.data._matrix import (
    align_genes,
    gene_names,
    log1p_per_depth,
    read_matrix,
    spread_columns,
)
from perturbdiff.data._registry import Registry
from perturbdiff.data._rounding import rounding_that_explains

_COUNTS = "counts"
_NAMED = "predicted_"
_NEAR = 1e-3  # of a logarithm: far above rounding to float32, far below one count
_AS_RETURNED = "Give the prediction as predict returned it, and change a copy."


def made_name(number: int) -> str:
    """Name of a predicted cell."""
    return f"{_NAMED}{number:06d}"


def made_number(name: str) -> int | None:
    """Number of a predicted cell; None where the name is another."""
    number = name.removeprefix(_NAMED)
    return int(number) if name.startswith(_NAMED) and number.isdecimal() else None


def read_prediction(
    pred: AnnData, registry: Registry, rows: Rows
) -> tuple[Cells, Bool[np.ndarray, " genes"]]:
    """Predicted cells from ``X``, which was written on a known scale, and which genes it holds.

    Their counts may sum to more than the library size, which is that of the control partner, so
    what is asked of measured cells cannot be asked of them. ``X`` must still be what their counts
    and library sizes say, where the prediction has these.

    Raises
    ------
    ScaleError, ExpressionError
        When ``X`` is no longer as it was written.
    GeneError
        When genes are there twice, or none is one of the model.
    """
    if declared_scale(pred) != "log1p_cp10k":
        msg = "X of the prediction is no longer on the scale that it was written on, log1p_cp10k."
        raise ScaleError(msg)
    columns, genes = align_genes(gene_names(pred), registry.genes, missing="infer")
    there = np.isin(np.array(registry.genes, dtype=object), np.array(genes, dtype=object))
    held = read_matrix(pred, None, rows=rows.rows)
    _check_as_written(held, pred, rows, registry=registry)
    held = pick_columns(held, columns).astype(np.float32)
    cells = Cells(
        log1p=spread_columns(held, np.flatnonzero(there), len(there)),
        counts=None,
        library_size=None,
        genes=registry.genes,
        names=rows.names,
        rows=rows.rows,
        distinct=rows.conditions,
        condition=rows.condition,
        n_missing_labels=rows.n_missing,
    )
    return cells, there


def _check_as_written(held: sp.csr_array, pred: AnnData, rows: Rows, *, registry: Registry) -> None:
    if n_bad := int((~np.isfinite(held.data)).sum()):
        msg = (
            f"X of the prediction holds {counted(n_bad, 'value')} that are NaN or infinite, which "
            f"predict never writes. {_AS_RETURNED}"
        )
        raise ExpressionError(msg)
    if n_bad := int((held.data < 0).sum()):
        msg = (
            f"X of the prediction holds {counted(n_bad, 'negative value')}, which predict never "
            f"writes: it looks scaled or centred. {_AS_RETURNED}"
        )
        raise ExpressionError(msg)
    key = registry.library_size_key or LIBRARY_SIZE
    if _COUNTS not in pred.layers or key not in pred.obs.columns:
        depth = np.asarray(sp.csr_array(held).expm1().sum(axis=1)).ravel()
        highest = float(held.data.max(initial=0.0))
        warn_logged_twice(depth[depth > 0], highest=highest, where="X of the prediction")
        return
    counts = read_matrix(pred, _COUNTS, rows=rows.rows)
    column = pd.to_numeric(column_of(pred.obs, key), errors="coerce")
    sizes = column.to_numpy(np.float64, na_value=np.nan)[rows.rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        written = log1p_per_depth(counts, sizes)
    if n_off := _unlike(held, written):
        how = rounding_that_explains(held, sizes)
        cause = f"it seems rounded {how}" if how else "by a second logarithm, say"
        msg = (
            f"X of the prediction is not log1p of its counts per 10,000 in {n_off} of "
            f"{counted(len(sizes), 'cell')}: X, layers[{_COUNTS!r}] or obs[{key!r}] was changed "
            f"after predict, {cause}. {_AS_RETURNED}"
        )
        raise ScaleError(msg)


def _unlike(held: sp.csr_array, written: sp.csr_array) -> int:
    """Cells in which the two differ by more than rounding."""
    same = np.array_equal(held.indptr, written.indptr)
    if same and np.array_equal(held.indices, written.indices):
        off = ~(np.abs(held.data - written.data) <= _NEAR)
        return len(np.unique(np.searchsorted(held.indptr, np.flatnonzero(off), side="right")))
    apart = sp.csr_array(abs(held - written))
    off = ~(apart.data <= _NEAR)
    return len(np.unique(np.searchsorted(apart.indptr, np.flatnonzero(off), side="right")))
