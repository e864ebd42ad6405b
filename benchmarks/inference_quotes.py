"""How close quotes are: whole predictions of many shapes, quoted first and then run."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

import perturbdiff as ptd
from benchmarks.inference_models import Models, plain_decoding, synchronised

REPEATS = 3
SHAPES = [
    {"genes": genes, "width": width, "set_size": size, "n_cells": n, "n_steps": steps,
     "guidance_scale": scale, "n_contexts": contexts}
    for genes, (width, size), (n, steps, scale), contexts in product(
        (500, 1000),
        ((96, 32), (192, 16), (96, 128)),
        ((1, 18, 1.0), (300, 8, 1.0), (700, 18, 2.0), (1200, 30, 1.0), (900, 4, 2.0),
         (2100, 12, 1.0)),
        (1, 2),
    )
]  # fmt: skip
WRITTEN = [(1, 1), (3, 1), (12, 1), (33, 1), (70, 1), (150, 1), (8, 2), (40, 2)]


def quoted(models: Models, *, clock: Callable[[], float]) -> dict[str, Any]:
    """Errors of the quotes of both models."""
    rows = [_diffusion(models, shape, clock) for shape in SHAPES]
    models.sibling(500).predict(**models.question, n_cells=1, **plain_decoding())  # to warm up
    written = [
        _sibling(models, n_cells=n, n_contexts=contexts, clock=clock) for n, contexts in WRITTEN
    ]
    return {
        "set_diffusion": {**summary(rows), "rows": rows},
        "causal_baseline": {**summary(written), "rows": written, "how": written[-1]["how"]},
        "repeats": REPEATS,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and 95th percentile of the relative errors, and how much repeats differ."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "shapes": len(rows),
        "median_error": statistics.median(errors),
        "error_95": float(np.quantile(errors, 0.95)),
        "within_range": statistics.mean(
            float(row["low"] <= row["seconds"] <= row["high"]) for row in rows
        ),
        "median_spread_of_repeats": statistics.median(row["spread"] for row in rows),
        "spread_of_repeats_95": float(np.quantile([row["spread"] for row in rows], 0.95)),
    }


def _diffusion(models: Models, shape: dict[str, Any], clock: Callable[[], float]) -> dict[str, Any]:
    model = models.diffusion(shape["genes"], width=shape["width"])
    sample = ptd.SampleConfig(
        set_size=shape["set_size"], n_steps=shape["n_steps"],
        guidance_scale=shape["guidance_scale"],
    )  # fmt: skip
    asked = {"n_cells": shape["n_cells"], "sample": sample}
    counts = {"n_conditions": shape["n_contexts"], "n_contexts": shape["n_contexts"]}
    quote = model.quote(**asked, **counts)
    n_contexts = shape["n_contexts"]
    found = compared(models, model, quote, asked=asked, n_contexts=n_contexts, clock=clock)
    return {**shape, **found}


def _sibling(
    models: Models, *, n_cells: int, n_contexts: int, clock: Callable[[], float]
) -> dict[str, Any]:
    model = models.sibling(500)
    asked = {"n_cells": n_cells, **plain_decoding()}
    quote = model.quote(**asked, n_conditions=n_contexts, n_contexts=n_contexts)
    found = compared(
        models, model, quote, asked=asked, n_contexts=n_contexts, clock=clock, repeats=1
    )
    return {"genes": 500, "n_cells": n_cells, "n_contexts": n_contexts, **found}


def compared(
    models: Models,
    model: Any,
    quote: Any,
    *,
    asked: dict[str, Any],
    n_contexts: int,
    clock: Callable[[], float],
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """A quote, and first predictions of what it is for."""
    perturbations = models.question["perturbations"]
    took = []
    for seed in range(repeats):
        model.probe_points().forget()
        synchronised(models.device)
        began = clock()
        pred = model.predict(
            perturbations=perturbations, contexts=models.contexts(n_contexts), seed=seed, **asked
        )
        synchronised(models.device)
        took.append(clock() - began)
    seconds = statistics.median(took)
    return {
        "seconds": seconds,
        "quoted": quote.seconds,
        "low": quote.low,
        "high": quote.high,
        "error": quote.seconds / seconds - 1,
        "spread": max(took) / min(took) - 1,
        "network_calls": int(pred.uns["perturbdiff"]["nfe"]),
        "quoted_calls": quote.network_calls,
        "quoted_memory_bytes": quote.memory_bytes,
        "how": quote.how,
    }


def process_clock() -> float:
    """Processor time of this process: on one thread, what a machine without others would take."""
    return time.process_time()
