"""Predicted against measured response, gene by gene.

G genes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import whole_number
from perturbdiff.data._comparison import compare
from perturbdiff.metrics import mae_shift, pearson_shift
from perturbdiff.pl._labels import name_points
from perturbdiff.pl._panels import check_save, finish, make_panels
from perturbdiff.pl._symbols import gene_labels
from perturbdiff.pl._titles import labels_of, name_lines, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 100
UNIT = "log1p counts per 10,000"


def response(
    pred: AnnData,
    *,
    reference: AnnData,
    n_genes: int = 12,
    gene_symbols: str | None = None,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot the predicted against the measured mean shift from control, one panel per condition.

    Parameters
    ----------
    pred
        Prediction.
    reference
        File with the measured cells.
    n_genes
        Genes to name, at most 100: those that change most, as measured or as predicted.
    gene_symbols
        Column of ``var`` of the reference or the prediction with what to call genes; ``None`` for
        their ``var_names``.
    ax
        Panels to draw into, one per condition; ``None`` for a new figure.
    show
        Call ``matplotlib.pyplot.show``.
    save
        File to write; the figure is then closed unless it is shown.

    Returns
    -------
    The panels, in the order of the conditions. Nothing is written into ``pred`` or ``reference``.

    Raises
    ------
    UnknownKeyError, LabelError
        When ``pred`` is no prediction, the reference lacks cells of a condition, or ``var`` such a
        column.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file.
    ConfigError
        When ``n_genes`` is no number from 0 to 100, the number of panels given does not fit, or
        ``save`` is of no known kind.
    """
    check_save(save)
    n_genes = whole_number("n_genes", n_genes, least=0)
    if n_genes > _MOST_NAMES:
        raise ConfigError("n_genes", n_genes, rule=f"is more than can be read: {_MOST_NAMES}")
    called = gene_labels(gene_symbols, reference, pred)
    comparison = compare(pred, reference)
    panels = make_panels(len(comparison.conditions), ax, size=4.2)
    for panel, condition in zip(panels, comparison.conditions, strict=True):
        cells = comparison.predicted(condition)
        truth = comparison.measured(condition)
        control = comparison.controls(condition).log1p.toarray()
        correlation = pearson_shift(cells, truth, control, no_effect="zero")
        error = mae_shift(cells, truth, control)
        _draw(
            panel,
            truth.mean(0, dtype=np.float64) - control.mean(0, dtype=np.float64),
            cells.mean(0, dtype=np.float64) - control.mean(0, dtype=np.float64),
            genes=[called.get(name, name) for name in comparison.reference.genes],
            n_genes=n_genes,
        )
        named = name_lines(labels_of(condition, comparison.registry))
        set_title(panel, [*named, f"Pearson {correlation:.3f}, MAE {error:.3f}"])
    finish(panels, show=show, save=save)
    return panels


def _draw(
    panel: "Axes",
    measured: Float[np.ndarray, " genes"],
    predicted: Float[np.ndarray, " genes"],
    *,
    genes: Sequence[str],
    n_genes: int,
) -> None:
    both = np.stack([measured, predicted], axis=1)
    panel.axline((0, 0), slope=1, color="0.6", lw=0.8, ls="--", zorder=1)
    panel.axhline(0, color="0.85", lw=0.6, zorder=0)
    panel.axvline(0, color="0.85", lw=0.6, zorder=0)
    panel.scatter(measured, predicted, s=8, color="0.55", lw=0, rasterized=True, zorder=2)
    top = np.argsort(-np.abs(both).max(1), kind="stable")[:n_genes]
    panel.scatter(measured[top], predicted[top], s=16, color="#0072b2", lw=0, zorder=3)
    low, high = both.min(), both.max()
    pad = 0.08 * (high - low) or 1.0
    panel.set(xlim=(low - pad, high + pad), ylim=(low - pad, high + pad), aspect="equal")
    panel.set_xlabel(f"measured shift ({UNIT})")
    panel.set_ylabel(f"predicted shift ({UNIT})")
    panel.spines[["top", "right"]].set_visible(False)
    name_points(panel, both[top], [genes[number] for number in top], others=both)
