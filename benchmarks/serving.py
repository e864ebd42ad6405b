"""How a server bears a load, beside request at a time and whole requests in batches.

    python -m benchmarks.serving [--sections throughput overhead quotes soak]

Fits the shipped real cells for a few steps (weights change no time), saves the model with control
cells, and asks each arrangement over loopback in one run. Load is open: requests come at random
times, whether or not earlier ones were answered.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import perturbdiff as ptd
from benchmarks.environment import environment
from benchmarks.serving_arrangements import OURS, SINGLE, WHOLE
from benchmarks.serving_load import (
    Outcome,
    cpu_seconds,
    load,
    resident_mb,
    serving,
    summary,
)
from benchmarks.serving_report import told
from perturbdiff.data import datasets
from perturbdiff.serve._formats import from_h5ad

HERE = Path(__file__).resolve().parent
TYPES = ("NK", "CD14 Mono")
SEEDS = 2
FASTER = 2.0
_SOLVES_S = 0.6  # a request that takes less had nothing to solve
WAYS = (
    (OURS, {"workers": 1, "threads": 1}),
    (SINGLE, {"workers": 2, "threads": 1}),
    (WHOLE, {"workers": 2, "threads": 1}),
)
LOADS = {
    "known": {"limit_s": 1.0, "first": 2.0, "words": "two seeds: populations are solved"},
    "fresh": {"limit_s": 10.0, "first": 0.5, "words": "every request has a seed of its own"},
}
Kinds = Iterator[tuple[str, Mapping[str, Any]]]


def fitted_bundle(folder: Path) -> Path:
    """The shipped cells, fitted for a few steps and saved with control cells."""
    adata = datasets.kang2018_small()
    columns: dict[str, Any] = {
        "perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"],
        "scale": "counts",
    }  # fmt: skip
    model = ptd.SetDiffusion.from_anndata(adata, **columns).fit(
        adata,
        holdout={"cell_type": ["NK"]},
        train=ptd.TrainConfig(max_steps=40, check_every=20),
        options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )
    model.save(folder / "bundle", include_controls=256)
    return folder / "bundle"


def question(rng: np.random.Generator, *, seed: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One of the mixed questions: another context, size, number of steps and guidance each."""
    return {
        "perturbations": ["stim"],
        "contexts": [{"cell_type": str(rng.choice(TYPES))}],
        "n_cells": int(rng.choice(sizes)),
        "seed": seed,
        "sample": {
            "n_steps": int(rng.choice((10, 18))),
            "guidance_scale": float(rng.choice((1.0, 1.5))),
        },
    }


def questions(name: str, *, seed: int, sizes: tuple[int, ...] = (16, 32, 64)) -> Kinds:
    """Small questions without end: of few seeds, or each of its own."""
    rng, number = np.random.default_rng(seed), 0
    while True:
        number += 1
        own = 1000 * (seed + 1) + number if name == "fresh" else int(rng.integers(SEEDS))
        yield "plain", question(rng, seed=own, sizes=sizes)


def all_known() -> Kinds:
    """Every question of the known kind once."""
    for kind in TYPES:
        for n_steps in (10, 18):
            for scale in (1.0, 1.5):
                for seed in range(SEEDS):
                    yield "plain", {
                        "perturbations": ["stim"], "contexts": [{"cell_type": kind}],
                        "n_cells": 64, "seed": seed,
                        "sample": {"n_steps": n_steps, "guidance_scale": scale},
                    }  # fmt: skip


def warmed(url: str, *, workers: int) -> None:
    """Every known question asked until no worker has one to solve, or often enough."""
    for turn in range(1 if workers == 1 else 6):
        took = [one.seconds for one in load(url, all_known(), rate=8.0, seconds=30.0, seed=turn)]
        if max(took) < _SOLVES_S:
            return


