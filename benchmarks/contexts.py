"""Contexts held out in turn: their perturbed cells are never seen, their control cells are.

N cells, G genes, T contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np

from benchmarks.cache import PACKAGE, Cache, file_checksum, source_files, source_hash
from benchmarks.environment import DECISIVE, environment, versions
from benchmarks.fits import Recipe, Wanted, kept_fit, predicted_cells
from benchmarks.held_out import HeldOut, half_shifts, true_shift
from benchmarks.simple import answers, fitted_baselines, score_simple
from perturbdiff.config import NetworkConfig
from perturbdiff.data import Cells, Condition, Registry, encode, split
from perturbdiff.metrics import Projection
from perturbdiff.model._questions import Controls
from perturbdiff.model._training_data import prepare

N_AXES_OF_DISTANCE = 30
TRANSPORTED = ("mixture_log_ratio", "effect_prior")
WHOLE = ("mixture_log_ratio",)
HERE = Path(__file__).resolve().parent


@cache
def simple_sources(*scripts: str) -> str:
    """Hash of the code behind simple answers and scores."""
    rooms = source_files(rooms=("data", "prior", "metrics"))
    model = [PACKAGE / "model" / name for name in ("_questions.py", "_training_data.py")]
    return source_hash([*rooms, *model, *(HERE / name for name in scripts)])


@dataclass(eq=False, kw_only=True)
class ContextStudy:
    """A file with one perturbation in several contexts, and what is derived from it."""

    path: Path
    perturbation_key: str
    control: str
    context_key: str
    recipe: Recipe
    cache: Cache
    scale: str = "counts"
    _views: dict[str, HeldOut] = field(default_factory=dict)

    @cached_property
    def checksum(self) -> str:
        """Checksum of the file."""
        return file_checksum(self.path)

    @cached_property
    def adata(self) -> ad.AnnData:
        """The file."""
        return ad.read_h5ad(self.path)

    @cached_property
    def registry(self) -> Registry:
        """What its columns mean."""
        return Registry.from_anndata(
            self.adata,
            perturbation_key=self.perturbation_key,
            control=self.control,
            covariate_keys=[self.context_key],
            scale=self.scale,
        )

    @cached_property
    def cells(self) -> Cells:
        """All cells, all measured genes."""
        return encode(self.adata, self.registry)

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """Treated conditions with control cells, sorted."""
        controls = self.cells.controls()
        found = tuple(sorted(c for c in self.cells.conditions() if c.context in controls))
        if len({c.members for c in found}) != 1:
            msg = "Contexts are held out of files with one perturbation; this one has more or none."
            raise ValueError(msg)
        return found

    @property
    def contexts(self) -> tuple[str, ...]:
        """Names of the contexts."""
        return tuple(condition.context[0] for condition in self.conditions)

    def holdout(self, context: str) -> dict[str, list[str]]:
        """What is left out of training."""
        return {self.context_key: [context]}

    def wanted(self, context: str) -> Wanted:
        """What the model is asked about a held-out context."""
        (members,) = {condition.members for condition in self.conditions}
        return Wanted(
            label=context,
            holdout=self.holdout(context),
            perturbations=("+".join(members),),
            contexts=({self.context_key: context},),
            split_hash=split(self.cells, self.registry, holdout=self.holdout(context)).hash,
        )

    def _prepared(self, context: str) -> tuple[Any, HeldOut]:
        """Training data without the held-out cells, and these."""
        data = prepare(
            self.adata,
            self.registry,
            holdout=self.holdout(context),
            n_top_genes=self.recipe.n_top_genes,
            n_axes=NetworkConfig().n_axes,
        )
        cells = self.cells.select(data.registry.genes)
        treated, controls = cells.conditions(), cells.controls()
        cells_of = [cells.log1p[treated[c]] for c in self.conditions]
        controls_of = [cells.log1p[controls[c.context]] for c in self.conditions]
        own = self.contexts.index(context)
        condition = self.conditions[own]
        held = HeldOut(
            condition=condition,
            controls=Controls(
                cells.take(controls[condition.context]), condition.context, data.loadings, data.mean
            ),
            truth=cells.log1p[treated[condition]].toarray(),
            project=Projection(data.mean, data.loadings[:, :N_AXES_OF_DISTANCE].T),
            true_shifts=np.stack(
                [true_shift(*each) for each in zip(cells_of, controls_of, strict=True)]
            ),
            half_shifts=half_shifts(cells_of, controls_of),
            own=own,
        )
        return data, held

    def simple(self, context: str) -> dict[str, Any]:
        """Scores of the baselines and the ceiling, from the cache where they are."""
        key = {
            "data": self.checksum,
            "split": self.wanted(context).split_hash,
            "n_top_genes": self.recipe.n_top_genes,
            "source": simple_sources("held_out.py", "simple.py", "contexts.py"),
            "packages": versions(DECISIVE),
        }
        plain, _ = self.cache.get(
            f"simple {context}", key, lambda: (self._score_simple(context), {})
        )
        return plain

    def _score_simple(self, context: str) -> dict[str, Any]:
        data, held = self._prepared(context)
        means = answers(fitted_baselines(data), held)
        return {
            **score_simple(means, held, transported=TRANSPORTED, whole=WHOLE),
            "ceiling": held.ceiling(),
            "n_true": len(held.truth),
            "n_control": len(held.controls),
            "genes": list(data.registry.genes),
            "split_hash": data.split_hash,
            "made_with": environment(),
        }

    def fit(self, context: str, seed: int) -> dict[str, Any]:
        """One fit of the model: its scores, times and origin, without the cells themselves."""
        plain, arrays, name = kept_fit(
            self.cache,
            self.adata,
            self.wanted(context),
            registry=self.registry,
            data_checksum=self.checksum,
            recipe=self.recipe,
            seed=seed,
        )
        key = {"fit": name, "source": simple_sources("held_out.py", "contexts.py")}

        def score() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            held = self._view(context)
            if plain["genes"] != list(held.controls.cells.genes):
                msg = f"{context}: the model works on other genes than the baselines."
                raise RuntimeError(msg)
            cells = predicted_cells(plain, arrays)
            scores = held.score(cells)
            once = scores if held.n_once == len(cells) else held.score(cells[: held.n_once])
            return scores | {"once": once}, {}

        scores, _ = self.cache.get(f"score {context} {seed}", key, score)
        kept = {name: value for name, value in plain.items() if name not in ("genes", "labels")}
        return {"held_out": context, "seed": seed, **kept, **scores}

    def _view(self, context: str) -> HeldOut:
        if context not in self._views:
            self._views.clear()  # one at a time is enough, and they are large
            self._views[context] = self._prepared(context)[1]
        return self._views[context]


def seeds_of(contexts: Sequence[str], *, several: Sequence[str], n_seeds: int) -> dict[str, int]:
    """Number of seeds of each context."""
    return {context: n_seeds if context in several else 1 for context in contexts}
