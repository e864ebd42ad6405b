"""Real, shifted and predicted cells in one embedding.

N cells, G genes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._errors import UnknownKeyError
from perturbdiff.data import Condition
from perturbdiff.data._comparison import Comparison, compare
from perturbdiff.data._genes import principal_axes
from perturbdiff.pl._panels import check_save, draw_legend, finish, make_panels
from perturbdiff.pl._titles import labels_of, name_lines, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        # By kind of cells, never by position: the same in every picture. Lightness and marker tell
        # them apart in grey too.
        "real control": {"color": "#c4c4c4", "marker": "o"},
        "shifted control": {"color": "#e69f00", "marker": "^"},
        "real treated": {"color": "#1a1a1a", "marker": "o"},
        "predicted": {"color": "#0072b2", "marker": "X"},
    }
)
_ON_DARK: Final[Mapping[str, str]] = MappingProxyType(
    {"real control": "#6a6a6a", "real treated": "#f5f5f5"}
)


def style_on(panel: "Axes", name: str) -> dict[str, Any]:
    """Look of a kind of cells; greys turn round where the panel is dark."""
    from matplotlib.colors import to_rgb  # noqa: PLC0415 - slow to import

    dark = np.dot(to_rgb(panel.get_facecolor()), (0.299, 0.587, 0.114)) < 0.5
    style = dict(STYLES[name])
    if dark and name in _ON_DARK:
        style["color"] = _ON_DARK[name]
    return style


def embedding(
    pred: AnnData,
    *,
    reference: AnnData,
    baseline: str | None = None,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot real, shifted and predicted cells in two principal axes, one panel per condition.

    The axes of a panel are those of its real cells, control and treated together, so that they show
    where prediction and truth differ. Large markers are means.

    Parameters
    ----------
    pred
        Prediction.
    reference
        File with the measured cells.
    baseline
        Baseline whose mean the shifted control cells have; ``None`` for the effect prior, or for
        the only one that the prediction knows.
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
    UnknownKeyError
        When ``pred`` is no prediction, the reference lacks a column, or there is no such baseline.
    LabelError
        When the reference lacks cells of a condition.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file.
    ConfigError
        When the number of panels given does not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    comparison = compare(pred, reference)
    baseline = _known(baseline, list(comparison.stated))
    panels = make_panels(len(comparison.conditions), ax, size=4.2)
    for panel, condition in zip(panels, comparison.conditions, strict=True):
        _draw(panel, _kinds(comparison, condition, baseline))
        set_title(panel, name_lines(labels_of(condition, comparison.registry)))
    n_columns = 2 if len(panels) == 1 else 4
    draw_legend(panels, shared=ax is None, n_columns=n_columns, fontsize=8, markerscale=1.8)
    finish(panels, show=show, save=save)
    return panels


def _known(baseline: str | None, stated: Sequence[str]) -> str:
    """The baseline that is meant, refused where the prediction has no answer of it."""
    if baseline is None:
        baseline = stated[0] if len(stated) == 1 else "effect_prior"
    if baseline not in stated:
        where = "The list of the prediction's baselines"
        raise UnknownKeyError(where, baseline, known=stated)
    return baseline


def _kinds(
    comparison: Comparison, condition: Condition, baseline: str
) -> dict[str, Float[np.ndarray, "cells genes"]]:
    """Cells by kind; without shifted ones where the baseline has no answer."""
    control = comparison.controls(condition).log1p.toarray()
    kinds = {
        "real control": control,
        "real treated": comparison.measured(condition),
        "predicted": comparison.predicted(condition),
    }
    mean = comparison.stated[baseline][condition.name]
    if not isinstance(mean, str):
        kinds["shifted control"] = np.maximum(control + (mean - control.mean(0)), 0)
    return kinds


def _draw(panel: "Axes", kinds: Mapping[str, Float[np.ndarray, "cells genes"]]) -> None:
    real = np.concatenate([kinds["real control"], kinds["real treated"]])
    mean, axes = principal_axes(sp.csr_array(real), 2)
    middle = {}
    for name in STYLES:
        if name in kinds:
            xy = np.zeros((len(kinds[name]), 2))
            xy[:, : axes.shape[1]] = (kinds[name] - mean) @ axes
            panel.scatter(
                xy[:, 0],
                xy[:, 1],
                s=12,
                lw=0,
                alpha=0.75,
                rasterized=True,
                label=name,
                **style_on(panel, name),
            )
            middle[name] = xy.mean(0)
    for name, xy in middle.items():
        panel.scatter(
            xy[0], xy[1], s=130, lw=1.5, edgecolor="white", zorder=5, **style_on(panel, name)
        )
    panel.set_xlabel("principal axis 1 (log1p counts per 10,000)")
    panel.set_ylabel("principal axis 2 (log1p counts per 10,000)")
    panel.spines[["top", "right"]].set_visible(False)
