"""The cells that anything may be learnt from."""

from collections.abc import Mapping

import numpy as np
from anndata import AnnData

from perturbdiff._errors import ExpressionError, counted
from perturbdiff._logging import logger
from perturbdiff.data._cells import Cells
from perturbdiff.data._checks import usable
from perturbdiff.data._door import encode
from perturbdiff.data._matrix import place
from perturbdiff.data._registry import Registry
from perturbdiff.data._splits import Holdout, check_leakage, split


def training_cells(
    adata: AnnData, registry: Registry, *, holdout: Holdout | None
) -> tuple[Cells, str]:
    """Read the cells of a file that are neither held out nor empty, on all measured genes.

    Parameters
    ----------
    adata
        Cells with labels.
    registry
        What its columns mean; genes that it selects are not looked at.
    holdout
        What to leave out, as in :func:`~perturbdiff.data.split`; ``None``, or an empty one, for
        nothing.

    Returns
    -------
    Cells, and the hash of the split; empty where nothing is held out.

    Raises
    ------
    SplitError
        When nothing is left to learn from.
    ExpressionError
        When the expression is zero in all cells.
    """
    cells = encode(adata, registry.with_genes(()))
    if not cells.log1p.count_nonzero():
        msg = (
            f"{place(registry.layer)} is zero in all {len(cells)} labelled cells, so there is "
            f"nothing to learn from. {usable(adata, skip=(registry.layer,))}"
        )
        raise ExpressionError(msg.rstrip())
    cells = _with_counts(cells)
    if holdout is None or (isinstance(holdout, Mapping | list | tuple) and not holdout):
        return cells, ""
    parts = split(cells, registry, holdout=holdout)
    cells = cells.take(parts.train)
    check_leakage(cells, parts)
    return cells, parts.hash


def _with_counts(cells: Cells) -> Cells:
    """The cells that have a library: of an empty one nothing is known per count."""
    if cells.library_size is None or (cells.library_size > 0).all():
        return cells
    kept = cells.take(np.flatnonzero(cells.library_size > 0))
    logger.warning("left out %s without counts", counted(len(cells) - len(kept), "cell"))
    return kept
