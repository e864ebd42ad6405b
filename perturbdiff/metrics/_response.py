"""How well the mean response is predicted, and the spread of the genes that respond.

G genes. A *shift* is the mean over the cells of a condition minus the mean over its control cells,
per gene.
"""

import numpy as np

from perturbdiff._errors import MetricError
from perturbdiff.metrics._intake import FLAT, Cells, Matrix, dense, same_genes, triple


def mean_shift(cells: Cells, control_cells: Cells) -> Matrix:
    """Mean over cells minus mean over control cells.

    Parameters
    ----------
    cells, control_cells
        Cells by genes, log1p of counts per 10,000.

    Returns
    -------
    Shift per gene, float64, in the unit of the input.

    Raises
    ------
    MetricError
        When an input is empty, not finite, or of another width.
    """
    treated, control = dense(cells, what="cells"), dense(control_cells, what="control_cells")
    same_genes(treated, control, names=("cells", "control_cells"))
    shift_G: Matrix = treated.mean(0) - control.mean(0)
    return shift_G


def pearson_shift(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    pred_control_cells: Cells | None = None,
    no_effect: str = "refuse",
) -> float:
    """Pearson correlation over genes of the predicted and the true shift; 1 is best.

    Both shifts are taken from the same control cells. ``cell-eval`` (``pearson_delta``) takes the
    predicted shift from the control cells that came with the prediction, so a prediction can gain
    or lose by its own control cells; pass those as ``pred_control_cells`` to get that figure.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, log1p of counts per 10,000, genes in the same order.
    pred_control_cells
        Control cells of the predicted shift, where they are not the same.
    no_effect
        What a predicted shift that is constant over genes scores: ``refuse`` is an error,
        ``zero`` is 0 (it explains nothing).

    Returns
    -------
    Correlation between -1 and 1.

    Raises
    ------
    MetricError
        When the true shift is constant over genes, or the predicted one under
        ``no_effect="refuse"``.
    """
    pred, true, control = triple(pred_cells, true_cells, control_cells)
    pred_base = control if pred_control_cells is None else _own_control(pred_control_cells, true)
    return pearson(
        pred.mean(0) - pred_base.mean(0), true.mean(0) - control.mean(0), no_effect=no_effect
    )


def mae_shift(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    pred_control_cells: Cells | None = None,
) -> float:
    """Mean absolute error over genes of the predicted shift; 0 is best.

    With one set of control cells this is ``cell-eval``'s ``mae`` and ``mae_delta`` alike; with
    ``pred_control_cells`` it is its ``mae_delta``.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, log1p of counts per 10,000, genes in the same order.
    pred_control_cells
        Control cells of the predicted shift, where they are not the same.

    Returns
    -------
    Error in units of log1p expression.

    Raises
    ------
    MetricError
        When an input is empty, not finite, or of another width.
    """
    pred, true, control = triple(pred_cells, true_cells, control_cells)
    pred_base = control if pred_control_cells is None else _own_control(pred_control_cells, true)
    return mae(pred.mean(0) - pred_base.mean(0), true.mean(0) - control.mean(0))


def variance_explained(
    pred_cells: Cells, true_cells: Cells, control_cells: Cells, *, n_top: int = 100
) -> float:
    """Share of the variance of the top changed genes that the prediction reproduces.

    ``1 - sum((v - v_true)^2) / sum((v_true - mean(v_true))^2)`` over the ``n_top`` genes with the
    largest true shift, ``v`` being the variance over cells (population form). 1 is best, 0 is a
    constant, below 0 worse.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes, log1p of counts per 10,000, genes in the same order.
    n_top
        Number of genes; all of them where there are fewer.

    Returns
    -------
    Coefficient of determination, at most 1.

    Raises
    ------
    MetricError
        With fewer than two cells on a side, or when all chosen genes have the same true variance.
    """
    pred, true, control = triple(pred_cells, true_cells, control_cells)
    return variance_of_top(pred, true, true.mean(0) - control.mean(0), n_top=n_top)


def pearson(pred_shift_G: Matrix, true_shift_G: Matrix, *, no_effect: str) -> float:
    """Correlation of two shifts, with the refusals of :func:`pearson_shift`."""
    if no_effect not in ("refuse", "zero"):
        msg = f"no_effect is {no_effect!r}; use 'refuse' or 'zero'."
        raise MetricError(msg)
    if _flat(true_shift_G):
        msg = (
            "The true shift is the same for every gene, so its correlation is not defined. "
            "Check that true and control cells differ, and leave this condition out."
        )
        raise MetricError(msg)
    if _flat(pred_shift_G):
        if no_effect == "zero":
            return 0.0
        msg = (
            "The predicted shift is the same for every gene (a copy of the control cells?), so "
            "its correlation is not defined. Pass no_effect='zero' to count it as explaining "
            "nothing."
        )
        raise MetricError(msg)
    left, right = pred_shift_G - pred_shift_G.mean(), true_shift_G - true_shift_G.mean()
    left, right = left / np.linalg.norm(left), right / np.linalg.norm(right)
    return float(np.clip(left @ right, -1.0, 1.0))


def mae(pred_shift_G: Matrix, true_shift_G: Matrix) -> float:
    """Mean absolute difference of two shifts."""
    return float(np.abs(pred_shift_G - true_shift_G).mean())


def variance_of_top(pred: Matrix, true: Matrix, true_shift_G: Matrix, *, n_top: int) -> float:
    """Body of :func:`variance_explained`, for a shift already taken."""
    if min(len(pred), len(true)) < 2 or n_top < 2:
        msg = (
            f"Variance explained needs at least 2 cells a side and 2 genes; here are {len(pred)} "
            f"predicted and {len(true)} true cells, n_top={n_top}. Predict more cells or leave "
            "this condition out."
        )
        raise MetricError(msg)
    var_G, true_var_G = pred.var(0), true.var(0)
    # Equally changed genes are told apart by their variances and not by their place among the
    # genes.
    top = np.lexsort((var_G, true_var_G, -np.abs(true_shift_G)))[:n_top]
    var, true_var = var_G[top], true_var_G[top]
    total = float(((true_var - true_var.mean()) ** 2).sum())
    if total <= FLAT**2:
        msg = (
            f"The {len(top)} most changed genes all have the same true variance, so none of it "
            "can be explained. Use more genes (n_top) or more cells."
        )
        raise MetricError(msg)
    return 1.0 - float(((var - true_var) ** 2).sum()) / total


def _flat(shift_G: Matrix) -> bool:
    return bool(np.ptp(shift_G) <= FLAT)


def _own_control(cells: Cells, true: Matrix) -> Matrix:
    control = dense(cells, what="pred_control_cells")
    same_genes(control, true, names=("pred_control_cells", "true_cells"))
    return control
