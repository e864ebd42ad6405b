"""Reading expression out of an AnnData, whatever holds it, into one canonical sparse form."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._constants import DEPTH
from perturbdiff._errors import (
    ConfigError,
    ExpressionError,
    GeneError,
    GeneOverlapError,
    UnknownKeyError,
    counted,
    listed,
)

BLOCK = 2**24
"""Values of a dense matrix, or stored values of a sparse one, that are worked on at a time."""


def read_matrix(
    adata: AnnData, layer: str | None, *, rows: Int[np.ndarray, " cells"] | None = None
) -> sp.csr_array:
    """Expression as sparse rows: sorted indices, no duplicates, no stored zeros.

    Parameters
    ----------
    adata
        Cells × genes; in memory, backed or a view. It is not changed.
    layer
        Layer to read; ``None`` for ``X``.
    rows
        Rows to read, in this order; all when ``None``.

    Returns
    -------
    The same numbers for dense, CSR, CSC, backed or lazy storage, in memory of their own.
    Indices are never narrowed.

    Raises
    ------
    UnknownKeyError
        When there is no such layer.
    ExpressionError
        When there is no expression, or it is not numeric.
    """
    values = _stored(adata, layer)
    if values.dtype.kind not in "biuf":
        msg = f"{place(layer)} holds {values.dtype}, not numbers."
        raise ExpressionError(msg)
    if not sp.issparse(values):
        return _from_dense(values, rows)
    # A new csr_array keeps the width of its indices, where operations on a csr_matrix narrow it.
    csr = values if values.format == "csr" else sp.csr_array(values)
    matrix = sp.csr_array((csr.data, csr.indices, csr.indptr), shape=csr.shape)
    if rows is None or np.array_equal(rows, np.arange(matrix.shape[0])):
        matrix = matrix.copy()
    else:
        matrix = matrix[rows]
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


def place(layer: str | None) -> str:
    """Where expression is read, for messages."""
    return "adata.X" if layer is None else f"adata.layers[{layer!r}]"


def require_anndata(adata: object, *, name: str = "adata") -> None:
    """Refuse what is no AnnData, such as the path of one.

    Raises
    ------
    ConfigError
        When it is something else; a path is told how to open it.
    """
    if not isinstance(adata, AnnData):
        path = isinstance(adata, str | Path)
        shown = str(adata) if path else type(adata).__name__
        rule = "must be an AnnData"
        rule += f"; open the file first: anndata.read_h5ad({shown!r})" if path else ""
        raise ConfigError(name, shown, rule=rule)


def gene_names(adata: AnnData) -> tuple[str, ...]:
    """Names of the measured genes, refused when there is none or one is there twice."""
    require_anndata(adata)
    names = adata.var_names
    if not len(names):
        msg = "The file has no genes: adata.var is empty."
        raise GeneError(msg)
    if not names.is_unique:
        twice = names[names.duplicated()].unique()
        msg = (
            f"adata.var_names holds {counted(len(twice), 'name')} more than once: {listed(twice)}. "
            "Call adata.var_names_make_unique(), or sum or drop the copies; none is picked for you."
        )
        raise GeneError(msg)
    return tuple(names.astype(str))


INFER = "Add them, or pass missing_genes='infer'."

LEAST_SHARE = 0.1
"""Share of the model's genes below which the others are not inferred."""


def align_genes(
    measured: Sequence[str],
    wanted: Sequence[str],
    *,
    missing: str = "refuse",
    remedy: str = INFER,
) -> tuple[Int[np.ndarray, " genes"], tuple[str, ...]]:
    """Columns of the wanted genes that were measured, in the wanted order.

    Parameters
    ----------
    measured
        Gene names of the file.
    wanted
        Gene names of the model.
    missing
        ``"refuse"`` wanted genes that were not measured, or ``"infer"`` them later.
    remedy
        What to do about missing genes, for the message.

    Returns
    -------
    Columns, and the names they have.

    Raises
    ------
    ConfigError
        When ``missing`` is neither.
    GeneOverlapError
        When not a single wanted gene was measured.
    GeneError
        When some were not and ``missing="refuse"``.
    """
    if missing not in ("refuse", "infer"):
        raise ConfigError("missing_genes", missing, rule="must be 'refuse' or 'infer'")
    position = {name: column for column, name in enumerate(measured)}
    there = tuple(name for name in wanted if name in position)
    if wanted and not there:
        msg = (
            f"None of the {len(wanted)} genes of the model is in the file. "
            f"Model: {listed(wanted)}. File: {listed(measured)}. Are these other identifiers?"
        )
        raise GeneOverlapError(msg)
    if missing == "refuse" and len(there) < len(wanted):
        absent = [name for name in wanted if name not in position]
        msg = (
            f"{len(absent)} of {len(wanted)} genes of the model are not in the file: "
            f"{listed(absent)}. {remedy}"
        )
        raise GeneError(msg)
    columns = np.fromiter((position[name] for name in there), np.int64, len(there))
    return columns, there


