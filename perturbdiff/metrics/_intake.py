"""What a metric accepts: matrices of cells by genes, and what it refuses before it counts.

N cells, G genes. Every matrix becomes float64 once, here, so that the input's dtype never shows in
a score.
"""

from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from perturbdiff._constants import DEPTH
from perturbdiff._errors import MetricError

Matrix: TypeAlias = NDArray[np.float64]
Cells: TypeAlias = NDArray[Any] | sp.sparray | sp.spmatrix
"""Cells by genes, dense or sparse, of any real dtype."""

FLAT = 1e-9  # a shift that varies less than this over genes is rounding, not a response
_SLACK = 1e-3  # half-precision rounding of the largest value that a scale allows


def dense(cells: Cells, *, what: str) -> Matrix:
    """Cells as a float64 matrix; the input is read only.

    Raises
    ------
    MetricError
        When it is not a matrix of real, finite numbers with at least one cell and one gene.
    """
    array = unpacked(cells)
    if array.ndim != 2:
        msg = f"{what} must be cells by genes, but has shape {array.shape}. Reshape it to two axes."
        raise MetricError(msg)
    if 0 in array.shape:
        msg = (
            f"{what} is empty ({array.shape[0]} cells, {array.shape[1]} genes). Leave this "
            "condition out."
        )
        raise MetricError(msg)
    if array.dtype.kind not in "fiub":
        msg = (
            f"{what} holds {array.dtype}, not real numbers. Convert it to a float or integer dtype."
        )
        raise MetricError(msg)
    matrix = array.astype(np.float64, copy=False)
    if bad := matrix.size - int(np.isfinite(matrix).sum()):
        msg = (
            f"{what} has {bad} value(s) that are NaN or infinite. Remove those cells or genes "
            "first."
        )
        raise MetricError(msg)
    return matrix


def unpacked(cells: Cells) -> NDArray[Any]:
    """Cells as a dense array of their own dtype."""
    return np.asarray(cells.toarray() if sp.issparse(cells) else cells)  # type: ignore[union-attr]


def triple(
    pred_cells: Cells, true_cells: Cells, control_cells: Cells
) -> tuple[Matrix, Matrix, Matrix]:
    """Predicted, true and control cells over the same genes, none of them standing in for another.

    Raises
    ------
    MetricError
        When gene numbers differ, or when the true cells also play one of the other parts.
    """
    pred, true = pair(pred_cells, true_cells)
    refuse_same(true_cells, control_cells, names=("true_cells", "control_cells"))
    control = dense(control_cells, what="control_cells")
    same_genes(control, true, names=("control_cells", "true_cells"))
    return pred, true, control


def pair(pred_cells: Cells, true_cells: Cells) -> tuple[Matrix, Matrix]:
    """Predicted and true cells over the same axes, which must not be one object."""
    refuse_same(pred_cells, true_cells, names=("pred_cells", "true_cells"))
    pred = dense(pred_cells, what="pred_cells")
    true = dense(true_cells, what="true_cells")
    same_genes(pred, true, names=("pred_cells", "true_cells"))
    return pred, true


def same_genes(left: Matrix, right: Matrix, *, names: tuple[str, str]) -> None:
    """Refuse matrices of different width."""
    if left.shape[1] != right.shape[1]:
        msg = (
            f"{names[0]} has {left.shape[1]} columns and {names[1]} has {right.shape[1]}. "
            "Align both by gene name before scoring."
        )
        raise MetricError(msg)


def refuse_same(left: Cells, right: Cells, *, names: tuple[str, str]) -> None:
    """Refuse two arguments that look into the same memory: data would be compared with itself."""
    if left is right or np.shares_memory(_memory(left), _memory(right)):
        msg = (
            f"{names[0]} and {names[1]} share memory, so the data would be compared with "
            "itself. Pass the right array, or a copy where this is meant."
        )
        raise MetricError(msg)


def refuse_scale(cells: Matrix, *, what: str, scale: str, signed: bool = False) -> None:
    """Refuse values that cannot be on the declared scale; all others are taken as declared.

    No cell has more than ``DEPTH`` counts per ``DEPTH``, so ``log1p(DEPTH)`` (9.21) bounds the
    logged values. ``signed`` lets negative values pass: some models predict them, and only fold
    changes are undefined then.
    """
    if scale not in ("log1p_cp10k", "cp10k"):
        msg = (
            f"scale {scale!r} is not known here. Declare 'log1p_cp10k' or 'cp10k'; "
            "counts must be normalised by library size first."
        )
        raise MetricError(msg)
    highest = float(np.log1p(DEPTH)) if scale == "log1p_cp10k" else DEPTH
    low, high = float(cells.min()), float(cells.max())
    if (low < 0 and not signed) or high > highest * (1 + _SLACK):
        msg = (
            f"{what} is declared {scale} but its values run from {low:.4g} to {high:.4g}; that "
            f"scale runs from 0 to {highest:.4g}. Normalise it, declare the right scale, or clip "
            "the prediction."
        )
        raise MetricError(msg)


def _memory(cells: Cells) -> NDArray[Any]:
    return np.asarray(cells.data if sp.issparse(cells) else cells)
