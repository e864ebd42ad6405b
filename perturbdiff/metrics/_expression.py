"""Agreement of predicted and true differential expression.

G genes. Both sides are tested against the same control cells (:func:`rank_genes`), the truth says
which genes count.
"""

from dataclasses import dataclass

import numpy as np

from perturbdiff._errors import MetricError
from perturbdiff.metrics._intake import Cells, Matrix, refuse_scale, triple
from perturbdiff.metrics._rank_sum import DETable, positions, table_of

FDR = 0.05


@dataclass(frozen=True, kw_only=True)
class DEAgreement:
    """Scores of a predicted table against a true one, and how many genes stand behind them."""

    overlap: float
    direction_match: float
    n_true: int  # significant genes of the truth
    n_pred: int  # significant genes of the prediction
    n_compared: int  # significant genes of the truth that the prediction holds
    n_absent: int  # significant genes of the truth that it lacks


def compare_tables(
    pred: DETable,
    true: DETable,
    *,
    n_top: int | None = None,
    fdr: float = FDR,
    absent: str = "no_effect",
    ties: str = "average",
) -> DEAgreement:
    """Overlap and direction match of two tables of differential expression.

    Parameters
    ----------
    pred, true
        Tables from :func:`rank_genes`; with gene names they need not hold the same genes.
    n_top
        Genes taken from each side; by default as many as are significant in the truth ("at N").
    fdr
        False discovery rate below which a gene is significant.
    absent
        A truly significant gene that the predicted table lacks is counted as predicted unchanged
        (``no_effect``). ``cell-eval`` 0.8.2 joins the tables and so leaves it out of the direction
        match (``drop``), which inflates the score of a table that lacks the hard genes.
    ties
        As in :func:`de_overlap`.

    Returns
    -------
    Scores and the numbers of genes behind them.

    Raises
    ------
    MetricError
        When the truth has no significant gene, or nothing is left to compare.
    """
    if absent not in ("no_effect", "drop") or ties not in ("average", "p_value"):
        msg = (
            f"absent is {absent!r} and ties is {ties!r}; use 'no_effect' or 'drop', and 'average' "
            "or 'p_value'."
        )
        raise MetricError(msg)
    significant = np.flatnonzero(true.fdr < fdr)
    if len(significant) == 0:
        msg = (
            f"No gene of the truth is significant at a false discovery rate of {fdr:g} "
            f"({len(true)} tested), so there is nothing to recover. Leave this condition out or "
            "use more cells."
        )
        raise MetricError(msg)
    place = positions(pred, true)
    n = len(significant) if n_top is None else min(n_top, len(significant))
    if n < 1:
        msg = f"n_top is {n_top}; use at least 1."
        raise MetricError(msg)
    there = significant[place[significant] >= 0]
    taken = _taken(true, n, fdr=fdr, ties=ties)[there]
    shared = taken @ _taken(pred, n, fdr=fdr, ties=ties)[place[there]]
    signs = np.sign(pred.log2_fold_change[place[there]]) == np.sign(true.log2_fold_change[there])
    base = len(there) if absent == "drop" else len(significant)
    if base == 0:
        msg = (
            "The predicted table has none of the truly significant genes, so no direction can be "
            "compared. Score all genes, or count them as unchanged with absent='no_effect'."
        )
        raise MetricError(msg)
    return DEAgreement(
        overlap=float(shared) / n,
        direction_match=float(signs.sum()) / base,
        n_true=len(significant),
        n_pred=int((pred.fdr < fdr).sum()),
        n_compared=len(there),
        n_absent=len(significant) - len(there),
    )


def de_overlap(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    n_top: int | None = None,
    fdr: float = FDR,
    scale: str = "log1p_cp10k",
    pseudo_count: float = 0.0,
    ties: str = "average",
) -> float:
    """Share of the N strongest true genes that are among the N strongest predicted ones.

    Only significant genes are taken, ranked by absolute log2 fold change; N is the number of
    significant true genes, or ``n_top`` where that is smaller. This is ``overlap_at_N`` (and
    ``overlap_at_50`` and so on) of ``cell-eval`` 0.8.2, of which four things should be known.
    Genes silent on one side have infinite fold changes and come first: ``pseudo_count=0.1`` mends
    that. They are ordered among themselves by an unstable sort, which changes with the order of
    genes and the number of threads: where they do not all fit, its figure is one of many, and
    the mean of these is given here. A condition without a significant true gene gets 0 there, even
    for a perfect prediction: here it is refused. And significance grows with the number of cells,
    so predict as many as were measured.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, genes in the same order.
    n_top
        Upper limit of N.
    fdr
        False discovery rate below which a gene is significant.
    scale
        Declared scale of all three, ``log1p_cp10k`` or ``cp10k``.
    pseudo_count
        Added to both sides of the fold change, in counts per 10,000.
    ties
        Equal fold changes of which only some fit: ``average`` is the mean over all ways to choose;
        ``p_value`` takes the smaller p-value first, then the larger change of the mean.

    Returns
    -------
    Share between 0 and 1; higher is better.

    Raises
    ------
    MetricError
        When no true gene is significant, or values cannot be on the declared scale.
    """
    pred, true = _tables(
        pred_cells, true_cells, control_cells, scale=scale, pseudo_count=pseudo_count
    )
    return compare_tables(pred, true, n_top=n_top, fdr=fdr, ties=ties).overlap


def direction_match(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    fdr: float = FDR,
    scale: str = "log1p_cp10k",
) -> float:
    """Share of the significant true genes whose predicted fold change has the true sign.

    This is ``de_direction_match`` of ``cell-eval`` 0.8.2 where the prediction has all genes; for
    tables that lack some see :func:`compare_tables`.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, genes in the same order.
    fdr
        False discovery rate below which a gene is significant.
    scale
        Declared scale of all three, ``log1p_cp10k`` or ``cp10k``.

    Returns
    -------
    Share between 0 and 1; higher is better, a guess has 0.5.

    Raises
    ------
    MetricError
        When no true gene is significant, or values cannot be on the declared scale.
    """
    pred, true = _tables(pred_cells, true_cells, control_cells, scale=scale, pseudo_count=0.0)
    return compare_tables(pred, true, fdr=fdr).direction_match


def _tables(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    scale: str,
    pseudo_count: float,
) -> tuple[DETable, DETable]:
    pred, true, control = triple(pred_cells, true_cells, control_cells)
    for cells, what in ((pred, "pred_cells"), (true, "true_cells"), (control, "control_cells")):
        refuse_scale(cells, what=what, scale=scale)
    return (
        table_of(pred, control, scale=scale, pseudo_count=pseudo_count),
        table_of(true, control, scale=scale, pseudo_count=pseudo_count),
    )


def _taken(table: DETable, n: int, *, fdr: float, ties: str) -> Matrix:
    """How much of each gene is among the ``n`` most changed significant ones, between 0 and 1."""
    found = np.flatnonzero(table.fdr < fdr)
    weight_G = np.zeros(len(table))
    if len(found) <= n:
        weight_G[found] = 1.0
        return weight_G
    keys = [np.abs(table.log2_fold_change)]
    if ties == "p_value":
        keys += [-table.p_value, np.abs(table.mean - table.control_mean)]
    # Single precision, as cell-eval ranks: rounding of a mean must not part genes that are equal.
    single = np.stack(keys, axis=1)[found].astype(np.float32)
    level = np.unique(single, axis=0, return_inverse=True)[1].reshape(-1)
    last = np.sort(level)[-n]
    above, equal = level > last, level == last
    weight_G[found] = above + equal * (n - above.sum()) / equal.sum()
    return weight_G
