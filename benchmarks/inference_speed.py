"""What makes predictions faster, and what it costs: precision, steps, screening, many cells."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perturbdiff as ptd
from benchmarks.cache import Cache
from benchmarks.contexts import ContextStudy
from benchmarks.fits import Recipe
from benchmarks.inference_models import Models
from benchmarks.inference_written import written_scores, written_speed
from benchmarks.tables import better
from perturbdiff._constants import UNS_KEY
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig
from perturbdiff.model._quote_diffusion import DenoiserCost
from perturbdiff.profiling._machine import run_seconds

SCORES = (
    "pearson_shift", "mae_shift", "energy_distance", "centred_energy_distance", "mmd",
    "variance_explained", "de_overlap", "direction_match",
)  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "int8", "float8")
PRODUCTS = (  # how float32 numbers are multiplied, which torch lets one set
    ("float32", "highest"), ("float32, medium", "medium"), ("bfloat16", "highest"),
    ("int8", "highest"), ("float8", "highest"),
)  # fmt: skip
SAMPLERS = ("euler", "heun", "dpmpp_2m", "stochastic")
STEPS = (1, 2, 4, 8, 18, 50)
CONTEXT = "B"
WIDE = ptd.NetworkConfig(width=256, n_blocks=3, n_heads=4, expansion=4)
WIDE_STEPS = 150
SCREEN = SimulationConfig(
    n_genes=500, n_contexts=3, n_perturbations=45, n_unseen=0, n_pairs=3, n_cells=40,
    n_controls=256, doses=(), hours=(),
)  # fmt: skip
SCREENED = 1000
SEPARATE = 25
MANY = 200_000


class Judge:
    """A held-out context of Kang 2018: models to fit, cells to score.

    Parameters
    ----------
    path
        File.
    n_genes
        Highly variable genes that models know.
    """

    def __init__(self, path: Path, n_genes: int = 2000) -> None:
        self.n_genes = n_genes
        with tempfile.TemporaryDirectory() as folder:
            self.study = ContextStudy(
                path=path, perturbation_key="condition", control="ctrl", context_key="cell_type",
                recipe=Recipe(n_top_genes=n_genes), cache=Cache(Path(folder)),
            )  # fmt: skip
            self.wanted, self.held = self.study.wanted(CONTEXT), self.study._view(CONTEXT)

    def fitted(self, network: Any, train: ptd.TrainConfig, kind: Any = ptd.SetDiffusion) -> Any:
        """A model that did not see the context."""
        model = kind(self.study.registry)
        model.fit(
            self.study.adata, holdout=self.wanted.holdout, n_top_genes=self.n_genes, seed=0,
            network=network, train=train, options=ptd.TrainerOptions(progress=False),
        )  # fmt: skip
        return model

    def ask(self, model: Any, **how: Any) -> Any:
        """512 cells of the context."""
        return model.predict(
            self.study.adata, perturbations=self.wanted.perturbations,
            contexts=self.wanted.contexts, **({"n_cells": 512, "seed": 0} | how),
        )  # fmt: skip

    def scores(self, pred: Any) -> dict[str, float]:
        """Every score of the cells."""
        order = pred.var_names.get_indexer(list(self.held.controls.cells.genes))
        found = self.held.score(pred.X.toarray()[:, order].astype(np.float32))["values"]
        return {name: float(found[name]) for name in SCORES}


def precisions(models: Models, data: Path | None) -> dict[str, Any]:
    """Seconds of a wide step in each precision, and every score of cells made in it."""
    device, speed = torch.device(models.device), []
    products_before = torch.get_float32_matmul_precision()
    for width in (96, 256, 512):
        shape = {"width": width, "n_blocks": 3, "n_heads": max(width // 64, 2), "expansion": 4}
        whole = models.diffusion(500, **shape)
        for set_size, n_sets in ((32, 64), (256, 8)):
            took = {}
            for name, products in PRODUCTS:
                lower = whole.in_precision(name.split(",")[0])
                torch.set_float32_matmul_precision(products)
                with torch.inference_mode():
                    call = DenoiserCost(lower.fitted, set_size).call(n_sets)
                    took[name] = run_seconds(device, call, 0.6)[0]
            speed.append({"width": width, "sets": n_sets, "set_size": set_size, "seconds": took})
    torch.set_float32_matmul_precision("highest")
    found: dict[str, Any] = {"speed": speed}
    if data is not None:
        judge = Judge(data)
        model = judge.fitted(WIDE, ptd.TrainConfig(max_steps=WIDE_STEPS, check_every=WIDE_STEPS))
        cells = {name: judge.ask(model.in_precision(name)) for name in PRECISIONS}
        scores = {name: judge.scores(pred) for name, pred in cells.items()}
        scores["float32, another seed"] = judge.scores(judge.ask(model, seed=1))
        found |= {"scores": scores, "lost": losses(scores), "context": CONTEXT}
        found["train_steps"], found["width"] = model.fitted.steps, WIDE.width
    found["sibling"] = _written(models, data)
    torch.set_float32_matmul_precision(products_before)
    return found


def _written(models: Models, data: Path | None) -> dict[str, Any]:
    """The same of the sibling."""
    found = written_speed(models)
    if data is not None:
        found |= written_scores(Judge(data, n_genes=found["genes"]))
        found |= {"lost": losses(found["scores"]), "context": CONTEXT}
    return found


def losses(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Share of each float32 score that is lost; below 0 where the other is better."""
    whole = scores["float32"]
    return {
        name: {
            metric: (1 if better(metric, whole[metric], value) else -1)
            * abs(value - whole[metric])
            / max(abs(whole[metric]), 1e-12)
            for metric, value in found.items()
        }
        for name, found in scores.items()
        if name != "float32"
    }


