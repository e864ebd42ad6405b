"""Whether the numbers are what they are said to be."""

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._errors import PerturbDiffError, counted
from perturbdiff._typing import Scale
from perturbdiff.data._checks import check_values, resolve_scale
from perturbdiff.data._library import LIBRARY_SIZE, counts_by_size, library_sizes
from perturbdiff.data._matrix import BLOCK, place, read_matrix
from perturbdiff.pp._finding import FACT, FAULT, WARNING, Finding, refused

_LARGE = 16 * BLOCK
_LOOKED_AT = 1024  # cells of a large or backed file


def expression_findings(
    adata: AnnData, *, scale: str | None, layer: str | None, key: str | None
) -> list[Finding]:
    """Compare the numbers with what they are declared to be, and describe them.

    Parameters
    ----------
    adata
        Cells × genes. Of a large or backed file, 1,024 cells at equal distances are looked at.
    scale, layer
        As declared.
    key
        Column of library sizes, where one is named.

    Returns
    -------
    Findings.
    """
    where = place(layer)
    found: list[Finding] = []
    declared: Scale | None = None
    try:
        declared = resolve_scale(adata, scale, layer)
    except PerturbDiffError as error:
        found.append(refused(error, about="expression", where=where, n=adata.n_obs))
    rows = np.arange(adata.n_obs)
    if adata.isbacked or adata.n_obs * adata.n_vars > _LARGE:
        few = min(adata.n_obs, _LOOKED_AT)
        rows = np.unique(np.linspace(0, adata.n_obs - 1, few).astype(np.int64))
    try:
        matrix = read_matrix(adata, layer, rows=rows)
    except PerturbDiffError as error:
        return [*found, refused(error, about="expression", where=where, n=adata.n_obs)]
    found += _described(matrix, where, declared)
    if declared is None or not _holds_values(matrix):
        return found
    try:
        check_values(matrix, declared, adata=adata, layer=layer)
    except PerturbDiffError as error:
        return [*found, refused(error, about="expression", where=where, n=adata.n_obs)]
    return [*found, *_sizes(adata, matrix, rows, scale=declared, key=key, layer=layer)]


def _holds_values(matrix: sp.csr_array) -> bool:
    """Whether there is a value other than zero."""
    return len(matrix.data) > 0


def _described(matrix: sp.csr_array, where: str, declared: Scale | None) -> Iterator[Finding]:
    n_cells, n_genes = matrix.shape
    if not _holds_values(matrix):
        yield Finding(
            level=FAULT, about="expression", where=where, n=n_cells,
            found="zero everywhere, so there is nothing to learn from",
            what_to_do="Name the layer that holds the expression.",
        )  # fmt: skip
        return
    zeros = 1 - len(matrix.data) / (n_cells * n_genes)
    low, high = float(matrix.data.min()), float(matrix.data.max())
    said = "of no declared scale" if declared is None else f"declared as {declared}"
    yield Finding(
        level=FACT, about="expression", where=where, n=n_cells,
        found=f"{_look(matrix.data)}, {min(low, 0):.4g} to {high:.4g}, {zeros:.0%} zeros, {said}",
    )  # fmt: skip
    silent = n_genes - len(np.unique(matrix.indices))
    if silent:
        yield Finding(
            level=FACT, about="genes", where=where, n=silent,
            found=f"{counted(silent, 'gene')} of {n_genes} zero in all cells looked at",
        )  # fmt: skip
    empty = int((np.diff(matrix.indptr) == 0).sum())
    if empty:
        yield Finding(
            level=WARNING, about="expression", where=where, n=empty,
            found=f"{counted(empty, 'cell')} without any count, which nothing is learnt from",
            what_to_do="Leave them out.",
        )  # fmt: skip


def _look(values: np.ndarray) -> str:
    if not np.isfinite(values).all():
        return "numbers with NaN or infinity"
    if (values < 0).any():
        return "numbers that look scaled, with negative ones"
    if values.dtype.kind in "biu" or bool((values == np.rint(values)).all()):
        return "whole numbers, as counts are"
    return "fractions, as log values are" if values.max() < 20 else "large fractions"


def _sizes(
    adata: AnnData,
    matrix: sp.csr_array,
    rows: Int[np.ndarray, " cells"],
    *,
    scale: Scale,
    key: str | None,
    layer: str | None,
) -> Iterator[Finding]:
    there = key or (LIBRARY_SIZE if LIBRARY_SIZE in adata.obs else None)
    where = "adata.obs" if there is None else f"obs[{there!r}]"
    names = tuple(adata.var_names.astype(str))
    try:
        sizes = library_sizes(adata, matrix, scale, key=key, measured=names, rows=rows)
        if scale == "log1p_cp10k" and sizes is not None:
            counts_by_size(matrix, sizes, adata=adata, layer=layer, key=key)
    except PerturbDiffError as error:
        yield refused(error, about="library size", where=where, n=len(rows))
        return
    if sizes is None:
        yield Finding(
            level=WARNING, about="library size", where=where, n=len(rows),
            found="not known, so no model can make cells with counts",
            what_to_do="Write each cell's counts over all measured genes to "
            f"obs[{LIBRARY_SIZE!r}], or name the column with library_size_key.",
        )  # fmt: skip
        return
    yield from _of_sizes(sizes, where=where, summed=there is None)


def _of_sizes(sizes: Float[np.ndarray, " cells"], *, where: str, summed: bool) -> Iterator[Finding]:
    low, middle, high = np.quantile(sizes, [0.0, 0.5, 1.0])
    how = "summed over all genes of the file" if summed else "as the column says"
    yield Finding(
        level=FACT, about="library size", where=where, n=len(sizes),
        found=f"{middle:,.0f} counts a cell (median; {low:,.0f} to {high:,.0f}), {how}",
        what_to_do="If the file holds a selection of genes, name the column of all counts with "
        "library_size_key." if summed else "",
    )  # fmt: skip
    if n_zero := int((sizes <= 0).sum()):
        yield Finding(
            level=WARNING, about="library size", where=where, n=n_zero,
            found=f"{counted(n_zero, 'cell')} with a library size of zero, which are left out",
            what_to_do="Leave them out, or correct the column.",
        )  # fmt: skip
