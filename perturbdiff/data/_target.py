"""Where results are written: into a file as it is, or into a copy of it."""

from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff._logging import logger


def target_of(adata: AnnData, *, copy: bool) -> AnnData:
    """The AnnData to write results into.

    Parameters
    ----------
    adata
        As given.
    copy
        Whether it stays as it is.

    Returns
    -------
    A copy in memory, or the AnnData itself. A view becomes an AnnData of its own first, which is
    logged: what it is a view of does not change.

    Raises
    ------
    ConfigError
        When it is backed and would be written to.
    """
    if adata.isbacked and not copy:
        raise ConfigError("copy", copy, rule="a backed AnnData is not written to; pass copy=True")
    if copy:
        return adata.to_memory(copy=True) if adata.isbacked else adata.copy()
    if adata.is_view:
        logger.info("made a view into an AnnData of its own, to write results into")
        adata._init_as_actual(adata.copy())
    return adata