def spread_columns(
    matrix: sp.csr_array, columns: Int[np.ndarray, " genes"], width: int
) -> sp.csr_array:
    """The columns at their places in a wider matrix that is empty elsewhere."""
    wide = sp.csr_array(
        (matrix.data, columns[matrix.indices], matrix.indptr), shape=(matrix.shape[0], width)
    )
    wide.sort_indices()
    return wide


def log1p_per_depth(
    counts: sp.csr_array, library_size: Float[np.ndarray, " cells"]
) -> sp.csr_array:
    """``log1p(counts / library_size * 10^4)`` in float32, computed in float64.

    Parameters
    ----------
    counts
        Cells × genes.
    library_size
        Counts of each cell over all measured genes; may be zero where a cell has no counts.

    Returns
    -------
    Cells × genes with the sparsity of ``counts``.
    """
    values = np.empty(len(counts.data), np.float32)
    indptr = counts.indptr.astype(np.int64)
    for start, stop in _row_blocks(indptr):
        part = slice(indptr[start], indptr[stop])
        depth = np.repeat(library_size[start:stop], np.diff(indptr[start : stop + 1]))
        values[part] = np.log1p(counts.data[part] / depth * DEPTH)
    return sp.csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def counts_of_log1p(
    log1p: sp.csr_array, library_size: Float[np.ndarray, " cells"]
) -> sp.csr_array | None:
    """Undo ``log1p_per_depth``; None where the result is not whole numbers."""
    counts = np.empty(len(log1p.data), np.int64)
    indptr = log1p.indptr.astype(np.int64)
    for start, stop in _row_blocks(indptr):
        part = slice(indptr[start], indptr[stop])
        depth = np.repeat(library_size[start:stop], np.diff(indptr[start : stop + 1]))
        exact = np.expm1(log1p.data[part].astype(np.float64)) * depth / DEPTH
        whole = np.rint(exact)
        if (whole < 1).any() or (np.abs(exact - whole) > 0.02 + 2e-6 * exact).any():
            return None
        counts[part] = whole
    return sp.csr_array((counts, log1p.indices, log1p.indptr), shape=log1p.shape)


def row_sums(matrix: sp.csr_array) -> Float[np.ndarray, " cells"]:
    """Sum of each row in float64."""
    indptr = matrix.indptr.astype(np.int64)
    totals = np.zeros(matrix.shape[0])
    for start, stop in _row_blocks(indptr):
        part = matrix.data[indptr[start] : indptr[stop]].astype(np.float64)
        row = np.repeat(np.arange(stop - start), np.diff(indptr[start : stop + 1]))
        totals[start:stop] = np.bincount(row, weights=part, minlength=stop - start)
    return totals


def _stored(adata: AnnData, layer: str | None) -> Any:
    if layer is not None and not isinstance(layer, str):
        raise ConfigError("layer", layer, rule="must be the name of a layer, or None for X")
    if layer is not None and layer not in adata.layers:
        raise UnknownKeyError("adata.layers", layer, known=list(adata.layers))
    values: Any = adata.X if layer is None else adata.layers[layer]
    if values is None:
        msg = f"adata.X is empty. Name a layer; there are: {listed(adata.layers) or 'none'}."
        raise ExpressionError(msg)
    for method in ("to_memory", "compute"):
        if hasattr(values, method):
            values = getattr(values, method)()
    return values


def _from_dense(values: Any, rows: Int[np.ndarray, " cells"] | None) -> sp.csr_array:
    """Sparse rows of a dense array, in memory or on disk, a block at a time."""
    if rows is not None and isinstance(values, np.ndarray):
        values, rows = values[rows], None
    step = max(1, BLOCK // max(1, values.shape[1]))
    starts = range(0, max(1, values.shape[0]), step)
    dtype = values.dtype.newbyteorder("=")
    dtype = np.dtype(np.float32) if dtype == np.float16 else dtype  # sparse arrays know no float16
    blocks = [sp.csr_array(np.asarray(values[at : at + step], dtype=dtype)) for at in starts]
    matrix = sp.csr_array(sp.vstack(blocks, format="csr")) if len(blocks) > 1 else blocks[0]
    return matrix if rows is None else sp.csr_array(matrix[rows])


def _row_blocks(indptr: Int[np.ndarray, " ends"]) -> list[tuple[int, int]]:
    """Runs of rows with at most about ``BLOCK`` stored values each."""
    n_rows = len(indptr) - 1
    marks = np.arange(indptr[0], indptr[-1] + BLOCK, BLOCK)
    edges = np.unique(np.clip(np.searchsorted(indptr, marks), 0, n_rows))
    edges = np.unique(np.concatenate([[0], edges, [n_rows]]))
    return [(int(a), int(b)) for a, b in pairwise(edges)]
