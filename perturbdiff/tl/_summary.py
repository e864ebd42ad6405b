"""Averages of a table of scores over conditions, for reading."""

from typing import Final

import pandas as pd
from anndata import AnnData

from perturbdiff.data._target import table_under
from perturbdiff.metrics import CONDITION_METRICS

SCORES: Final = (*CONDITION_METRICS, "discrimination")


def summarise_scores(pred: AnnData, *, key: str = "score") -> pd.DataFrame:
    """Average scores over the conditions where each is defined.

    Parameters
    ----------
    pred
        Prediction that was scored.
    key
        Where in ``uns`` the table of scores is.

    Returns
    -------
    One row per method, indexed by method and kind of cells, in the order of the table; one column
    per metric, and ``n_conditions`` with the number of conditions behind the row.

    Raises
    ------
    UnknownKeyError
        When there is nothing under that key.
    ConfigError
        When there is something else.
    """
    table = table_under(pred, key, columns=("method", "cells", *SCORES), writer="tl.score")
    groups = table.assign(method=table["method"].astype(str), cells=table["cells"].astype(str))
    grouped = groups.groupby(["method", "cells"], sort=False)
    means = grouped[list(SCORES)].mean()
    return means.assign(n_conditions=grouped["pearson_shift"].count())
