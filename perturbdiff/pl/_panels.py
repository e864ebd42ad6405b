"""Figures with one panel per condition, saved or shown as asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbdiff._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_DPI = 150
_MOST_COLUMNS = 4


def make_panels(
    n_panels: int,
    ax: "Axes | Sequence[Axes] | None",
    *,
    size: float,
    each: str = "condition",
    height: float | None = None,
) -> "list[Axes]":
    """One panel each: the caller's own, or those of a new figure, square unless a height is given.

    Raises
    ------
    ConfigError
        When the caller gave another number of panels than are needed, or something else.
    """
    if ax is not None:
        given = list(np.ravel(np.array(ax, dtype=object)))
        if strange := [panel for panel in given if not hasattr(panel, "get_figure")]:
            rule = f"must be matplotlib axes, {n_panels} of them, one for each {each}"
            raise ConfigError("ax", strange[0], rule=rule)
        if len(given) != n_panels:
            rule = f"must be {n_panels} panels, one for each {each}"
            raise ConfigError("ax", len(given), rule=rule)
        return given
    from matplotlib import pyplot as plt  # noqa: PLC0415 - slow to import

    n_columns = min(n_panels, _MOST_COLUMNS)
    n_rows = -(-n_panels // n_columns)
    figure, grid = plt.subplots(
        n_rows,
        n_columns,
        figsize=(size * n_columns, (height or size) * n_rows),
        squeeze=False,
        layout="constrained",
    )
    panels = list(grid.flat)
    for spare in panels[n_panels:]:
        figure.delaxes(spare)
    return panels[:n_panels]


def draw_legend(
    panels: "Sequence[Axes]",
    *,
    shared: bool,
    n_columns: int,
    handles: "Sequence[Artist] | None" = None,
    below: bool = False,
    **look: Any,
) -> None:
    """One legend for all panels: below those of our own figure, else in the first, or below it."""
    given = panels[0].get_legend_handles_labels()[0] if handles is None else list(handles)
    if shared:
        figure = panels[0].get_figure(root=True)
        assert figure is not None  # a panel belongs to one
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": n_columns}
        figure.legend(handles=given, frameon=False, **place, **look)
    else:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)} if below else {}
        panels[0].legend(handles=given, frameon=False, **place, **look)


def check_save(save: object) -> None:
    """Refuse a file that cannot be written, before anything is drawn.

    Raises
    ------
    ConfigError
        When it is a folder, has no name, or its ending stands for no known kind.
    """
    if save is None:
        return
    if not isinstance(save, str | Path):
        raise ConfigError("save", save, rule="must be the name of a file, such as 'picture.png'")
    path = Path(save)
    if not path.name.strip(". ") or str(save).endswith(("/", "\\")) or path.is_dir():
        rule = "is a folder; name a file in it, such as 'picture.png'"
        raise ConfigError("save", str(save), rule=rule)
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415

    known = FigureCanvasBase.get_supported_filetypes()
    hidden = path.name.startswith(".") and not path.suffix
    if hidden:
        raise ConfigError("save", str(save), rule="has an ending and no name before it")
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise ConfigError(
            "save", str(save), rule=f"must end in one of .{', .'.join(sorted(known))}"
        )


def finish(panels: "Sequence[Axes]", *, show: bool | None, save: str | Path | None) -> None:
    """Save and show as asked; by default show what was neither saved nor drawn into given panels.

    A figure that is saved and not shown is closed, so that many can be made in a row.
    """
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure = panels[0].get_figure(root=True)
    assert figure is not None  # a panel belongs to one
    if save is not None:
        path = Path(save)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI)
    if show:
        plt.show()
    elif save is not None:
        plt.close(figure)