def few_steps(data: Path | None) -> dict[str, Any]:
    """Scores against steps, for every sampler; the default fit on Kang 2018."""
    if data is None:
        return {"rows": [], "why": "no file was given to score against"}
    judge = Judge(data)
    model, rows = judge.fitted(ptd.NetworkConfig(), ptd.TrainConfig()), []
    for sampler in SAMPLERS:
        for n_steps in STEPS:
            model.fitted.plans.clear()
            began = time.perf_counter()
            pred = judge.ask(model, sample=ptd.SampleConfig(sampler=sampler, n_steps=n_steps))
            rows.append(
                {
                    "sampler": sampler,
                    "n_steps": n_steps,
                    "nfe": int(pred.uns[UNS_KEY]["nfe"]),
                    "seconds": time.perf_counter() - began,
                    "scores": judge.scores(pred),
                }
            )
    return {"rows": rows, "context": CONTEXT, "train_steps": model.fitted.steps}


def screening(device: str) -> dict[str, Any]:
    """Many perturbations of one context in one call, against a call for each of them."""
    adata = simulated(SCREEN, seed=0).adata
    model = ptd.SetDiffusion.from_anndata(
        adata, perturbation_key="perturbation", control="control", covariate_keys=["cell_type"],
        scale="counts", separator="+",
    )  # fmt: skip
    few = ptd.TrainConfig(max_steps=30, check_every=30)
    model.fit(adata, n_top_genes=None, train=few, options=ptd.TrainerOptions(progress=False))
    model.to(device)
    singles = [f"P{number + 1}" for number in range(SCREEN.n_perturbations)]
    asked = [*singles, *("+".join(pair) for pair in combinations(singles, 2))][:SCREENED]
    rules = {"contexts": [{"cell_type": "T1"}], "n_cells": 32}
    sample = ptd.SampleConfig(n_steps=8, sampler="dpmpp_2m")
    model.predict(adata, perturbations=asked[-1:], sample=sample, seed=9, **rules)
    began = time.perf_counter()
    for one in asked[:: len(asked) // SEPARATE][:SEPARATE]:
        model.predict(adata, perturbations=[one], sample=sample, seed=1, **rules)
    each = (time.perf_counter() - began) / SEPARATE
    timed = _Stages(model)
    began = time.perf_counter()
    with timed:
        pred = model.predict(adata, perturbations=asked, sample=sample, seed=2, **rules)
    together = time.perf_counter() - began
    return {
        "perturbations": len(asked),
        "cells": pred.n_obs,
        "genes": pred.n_vars,
        "seconds_together": together,
        "seconds_separate": each * len(asked),
        "separate_calls_timed": SEPARATE,
        "times_faster": each * len(asked) / together,
        "seconds_by_stage": timed.seconds,
        "share_of_bound": sum(timed.seconds.values()) / together,
    }


class _Stages:
    """Seconds in what each condition needs for itself: network, transport, draws."""

    def __init__(self, model: Any) -> None:
        self.owners = {
            "network": (model.fitted.sampler, "sample"),
            "transport solved": (model.fitted, "solve"),
            "counts drawn": (model.fitted, "_draw_all"),
        }
        self.seconds = dict.fromkeys(self.owners, 0.0)

    def __enter__(self) -> None:
        for stage, (owner, name) in self.owners.items():
            setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def _timed(self, stage: str, work: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            done = work(*given, **named)
            self.seconds[stage] += time.perf_counter() - began
            return done

        return timed

    def __exit__(self, *_: object) -> None:
        for owner, name in self.owners.values():
            delattr(owner, name)


def many_cells(models: Models) -> dict[str, Any]:
    """Memory of a process that loads a model and predicts very many cells."""
    model = models.diffusion(2000)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "bundle"
        model.to("cpu").save(where, include_controls=512)
        script = (
            "import json, sys, benchmarks.inference_speed as it; "
            "print(json.dumps(it.predicted(sys.argv[1], int(sys.argv[2]))))"
        )
        command = [sys.executable, "-c", script, str(where), str(MANY)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(bundle: str, n_cells: int) -> dict[str, Any]:
    """In a process of its own: the most memory that it ever held."""
    model = ptd.load(bundle)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    control = model._reservoir.obs
    context = {key: str(control[key].iloc[0]) for key in model.registry.covariate_keys}
    began = time.perf_counter()
    pred = model.predict(
        perturbations=[model.registry.perturbations.levels[0]], contexts=[context],
        n_cells=n_cells, sample=ptd.SampleConfig(n_steps=8, sampler="dpmpp_2m"),
    )  # fmt: skip
    return {
        "cells": pred.n_obs,
        "genes": pred.n_vars,
        "seconds": time.perf_counter() - began,
        "bytes_before": before,
        "bytes_most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "entries_not_zero": int(pred.X.nnz),
    }
