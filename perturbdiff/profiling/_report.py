"""Profiles as files: JSON, a table, and a trace."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perturbdiff.config._reports import profile_report

_GIGA, _MEBI = 1e9, 2**20
_HEADER = (
    "model", "cells", "phase", "s", "share", "calls", "GFLOP", "MiB moved", "FLOP/byte",
    "GFLOP/s", "of rate", "of bandwidth", "bound by", "peak MiB",
)  # fmt: skip
_WORDS = (
    "Operations are those of matrix products and attention; bytes are what operators read and "
    "write, caches of the processor not considered, so a share of bandwidth may be above 100 %. "
    "Work in NumPy and SciPy has neither. A phase is bound by *overhead* where it takes more than "
    "four times what products or bytes alone would take. Seconds are the least of the runs; peak "
    "is of tensors that live at once, weights apart."
)


def table(report: Mapping[str, Any] | str | Path) -> str:
    """The figures of a report in Markdown.

    Parameters
    ----------
    report
        From :func:`compare`, or the folder or ``profile.json`` that it was written to.

    Returns
    -------
    The machine, and one row for each phase and for the whole of each run.

    Raises
    ------
    ConfigError
        When it is no report.
    """
    report = profile_report(report, "machines", "runs")
    lines = [_machine(machine) for machine in report["machines"].values()]
    rows = [list(_HEADER)]
    for run in report["runs"]:
        rows += [_row(run, phase, phase["name"]) for phase in run["phases"]]
        rows.append(_row(run, run, "**whole**"))
    width = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    rule = ["-" * size for size in width]
    body = [
        "| " + " | ".join(x.ljust(size) for x, size in zip(row, width, strict=True)) + " |"
        for row in (rows[0], rule, *rows[1:])
    ]
    return "\n".join([*lines, "", *body, "", _WORDS, ""])


def write(report: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write a report as ``profile.json``, ``profile.md`` and ``trace.json``.

    Parameters
    ----------
    report
        From :func:`compare`.
    folder
        Where to; made if it is not there.

    Returns
    -------
    The files.

    Raises
    ------
    ConfigError
        When it is no report with a trace.
    """
    report = profile_report(report, "machines", "runs", "trace")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {key: value for key, value in report.items() if key != "trace"}
    trace = {"traceEvents": report["trace"], "displayTimeUnit": "ms"}
    contents = {
        "profile.json": json.dumps(figures, indent=1) + "\n",
        "profile.md": table(report),
        "trace.json": json.dumps(trace) + "\n",
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]


def _machine(machine: Mapping[str, Any]) -> str:
    rates = ", ".join(
        f"{name} {'cannot run' if rate is None else f'{rate / _GIGA:.0f} GFLOP/s'}"
        for name, rate in machine["rates"].items()
    )
    return (
        f"{machine['name']}, {machine['device']}, {machine['threads']} thread(s), float32 "
        f"precision '{machine['precision']}', torch {machine['torch']}: {rates}; "
        f"copy {machine['bandwidth'] / _GIGA:.1f} GB/s."
    )


def _row(run: Mapping[str, Any], part: Mapping[str, Any], name: str) -> list[str]:
    return [
        run["name"],
        str(run["n_cells"]),
        name,
        f"{part['seconds']:.4f}",
        f"{part['seconds'] / run['seconds']:.0%}",
        str(part["network_calls"]),
        f"{part['operations'] / _GIGA:.3f}",
        f"{_moved(part) / _MEBI:.1f}",
        _number(part["intensity"], ".1f"),
        _number(part["operations_per_second"], ".2f", _GIGA),
        _number(part["share_of_rate"], ".1%"),
        _number(part["share_of_bandwidth"], ".1%"),
        part["bound"] or "n/a",
        f"{part['peak_bytes'] / _MEBI:.1f}",
    ]


def _moved(part: Mapping[str, Any]) -> float:
    return float(part["weight_bytes"] + part["activation_bytes"] + part["cache_bytes"])


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "n/a" if value is None else format(value / unit, form)
