"""What ``benchmarks.serving`` found, as text."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import markdown

_WORDS = {
    "known": "Known populations: two seeds, so that means are solved and small draws repeat",
    "fresh": "Fresh populations: every request has a seed of its own and must be solved",
}


def told(report: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [
        "# How a server bears a load",
        "",
        "Everything runs on one machine over loopback, the load generator too. Requests come at "
        "random times whether or not earlier ones were answered: two contexts, 16 to 64 "
        "cells, 10 or 18 steps, guidance 1 or 1.5 each at random; answers are .h5ad files. All "
        "arrangements run the same engine (LitServe) and model, and remember as many populations. "
        "Beside it ran only work of the lowest priority (tests). Weights are of a fit of 60 steps, "
        "which changes no time.",
        "",
    ]
    for name, section in report["sections"].items():
        made = section["made_with"]
        changed = " with uncommitted changes" if made["uncommitted_changes"] else ""
        lines += [*_TOLD[name](section["found"]), ""]
        lines += [
            f"`{section['command']}`; commit {made['commit'][:7]}{changed}, {made['cpu']}, "
            f"{made['n_cpus']} cores, torch {made['packages']['torch']}, "
            f"{section['minutes']:.0f} min.",
            "",
        ]
    return "\n".join(lines)


def _throughput(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Throughput", ""]
    for kind, words in _WORDS.items():
        limit = next(iter(found.values()))[kind]["limit_s"]
        rows = []
        for label, loads in found.items():
            steps, best = loads[kind]["steps"], loads[kind]["best"]
            within = [step for step in steps if step["p95"] <= limit]
            shown = within[-1] if within else steps[0]
            spent = [step["cpu_seconds"] * step["answered"] for step in steps]
            each = sum(spent) / sum(step["answered"] for step in steps)
            rows.append([label, best, shown["p50"], shown["p95"], shown["p99"], 1000 * each])
        header = ["arrangement", "a second", "p50", "p95", "p99", "CPU ms a request"]
        lines += [
            f"{words}. Most requests a second with p95 at most {limit:g} s (rates double from step "
            "to step), latency there in s, and processor time that all processes of the server "
            "took for an answer, less what they take when idle; other work changes it least:",
            "",
            markdown(header, rows, digits=2),
            "",
        ]
    return lines


def _overhead(found: Mapping[str, Any]) -> list[str]:
    medians = found["medians"]
    return [
        "## Overhead at full batch",
        "",
        f"{found['n_cells']} cells of one condition, a fresh seed each, in turns: "
        f"{medians['server']:.2f} s through the server (.h5ad sent and read), "
        f"{medians['model']:.2f} s by the model's own `predict` on one thread: "
        f"{100 * found['overhead']:+.0f} %. At most 10 % were wanted.",
    ]


def _quotes(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, one["requests"], one["mean_quote"], one["mean_seconds"], one["median_ratio"],
         f"{100 * one['within_half_and_double']:.0f} %"]
        for name, one in found.items()
    ]  # fmt: skip
    return [
        "## Quotes",
        "",
        "Seconds quoted (what waits and the request itself) before requests of 16 to 1,024 cells, "
        "a fifth of them of fresh seeds, and seconds taken:",
        "",
        markdown(
            ["", "requests", "quoted", "taken", "median taken / quoted", "within ½ to 2"], rows
        ),
    ]


def _soak(found: Mapping[str, Any]) -> list[str]:
    before, after = found["memory_after_first_minute"], found["memory_at_end"]
    flat = "n/a" if not before or not after else f"{100 * (after / before - 1):+.1f} %"
    statuses = "; ".join(
        f"{kind}: " + ", ".join(f"{count} of {status}" for status, count in counts.items())
        for kind, counts in found["statuses"].items()
    )
    return [
        "## Soak",
        "",
        f"{found['seconds'] / 60:.0f} minutes at {found['rate']:g} requests a second, 1 % "
        f"malformed, 5 % cancelled ({statuses}; 0 is a client that left). p50 {found['p50']:.2f}, "
        f"p95 {found['p95']:.2f}, p99 {found['p99']:.2f} s. {found['checked']} answers were "
        f"compared with the model's own: {found['wrong']} wrong. {found['stuck']} stuck. Resident "
        f"memory of all processes, end against second minute: {flat} (at most 5 % were wanted).",
    ]


_TOLD = {"throughput": _throughput, "overhead": _overhead, "quotes": _quotes, "soak": _soak}
