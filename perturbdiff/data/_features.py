"""Features of perturbations, read from the one place that was named."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._errors import ConfigError, LabelError, UnknownKeyError, listed
from perturbdiff.data._conditions import Columns, read_rows
from perturbdiff.data._labels import text_of


def read_features(adata: AnnData, key: str, columns: Columns) -> dict[str, tuple[float, ...]]:
    """Read one row of features for each single perturbation.

    Parameters
    ----------
    adata
        File with ``uns[key]`` (DataFrame indexed by perturbation, or mapping from perturbation to
        vector) or else ``obsm[key]`` (the same row in all cells of a perturbation).
    key
        Where to look. Nothing else is read.
    columns
        How perturbations are labelled.

    Returns
    -------
    Features by perturbation, sorted by name, for perturbations without any cell too.

    Raises
    ------
    UnknownKeyError
        When neither place has the key; lists what is there.
    ConfigError
        When the table has another form, or values that are not finite numbers.
    LabelError
        When cells of one perturbation have different rows.
    """
    if not isinstance(key, str):
        raise ConfigError("embedding_key", key, rule="must be the name of a table in uns or obsm")
    if key in adata.uns:
        table = _rows_of_table(adata.uns[key], key)
    elif key in adata.obsm:
        table = _rows_of_cells(adata, key, columns)
    else:
        known = [*(f"uns: {name}" for name in adata.uns), *(f"obsm: {name}" for name in adata.obsm)]
        raise UnknownKeyError("adata.uns or adata.obsm", key, known=known)
    widths = {row.shape for row in table.values()}
    if len(widths) > 1 or not all(np.isfinite(row).all() for row in table.values()):
        rule = "needs one vector of finite numbers for each perturbation, all of one length"
        raise ConfigError("embedding_key", key, rule=rule)
    control = set(columns.control)
    return {n: tuple(row.tolist()) for n, row in sorted(table.items()) if n not in control}


def _rows_of_table(table: Any, key: str) -> dict[str, Float[np.ndarray, " features"]]:
    try:
        if isinstance(table, pd.DataFrame):
            if not table.index.is_unique:
                twice = table.index[table.index.duplicated()].unique()
                msg = f"adata.uns[{key!r}] has more than one row for {listed(twice)}."
                raise LabelError(msg)
            values = table.to_numpy(np.float64, na_value=np.nan)
            return {text_of(n): row for n, row in zip(table.index, values, strict=True)}
        if isinstance(table, Mapping):
            rows = {text_of(n): np.asarray(row, np.float64) for n, row in table.items()}
            if all(row.ndim == 1 for row in rows.values()):
                return rows
    except (TypeError, ValueError) as error:
        if isinstance(error, LabelError):
            raise
    rule = "must be a DataFrame of numbers indexed by perturbation, or a mapping to vectors"
    raise ConfigError("embedding_key", key, rule=rule)


def _rows_of_cells(
    adata: AnnData, key: str, columns: Columns
) -> dict[str, Float[np.ndarray, " features"]]:
    found = read_rows(adata.obs, columns)
    values = np.asarray(adata.obsm[key], np.float64)[found.rows]
    table: dict[str, Float[np.ndarray, " features"]] = {}
    for number, condition in enumerate(found.conditions):
        if len(condition.members) != 1:
            continue
        cells = values[found.condition == number]
        first = table.setdefault(condition.members[0], cells[0])
        if not np.array_equal(cells, np.broadcast_to(first, cells.shape)):
            msg = (
                f"adata.obsm[{key!r}] differs between cells of {condition.members[0]!r}; "
                "features describe the perturbation, not the cell."
            )
            raise LabelError(msg)
    return table
