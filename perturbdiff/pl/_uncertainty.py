"""Intervals of predicted mean shifts."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import whole_number
from perturbdiff.data._target import table_under
from perturbdiff.pl._panels import check_save, draw_legend, finish, make_panels
from perturbdiff.pl._symbols import gene_labels
from perturbdiff.pl._titles import name_lines, set_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

_NEEDED: Final = ("gene", "shift", "lower", "upper")
_VALUES: Final = frozenset({
    *_NEEDED, "prior_error", "set_error", "stratum", "supported", "collapsed",
})  # fmt: skip
_FAR: Final = "out of support: do not rely on it"
_UNTOLD: Final = "too few contexts"
_ALIKE: Final = "cells too much alike (mode collapse)"
_MOST_GENES, _SIZE, _ROW = 200, 4.2, 0.14  # inches
_UNIT = "log1p counts per 10,000"


def uncertainty(
    pred: AnnData,
    *,
    reference: AnnData | None = None,
    key: str = "uncertainty",
    n_genes: int = 20,
    gene_symbols: str | None = None,
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
    reference
        File whose ``var`` has ``gene_symbols``; ``None`` where that of the prediction has them.
    key
        Where in ``uns`` it is.
    n_genes
        Genes to show, at most 200: those with the largest predicted shift.
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
    The panels, in the order of the table. Nothing is written into ``pred``.

    Raises
    ------
    UnknownKeyError
        When ``pred`` has no such table, or ``var`` no such column.
    ConfigError
        When the key holds something else, ``n_genes`` is not from 1 to 200, the number of panels
        given does not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    n_genes = whole_number("n_genes", n_genes, least=1)
    if n_genes > _MOST_GENES:
        raise ConfigError("n_genes", n_genes, rule=f"is more than can be read: {_MOST_GENES}")
    called = gene_labels(gene_symbols, reference, pred)
    table = table_under(pred, key, columns=_NEEDED, writer="tl.uncertainty")
    labels = [name for name in table.columns if name not in _VALUES]
    groups = list(table.groupby(labels, sort=False, observed=True, dropna=False))
    height = max(_SIZE, 1.2 + _ROW * min(n_genes, table["gene"].nunique()))
    panels = make_panels(len(groups), ax, size=_SIZE, height=height)
    for panel, (names, own) in zip(panels, groups, strict=True):
        order = np.argsort(-own["shift"].abs().to_numpy(), kind="stable")[:n_genes]
        labelled = dict(zip(labels, names, strict=True))
        flags = _flags(own, _reasons(pred.uns.get(f"{key}_flags"), labelled))
        shown = own.iloc[order].assign(gene=[called.get(g, g) for g in own["gene"].iloc[order]])
        _draw(panel, shown, dashed=bool(flags))
        set_title(panel, [*name_lines(labelled), *flags])
    draw_legend(panels, shared=ax is None, n_columns=2, fontsize=8)
    finish(panels, show=show, save=save)
    return panels


def _reasons(judged: object, labels: "Mapping[str, object]") -> list[str]:
    """Why a condition is not supported, as far as the table of flags is still there."""
    if not isinstance(judged, pd.DataFrame) or not {"reason", *labels} <= set(judged.columns):
        return []
    own = judged[(judged[[*labels]].astype(str) == [*map(str, labels.values())]).all(axis=1)]
    return [reason for text in own["reason"].astype(str) for reason in text.split("; ")]


def _flags(own: pd.DataFrame, reasons: list[str]) -> list[str]:
    """What is to be said of a condition over its panel."""
    said = []
    if "supported" in own and not own["supported"].any():
        untold = bool(reasons) and all(reason.startswith(_UNTOLD) for reason in reasons)
        said.append(f"{_UNTOLD} to tell whether it is in support" if untold else _FAR)
    if "collapsed" in own and own["collapsed"].all():
        said.append(_ALIKE)
    return said


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
