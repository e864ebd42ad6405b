"""The autoregressive sibling in lower precision: a call, whole predictions, and cells to score."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import perturbdiff as ptd
from benchmarks.inference_models import Models, plain_decoding, synchronised
from perturbdiff.model import _quote_causal
from perturbdiff.model._quote_causal import DecoderCost, _task
from perturbdiff.model._quote_rest import own_controls

PRECISIONS = ("float32", "bfloat16", "int8")
GENES = 500
WIDTHS = (96, 256)
CELLS = (1, 16, 256)
AT_ONCE = 256
_TURNS = 15
_WHOLE_TURNS = 2
WIDE = ptd.DecoderConfig(width=256)
TRAIN_STEPS = 150


def written_speed(models: Models) -> dict[str, Any]:
    """Seconds of a decode call half way, and of whole predictions; precisions take turns."""
    calls, whole = [], []
    for width in WIDTHS:
        model = models.sibling(GENES, width=width)
        lower = {name: model.in_precision(name) for name in PRECISIONS}
        for n_cells in CELLS:
            took = in_turns(_calls(lower, n_cells), models.device, turns=_TURNS)
            calls.append({"width": width, "cells": n_cells, "seconds": took})
        asked = {name: _asking(models, one) for name, one in lower.items()}
        took = in_turns(asked, models.device, turns=_WHOLE_TURNS)
        whole.append({"width": width, "cells": AT_ONCE, "seconds": took})
    return {"calls": calls, "whole": whole, "genes": GENES}


def in_turns(work: Mapping[str, Callable[[], Any]], device: str, *, turns: int) -> dict[str, float]:
    """Median seconds of each, run one after another in turns, so that all meet the same machine."""
    took: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):  # the first is to warm up
        for name, one in work.items():
            synchronised(device)
            began = time.perf_counter()
            one()
            synchronised(device)
            if turn:
                took[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in took.items()}


def _calls(models: Mapping[str, Any], n_cells: int) -> dict[str, Callable[[], Any]]:
    """A call of each that says a gene half way through the cells."""
    some = next(iter(models.values()))
    config = ptd.DecodeConfig(draft_length=0)
    found = {}
    for name, model in models.items():
        cost = object.__new__(DecoderCost)  # for its calls: nothing is measured here
        cost.fitted, cost.config = model.fitted, config
        cost.task = _task_for(some)
        cost.decoding, cost.n_genes = model.fitted.sampler._decoding(config, None), GENES
        with torch.inference_mode():
            found[name] = _untracked(cost.advancing(cost.cells(n_cells), GENES // 2))
    return found


def _task_for(model: Any) -> Any:
    """A condition with partners for as many cells as are written together."""
    most = _quote_causal._CELLS
    _quote_causal._CELLS = (AT_ONCE,)
    try:
        return _task(model, own_controls(model), missing_genes="refuse")
    finally:
        _quote_causal._CELLS = most


def _untracked(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with torch.inference_mode():
            call()

    return run


def _asking(models: Models, model: Any) -> Callable[[], Any]:
    return lambda: model.predict(**models.question, n_cells=AT_ONCE, **plain_decoding())


def written_scores(judge: Any) -> dict[str, Any]:
    """Every score of cells in each precision, seconds of them, and another seed as yardstick."""
    steps = {"max_steps": TRAIN_STEPS, "check_every": TRAIN_STEPS}
    few = ptd.TrainConfig(**(vars(ptd.model._causal_baseline.CAUSAL_TRAIN) | steps))
    model = judge.fitted(WIDE, few, kind=ptd.CausalBaseline)
    made: dict[str, Any] = {}

    def asking(name: str) -> Callable[[], None]:
        lower = model.in_precision(name)

        def ask() -> None:
            made[name] = judge.ask(lower)

        return ask

    asked = {name: asking(name) for name in PRECISIONS}
    seconds = in_turns(asked, str(model.fitted.sampler.device), turns=_WHOLE_TURNS)
    scores = {name: judge.scores(pred) for name, pred in made.items()}
    scores["float32, another seed"] = judge.scores(judge.ask(model, seed=1))
    return {
        "scores": scores,
        "seconds": seconds,
        "train_steps": model.fitted.steps,
        "width": WIDE.width,
        "genes": len(model.registry.genes),
    }
