"""Library sizes: each cell's counts over all measured genes, taken before any gene is selected."""

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._errors import ExpressionError, ScaleError
from perturbdiff._typing import Scale
from perturbdiff.data._checks import is_prediction, usable
from perturbdiff.data._labels import column_of
from perturbdiff.data._matrix import counts_of_log1p, place, row_sums
from perturbdiff.data._rounding import rounding_that_explains

LIBRARY_SIZE = "library_size"
"""Column that is read when none is named, and written to."""

COVERAGE = 0.9
"""Share of the training file's genes that a file must have for its counts to be summed."""


def library_sizes(
    adata: AnnData,
    matrix: sp.csr_array,
    scale: Scale,
    *,
    key: str | None,
    measured: tuple[str, ...],
    rows: Int[np.ndarray, " cells"],
) -> Float[np.ndarray, " cells"] | None:
    """Library size of each cell.

    Parameters
    ----------
    adata
        File.
    matrix
        Expression of ``rows``, all genes of the file.
    scale
        What ``matrix`` holds.
    key
        Column of library sizes, where one was named.
    measured
        Genes measured in training.
    rows
        Rows of the file that are read.

    Returns
    -------
    The named column, else ``obs["library_size"]``, else the sum of counts; None for log values
    without such a column.

    Raises
    ------
    UnknownKeyError
        When the named column is not there.
    ExpressionError
        When the column is not a number of counts that can be a library size.
    ScaleError
        When counts would have to be summed over a subset of the measured genes.
    """
    if key is None and LIBRARY_SIZE in adata.obs.columns:
        key = LIBRARY_SIZE
    totals = row_sums(matrix) if scale == "counts" else None
    if key is not None:
        sizes = _column(adata.obs, key, rows)
        too_small = totals is not None and bool((sizes < totals * (1 - 1e-6)).any())
        if totals is not None and too_small and not is_prediction(adata):
            worst = int(np.argmax(totals - sizes))
            msg = (
                f"obs[{key!r}] is {sizes[worst]:g} where the counts of cell "
                f"{adata.obs_names[rows[worst]]!r} sum to {totals[worst]:g}: it is no library size."
            )
            raise ExpressionError(msg)
        return sizes
    if totals is not None and (evidence := subset_evidence(adata, measured)):
        msg = (
            f"The file holds a subset of the measured genes ({evidence}), so its counts do "
            "not sum to library sizes. Name the column that holds them with "
            "library_size_key, or write obs['library_size'] before selecting genes."
        )
        raise ScaleError(msg)
    return totals


def counts_by_size(
    log1p: sp.csr_array,
    sizes: Float[np.ndarray, " cells"],
    *,
    adata: AnnData,
    layer: str | None,
    key: str | None,
) -> sp.csr_array | None:
    """Counts that log values and library sizes stand for.

    Parameters
    ----------
    log1p
        Log1p of counts per 10,000, all genes of the file.
    sizes
        Library size of each cell.
    adata, layer, key
        Where both come from, for the message.

    Returns
    -------
    Counts; None for predicted cells with values that no count says, as constraints may ask for.

    Raises
    ------
    ScaleError
        When they are no whole numbers: values or library sizes are not what they are said to be.
    """
    counts = counts_of_log1p(log1p, sizes)
    if counts is None and not is_prediction(adata):
        cause = (
            "Values that were logged twice or scaled, and library sizes of other cells or genes, "
            "look like that. Give raw counts (scale='counts'), name the right column with "
            "library_size_key"
        )
        remedy = ""
        if how := rounding_that_explains(log1p, sizes):
            cause = (
                f"The likely cause is that they were rounded {how} after the logarithm: they are "
                "off by no more than that, but large counts cannot be told from them any more. "
                "Give raw counts (scale='counts'), give the logarithms as they were before (in "
                "float32, not rounded)"
            )
            remedy = usable(adata, skip=(layer,))
        msg = (
            f"The values of {place(layer)} do not fit obs[{key or LIBRARY_SIZE!r}]: undoing the "
            f"logarithm does not give whole counts. {cause}, or take the column out of the file, "
            f"if nothing that needs counts is wanted. {remedy}"
        )
        raise ScaleError(msg.rstrip())
    return counts


def sizes_of_made_cells(
    counts: sp.csr_array, partner: Float[np.ndarray, " cells"]
) -> Float[np.ndarray, " cells"]:
    """Library sizes of cells that were made from others.

    A cell has that of its partner, whose counts of all the genes that are not modelled it is taken
    to keep, unless its own counts are more than that: no cell has more counts than its library.
    """
    return np.asarray(np.maximum(partner, row_sums(counts)))


def subset_evidence(adata: AnnData, measured: tuple[str, ...]) -> str:
    """What in the file says that genes were selected; empty when nothing does."""
    if adata.raw is not None and adata.raw.n_vars > adata.n_vars:
        return f"adata.raw has {adata.raw.n_vars} genes, adata {adata.n_vars}"
    flags = adata.var.get("highly_variable")
    if flags is not None and adata.n_vars and bool(flags.fillna(value=False).astype(bool).all()):
        return "all its genes are flagged highly_variable"
    there = len(set(measured) & set(adata.var_names))
    if there < COVERAGE * len(measured):
        return f"{there} of the {len(measured)} genes measured in training"
    return ""


def _column(
    obs: pd.DataFrame, key: str, rows: Int[np.ndarray, " cells"]
) -> Float[np.ndarray, " cells"]:
    column = pd.to_numeric(column_of(obs, key), errors="coerce")
    sizes: Float[np.ndarray, " cells"] = column.to_numpy(np.float64, na_value=np.nan)[rows]
    bad = ~np.isfinite(sizes) | (sizes < 0)
    if bad.any():
        row = obs.index[rows[int(np.argmax(bad))]]
        msg = f"obs[{key!r}] must be numbers of counts; {int(bad.sum())} are not (cell {row!r})."
        raise ExpressionError(msg)
    return sizes
