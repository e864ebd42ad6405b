"""Counts to log1p of counts per 10,000, with the scale declared in the file."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ScaleError
from perturbdiff._logging import logger
from perturbdiff.data._checks import check_values, declared_scale, resolve_scale
from perturbdiff.data._library import LIBRARY_SIZE, library_sizes
from perturbdiff.data._matrix import gene_names, log1p_per_depth, read_matrix
from perturbdiff.data._target import target_of


def normalize(
    adata: AnnData,
    *,
    layer: str | None = None,
    library_size_key: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Bring counts to log1p of counts per 10,000 and say so in the file.

    Parameters
    ----------
    adata
        Cells × genes with integer counts.
    layer
        Layer that holds the counts; ``None`` for ``X``.
    library_size_key
        Column with each cell's counts over all measured genes. Without it ``obs["library_size"]``
        is used where present, else counts are summed over all genes.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``X`` (float32, sparse where it was sparse),
    ``obs["library_size"]`` and ``uns["perturbdiff"]["scale"]``. Cells without counts stay zero.

    Raises
    ------
    ExpressionError
        When the numbers are no counts; tells what else in the file is.
    ScaleError
        When the file declares another scale, was normalised before, or holds a subset of the
        genes and no library sizes.
    GeneError
        When there are no genes, or one is there twice.
    ConfigError
        When it is no AnnData, or is backed and would be written to.
    """
    gene_names(adata)
    if layer is None and declared_scale(adata) == "log1p_cp10k":
        msg = (
            f"X is log1p of counts per 10,000 already, as uns[{UNS_KEY!r}]['scale'] says: there is "
            "nothing to normalise. Where raw counts are kept in a layer, name it: layer='counts'."
        )
        raise ScaleError(msg)
    adata = target_of(adata, copy=copy)
    resolve_scale(adata, "counts", layer)
    counts = read_matrix(adata, layer)
    check_values(counts, "counts", adata=adata, layer=layer)
    sizes = library_sizes(
        adata,
        counts,
        "counts",
        key=library_size_key,
        measured=tuple(adata.var_names),
        rows=np.arange(adata.n_obs),
    )
    assert sizes is not None  # only log values have none
    if n_empty := int((np.diff(counts.indptr) == 0).sum()):
        logger.warning("%d of %d cells have no counts at all and stay zero", n_empty, adata.n_obs)
    stored = adata.X if layer is None else adata.layers[layer]
    adata.X = _like(stored, log1p_per_depth(counts, sizes))
    adata.obs[LIBRARY_SIZE] = sizes
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), "scale": "log1p_cp10k"}
    return adata if copy else None


def _like(stored: Any, values: sp.csr_array) -> Any:
    """The values in the kind of storage that the counts were in."""
    if not sp.issparse(stored):
        return values.toarray()
    if isinstance(stored, sp.sparray):
        return values.asformat(stored.format)
    return sp.csc_matrix(values) if stored.format == "csc" else sp.csr_matrix(values)
