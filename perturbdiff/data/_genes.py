"""Genes and axes to work in, chosen from training cells only.

N cells, G genes, K principal axes.
"""

import warnings

import numpy as np
import pandas as pd
import scipy.linalg
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._logging import logger
from perturbdiff.config._checks import whole_number
from perturbdiff.data._cells import Cells


def variable_genes(train: Cells, n_top_genes: int) -> tuple[str, ...]:
    """Highly variable genes of the training cells, by scanpy's ``highly_variable_genes``.

    Parameters
    ----------
    train
        Training cells, without those of held-out conditions.
    n_top_genes
        How many; all genes where there are not more.

    Returns
    -------
    Names in the order of ``train.genes``.

    Raises
    ------
    ConfigError
        When fewer than 2 are asked for.
    """
    import scanpy as sc  # noqa: PLC0415 - seconds to import, needed in fit only

    n_top_genes = whole_number("n_top_genes", n_top_genes, least=2)
    if n_top_genes >= len(train.genes):
        return train.genes
    # Statistics need neither names of cells nor a copy: the matrix is read, not changed.
    var = pd.DataFrame(index=pd.Index(list(train.genes), dtype=object))
    adata = AnnData(X=sp.csr_matrix(train.log1p), var=var)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*n_top_genes")  # noqa: TID251 - undone on leaving
        table = sc.pp.highly_variable_genes(adata, n_top_genes=n_top_genes, inplace=False)
    chosen = table["highly_variable"].to_numpy(copy=True)
    if (n_chosen := int(chosen.sum())) < n_top_genes:
        logger.warning("only %d genes vary; n_top_genes = %d asks for more", n_chosen, n_top_genes)
    elif n_chosen > n_top_genes:  # genes that are alone among their like all vary by 1: by name
        spread = table["dispersions_norm"].to_numpy()
        order = sorted(np.flatnonzero(chosen), key=lambda at: (-spread[at], train.genes[at]))
        chosen[order[n_top_genes:]] = False
    return tuple(name for name, picked in zip(train.genes, chosen, strict=True) if picked)


def principal_axes(
    log1p_NG: sp.csr_array, n_axes: int
) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes axes"]]:
    """Mean and leading principal axes, from the covariance, so that sparse stays sparse.

    Parameters
    ----------
    log1p_NG
        Training cells.
    n_axes
        How many axes; fewer come back where there are fewer genes or cells.

    Returns
    -------
    Mean per gene, and orthonormal loadings. The sign of each axis is that in which the loadings'
    third moment is positive, which does not depend on the order of genes.
    """
    values = log1p_NG.astype(np.float64)
    n_cells, n_genes = values.shape
    mean = np.asarray(values.mean(0)).ravel()
    gram = values.T @ values
    covariance = gram.toarray() / n_cells - np.outer(mean, mean)
    n_axes = min(n_axes, n_genes, max(n_cells - 1, 1))
    _, loadings = scipy.linalg.eigh(covariance, subset_by_index=[n_genes - n_axes, n_genes - 1])
    loadings = loadings[:, ::-1]
    sign = np.where((loadings**3).sum(0) < 0, -1.0, 1.0)
    return mean, np.ascontiguousarray(loadings * sign)
