"""The held-out conditions that are asked about, the models that answer, and their true cells."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from anndata import AnnData

import perturbdiff as ptd
from benchmarks.cache import Cache, key_digest
from benchmarks.constraint_tasks import SET_SIZE
from benchmarks.fits import Recipe
from benchmarks.quality import say
from benchmarks.worlds import SimulatedWorld
from perturbdiff.data import Condition
from perturbdiff.data.datasets import SimulationConfig
from perturbdiff.data.datasets._simulate import Treatment
from perturbdiff.model._causal_baseline import CAUSAL_TRAIN

DRAWS = 8
N_TRUE = 16_384
WORLD = SimulationConfig(
    n_genes=400,
    n_contexts=5,
    n_perturbations=3,
    n_unseen=0,
    n_pairs=0,
    doses=(),
    hours=(),
    n_cells=200,
    n_controls=512,
    responder_share=0.5,
    effect_size=2.0,
)


class Question:
    """One held-out condition, the models that answer it, and its true cells."""

    def __init__(
        self,
        name: str,
        models: "Models",
        adata: AnnData,
        *,
        perturbation: str,
        context: dict[str, str],
        true_NG: np.ndarray,
        control_RG: np.ndarray,
    ) -> None:
        self.name, self.adata = name, adata
        self.model, self.sibling = models.diffusion, models.sibling
        self.seconds_fit = models.seconds
        self.perturbation, self.context = perturbation, context
        self.true_NG, self.control_RG = true_NG, control_RG
        self.axes = models.diffusion.fitted.loadings[:, :30]

    def ask(
        self, n_cells: int, *, model: Any = None, **wish: Any
    ) -> tuple[np.ndarray, AnnData, float]:
        """Cells, the prediction, and seconds."""
        started = time.perf_counter()
        pred = (model or self.model).predict(
            self.adata,
            perturbations=[self.perturbation],
            contexts=[self.context],
            n_cells=n_cells,
            **{"seed": 1, **wish},
        )
        seconds = time.perf_counter() - started
        return np.asarray(pred.X.toarray(), dtype=np.float64), pred, seconds

    def ask_often(self, n_cells: int, **wish: Any) -> np.ndarray:
        """Mean over several seeds: what is expected of each cell."""
        every = [self.ask(n_cells, seed=seed, **wish)[0] for seed in range(DRAWS)]
        return np.asarray(np.mean(every, axis=0))

    def true_sets(self, n_sets: int) -> np.ndarray:
        """Sets of true cells, drawn with replacement."""
        rng = np.random.default_rng(0)
        rows = rng.choice(len(self.true_NG), (n_sets, SET_SIZE))
        return self.true_NG[rows]

    def training_cells(self) -> np.ndarray:
        """Log1p values of cells that the model was trained on: not those of the question."""
        cells = ptd.data.encode(self.adata, self.model.registry)
        asked = Condition((self.perturbation,), tuple(self.context.values()))
        kept = np.ones(len(cells), dtype=bool)
        kept[cells.conditions().get(asked, [])] = False
        return np.asarray(cells.log1p.toarray(), dtype=np.float64)[kept]


class Models:
    """The siblings fitted on the same cells.

    They are kept in a folder by settings and data, not by source code: another way of enforcing
    needs no other fit. Empty the folder after a change to how models learn.
    """

    def __init__(
        self, registry: Any, adata: AnnData, *, holdout: Any, recipe: Recipe, folder: Path
    ) -> None:
        self.seconds: dict[str, float] = {}
        settings = {"holdout": holdout, "n_top_genes": recipe.n_top_genes, "seed": 0}
        options = ptd.TrainerOptions(progress=False, accelerator=recipe.accelerator)

        def kept(kind: Any, **own: Any) -> Any:
            key = {name: value for name, value in recipe.key().items() if name != "source"}
            key |= {"holdout": holdout, "registry": registry.to_json(), "cells": adata.n_obs}
            path = folder / f"{kind.kind}-{key_digest(key)}"
            if path.is_dir():
                return ptd.load(path)
            say(f"{kind.kind} learns")
            began = time.perf_counter()
            model = kind(registry).fit(adata, **settings, options=options, **own)
            self.seconds[kind.kind] = time.perf_counter() - began
            model.save(path)
            return model

        self.diffusion = kept(ptd.SetDiffusion, train=recipe.train)
        few = (
            CAUSAL_TRAIN if recipe.steps is None else replace(CAUSAL_TRAIN, max_steps=recipe.steps)
        )
        self.sibling = kept(ptd.CausalBaseline, train=few)


def simulated_question(recipe: Recipe, folder: Path, *, seed: int = 0) -> Question:
    """The response that depends on the state of the cell, of a context never seen treated."""
    world = SimulatedWorld(
        label="constraints", config=WORLD, seed=seed, recipe=recipe, cache=Cache(folder),
        with_features=False,
    )  # fmt: skip
    adata, holdout = world.simulation.adata, {"cell_type": ["T1"]}
    models = Models(world.registry, adata, holdout=holdout, recipe=recipe, folder=folder)
    world.registry = models.diffusion.registry
    perturbation = world.measured[0]
    true = world.fresh_log1p(Treatment(perturbation, "T1"), N_TRUE, seed=1)
    controls = world.fresh_log1p(Treatment("control", "T1"), 512, seed=2)
    return Question(
        "simulated",
        models,
        adata,
        perturbation=perturbation,
        context={"cell_type": "T1"},
        true_NG=true.astype(np.float64),
        control_RG=controls.astype(np.float64),
    )


def kang_question(adata: AnnData, recipe: Recipe, folder: Path, *, context: str) -> Question:
    """Interferon in a cell type that was never seen treated."""
    registry = ptd.Registry.from_anndata(
        adata, perturbation_key="condition", control="ctrl", covariate_keys=["cell_type"],
        scale="counts",
    )  # fmt: skip
    models = Models(registry, adata, holdout={"cell_type": [context]}, recipe=recipe, folder=folder)
    cells = ptd.data.encode(adata, models.diffusion.registry)
    log1p = np.asarray(cells.log1p.toarray(), dtype=np.float64)
    return Question(
        "kang2018",
        models,
        adata,
        perturbation="stim",
        context={"cell_type": context},
        true_NG=log1p[cells.conditions()[Condition(("stim",), (context,))]],
        control_RG=log1p[cells.controls()[context,]],
    )
