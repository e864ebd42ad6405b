"""Where results are written: into a file as it is, or into a copy of it, under which name."""

from collections.abc import Collection
from typing import Final, NamedTuple

import pandas as pd
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ConfigError, UnknownKeyError, listed
from perturbdiff._logging import logger
from perturbdiff.data._matrix import require_anndata

_TAKEN: Final = (UNS_KEY, "log1p", "_index")  # by this package, by scanpy, by files


class Table(NamedTuple):
    """A table of results: the function that writes it, and columns by which one is known."""

    writer: str
    columns: tuple[str, ...]


TABLES: Final = {
    "score": Table("tl.score", ("method", "cells", "pearson_shift")),
    "response": Table("tl.response", ("gene", "log2_fold_change", "fdr")),
    "uncertainty": Table("tl.uncertainty", ("gene", "shift", "lower", "upper")),
    "uncertainty_flags": Table("tl.uncertainty", ("supported", "collapsed", "reason")),
    "trajectory": Table("tl.trajectory", ("cell", "stage", "step", "axis_1")),
    "perturbation_ranking": Table("tl.rank_perturbations", ("rank", "satisfied_sets", "energy")),
}
"""By the usual name in ``uns``."""


def result_key(key: object, *, taken: Collection[str | None] = ()) -> str:
    """The name that a result is written under, refused where it would be lost or do harm.

    Parameters
    ----------
    key
        As given: ``key_added``.
    taken
        Names that hold something else, beside those that always do.

    Returns
    -------
    The name.

    Raises
    ------
    ConfigError
        When it is no text, is empty, holds a slash, or is the name of something else.
    """
    if not isinstance(key, str) or not key.strip() or "/" in key:
        rule = "must be text that is not empty and has no '/', which files take for a folder"
        raise ConfigError("key_added", key, rule=rule)
    if key in _TAKEN or key in taken:
        raise ConfigError("key_added", key, rule="is the name of something else; choose another")
    return key


def table_key(key: object, file: AnnData, *, usual: str, name: str = "pred") -> str:
    """The name that a table is written under, refused where it would replace something else.

    Parameters
    ----------
    key
        As given: ``key_added``.
    file
        Where the table is to be written.
    usual
        Its usual name.
    name
        What the file is called, for the message.

    Returns
    -------
    The name. A table of the same kind may be there, and is replaced.

    Raises
    ------
    ConfigError
        As :func:`result_key`, and when it is the usual name of another table, or ``uns`` holds
        something else there.
    """
    key = result_key(key)
    require_anndata(file, name=name)
    if key in TABLES and key != usual:
        rule = f"is the usual name of another table, of {TABLES[key].writer}; choose another"
        raise ConfigError("key_added", key, rule=rule)
    there, own = file.uns.get(key), TABLES[usual]
    alike = isinstance(there, pd.DataFrame) and {*own.columns} <= {*there.columns}
    if there is not None and not alike:
        rule = f"uns of {name} holds something else there than {own.writer} writes; choose another"
        raise ConfigError("key_added", key, rule=rule)
    return key


def table_under(pred: AnnData, key: str, *, columns: Collection[str], writer: str) -> pd.DataFrame:
    """A table of results in ``uns``.

    Parameters
    ----------
    pred
        Prediction.
    key
        Where the table is.
    columns
        Columns by which such a table is known.
    writer
        The function that writes it, for messages.

    Raises
    ------
    UnknownKeyError
        When there is nothing under that key.
    ConfigError
        When there is something else.
    """
    require_anndata(pred, name="pred")
    if not isinstance(key, str):
        raise ConfigError("key", key, rule="must be text, the name of a table in uns")
    fitting = {
        name: entry
        for name, entry in pred.uns.items()
        if isinstance(entry, pd.DataFrame) and set(columns) <= set(entry.columns)
    }
    if key in fitting:
        return fitting[key]
    if key not in pred.uns:
        where = f"uns of the prediction (written by {writer})"
        raise UnknownKeyError(where, key, known=list(fitting))
    found = "another table" if isinstance(pred.uns[key], pd.DataFrame) else "something else"
    there = f"those of {writer} here: {listed(fitting)}" if fitting else f"call {writer} first"
    raise ConfigError("key", key, rule=f"holds {found} than {writer} writes; {there}")


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