def idle_cpu(pid: int, *, seconds: float = 5.0) -> float:
    """Processor time a second of a server that nobody asks."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds


def throughput(bundle: Path, *, seconds: float) -> dict[str, Any]:
    """For each arrangement and load: faster and faster, until p95 is above the limit."""
    found: dict[str, Any] = {}
    for name, way in WAYS:
        label = f"{name}, {way['workers']} worker(s), {way['threads']} thread(s)"
        found[label] = {}
        with serving(name, bundle, **way) as (url, pid):
            warmed(url, workers=way["workers"])
            found[label]["idle_cpu"] = idle_cpu(pid)
            for kind in LOADS:
                found[label][kind] = _ladder(
                    url, pid, kind, seconds=seconds, idle=found[label]["idle_cpu"]
                )
                print(label, kind, found[label][kind]["best"], flush=True)
    return found


def _ladder(url: str, pid: int, kind: str, *, seconds: float, idle: float) -> dict[str, Any]:
    rate, limit = LOADS[kind]["first"], LOADS[kind]["limit_s"]
    steps: list[dict[str, float]] = []
    best = 0.0
    while True:
        before, started = cpu_seconds(pid), time.perf_counter()
        asked = questions(kind, seed=len(steps) + 7)
        got = summary(load(url, asked, rate=rate, seconds=seconds, seed=3))
        nothing = idle * (time.perf_counter() - started)
        spent = (cpu_seconds(pid) - before - nothing) / max(got["answered"], 1)
        steps.append({"rate": rate, **got, "cpu_seconds": spent})
        if not got["p95"] <= limit:
            return {"steps": steps, "best": best, "limit_s": limit}
        best, rate = max(best, got["per_second"]), rate * FASTER


def overhead(bundle: Path, *, turns: int = 5, n_cells: int = 2048) -> dict[str, Any]:
    """A full batch through the server and by the model itself, in turns."""
    import httpx  # noqa: PLC0415 - only here

    torch.set_num_threads(1)
    model = ptd.load(bundle)
    times: dict[str, list[float]] = {"server": [], "model": []}
    ask: dict[str, Any] = {
        "perturbations": ["stim"], "contexts": [{"cell_type": "NK"}], "n_cells": n_cells,
    }  # fmt: skip
    with (
        serving(OURS, bundle) as (url, _),
        httpx.Client(base_url=url, timeout=300) as http,
    ):
        for turn in range(turns + 1):
            started = time.perf_counter()
            answer = http.post(
                "/predict", json=ask | {"seed": turn}, headers={"Accept": "application/x-hdf5"}
            )
            served = from_h5ad(answer.content)
            middle = time.perf_counter()
            pred = model.predict(None, seed=turn, **ask)
            ended = time.perf_counter()
            same = served.layers["counts"] != pred.layers["counts"]
            if turn:  # the first is warm-up
                times["server"].append(middle - started)
                times["model"].append(ended - middle)
            assert same.nnz <= 1e-5 * pred.n_obs * pred.n_vars
    medians = {name: statistics.median(values) for name, values in times.items()}
    share = medians["server"] / medians["model"] - 1
    return {"n_cells": n_cells, "seconds": times, "medians": medians, "overhead": share}


def quotes(bundle: Path, *, seconds: float) -> dict[str, Any]:
    """What requests were quoted, and what they took, alone and under load."""

    def mixed() -> Kinds:
        rng, number = np.random.default_rng(11), 0
        while True:
            number += 1
            kind = "quoted" if rng.random() < 0.5 else "plain"
            seed = number if rng.random() < 0.2 else int(rng.integers(SEEDS))
            yield kind, question(rng, seed=seed, sizes=(16, 64, 256, 1024))

    found = {}
    with serving(OURS, bundle) as (url, _):
        load(url, mixed(), rate=2, seconds=20)
        for name, rate in (("alone", 0.25), ("under load", 1.5)):
            asked = [
                one
                for one in load(url, mixed(), rate=rate, seconds=seconds, seed=5)
                if one.quoted is not None and one.status == 200
            ]
            ratio = np.array([one.seconds / max(one.quoted or 0.0, 1e-6) for one in asked])
            found[name] = {
                "requests": len(asked),
                "rate": rate,
                "median_ratio": float(np.median(ratio)),
                "within_half_and_double": float(((ratio > 0.5) & (ratio < 2)).mean()),
                "mean_seconds": float(np.mean([one.seconds for one in asked])),
                "mean_quote": float(np.mean([one.quoted for one in asked])),
            }
    return found


def soak(bundle: Path, *, seconds: float, rate: float = 6.0) -> dict[str, Any]:
    """Mixed requests for long, 1 % malformed and 5 % cancelled, with every 7th answer checked."""
    model, wrong, checked = ptd.load(bundle), 0, 0
    truth: dict[str, Any] = {}

    def mixed() -> Kinds:
        rng, number = np.random.default_rng(5), 0
        while True:
            number += 1
            chance = rng.random()
            kind = "malformed" if chance < 0.01 else "cancelled" if chance < 0.06 else "plain"
            fresh = kind == "cancelled" or rng.random() < 0.03
            yield (
                kind,
                question(
                    rng, seed=number if fresh else int(rng.integers(SEEDS)), sizes=(16, 32, 64, 256)
                ),
            )

    def right(one: Outcome) -> bool:
        asked = dict(one.question)
        sample, n_cells = asked.pop("sample"), asked.pop("n_cells")
        name = json.dumps([asked, sample])
        if name not in truth:
            truth[name] = model.predict(
                None, sample=ptd.SampleConfig(**sample), n_cells=256, **asked
            )
        have, want = from_h5ad(one.body), truth[name][:n_cells]
        difference = abs(have.layers["counts"] - want.layers["counts"])
        return bool(difference.sum() <= 1e-5 * want.n_obs * want.n_vars)

    memory: list[tuple[float, float]] = []
    with serving(OURS, bundle) as (url, pid):
        ended, started = threading.Event(), time.monotonic()

        def watch() -> None:
            while not ended.wait(5):
                memory.append((time.monotonic() - started, resident_mb(pid)))

        watching = threading.Thread(target=watch)
        watching.start()
        outcomes = load(
            url, mixed(), rate=rate, seconds=seconds, keep=lambda number: number % 7 == 0
        )
        ended.set()
        watching.join()
        for one in outcomes:
            if one.body and one.status == 200:
                checked += 1
                wrong += not right(one)
    settled = [mb for at, mb in memory if 60 <= at < 90]
    last = [mb for at, mb in memory if at > seconds - 30]
    statuses: dict[str, dict[str, int]] = {}
    for one in outcomes:
        row = statuses.setdefault(one.kind, {})
        row[str(one.status)] = row.get(str(one.status), 0) + 1
    return {
        "seconds": seconds,
        "rate": rate,
        **summary([one for one in outcomes if one.kind == "plain"]),
        "statuses": statuses,
        "checked": checked,
        "wrong": wrong,
        "stuck": sum(one.status == -1 for one in outcomes),
        "memory_mb": [[round(at, 1), round(mb, 1)] for at, mb in memory],
        "memory_after_first_minute": statistics.mean(settled) if settled else None,
        "memory_at_end": statistics.mean(last) if last else None,
    }


def main() -> None:
    """Run the sections that are asked for; what others found before stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("throughput", "overhead", "quotes", "soak")
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each step of a load")
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    parser.add_argument("--bundle", type=Path, help="saved with control cells of the shipped file")
    parser.add_argument("--out", type=Path, default=HERE)
    asked = parser.parse_args()
    result = asked.out / "results" / "serving.json"
    report = json.loads(result.read_text()) if result.exists() else {"sections": {}}
    with TemporaryDirectory() as folder:
        bundle = asked.bundle or fitted_bundle(Path(folder))
        for name in asked.sections:
            started = time.monotonic()
            if name == "throughput":
                found = throughput(bundle, seconds=asked.seconds)
            elif name == "overhead":
                found = overhead(bundle)
            elif name == "quotes":
                found = quotes(bundle, seconds=4 * asked.seconds)
            else:
                found = soak(bundle, seconds=asked.soak_seconds)
            report["sections"][name] = {
                "found": found,
                "made_with": environment(),
                "command": f"python -m benchmarks.serving --sections {name}",
                "minutes": (time.monotonic() - started) / 60,
            }
            result.parent.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(report, indent=1) + "\n")
            (asked.out / "reports").mkdir(exist_ok=True)
            (asked.out / "reports" / "serving.md").write_text(told(report))
            print(name, f"{(time.monotonic() - started) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
