"""How near a machine's limits a model runs, and which limit it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbdiff._errors import ConfigError
from perturbdiff.config._reports import profile_report
from perturbdiff.pl._panels import check_save, finish, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKS = {
    "denoising steps": "o", "decode steps": "o", "control encoding": "s",
    "condition encoding": "D", "decode to genes": "^", "post-processing": "v",
}  # fmt: skip
_GIGA = 1e9
_FEW = 1e6  # operations below which a phase does no products worth a point


def roofline(
    report: Mapping[str, Any] | str | Path,
    *,
    ax: "Axes | None" = None,
    show: bool | None = None,
    save: str | Path | None = None,
) -> "Axes":
    """Plot the phases of a profile under the limits of the machine.

    Parameters
    ----------
    report
        From :func:`perturbdiff.profiling.compare`, or the folder or ``profile.json`` that it was
        written to.
    ax
        Panel to draw into; ``None`` for a new figure.
    show
        Call ``matplotlib.pyplot.show``.
    save
        File to write; the figure is then closed unless it is shown.

    Returns
    -------
    The panel. One point a phase, open in the smallest regime of a model and filled in the largest;
    slopes are bandwidth, flats are rates of products.

    Raises
    ------
    ConfigError
        When it is no report, no run in it has products, or ``save`` is of no known kind.
    """
    check_save(save)
    report = profile_report(report, "machines", "runs")
    points = _points(report)
    if not points:
        raise ConfigError("report", sorted(report), rule="has no phase with products to draw")
    panel = make_panels(1, ax, size=6.4)[0]
    intensity = np.array([point["intensity"] for point in points])
    span = np.array([min(intensity.min() / 3, 0.5), max(intensity.max() * 3, 300)])
    for device, machine in report["machines"].items():
        _roof(panel, machine, span, alone=len(report["machines"]) == 1, device=device)
    names = list(dict.fromkeys(point["model"] for point in points))
    for point in points:
        colour = _COLOURS[names.index(point["model"]) % len(_COLOURS)]
        panel.scatter(
            point["intensity"],
            point["rate"] / _GIGA,
            s=52,
            marker=_MARKS[point["phase"]],
            facecolor=colour if point["full"] else "white",
            edgecolor=colour,
            linewidths=1.4,
            zorder=4,
        )
    panel.set(xscale="log", yscale="log", xlim=tuple(span))
    panel.set_xlabel("operations a byte that operators read or write")
    panel.set_ylabel("GFLOP/s")
    panel.spines[["top", "right"]].set_visible(False)
    _legend(panel, points, names)
    finish([panel], show=show, save=save)
    return panel


def _points(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    runs, points = report["runs"], []
    for run in runs:
        regimes = [other["n_cells"] for other in runs if other["name"] == run["name"]]
        points += [
            {
                "model": run["name"],
                "cells": run["n_cells"],
                "full": run["n_cells"] == max(regimes),
                "phase": phase["name"],
                "intensity": phase["intensity"],
                "rate": phase["operations_per_second"],
            }
            for phase in run["phases"]
            if phase["operations"] >= _FEW
        ]
    return points


def _roof(
    panel: "Axes", machine: Mapping[str, Any], span: np.ndarray, *, alone: bool, device: str
) -> None:
    """Bandwidth, and the rate of each type of number that the machine multiplies."""
    where = "" if alone else f"{device}: "
    known = {name: rate for name, rate in machine["rates"].items() if rate is not None}
    x = np.geomspace(span[0], span[1], 200)
    for number, (name, rate) in enumerate(sorted(known.items(), key=lambda item: item[1])):
        height = np.minimum(rate, machine["bandwidth"] * x) / _GIGA
        panel.plot(x, height, color="0.25" if number == 0 else "0.7", lw=1.2, zorder=1)
        panel.annotate(
            f"{where}{name} {rate / _GIGA:.0f} GFLOP/s",
            (span[1], rate / _GIGA),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.35",
        )
    left = span[0] * 1.3
    panel.annotate(
        f"{where}copy {machine['bandwidth'] / _GIGA:.0f} GB/s",
        (left, machine["bandwidth"] * left / _GIGA),
        xytext=(8, -4),
        textcoords="offset points",
        fontsize=8,
        color="0.35",
    )


def _legend(panel: "Axes", points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Models and regimes by colour and filling, phases by mark."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - slow to import

    entries = []
    for point in points:
        colour = _COLOURS[names.index(point["model"]) % len(_COLOURS)]
        cells = "1 cell" if point["cells"] == 1 else f"{point['cells']} cells"
        entries.append((f"{point['model']}, {cells}", colour, point["full"]))
    handles = [
        Line2D([], [], ls="", marker="o", mec=colour, mfc=colour if full else "white", label=label)
        for label, colour, full in dict.fromkeys(entries)
    ]
    phases = dict.fromkeys(point["phase"] for point in points)
    if len({_MARKS[phase] for phase in phases}) > 1:
        handles += [
            Line2D([], [], ls="", marker=_MARKS[phase], mec="0.4", mfc="white", label=phase)
            for phase in phases
        ]
    panel.legend(handles=handles, fontsize=8, frameon=False, loc="lower right")
