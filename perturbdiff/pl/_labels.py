"""Names beside points, placed where they cover least."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ANGLES = np.linspace(0, 2 * np.pi, 16, endpoint=False)
_RADII = (8.0, 16.0, 26.0, 38.0, 52.0)  # points
_MARGIN = 1.5  # pixels
_NAMED_COUNT_FOR = 5  # dots


def name_points(
    panel: "Axes",
    xy: Float[np.ndarray, "points 2"],
    names: Sequence[str],
    *,
    others: Float[np.ndarray, "dots 2"],
) -> None:
    """Write a name beside each point, off the other names and off the crowd of dots.

    Parameters
    ----------
    panel
        Panel whose limits are already set.
    xy, names
        Points and their names, the most important first.
    others
        All dots of the panel.
    """
    figure = panel.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    pixels = panel.transData.transform(others)
    named = panel.transData.transform(xy)
    dots = np.concatenate([pixels, np.repeat(named, _NAMED_COUNT_FOR, axis=0)])
    frame = panel.get_window_extent()
    per_point = figure.dpi / 72
    taken: list[np.ndarray] = []
    for point, name in zip(xy, names, strict=True):
        note = panel.annotate(
            name, point, xytext=(0, 0), textcoords="offset points", fontsize=8,
            ha="center", va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.4", "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip
        extent = note.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2 + _MARGIN
        centre = panel.transData.transform(point)
        best, least = (0.0, 0.0), np.inf
        for radius in _RADII:
            for angle in _ANGLES:
                way = np.array([np.cos(angle), np.sin(angle)])
                offset = way * (radius * per_point + np.abs(way) * half)
                box = np.concatenate([centre + offset - half, centre + offset + half])
                cost = _cost(box, dots, taken, frame=np.array(frame.extents)) + radius / 40
                if cost < least:
                    best, least, chosen = tuple(offset / per_point), cost, box
        note.set_position(best)
        taken.append(chosen)


def _cost(
    box: np.ndarray, dots: np.ndarray, taken: Sequence[np.ndarray], *, frame: np.ndarray
) -> float:
    """How much a box at left, bottom, right, top would cover, or stick out."""
    inside = (
        (dots[:, 0] > box[0])
        & (dots[:, 0] < box[2])
        & (dots[:, 1] > box[1])
        & (dots[:, 1] < box[3])
    )
    outside = (box[:2] < frame[:2]).any() or (box[2:] > frame[2:]).any()
    overlaps = sum(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
        for other in taken
    )
    return float(inside.sum() + 100 * overlaps + 1000 * outside)
