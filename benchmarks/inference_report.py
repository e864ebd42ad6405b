"""What the sections of ``benchmarks.inference`` say, as text: a function for each that has one."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import inference_speed_report
from benchmarks.tables import markdown

Told = Callable[[Mapping[str, Any]], list[str]]
_NAMES = {"set_diffusion": "diffusion", "causal_baseline": "sibling"}
_MEBI = 2**20


def told(report: Mapping[str, Any], figure: str | None) -> str:
    """The report as text; a section without words of its own is left to its JSON."""
    made, settings = report["made_with"], report["settings"]
    lines = [
        "# What a prediction costs, and what limits it",
        "",
        "## How it was measured",
        "",
        f"{made['cpu']}, {made['n_cpus']} cores, GPU: {made['gpu']}; torch "
        f"{made['packages']['torch']}, float32 products `highest`, the default, unless said. "
        "Networks run on "
        f"{settings['accelerator']}, cells are {settings['cells']}. Networks have the true shape "
        "and their first weights, which change no time; the sibling says one gene a call.",
        "",
        markdown(["section", "commit", "threads", "took, s"], _runs(report), digits=0),
        "",
        *dict.fromkeys(f"`{run['command']}`\n" for run in report["made"].values()),
        *dict.fromkeys(f"{run['note']}\n" for run in report["made"].values() if run["note"]),
    ]
    for name, found in report["sections"].items():
        if name in TOLD:
            lines += [*TOLD[name](found), ""]
        else:
            lines += [f"## {name}", "", f"In the JSON, under `sections.{name}`.", ""]
    if figure is not None:
        lines += [f"![Both models under the limits of the machine]({figure})", ""]
    return "\n".join(lines)


def _runs(report: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [name, run["commit"][:7], run["threads"], run["seconds"]]
        for name, run in report["made"].items()
    ]


def _machine(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, "cannot run" if rate is None else rate / 1e9]
        for name, rate in found["rates"].items()
    ]
    return [
        "## What the machine can do",
        "",
        markdown(["numbers", "GFLOP/s of a matrix product"], rows, digits=0),
        "",
        f"Copying: {found['bandwidth'] / 1e9:.1f} GB/s, reads and writes both counted.",
    ]


def _batches(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Diffusion against the sibling", ""]
    for n_genes, one in found.items():
        sizes = ", ".join(f"{_NAMES[k]} {v:,}" for k, v in one["parameters"].items())
        crossing = one["crossover_batch"]
        where = (
            "at no batch up to 1,024 does the sibling let more cells through"
            if crossing is None
            else f"from batch {crossing} on the sibling lets more cells through"
        )
        header = [
            "cells", *(f"{_NAMES[kind]} {what}" for kind in one["rows"] for what in _COLUMNS),
        ]  # fmt: skip
        pairs = zip(*one["rows"].values(), strict=True)
        body = [[pair[0]["cells"], *(x for row in pair for x in _cells(row))] for pair in pairs]
        whole = one["whole_prediction"]
        diffusion, sibling = whole["set_diffusion"], whole["causal_baseline"]
        lines += [
            f"### {n_genes} genes",
            "",
            f"Parameters: {sizes}. In generation, {where}. A whole first prediction of one cell "
            f"takes {diffusion['1']['seconds']:.2f} s and {sibling['1']['seconds']:.2f} s; of 256 "
            f"cells, {diffusion['256']['seconds']:.2f} s for the diffusion model.",
            "",
            markdown(header, body, digits=2),
            "",
        ]
        checks = [row for row in one["rows"]["causal_baseline"] if "seconds_of_all_calls" in row]
        if checks:
            told_rows = ", ".join(
                f"{row['cells']} cell(s): {row['seconds']:.2f} s summed, "
                f"{row['seconds_of_all_calls']:.2f} s run"
                for row in checks
            )
            lines += [f"The sibling's times are sums over calls timed singly: {told_rows}.", ""]
    return lines[:-1]


_COLUMNS = ("s", "cells/s", "FLOP/byte", "% of rate", "bound by", "cache MiB")


def _cells(row: Mapping[str, Any]) -> list[Any]:
    return [
        row["seconds"], row["cells_per_second"], row["intensity"], 100 * row["share_of_rate"],
        row["bound"], row["cache_bytes"] / _MEBI,
    ]  # fmt: skip


def _quoted(found: Mapping[str, Any]) -> str:
    """Errors of quotes, by model."""
    rows = [
        [
            _NAMES[kind], one["shapes"], 100 * one["median_error"], 100 * one["error_95"],
            100 * one["within_range"], 100 * one["spread_of_repeats_95"],
        ]
        for kind, one in found.items() if kind in _NAMES
    ]  # fmt: skip
    header = [
        "model", "shapes", "median error %", "95th percentile %", "within the range said %",
        "95th percentile of the spread of repeats %",
    ]  # fmt: skip
    return markdown(header, rows, digits=1)


def _quotes(found: Mapping[str, Any]) -> list[str]:
    return [
        "## Quotes against whole predictions",
        "",
        _quoted(found),
        "",
        f"Clock: {found['clock']}. Seconds are the median of {found['repeats']} first predictions "
        "(one for the sibling). Of the sibling: " + found["causal_baseline"]["how"],
    ]


def _obeying(found: Mapping[str, Any]) -> list[str]:
    known, most = (found[kind] for kind in ("set_diffusion", "at_most"))
    met = (
        "were met to the call"
        if known["calls_met"] == 1
        else (f"were met in {100 * known['calls_met']:.0f} % of the predictions")
    )
    return [
        "## Quotes under constraints, and of transported cells",
        "",
        _quoted(found),
        "",
        f"Clock: {found['clock']}. Of the diffusion model all ways of enforcing but depth-first "
        f"search; quoted numbers of network calls {met}. Depth-first search ends when a set obeys, "
        f"so the most is told: {len(most['rows'])} predictions made "
        f"{100 * most['calls_of_the_most']:.0f} % of the calls, and "
        f"{100 * most['within_range']:.0f} % took a time within the range said. Of the sibling "
        f"{found['causal_baseline']['shapes']} of {len(found['causal_baseline']['rows'])} "
        "predictions made as many calls as were quoted; in the others fewer sets were drawn again. "
        "The errors are of those. A quote of constraints that were not quoted before took "
        f"{known['quoting']:.1f} s (median).",
    ]


def _step(found: Mapping[str, Any]) -> list[str]:
    lines = ["## A denoising step at set size 256", ""]
    header = ["width", "sets of 256", "ms", "FLOP/byte", "% of the matrix rate"]
    for products, one in found["products"].items():
        rows = [
            [r["width"], r["sets"], 1000 * r["seconds"], r["intensity"], 100 * r["share_of_rate"]]
            for r in one["rows"]
        ]
        least = min(row["share_of_rate"] for row in one["rows"])
        lines += [
            f"Float32 products `{products}`, {one['matrix_rate'] / 1e9:.0f} GFLOP/s measured in "
            f"the same run; the least share is {least:.0%}, asked are {found['asked']:.0%}:",
            "",
            markdown(header, rows, digits=1),
            "",
        ]
    return lines[:-1]


def _together(found: Mapping[str, Any]) -> list[str]:
    most = max(row["cells_each"] for row in found["rows"])
    rows = [
        [r["sets"], 1e3 * r["seconds"], r["cells_each"], 100 * r["cells_each"] / most]
        for r in found["rows"]
    ]
    return [
        "## How many sets to put together",
        "",
        markdown([f"sets of {found['set_size']}", "step, ms", "cells/s", "% of the most"], rows,
                 digits=1),
        "",
        f"Cells a second are those of one step. The sampler puts {found['used']} together here.",
    ]  # fmt: skip


def _overhead(found: Mapping[str, Any]) -> list[str]:
    rows = [[r["width"], r["sets"], 100 * r["share_outside"]] for r in found["rows"]]
    return [
        "## What sampling adds to the network",
        "",
        markdown(["width", "sets of 32", "% outside the network"], rows, digits=1),
        "",
        f"Of the time of {found['n_steps']} steps, noise and contexts among it; asked: at most "
        f"{found['asked']:.0%}.",
    ]


def _devices(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [r["way"], r["devices"], r["latency"], r["throughput"], r["memory"] / _MEBI]
        for r in found["rows"]
    ]
    pools = found["pools"]
    apart = [
        [r["prefill"], r["decode"], r["latency"], r["throughput"], r["memory"] / _MEBI,
         r["decode_memory"] / _MEBI]
        for r in pools["rows"]
    ]  # fmt: skip
    return [
        "## More devices, on paper",
        "",
        "Nothing ran on several devices: formulas (tested against a simulation of events) on costs "
        f"measured on one. A batch of {found['sets']} sets; a pipeline cuts memory, not latency.",
        "",
        markdown(["way", "devices", "latency, s", "batches/s", "MiB a device"], rows),
        "",
        f"The sibling with prefill and decode apart, requests of {pools['cells']} cells, "
        f"{pools['slots']} in the slots of a decode worker; balanced at {pools['balance']:.3f} "
        "prefill workers for each decode worker.",
        "",
        markdown(
            ["prefill workers", "decode workers", "latency, s", "requests/s", "MiB prefill",
             "MiB decode"],
            apart,
        ),
    ]  # fmt: skip


TOLD: dict[str, Told] = {
    "machine": _machine,
    "batches": _batches,
    "quotes": _quotes,
    "obeying": _obeying,
    "step": _step,
    "together": _together,
    "overhead": _overhead,
    "devices": _devices,
    "ways": inference_speed_report.ways,
    "precision": inference_speed_report.precisions,
    "steps": inference_speed_report.few_steps,
    "screening": inference_speed_report.screening,
    "many_cells": inference_speed_report.many_cells,
}
