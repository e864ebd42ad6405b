"""Genes to work on, chosen without the cells that are held out."""

from collections.abc import Sequence

import numpy as np
from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff.data._genes import variable_genes
from perturbdiff.data._library import LIBRARY_SIZE, library_sizes
from perturbdiff.data._matrix import gene_names, read_matrix
from perturbdiff.data._registry import Registry
from perturbdiff.data._splits import Holdout
from perturbdiff.data._target import result_key, target_of
from perturbdiff.data._training_cells import training_cells


def select_genes(  # noqa: PLR0913 - the columns of from_anndata
    adata: AnnData,
    *,
    perturbation_key: str,
    control: str | Sequence[str],
    covariate_keys: Sequence[str] = (),
    scale: str | None = None,
    layer: str | None = None,
    separator: str | None = "+",
    library_size_key: str | None = None,
    dose_key: str | None = None,
    time_key: str | None = None,
    holdout: Holdout | None = None,
    n_top_genes: int = 2000,
    key_added: str = "highly_variable",
    copy: bool = False,
) -> AnnData | None:
    """Flag the highly variable genes of the training cells, as ``fit`` chooses them.

    A choice among all cells has seen the answer: genes that change in held-out cells vary. This one
    looks at the cells that ``holdout`` leaves, and is that of a model fitted with the same words.

    Parameters
    ----------
    adata
        Cells × genes.
    perturbation_key, control, covariate_keys, scale, layer, separator, library_size_key
        As in :meth:`~perturbdiff.SetDiffusion.from_anndata`.
    dose_key, time_key
        Likewise.
    holdout
        What to leave out, as in ``fit``, such as ``{"cell_type": ["NK"]}``; ``None`` for nothing.
    n_top_genes
        How many; all genes where there are not more.
    key_added
        Column of ``var`` that is written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``var[key_added]``, True for chosen genes,
    and, where counts had to be summed, ``obs["library_size"]``, so that
    ``adata[:, adata.var[key_added]]`` still says each cell's counts over all measured genes.

    Raises
    ------
    ConfigError
        When the file is backed and would be written to, ``var[key_added]`` holds something else
        than a mask, or fewer than 2 genes are asked for.
    UnknownKeyError, UnknownLevelError, LabelError, SplitError
        When a column or label is not there, or nothing is left to choose from.
    GeneError, ScaleError, ExpressionError
        When genes are there twice, or the numbers are not what was declared.
    """
    key_added = result_key(key_added)
    gene_names(adata)
    _refuse_other_column(key_added, adata)
    if adata.isbacked and not copy:
        raise ConfigError("copy", copy, rule="a backed AnnData is not written to; pass copy=True")
    registry = Registry.from_anndata(
        adata,
        perturbation_key=perturbation_key,
        control=control,
        covariate_keys=covariate_keys,
        scale=scale,
        layer=layer,
        separator=separator,
        library_size_key=library_size_key,
        dose_key=dose_key,
        time_key=time_key,
    )
    cells, _ = training_cells(adata, registry, holdout=holdout)
    chosen = set(variable_genes(cells, n_top_genes))
    flags = np.array([name in chosen for name in registry.measured_genes], bool)
    sizes = None
    if library_size_key is None and LIBRARY_SIZE not in adata.obs:
        everyone, panel = np.arange(adata.n_obs), registry.measured_genes
        matrix = read_matrix(adata, layer)
        sizes = library_sizes(
            adata, matrix, registry.scale, key=None, measured=panel, rows=everyone
        )
    adata = target_of(adata, copy=copy)
    adata.var[key_added] = flags
    if sizes is not None:
        adata.obs[LIBRARY_SIZE] = sizes
    return adata if copy else None


def _refuse_other_column(key: str, adata: AnnData) -> None:
    """Refuse to replace a column that is no mask, such as one of symbols or of means."""
    if key not in adata.var:
        return
    values = adata.var[key].dropna().tolist()
    if not all(isinstance(value, bool) for value in values):
        rule = "is a column of var that is no mask of genes; choose another name"
        raise ConfigError("key_added", key, rule=rule)
