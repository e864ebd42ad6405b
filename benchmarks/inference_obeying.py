"""How close quotes are under constraints, and of cells that the sibling makes by transport."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import perturbdiff as ptd
from benchmarks.inference_models import Models, plain_decoding
from benchmarks.inference_quotes import REPEATS, compared, summary
from perturbdiff._logging import logger

GENES = 500


def wishes(model: Any) -> dict[str, Any]:
    """A gene of every cell, the mean of a gene, and both, on genes that control cells have."""
    mean = np.asarray(model._reservoir.X.mean(0)).ravel()
    known = set(model.registry.genes)
    names = [name for name in model._reservoir.var_names[np.argsort(-mean)] if name in known]
    cell, population = ptd.AtLeast(names[5], 1.0), ptd.AtMost(names[8], 0.2, per="population")
    return {"cell": cell, "population": population, "both": [cell, population], "none": ()}


OBEYING: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("cell", "hard", 1, {}),
    ("cell", "hard", 200, {}),
    ("cell", "hard", 900, {"n_steps": 8}),
    ("cell", "hard", 256, {"guidance_scale": 2.0}),
    ("population", "hard", 64, {}),
    ("population", "hard", 700, {"n_steps": 10}),
    ("both", "hard", 300, {}),
    ("both", "hard", 2000, {"n_steps": 8}),
    ("cell", "soft", 64, {}),
    ("population", "soft", 300, {}),
    ("population", "soft", 1500, {"n_steps": 8}),
    ("population", ptd.Soft(through_network=True), 128, {}),
    ("cell", "best_of", 32, {}),
    ("population", "best_of", 200, {}),
    ("population", "best_of", 256, {"sampler": "heun", "n_steps": 8}),
    ("cell", ptd.BestOf(n=8, redraws=4), 128, {"n_steps": 12}),
    ("cell", "branch", 100, {}),
    ("population", "branch", 300, {}),
    ("cell", ptd.Branch(k=6, share=4), 64, {"n_steps": 10}),
    ("cell", "particles", 64, {}),
    ("population", "particles", 200, {"n_steps": 12}),
    ("both", ["soft", "hard"], 200, {}),
    ("both", ["best_of", "hard"], 1000, {"n_steps": 8}),
    ("cell", ["soft", "branch"], 150, {"set_size": 16}),
]
AT_MOST: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("cell", "depth_first", 64, {}),
    ("population", "depth_first", 150, {}),
]
WRITTEN: list[tuple[str, Any, int, str]] = [
    ("none", None, 40, "transport"),
    ("cell", "hard", 8, "raw"),
    ("cell", None, 100, "raw"),
    ("population", ptd.BestOf(n=2), 64, "raw"),
    ("both", "best_of", 20, "raw"),
    ("population", ptd.BestOf(n=2), 40, "transport"),
]


def obeyed(models: Models, *, clock: Callable[[], float]) -> dict[str, Any]:
    """Errors where the number of calls is known, and what is told where only the most is."""
    level, logged = logger.level, "ERROR"  # that cells miss is no matter here
    logger.setLevel(logged)
    try:
        known = [_diffusion(models, shape, clock) for shape in OBEYING]
        most = [_diffusion(models, shape, clock) for shape in AT_MOST]
        written = [_sibling(models, shape, clock) for shape in WRITTEN]
    finally:
        logger.setLevel(level)
    exact = [row for row in written if _met(row)]
    return {
        "set_diffusion": {
            **summary(known), "rows": known, "calls_met": statistics.mean(map(_met, known)),
            "quoting": statistics.median(row["quoting"] for row in known),
        },
        "causal_baseline": {**summary(exact), "rows": written},
        "at_most": {
            "rows": most,
            "calls_of_the_most": statistics.mean(
                row["network_calls"] / row["quoted_calls"] for row in most
            ),
            "within_range": statistics.mean(
                float(row["low"] <= row["seconds"] <= row["high"]) for row in most
            ),
        },
    }  # fmt: skip


def _met(row: dict[str, Any]) -> bool:
    return bool(row["network_calls"] == row["quoted_calls"])


def _told(
    models: Models,
    model: Any,
    *,
    asked: dict[str, Any],
    clock: Callable[[], float],
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """A quote, how long it took, and predictions."""
    began = clock()
    quote = model.quote(**asked)
    quoting = clock() - began
    found = compared(models, model, quote, asked=asked, n_contexts=1, clock=clock, repeats=repeats)
    return {**found, "quoting": quoting}


def _diffusion(
    models: Models, shape: tuple[str, Any, int, dict[str, Any]], clock: Callable[[], float]
) -> dict[str, Any]:
    wish, enforce, n_cells, settings = shape
    model = models.diffusion(GENES)
    asked = {
        "n_cells": n_cells, "sample": ptd.SampleConfig(**settings),
        "constraints": wishes(model)[wish], "enforce": enforce,
    }  # fmt: skip
    found = _told(models, model, asked=asked, clock=clock)
    return {"wish": wish, "enforce": str(enforce), "n_cells": n_cells, **settings, **found}


def _sibling(
    models: Models, shape: tuple[str, Any, int, str], clock: Callable[[], float]
) -> dict[str, Any]:
    wish, enforce, n_cells, decoding = shape
    model = models.sibling(GENES)
    asked = {
        "n_cells": n_cells, "decoding": decoding, "constraints": wishes(model)[wish],
        "enforce": enforce, **plain_decoding(),
    }  # fmt: skip
    found = _told(models, model, asked=asked, clock=clock, repeats=1)
    return {
        "wish": wish, "enforce": str(enforce), "n_cells": n_cells, "decoding": decoding, **found,
    }  # fmt: skip
