"""The command that says whether this installation works here, and what it has to work with."""

import os
import platform
import time
from importlib import metadata
from typing import Annotated, Any

import typer

from perturbdiff._constants import VERSION
from perturbdiff._errors import PerturbDiffError
from perturbdiff.cli._options import AsJson
from perturbdiff.cli._show import FAULT, plainly, say, say_json

_PACKAGES = (
    "torch", "lightning", "anndata", "scanpy", "numpy", "scipy", "pandas", "numba",
)  # fmt: skip
_OPTIONAL = ("litserve", "zarr", "torchmetrics")
_LITTLE_GB = 4.0


def doctor(
    as_json: AsJson = False,
    self_test: Annotated[
        bool, typer.Option(help="Fit and ask a small model, which takes about 5 seconds.")
    ] = True,
) -> None:
    """Say which versions, device, threads and memory are here, and whether a small model works.

    Ends with 0 where all is well, 1 where a package is missing or the test fails.
    """
    with plainly(verbose=False):
        found = examine(self_test=self_test)
        if as_json:
            say_json(found)
        else:
            for line in _lines(found):
                say(line)
    if found["problems"]:
        raise typer.Exit(FAULT)


def examine(*, self_test: bool) -> dict[str, Any]:
    """All that is found, as plain values, with what is wrong under ``problems``."""
    versions = {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)}
    missing = [name for name in _PACKAGES if versions[name] is None]
    problems = [f"{name} is not installed: pip install {name}" for name in missing]
    found: dict[str, Any] = {
        "perturbdiff": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "memory_gb": _memory(),
        "problems": problems,
        "notes": [],
    }
    if missing:
        return found
    found |= _device()
    memory, notes = found["memory_gb"]["available"], found["notes"]
    if memory is not None and memory < _LITTLE_GB:
        notes.append(f"only {memory:.1f} GB of memory are free; large files may not fit")
    if found["device"] == "cpu" and found["threads"] == 1 and (os.cpu_count() or 1) > 1:
        notes.append(f"torch uses 1 of {os.cpu_count()} cores; see OMP_NUM_THREADS")
    if self_test:
        found["self_test"] = _self_test()
        if found["self_test"]["error"]:
            problems.append(f"the self-test failed: {found['self_test']['error']}")
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, float | None]:
    """Memory of the machine in GB; None where the system does not say."""
    found: dict[str, float | None] = {}
    for name, key in (("total", "SC_PHYS_PAGES"), ("available", "SC_AVPHYS_PAGES")):
        try:
            found[name] = round(os.sysconf(key) * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
        except (AttributeError, OSError, ValueError):
            found[name] = None
    return found


def _device() -> dict[str, Any]:
    import torch

    from perturbdiff.profiling._machine import device_name

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "device": device,
        "device_name": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["device_memory_gb"] = {
            "total": round(total / 1e9, 1),
            "available": round(free / 1e9, 1),
        }
    return found


def _self_test() -> dict[str, Any]:
    """Fit, ask and score a small model on simulated cells; what went wrong, if anything did."""
    began = time.perf_counter()
    error = ""
    try:
        _small_run()
    except (PerturbDiffError, ArithmeticError, ImportError, OSError, RuntimeError, TypeError) as e:
        error = f"{type(e).__name__}: {e}"
    return {"seconds": round(time.perf_counter() - began, 1), "error": error}


def _small_run() -> None:
    import numpy as np

    from perturbdiff.config import NetworkConfig, TrainConfig
    from perturbdiff.data.datasets import SimulationConfig, simulated
    from perturbdiff.model import SetDiffusion
    from perturbdiff.train import TrainerOptions

    world = SimulationConfig(
        n_genes=40, n_contexts=3, n_perturbations=2, n_unseen=0, n_pairs=0, n_cells=30,
        n_controls=40, doses=(), hours=(),
    )  # fmt: skip
    adata = simulated(world, seed=0).adata
    columns = {"perturbation_key": "perturbation", "control": "control"}
    model = SetDiffusion.from_anndata(adata, **columns, covariate_keys=["cell_type"]).fit(
        adata,
        holdout={"cell_type": ["T1"]},
        n_top_genes=None,
        network=NetworkConfig(n_axes=5, n_response_axes=4, width=16, n_blocks=1, n_heads=2),
        train=TrainConfig(max_steps=4, check_every=2, n_sets=4, set_size=6, n_controls=6),
        options=TrainerOptions(progress=False),
    )
    ask: dict[str, Any] = {
        "perturbations": ["P1"],
        "contexts": [{"cell_type": "T1"}],
        "n_cells": 12,
    }
    first, again = (model.predict(adata, **ask, seed=0).layers["counts"] for _ in range(2))
    if not first.sum() or not np.isfinite(first.data).all() or (first != again).nnz:
        msg = "the same question had two answers, or none"
        raise RuntimeError(msg)


def _lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    memory = found["memory_gb"]
    packages = (f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    lines = [
        f"perturbdiff {found['perturbdiff']}, Python {found['python']}, {found['platform']}",
        f"packages: {', '.join(packages)}",
        f"memory: {_gb(memory['available'])} free of {_gb(memory['total'])}",
    ]
    if "device" in found:
        lines.append(
            f"device: {found['device']} ({found['device_name']}), torch uses {found['threads']} of "
            f"{found['cores']} cores"
        )
    if own := found.get("device_memory_gb"):
        lines.append(f"memory of the device: {_gb(own['available'])} free of {_gb(own['total'])}")
    if (test := found.get("self_test")) and not test["error"]:
        lines.append(f"self-test: a small model was fitted and asked in {test['seconds']} s")
    lines += [f"note: {note}" for note in found["notes"]]
    return [*lines, *(f"PROBLEM: {problem}" for problem in found["problems"] or ())]


def _gb(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} GB"
