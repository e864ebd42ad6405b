"""Intervals of predicted mean shifts."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff.config._checks import whole_number
from perturbdiff.data._target import table_under
from perturbdiff.pl._panels import check_save, finish, make_panels
from perturbdiff.pl._titles import name_lines, set_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_NEEDED: Final = ("gene", "shift", "lower", "upper")
_VALUES: Final = frozenset({
    *_NEEDED, "prior_error", "set_error", "stratum", "supported", "collapsed",
})  # fmt: skip
_FLAGS: Final = (
    ("supported", False, "out of support: do not rely on it"),
    ("collapsed", True, "cells too much alike (mode collapse)"),
)
_UNIT = "log1p counts per 10,000"


def uncertainty(
    pred: AnnData,
    *,
    key: str = "uncertainty",
    n_genes: int = 20,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot the intervals of the genes that are predicted to change most, one panel a condition.

    A dot is the predicted mean shift from control, the bar its interval. Filled dots are shifts
    whose interval leaves out zero, open ones may be no change at all. Bars are dashed, and the
    title says so, where the condition is out of support or the cells have collapsed: then the
    intervals do not hold what they promise.

    Parameters
    ----------
    pred
        Prediction with a table of :func:`~perturbdiff.tl.uncertainty`.
    key
        Where in ``uns`` it is.
    n_genes
        Genes to show: those with the largest predicted shift.
    ax
        Panels to draw into, one per condition; ``None`` for a new figure.
    show
        Call ``matplotlib.pyplot.show``.
    save
        File to write; the figure is then closed unless it is shown.

    Returns
    -------
    The panels, in the order of the table. Nothing is written into ``pred``.

    Raises
    ------
    UnknownKeyError
        When ``pred`` has no such table.
    ConfigError
        When the key holds something else, ``n_genes`` is below 1, the number of panels given does
        not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    n_genes = whole_number("n_genes", n_genes, least=1)
    table = table_under(pred, key, columns=_NEEDED, writer="tl.uncertainty")
    labels = [name for name in table.columns if name not in _VALUES]
    groups = list(table.groupby(labels, sort=False, observed=True, dropna=False))
    panels = make_panels(len(groups), ax, size=4.2)
    for panel, (names, own) in zip(panels, groups, strict=True):
        order = np.argsort(-own["shift"].abs().to_numpy(), kind="stable")[:n_genes]
        flags = [text for column, up, text in _FLAGS if column in own and (own[column] == up).all()]
        _draw(panel, own.iloc[order], dashed=bool(flags))
        set_title(panel, [*name_lines(dict(zip(labels, names, strict=True))), *flags])
    finish(panels, show=show, save=save)
    return panels


def _draw(panel: "Axes", table: pd.DataFrame, *, dashed: bool) -> None:
    places = np.arange(len(table))
    apart = ((table["lower"] > 0) | (table["upper"] < 0)).to_numpy()
    panel.axvline(0, color="0.6", lw=0.8, ls="--", zorder=1)
    panel.hlines(
        places, table["lower"], table["upper"], color="0.55", lw=1.6, zorder=2,
        ls=(0, (2, 1.5)) if dashed else "-",
    )  # fmt: skip
    shift = table["shift"].to_numpy()
    for chosen, fill, label in (
        (apart, "#0b3c5d", "interval without zero"), (~apart, "white", "zero within"),
    ):  # fmt: skip
        panel.plot(
            shift[chosen], places[chosen], "o", color="#0b3c5d", mfc=fill, ms=5, zorder=3,
            label=label,
        )  # fmt: skip
    panel.set_yticks(places, [str(gene) for gene in table["gene"]], fontsize=8)
    panel.set_ylim(len(table) - 0.5, -0.5)
    panel.set_xlabel(f"predicted shift ({_UNIT})")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False, loc="best")
