"""Diffusion against the sibling at equal parameters: latency, throughput, limits, crossover.

*Generation* is what the networks are for: of the diffusion model, encoding control cells and all
steps of the sampler, up to latent responses; of the sibling, prefill and one call a gene, up to
counts. Whole predictions are timed beside it: a diffusion model's first one solves count transport
on 512 pilot cells, however few cells are asked for.

The sibling's calls differ only in how many genes were said before, so for batches in which all of
them would take minutes, calls are timed at nine lengths and summed by the trapezoid rule; where
both are known, the sum is beside the time of all calls.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import perturbdiff as ptd
from benchmarks.inference_models import Models, plain_decoding, synchronised
from perturbdiff._random import cell_keys
from perturbdiff.model._fitted import PILOT_CELLS
from perturbdiff.model._quote_causal import DecoderCost
from perturbdiff.model._quote_diffusion import DenoiserCost, batches
from perturbdiff.profiling import Work, this_machine

BATCHES = (1, 4, 16, 64, 256, 1024)
LENGTHS = 9
AT_ONCE = 256  # cells that the sibling writes together
_SECONDS = 0.15


def both(models: Models, genes: tuple[int, ...]) -> dict[str, Any]:
    """Figures of both models for every number of genes."""
    return {str(n_genes): _of_genes(models, n_genes) for n_genes in genes}


def _of_genes(models: Models, n_genes: int) -> dict[str, Any]:
    diffusion, sibling = models.diffusion(n_genes), models.sibling(n_genes)
    rows = {
        "set_diffusion": [_diffused(models, diffusion, n) for n in BATCHES],
        "causal_baseline": [_written(models, sibling, n) for n in BATCHES],
    }
    return {
        "parameters": {
            "set_diffusion": diffusion.probe_points().n_parameters,
            "causal_baseline": sibling.probe_points().n_parameters,
        },
        "rows": rows,
        "whole_prediction": {
            "set_diffusion": {str(n): _whole(models, diffusion, n) for n in (1, 256)},
            "causal_baseline": {"1": _whole(models, sibling, 1, **plain_decoding())},
        },
        "crossover_batch": crossover(
            *([row["cells_per_second"] for row in rows[kind]] for kind in rows)
        ),
    }


def crossover(first: list[float], second: list[float]) -> int | None:
    """Smallest batch from which on the second lets more cells through; None if it never does."""
    ahead = [b > a for a, b in zip(first, second, strict=True)]
    for batch, number in zip(BATCHES, range(len(BATCHES)), strict=True):
        if all(ahead[number:]):
            return batch
    return None


def task_of(model: Any, models: Models, n_cells: int) -> Any:
    """The condition that is asked for, ready to sample."""
    question = model._ask(None, **models.question, n_cells=n_cells)
    condition, controls = model._with_controls_of(question)[0]
    target = model.fitted.target(condition, controls)
    return model.fitted.task(condition, controls, target, n_cells=max(n_cells, PILOT_CELLS), seed=0)


def _diffused(models: Models, model: Any, n_cells: int) -> dict[str, Any]:
    size = min(n_cells, 32)
    config, n_sets = ptd.SampleConfig(set_size=size), -(-n_cells // size)
    task = task_of(model, models, n_cells)

    def work() -> Any:
        model.probe_points().forget()
        return model.fitted.sampler.sample([task], [list(range(n_sets))], config, seed=0)

    seconds, calls = _timed(models, work)[0], config.n_steps
    cost = DenoiserCost(model.fitted, size)
    sizes = batches(n_sets, at_once=model.fitted.sampler.sets_at_once(size))
    done = sum((calls * count * cost.work(sets) for sets, count in sizes), Work())
    done += Work(operations=cost.shape.encode_controls())
    most = max(sets for sets, _ in sizes)
    cache = cost.shape.memory_numbers(most) * 4
    return _row(models, n_cells, seconds=seconds, work=done) | {
        "network_calls": calls * sum(count for _, count in sizes),
        "cache_bytes": cache,
    }


def _written(models: Models, model: Any, n_cells: int) -> dict[str, Any]:
    each = min(n_cells, AT_ONCE)
    config = replace(plain_decoding()["decode"], set_size=each)
    cost = DecoderCost(model.fitted, task_of(model, models, each), config)
    device, n_genes = torch.device(models.device), cost.n_genes
    reaches = np.unique(np.linspace(1, n_genes, LENGTHS).round().astype(int)).tolist()
    with torch.inference_mode():
        prefill = _median(models, lambda: cost.cells(each))
        cells = cost.cells(each)
        took = [_median(models, cost.advancing(cells, reach)) for reach in reaches]
    summed = (prefill + float(np.trapezoid(took, reaches))) * n_cells / each
    del cells
    row = _row(models, n_cells, seconds=summed, work=cost.work(each) * (n_cells / each))
    if device.type == "cpu" and n_genes * n_cells <= 8000:
        row["seconds_of_all_calls"] = _timed(models, lambda: _all_calls(cost, each), repeats=2)[0]
    return row | {
        "network_calls": (n_genes + 1) * (n_cells // each),
        "cache_bytes": cost.shape.cache_numbers(each) * 4,
    }


def _all_calls(cost: DecoderCost, n_cells: int) -> None:
    from perturbdiff.autoregressive import decode  # noqa: PLC0415

    with torch.inference_mode():
        cache = cost.fitted.sampler.prefilled([(cost.task, [0])], n_cells)
    keys = cell_keys(0, "timed", 0, n_cells=n_cells).to(cache.keys.device)
    decode(cost.decoding, cache, keys)


def _row(models: Models, n_cells: int, *, seconds: float, work: Work) -> dict[str, Any]:
    machine = this_machine(models.device)
    return {
        "cells": n_cells,
        "seconds": seconds,
        "cells_per_second": n_cells / seconds,
        **work.to_json(),
        "intensity": work.intensity,
        "operations_per_second": work.operations / seconds,
        **machine.judged(work, seconds),
    }


def _timed(models: Models, work: Callable[[], Any], repeats: int = 3) -> list[float]:
    """Times of some runs after one to warm up, shortest first."""
    took = []
    if repeats > 1:
        work()
    for _ in range(repeats):
        synchronised(models.device)
        began = time.perf_counter()
        work()
        synchronised(models.device)
        took.append(time.perf_counter() - began)
    return sorted(took)


def _median(models: Models, work: Callable[[], Any]) -> float:
    work()
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 3 or (time.perf_counter() - began < _SECONDS and len(took) < 50):
        took += _timed(models, work, repeats=1)
    return statistics.median(took)


def _whole(models: Models, model: Any, n_cells: int, **settings: Any) -> dict[str, float]:
    def work() -> None:
        model.probe_points().forget()
        model.predict(**models.question, n_cells=n_cells, **settings)

    seconds = _timed(models, work)[0]
    return {"seconds": seconds, "cells_per_second": n_cells / seconds}


def drawn_runs(found: dict[str, Any], n_genes: str) -> list[dict[str, Any]]:
    """Both models in both regimes, as ``ptd.pl.roofline`` wants them."""
    phases = {"set_diffusion": "denoising steps", "causal_baseline": "decode steps"}
    runs = []
    for kind, rows in found[n_genes]["rows"].items():
        for row in (rows[0], rows[-1]):
            phase = {"name": phases[kind], **row}
            runs.append({"name": kind, "n_cells": row["cells"], "phases": [phase]})
    return runs
