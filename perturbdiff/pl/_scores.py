"""Scores of a model beside those of the baselines and the replicate ceiling."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.data._target import table_under
from perturbdiff.metrics import METRICS
from perturbdiff.pl._panels import check_save, finish, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN: Final = (
    "pearson_shift", "mae_shift", "energy_distance", "centred_energy_distance",
    "variance_explained", "de_overlap", "discrimination",
)  # fmt: skip
_MODEL, _BASELINE, _CEILING = "generated", "baseline", "measured"
_LOG = {"log1p expression": "log1p counts per 10,000"}
STYLES: Final[dict[str, dict[str, Any]]] = {
    _MODEL: {"marker": "D", "color": "#0b3c5d", "ms": 7},
    _BASELINE: {"marker": "o", "color": "0.45", "mfc": "white", "ms": 6},
}
_CEILING_COLOUR = "#d55e00"


def scores(
    pred: AnnData,
    *,
    key: str = "score",
    metrics: Sequence[str] | None = None,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot the scores of a model, the baselines and the ceiling, one panel a metric.

    A diamond is the model, open circles are baselines, both means over conditions; ticks are single
    conditions. The dashed line is the ceiling: one half of the measured cells against the other.
    ``n/a`` stands where a score is not defined, for the reason in the column ``undefined``.

    Parameters
    ----------
    pred
        Prediction that was scored with :func:`~perturbdiff.tl.score`.
    key
        Where in ``uns`` the table of scores is.
    metrics
        Names of columns; ``None`` for the usual ones that are defined.
    ax
        Panels to draw into, one per metric; ``None`` for a new figure.
    show
        Call ``matplotlib.pyplot.show``.
    save
        File to write; the figure is then closed unless it is shown.

    Returns
    -------
    The panels, in the order of the metrics. Nothing is written into ``pred``.

    Raises
    ------
    UnknownKeyError
        When ``pred`` has no such table, or there is no such metric; names the nearest.
    ConfigError
        When the key holds something else, no metric is asked for or defined, the number of panels
        given does not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    table = _table(pred, key)
    chosen = _metrics(table, metrics)
    panels = make_panels(len(chosen), ax, size=3.4, each="metric")
    rows = list(dict.fromkeys(zip(table["method"], table["cells"], strict=True)))
    shown = [row for row in rows if row[1] != _CEILING]
    for number, (panel, metric) in enumerate(zip(panels, chosen, strict=True)):
        _draw(panel, table, metric=metric, rows=shown)
        place = panel.get_subplotspec()
        if ax is None and place is not None and not place.is_first_col():
            panel.tick_params(axis="y", labelleft=False)
        if number == 0:
            panel.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(-0.9, -0.3))
    finish(panels, show=show, save=save)
    return panels


def _table(pred: AnnData, key: str) -> pd.DataFrame:
    table = table_under(pred, key, columns=("method", "cells"), writer="tl.score")
    return table.assign(method=table["method"].astype(str), cells=table["cells"].astype(str))


def _metrics(table: pd.DataFrame, metrics: Sequence[str] | None) -> list[str]:
    known = [name for name in METRICS if name in table]
    if metrics is None:
        asked: list[str] = [name for name in SHOWN if name in known and table[name].notna().any()]
    else:
        several = isinstance(metrics, Iterable) and not isinstance(metrics, str)
        asked = list(metrics) if several else [str(metrics)]
    if not asked:
        rule = f"must name a score that is defined, of {', '.join(known)}"
        raise ConfigError("metrics", metrics, rule=rule)
    for name in asked:
        if name not in known:
            where = "The table of scores"
            raise UnknownKeyError(where, name, known=known)
    return asked


def _draw(panel: "Axes", table: pd.DataFrame, *, metric: str, rows: list[tuple[str, str]]) -> None:
    info = METRICS[metric]
    ceiling = table.loc[table["cells"] == _CEILING, metric].mean()
    if np.isfinite(ceiling):
        panel.axvline(ceiling, ls="--", lw=1.4, color=_CEILING_COLOUR, zorder=1, label="ceiling")
    named: set[str] = set()
    for place, (method, made_by) in enumerate(rows):
        own = table[(table["method"] == method) & (table["cells"] == made_by)]
        values = own[metric].dropna().to_numpy(dtype=float)
        if not len(values):
            panel.text(
                0.02, place, "n/a", fontsize=7, va="center", color="0.3",
                transform=panel.get_yaxis_transform(), zorder=4,
                bbox={"fc": panel.get_facecolor(), "ec": "none", "pad": 1.0},
            )  # fmt: skip
            continue
        kind = _MODEL if made_by == _MODEL else _BASELINE
        style = STYLES[kind]
        if len(values) > 1:
            heights = np.full(len(values), place)
            panel.plot(
                values, heights, "|", color=style["color"], ms=6, mew=0.7, alpha=0.6,
                label=None if "condition" in named else "one condition",
            )  # fmt: skip
            named.add("condition")
        label = {_MODEL: "model", _BASELINE: "baseline"}[kind]
        panel.plot(
            values.mean(), place, **style, ls="none", zorder=3,
            label=None if label in named else label,
        )  # fmt: skip
        named.add(label)
    panel.set_yticks(range(len(rows)), [_name(method, made_by) for method, made_by in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="both", labelsize=8)
    panel.locator_params(axis="x", nbins=5)
    panel.grid(axis="y", color="0.92", lw=0.6, zorder=0)
    panel.set_axisbelow(True)
    better = "higher" if info.higher_is_better else "lower"
    panel.set_title(f"{info.title}\n{better} is better", fontsize=9)
    panel.set_xlabel(_LOG.get(info.unit, info.unit), fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _name(method: str, made_by: str) -> str:
    words = method.replace("_", " ")
    return f"{words} (model)" if made_by == _MODEL else f"{words}, {made_by}"
