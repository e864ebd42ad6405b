"""Differential expression of predicted against control cells.

N cells, G genes.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData

from perturbdiff._errors import ConfigError, LabelError, counted
from perturbdiff._logging import logger
from perturbdiff._optional import progress_bars
from perturbdiff.config._checks import finite_number, whole_number
from perturbdiff.data import Cells, Condition, Registry
from perturbdiff.data._comparison import beside_controls
from perturbdiff.data._target import table_key, table_under, target_of
from perturbdiff.tl._labels import condition_labels

VALUES: Final = (
    "gene", "rank", "score", "log2_fold_change", "p_value", "fdr", "mean", "control_mean",
)  # fmt: skip
_LEAST_CELLS = 2


def response(
    pred: AnnData,
    *,
    reference: AnnData,
    key_added: str = "response",
    copy: bool = False,
) -> AnnData | None:
    """Test which genes differ between predicted cells and control cells of the same context.

    Wilcoxon rank sums with correction for ties, by scanpy's ``rank_genes_groups``. Predicted cells
    are as many as were asked for and no replicates: a rate says how clearly the *prediction*
    differs, and falls as more cells are predicted. It is no evidence that a gene responds.

    The first call on a machine takes some 20 s more, in which scanpy compiles; a bar shows that it
    runs.

    Parameters
    ----------
    pred
        Prediction of :func:`~perturbdiff.tl.predict`.
    reference
        File with control cells of every predicted context, read as the model's own data was;
        usually the file that was given to ``predict``. Treated cells are not looked at.
    key_added
        Where in ``uns`` the table is written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: a table with one row per
    condition and gene. Columns: the labels by their names in ``obs``, ``gene``, ``rank`` (1 is the
    highest score), ``score`` (z of the rank sum, above 0 where predicted cells express more),
    ``log2_fold_change`` (of counts per 10,000), ``p_value``, ``fdr`` (Benjamini and Hochberg),
    ``mean`` and ``control_mean`` (log1p of counts per 10,000).

    Raises
    ------
    ConfigError
        When ``key_added`` is empty, holds a slash, or is the name of something else.
    UnknownKeyError
        When ``pred`` is no prediction, or the reference lacks a column.
    LabelError
        When the reference is a prediction, lacks control cells of a context, or there are fewer
        than two cells to compare.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file.
    """
    key_added = table_key(key_added, pred, usual="response")
    registry, cells, controls = beside_controls(pred, reference)
    parts = list(_tables(registry, cells, controls))
    table = pd.concat(parts, ignore_index=True)
    table.index = table.index.astype(str)
    for name in table.columns[: table.columns.get_loc("rank")]:
        if table[name].dtype == object:
            table[name] = pd.Categorical(table[name])
    target = target_of(pred, copy=copy)
    target.uns[key_added] = table
    return target if copy else None


def response_genes(
    pred: AnnData, *, key: str = "response", n_genes: int = 10, fdr: float = 0.05
) -> pd.DataFrame:
    """Genes that change most in each predicted condition, for reading.

    Parameters
    ----------
    pred
        Prediction with a table of :func:`~perturbdiff.tl.response`.
    key
        Where in ``uns`` it is.
    n_genes
        Most genes of each condition.
    fdr
        False discovery rate that a gene must be below.

    Returns
    -------
    Rows of the table, conditions in its order, in each the genes with the largest absolute score
    first.

    Raises
    ------
    UnknownKeyError
        When there is no such table.
    ConfigError
        When the key holds something else, ``n_genes`` is below 1, or ``fdr`` is not between 0 and
        1.
    """
    n_genes = whole_number("n_genes", n_genes, least=1)
    fdr = finite_number("fdr", fdr)
    if not 0 < fdr <= 1:
        raise ConfigError("fdr", fdr, rule="must be above 0 and at most 1")
    found = table_under(pred, key, columns=VALUES, writer="tl.response")
    labels = [name for name in found.columns if name not in VALUES]
    order = np.argsort(-found["score"].abs().to_numpy(), kind="stable")
    # Labels may be missing, such as the time of a condition that has none.
    condition = found.groupby(labels, sort=False, observed=True, dropna=False).ngroup()
    strong = found.iloc[order].loc[lambda table: table["fdr"] < fdr]
    own = condition.loc[strong.index]
    first = strong[own.groupby(own).cumcount() < n_genes]
    return first.loc[condition.loc[first.index].sort_values(kind="stable").index]


def _tables(registry: Registry, cells: Cells, controls: Cells) -> Iterator[pd.DataFrame]:
    """One table for each condition, those of one context tested together."""
    by_context: dict[tuple[str, ...], list[Condition]] = {}
    for condition in cells.conditions():
        by_context.setdefault(condition.context, []).append(condition)
    rows, unperturbed = cells.conditions(), controls.controls()
    for context, conditions in by_context.items():
        of_controls = Condition((), context), len(unperturbed[context])
        for condition, n_cells in (of_controls, *((c, len(rows[c])) for c in conditions)):
            if n_cells < _LEAST_CELLS:
                msg = (
                    f"There is {counted(n_cells, 'cell')} of {condition}; two are needed to "
                    "compare. Predict more, or give a reference with more control cells."
                )
                raise LabelError(msg)
    found: dict[Condition, dict[str, Any]] = {}
    logger.info(
        "comparing genes in %s with scanpy, which compiles some 20 s when first used on a machine",
        counted(len(by_context), "context"),
    )
    bar = progress_bars()(  # for people only
        by_context.items(), desc="comparing genes", unit="context", leave=False, disable=None
    )
    for context, conditions in bar:
        values = [controls.log1p[unperturbed[context]], *(cells.log1p[rows[c]] for c in conditions)]
        found |= dict(zip(conditions, _tested(values, registry.genes), strict=True))
    for condition in cells.conditions():
        labels = condition_labels(registry, condition)
        taken = {f"obs_{key}" if key in VALUES else key: text for key, text in labels.items()}
        yield pd.DataFrame({**taken, **found[condition]})


def _tested(values: list[sp.csr_array], genes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Columns of each group against the first one, genes as scanpy ranks them."""
    import scanpy as sc  # noqa: PLC0415 - seconds to import

    groups = np.repeat(np.arange(len(values)), [matrix.shape[0] for matrix in values]).astype(str)
    # Names of cells are not needed, and may be the same on both sides.
    obs = pd.DataFrame({"group": pd.Categorical(groups)}, index=np.arange(len(groups)).astype(str))
    var = pd.DataFrame(index=pd.Index(list(genes), dtype=object))
    both = AnnData(X=sp.csr_matrix(sp.vstack(values, format="csr")), obs=obs, var=var)
    with np.errstate(divide="ignore", invalid="ignore"):
        sc.tl.rank_genes_groups(
            both, "group", reference="0", method="wilcoxon", tie_correct=True, use_raw=False
        )
    result = both.uns["rank_genes_groups"]
    place = {name: number for number, name in enumerate(genes)}
    control = _mean(values[0])
    for number in range(1, len(values)):
        names = [str(name) for name in result["names"][str(number)]]
        order = np.array([place[name] for name in names], dtype=np.int64)
        yield {
            "gene": names,
            "rank": np.arange(1, len(names) + 1),
            "score": result["scores"][str(number)].astype(np.float64),
            "log2_fold_change": result["logfoldchanges"][str(number)].astype(np.float64),
            "p_value": result["pvals"][str(number)],
            "fdr": result["pvals_adj"][str(number)],
            "mean": _mean(values[number])[order],
            "control_mean": control[order],
        }


def _mean(matrix: sp.csr_array) -> np.ndarray:
    return np.asarray(matrix.mean(0, dtype=np.float64)).ravel()
