"""How constraints came to hold while cells were generated."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import UnknownKeyError
from perturbdiff.data import Condition
from perturbdiff.data._comparison import condition_names, registry_of
from perturbdiff.data._matrix import require_anndata
from perturbdiff.pl._panels import check_save, draw_legend, finish, make_panels
from perturbdiff.pl._titles import labels_of, name_lines, set_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_WIDTH = 54  # letters of a line of the legend
_MOST_TICKS = 5
_APART = 0.012  # so that lines on top of each other are both seen
_BEFORE: Final[dict[str, Any]] = {"marker": "o", "mfc": "white", "ms": 6, "ls": "none"}
_AFTER: Final[dict[str, Any]] = {"marker": "o", "ms": 6, "ls": "none"}


def constraints(
    pred: AnnData,
    *,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot the share of sets that satisfy each constraint through the run, one panel a condition.

    Open dots are the cells of the same question without constraints: 1 where all obey, else 0.
    Lines are estimates at each step, before counts are drawn and projected: they need not reach 1
    for the cells that are returned to obey. Filled dots are these: the share of their sets (1 or 0
    for what is said of the whole population). Constraints that are not judged at single steps, such
    as those of means, which are met before the first step and after the last, have no line.

    Parameters
    ----------
    pred
        Prediction with constraints.
    ax
        Panels to draw into, one per condition; ``None`` for a new figure.
    show
        Call ``matplotlib.pyplot.show``.
    save
        File to write; the figure is then closed unless it is shown.

    Returns
    -------
    The panels, in the order of the conditions. Nothing is written into ``pred``.

    Raises
    ------
    UnknownKeyError
        When ``pred`` is no prediction with constraints.
    ConfigError
        When the number of panels given does not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    require_anndata(pred, name="pred")
    entries = pred.uns.get(UNS_KEY, {})
    if "constraints" not in entries:
        where = f"uns[{UNS_KEY!r}] of the prediction"
        raise UnknownKeyError(where, "constraints", known=list(entries))
    report: pd.DataFrame = entries["constraints"]
    course: pd.DataFrame = entries["constraint_course"]
    asked, followed = condition_names(report), condition_names(course)
    conditions = list(dict.fromkeys(asked))
    registry = registry_of(pred)
    panels = make_panels(len(conditions), ax, size=4.2)
    styles = _styles(report, course)
    for panel, condition in zip(panels, conditions, strict=True):
        own, passed = report[asked == condition], course[followed == condition]
        _draw(panel, own, passed, styles=styles)
        set_title(panel, name_lines(labels_of(Condition.named(condition), registry)))
    handles = _handles(styles, any_line=bool(len(course)))
    n_columns = 1 if len(panels) == 1 else 2
    draw_legend(
        panels, shared=ax is None, n_columns=n_columns, handles=handles, below=True, fontsize=8
    )
    finish(panels, show=show, save=save)
    return panels


def _styles(report: pd.DataFrame, course: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Look and name of each constraint, the same in every panel."""
    followed = set(course["constraint"].astype(str)) if len(course) else set()
    styles = {}
    for number, text in enumerate(dict.fromkeys(report["constraint"].astype(str))):
        shown = text in followed
        why = "" if shown else " (no line: not judged at single steps)"
        styles[text] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "ls": _DASHES[number % len(_DASHES)] if shown else "none",
            "marker": "none" if shown else "s",
            "label": "\n".join(textwrap.wrap(text + why, width=_WIDTH)),
        }
    return styles


def _handles(styles: dict[str, dict[str, Any]], *, any_line: bool) -> "list[Line2D]":
    from matplotlib.lines import Line2D  # noqa: PLC0415 - slow to import

    grey: dict[str, Any] = {"color": "0.35"}
    kinds = [Line2D([], [], label="without constraints", **_BEFORE, **grey)]
    if any_line:
        words = "estimate at a step, before counts are\ndrawn and projected"
        kinds.append(Line2D([], [], label=words, lw=1.4, **grey))
    kinds.append(Line2D([], [], label="cells that are returned", **_AFTER, **grey))
    return [*(Line2D([], [], lw=2.4, **style) for style in styles.values()), *kinds]


def _draw(
    panel: "Axes",
    report: pd.DataFrame,
    course: pd.DataFrame,
    *,
    styles: dict[str, dict[str, Any]],
) -> None:
    last = int(course["step"].max()) if len(course) else 0
    gap = max(0.18 * last, 1.0)  # dots stand beside the steps, in columns of their own
    spread = np.linspace(-0.25, 0.25, len(report)) * gap if len(report) > 1 else np.zeros(1)
    for number, row in enumerate(report.to_dict("records")):
        style = styles[str(row["constraint"])]
        if len(course):
            line = course[course["constraint"].astype(str) == str(row["constraint"])]
            shown = line["satisfied"].to_numpy() - _APART * number
            panel.plot(line["step"], shown, style["ls"], color=style["color"], lw=1.4)
        before = float(row["satisfied_before"])
        panel.plot([1 - gap + spread[number]], [before], color=style["color"], **_BEFORE)
        whole = row["per"] == "population" or np.isnan(row["satisfied_sets"])
        share = float(row["satisfied" if whole else "satisfied_sets"])
        panel.plot([last + gap + spread[number]], [share], color=style["color"], **_AFTER)
    steps = np.unique(np.linspace(1, last, min(last, _MOST_TICKS)).round().astype(int))
    names = ["without", *map(str, steps), "returned"]
    panel.set_xticks([1 - gap, *steps, last + gap], names, fontsize=8)
    panel.set(xlim=(1 - 1.5 * gap, last + 1.5 * gap), ylim=(-0.08, 1.08))
    panel.set_xlabel("step" if last else "cells")
    panel.set_ylabel("share of sets that obey")
    panel.spines[["top", "right"]].set_visible(False)
