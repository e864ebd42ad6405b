"""What makes predictions faster, as text."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import markdown, score_table

STEPS_SHOWN = (
    "pearson_shift", "mae_shift", "energy_distance", "centred_energy_distance",
    "variance_explained", "de_overlap",
)  # fmt: skip


def ways(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [row["what"], 1e3 * row["before"], 1e3 * row["after"], row["times"]]
        for row in found["rows"]
    ]
    once = [
        f"{row['what'].partition(', ')[2]} {row['once']:.0f} s"
        for row in found["rows"]
        if "once" in row
    ]
    return [
        "## What each way of making it faster bought",
        "",
        markdown(["what", "before, ms", "after, ms", "times faster"], rows, digits=2),
        "",
        *([f"`model.compiled()`, asked for, compiled once: {'; '.join(once)}."] if once else []),
    ]


def precisions(found: Mapping[str, Any]) -> list[str]:
    names = list(found["speed"][0]["seconds"])
    rows = [
        [
            row["width"], row["sets"], row["set_size"],
            *(1e3 * row["seconds"][name] for name in names),
            *(row["seconds"]["float32"] / row["seconds"][name] for name in names[1:]),
        ]
        for row in found["speed"]
    ]  # fmt: skip
    header = ["width", "sets", "set size", *(f"{name}, ms" for name in names)]
    header += [f"{name}, times faster" for name in names[1:]]
    lines = ["## Precision", "", markdown(header, rows, digits=2), *_scores(found)]
    return lines + (_written(found["sibling"]) if "sibling" in found else [])


def _scores(found: Mapping[str, Any]) -> list[str]:
    """Every score in each precision, and the most that is lost."""
    if "scores" not in found:
        return []
    scores, lost = found["scores"], found["lost"]
    worst = {name: max(one, key=lambda metric: one[metric]) for name, one in lost.items()}
    told = "; ".join(f"{name} {100 * lost[name][m]:.1f} % ({m})" for name, m in worst.items())
    return [
        "",
        f"Cells of {found['context']}, held out; width {found['width']}, trained for "
        f"{found['train_steps']} steps. Another seed of the noise is the yardstick.",
        "",
        score_table(scores, list(scores["float32"]), first="precision"),
        "",
        f"Most that is lost of a score, as a share of it: {told}.",
    ]


def _written(found: Mapping[str, Any]) -> list[str]:
    """The sibling in lower precision."""
    rows = [
        [
            what, row["width"], row["cells"], *(1e3 * s for s in row["seconds"].values()),
            *(row["seconds"]["float32"] / s for s in list(row["seconds"].values())[1:]),
        ]
        for what, name in (("a decode call", "calls"), ("a whole prediction", "whole"))
        for row in found[name]
    ]  # fmt: skip
    names = list(found["calls"][0]["seconds"])
    header = ["what", "width", "cells", *(f"{name}, ms" for name in names)]
    header += [f"{name}, times faster" for name in names[1:]]
    taken = ", ".join(f"{name} {s:.1f} s" for name, s in found.get("seconds", {}).items())
    ratios = [row["seconds"]["bfloat16"] / row["seconds"]["int8"] for row in found["whole"]]
    return [
        "",
        "### The sibling",
        "",
        f"{found['genes']} genes, one a call, half of them said before; precisions took turns. "
        "Both lower precisions keep keys and values in bfloat16. A processor widens them a few "
        "cells at a time: its own attention in bfloat16 takes more than twice as long as in "
        "float32.",
        "",
        markdown(header, rows, digits=2),
        "",
        f"In whole predictions int8 was {min(ratios):.2f} to {max(ratios):.2f} times as fast as "
        "bfloat16.",
        *_scores(found),
        *(["", f"These cells, with guesses ahead, took {taken}, in turns."] if taken else []),
    ]


def few_steps(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Few steps", ""]
    if not found["rows"]:
        return [*lines, f"Not measured: {found['why']}."]
    table = {
        f"{row['sampler']}, {row['n_steps']} ({row['nfe']} calls)": row["scores"]
        for row in found["rows"]
    }
    return [
        *lines,
        f"Cells of {found['context']}, held out; the default network, trained for "
        f"{found['train_steps']} steps.",
        "",
        score_table(table, STEPS_SHOWN, first="sampler, steps"),
    ]


def screening(found: Mapping[str, Any]) -> list[str]:
    stages = ", ".join(
        f"{stage} {seconds:.1f} s" for stage, seconds in found["seconds_by_stage"].items()
    )
    return [
        "## Screening",
        "",
        f"{found['perturbations']} perturbations of one context, 32 cells each, 8 steps, "
        f"{found['genes']} genes: {found['seconds_together']:.1f} s in one call, "
        f"{found['seconds_separate']:.1f} s in a call for each ({found['separate_calls_timed']} "
        f"timed): {found['times_faster']:.2f} times faster. The bound is what every condition "
        "needs for itself, since its mean is put right on a pilot of 512 cells that is the same "
        f"whatever else is asked ({stages}); "
        f"{100 * found['share_of_bound']:.0f} % of the time is that.",
    ]


def many_cells(found: Mapping[str, Any]) -> list[str]:
    before, most = found["bytes_before"] / 1e9, found["bytes_most"] / 1e9
    return [
        "## Many cells",
        "",
        f"{found['cells']:,} cells of one condition, {found['genes']} genes, 8 steps: "
        f"{found['seconds']:.0f} s, at most {most:.2f} GB in a process that held {before:.2f} GB "
        f"before ({found['entries_not_zero']:,} values are not zero).",
    ]
