"""Cells on their way from control partners through the denoising steps to counts.

N cells, T stages, G genes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._errors import ConfigError, LabelError, UnknownKeyError
from perturbdiff.data import Condition
from perturbdiff.data._comparison import Comparison, compare
from perturbdiff.data._target import table_under
from perturbdiff.pl._embedding import STYLES, style_on
from perturbdiff.pl._panels import check_save, draw_legend, finish, make_panels
from perturbdiff.pl._symbols import gene_labels
from perturbdiff.pl._titles import name_lines, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXES: Final = ("axis_1", "axis_2")
_FIXED: Final = frozenset({"cell", "stage", "step", "sigma", *_AXES})
_UNIT = "log1p counts per 10,000"
_COLOURS = "viridis_r"  # the later the darker, in grey too


def trajectory(
    pred: AnnData,
    *,
    reference: AnnData | None = None,
    key: str = "trajectory",
    genes: Sequence[str] = (),
    gene_symbols: str | None = None,
    ax: "Axes | Sequence[Axes] | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "list[Axes]":
    """Plot cells on their way through the denoising steps, one panel a condition.

    Open circles are control partners, dots what the denoiser made of the cells after each step, the
    later the darker, crosses the predicted cells once counts are drawn. Thin lines follow single
    cells, the thick one their mean. Measured cells of the condition stand behind, where a reference
    is given. The mean control cell is at the origin of the principal axes.

    Parameters
    ----------
    pred
        Prediction with a table of :func:`~perturbdiff.tl.trajectory`.
    reference
        File with the measured cells; ``None`` to draw none.
    key
        Where in ``uns`` the table is.
    genes
        Two genes of the table to draw along, in place of principal axes.
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
    The panels, in the order of the table. Nothing is written into ``pred`` or ``reference``.

    Raises
    ------
    UnknownKeyError
        When ``pred`` has no such table, the table no such gene, or ``var`` no such column.
    LabelError
        When the reference lacks cells of a condition, or ``pred`` those of the table.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file.
    ConfigError
        When the key holds something else, other than two genes are named, the number of
        panels given does not fit, or ``save`` is of no known kind.
    """
    check_save(save)
    table = _table(pred, key)
    named = [name for name in table.columns if name not in _FIXED]
    called = gene_labels(gene_symbols, reference, pred)
    along = _along(genes, named[_n_labels(table) :])
    labels = named[: _n_labels(table)]
    groups = list(table.groupby(labels, sort=False, observed=True, dropna=False))
    comparison = None if reference is None else compare(pred, reference)
    panels = make_panels(len(groups), ax, size=4.6)
    for panel, (names, own) in zip(panels, groups, strict=True):
        if comparison is not None:
            condition = _condition_of(str(own["cell"].iloc[0]), comparison)
            xy = _measured(pred, comparison, condition, key=key, genes=genes)
            panel.scatter(
                xy[:, 0], xy[:, 1], s=16, lw=0.7, alpha=0.5, rasterized=True, zorder=1,
                label="real treated", marker="+", color=style_on(panel, "real treated")["color"],
            )  # fmt: skip
        _draw(panel, own, along=along)
        set_title(panel, name_lines(dict(zip(labels, names, strict=True))))
        what = [called.get(name, name) for name in genes]
        shown = [f"{one} ({_UNIT})" for one in what or ("principal axis 1", "principal axis 2")]
        panel.set(xlabel=shown[0], ylabel=shown[1])
        panel.spines[["top", "right"]].set_visible(False)
    n_columns = 2 if len(panels) == 1 else 3
    draw_legend(panels, shared=ax is None, n_columns=n_columns, fontsize=8)
    finish(panels, show=show, save=save)
    return panels


def _table(pred: AnnData, key: str) -> pd.DataFrame:
    return table_under(pred, key, columns=_FIXED, writer="tl.trajectory")


def _n_labels(table: pd.DataFrame) -> int:
    """Labels stand before the cells, genes after the axes."""
    return list(table.columns).index("cell")


def _along(genes: Sequence[str], there: Sequence[str]) -> tuple[str, str]:
    """Two columns to draw along."""
    if isinstance(genes, Sequence) and not genes:
        return _AXES
    if isinstance(genes, str) or not isinstance(genes, Sequence) or len(genes) != 2:
        rule = "must be two genes, one for each axis, or none for principal axes"
        raise ConfigError("genes", genes, rule=rule)
    for name in genes:
        if name not in there:
            where = "The table of the trajectory (genes are asked for in tl.trajectory)"
            raise UnknownKeyError(where, name, known=there)
    return genes[0], genes[1]


def _condition_of(cell: str, comparison: Comparison) -> Condition:
    """Condition that a predicted cell belongs to."""
    cells = comparison.pred
    if cell not in cells.names:
        msg = f"The prediction has no cell {cell!r} any more, which its trajectory is of."
        raise LabelError(msg)
    return cells.distinct[int(cells.condition[cells.names.index(cell)])]


def _measured(
    pred: AnnData, comparison: Comparison, condition: Condition, *, key: str, genes: Sequence[str]
) -> Float[np.ndarray, "cells 2"]:
    """Measured treated cells along the axes of the trajectory, or along genes."""
    cells = comparison.measured(condition)
    names = comparison.reference.genes
    if genes:
        return np.asarray(cells[:, [names.index(gene) for gene in genes]])
    if key not in pred.varm or not comparison.there.all():
        msg = (
            f"The prediction no longer has all its genes, or varm[{key!r}], so measured cells "
            "cannot be placed along the axes. Call tl.trajectory again, or leave the reference out."
        )
        raise LabelError(msg)
    place = {name: number for number, name in enumerate(pred.var_names)}
    axes = np.asarray(pred.varm[key])[[place[name] for name in names]]
    base = np.asarray(comparison.controls(condition).log1p.mean(0, dtype=np.float64)).ravel()
    return np.asarray((cells - base) @ axes)


def _draw(panel: "Axes", table: pd.DataFrame, *, along: tuple[str, str]) -> None:
    """Ways of all cells, and their mean."""
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.collections import LineCollection  # noqa: PLC0415

    steps = [own for _, own in table.groupby("step", sort=True)]
    ways = np.stack([own[list(along)].to_numpy(dtype=float) for own in steps])
    sigma = [float(own["sigma"].iloc[0]) for own in steps]
    panel.add_collection(
        LineCollection(list(ways.transpose(1, 0, 2)), colors="0.75", linewidths=0.5, zorder=2)
    )
    colours = colormaps[_COLOURS](np.linspace(0.05, 0.95, max(len(ways) - 2, 1)))
    panel.plot(
        *ways[0].T, "o", ms=5, mfc="white", mec="0.35", ls="none", zorder=3, label="control partner"
    )
    last = len(ways) - 2
    for step in range(1, last + 1):
        name = f"after step {step} (noise {sigma[step]:.3g})"
        panel.plot(
            *ways[step].T, "o", ms=3.5, color=colours[step - 1], mew=0, ls="none", zorder=4,
            label=name if step in (1, (last + 1) // 2, last) else None,
        )  # fmt: skip
    panel.plot(
        *ways[-1].T, "X", ms=6, color=STYLES["predicted"]["color"], mec="white", mew=0.5, ls="none",
        zorder=5, label="predicted, counts drawn",
    )  # fmt: skip
    mean = ways.mean(1)
    panel.plot(*mean.T, "-", color="white", lw=4, zorder=6)
    panel.plot(*mean.T, "-", color="black", lw=1.8, zorder=7, label="mean")
    panel.plot(*mean[-1], "X", color="black", ms=9, mec="white", zorder=8)
