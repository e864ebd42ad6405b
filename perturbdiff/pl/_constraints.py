"""How constraints came to hold while cells were generated."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import UnknownKeyError
from perturbdiff.pl._panels import check_save, finish, make_panels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_LONGEST = 46
_APART = 0.012  # so that lines on top of each other are both seen


def constraints(
    pred: AnnData,
    *,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot the share of sets that satisfy each constraint through the run, one panel a condition.

    Lines are of expected values at each step; the dot at the end is the share of sets of the
    cells that were returned (1 or 0 for what is said of the whole population), the open one that of
    the cells before anything was enforced: 1 or 0.

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
    entries = pred.uns.get(UNS_KEY, {})
    if "constraints" not in entries:
        where = f"uns[{UNS_KEY!r}] of the prediction"
        raise UnknownKeyError(where, "constraints", known=list(entries))
    report: pd.DataFrame = entries["constraints"]
    course: pd.DataFrame = entries["constraint_course"]
    conditions = list(dict.fromkeys(report["condition"].astype(str)))
    panels = make_panels(len(conditions), ax, size=4.2)
    for panel, condition in zip(panels, conditions, strict=True):
        own = report[report["condition"].astype(str) == condition]
        passed = course[course["condition"].astype(str) == condition]
        _draw(panel, own, passed)
        members, context = json.loads(condition)[:2]
        panel.set_title(", ".join(["+".join(members), *context]), fontsize=10)
    finish(panels, show=show, save=save)
    return panels


def _draw(panel: "Axes", report: pd.DataFrame, course: pd.DataFrame) -> None:
    last = int(course["step"].max()) if len(course) else 1
    for number, row in enumerate(report.to_dict("records")):
        colour = _COLOURS[number % len(_COLOURS)]
        text = str(row["constraint"])
        name = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
        if len(course):
            line = course[course["constraint"].astype(str) == text]
            shown = line["satisfied"].to_numpy() - _APART * number
            style = _DASHES[number % len(_DASHES)]
            panel.plot(line["step"], shown, style, color=colour, lw=1.4)
        place = 0.25 * number
        before = float(row["satisfied_before"])
        panel.plot([-place], [before], "o", mfc="white", color=colour, ms=6)
        whole = row["per"] == "population" or np.isnan(row["satisfied_sets"])
        share = float(row["satisfied" if whole else "satisfied_sets"])
        panel.plot([last + 1 + place], [share], "o", color=colour, ms=6, label=name)
    margin = 1 + 0.25 * len(report)
    panel.set(xlim=(-margin, last + 1 + margin), ylim=(-0.08, 1.08), xlabel="step")
    panel.locator_params(axis="x", integer=True)
    panel.set_ylabel("share of sets that obey")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
