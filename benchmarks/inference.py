"""What a prediction costs, what limits it, and how well that is told beforehand.

    python -m benchmarks.inference --data kang2018.h5ad --threads 2

Sections are independent: ``--sections`` runs some of them and keeps what the result has of others.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.inference_batches import both, drawn_runs
from benchmarks.inference_devices import placements
from benchmarks.inference_models import GENES, Models
from benchmarks.inference_obeying import obeyed
from benchmarks.inference_quotes import process_clock, quoted
from benchmarks.inference_report import told
from benchmarks.inference_speed import few_steps, many_cells, precisions, screening
from benchmarks.inference_step import sampling_overhead, sets_together, step_shares
from benchmarks.inference_ways import ways
from perturbdiff.profiling import this_machine

HERE = Path(__file__).resolve().parent
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": process_clock}


class Run:
    """What the sections are given.

    Parameters
    ----------
    chosen
        Options of the command line.
    """

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.data: Path | None = chosen.data
        self.models = Models(chosen.data, chosen.accelerator)
        self.genes = tuple(chosen.genes)
        self.clock: str = chosen.clock


def _machine(run: Run) -> dict[str, Any]:
    return this_machine(run.models.device, refresh=True).to_json()


def _on_clock(run: Run, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """On the processor's clock, what is measured for quotes must be on it too."""
    known = time.perf_counter
    if run.clock == "processor":
        time.perf_counter = process_clock
    try:
        return measure(run.models, clock=CLOCKS[run.clock]) | {"clock": run.clock}
    finally:
        time.perf_counter = known


SECTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "machine": _machine,
    "batches": lambda run: both(run.models, run.genes),
    "step": lambda run: step_shares(run.models),
    "together": lambda run: sets_together(run.models),
    "overhead": lambda run: sampling_overhead(run.models),
    "devices": lambda run: placements(run.models),
    "quotes": lambda run: _on_clock(run, quoted),
    "obeying": lambda run: _on_clock(run, obeyed),
    "ways": lambda run: ways(run.models),
    "precision": lambda run: precisions(run.models, run.data),
    "steps": lambda run: few_steps(run.data),
    "screening": lambda run: screening(run.models.device),
    "many_cells": lambda run: many_cells(run.models),
}
"""Each answers one question and returns what JSON knows; its words are in ``inference_report``."""


def drawn(report: Mapping[str, Any], path: Path) -> str | None:
    """The roofline of both models, one cell and the largest batch; its name, or None without."""
    found = report["sections"]
    if not {"machine", "batches"} <= set(found):
        return None
    import matplotlib as mpl  # noqa: PLC0415 - only where something is drawn

    mpl.use("Agg")
    from perturbdiff.pl import roofline  # noqa: PLC0415

    n_genes = "1000" if "1000" in found["batches"] else next(iter(found["batches"]))
    runs = drawn_runs(found["batches"], n_genes)
    machines = {report["settings"]["accelerator"]: found["machine"]}
    roofline({"machines": machines, "runs": runs}, save=path, show=False)
    return path.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="Kang 2018; simulated cells where left out")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--genes", type=int, nargs="+", default=list(GENES))
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="of the quotes")
    parser.add_argument("--note", default="", help="what else to know, such as a busy machine")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "inference.json")
    parser.add_argument("--report", type=Path, default=HERE / "reports" / "inference.md")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    data = "simulated" if chosen.data is None else f"those of {chosen.data.name}"
    report: dict[str, Any] = {
        "question": __doc__.splitlines()[0],
        "made_with": environment(),  # before the clone has anything new in it
        "settings": {"accelerator": chosen.accelerator, "cells": data},
        "made": {},
        "sections": {},
    }
    if chosen.out.exists():
        known = json.loads(chosen.out.read_text(encoding="utf-8"))
        report |= {part: known[part] for part in ("made", "sections")}
    with tempfile.TemporaryDirectory() as fresh:  # nothing measured in an earlier run counts
        os.environ["XDG_CACHE_HOME"] = fresh
        run = Run(chosen)
        for name in chosen.sections:
            began = time.perf_counter()
            report["sections"][name] = SECTIONS[name](run)
            report["made"][name] = {
                "commit": report["made_with"]["commit"],
                "threads": chosen.threads,
                "seconds": round(time.perf_counter() - began, 1),
                "note": chosen.note,
                "command": _command(),
            }
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            _write(chosen, report)


def _write(chosen: argparse.Namespace, report: dict[str, Any]) -> None:
    """JSON, table and figure of what is measured so far, so that a run cut short is not lost."""
    for part in ("made", "sections"):
        report[part] = {name: report[part][name] for name in SECTIONS if name in report[part]}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    figure = drawn(report, chosen.report.with_suffix(".png"))
    chosen.report.write_text(told(report, figure), encoding="utf-8")


def _command() -> str:
    """The command line, files by their names alone."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return f"python -m benchmarks.inference {shlex.join(words)}".rstrip()


if __name__ == "__main__":
    main()
