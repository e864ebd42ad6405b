"""Simulated worlds, what is held out of them, and what the model and simpler answers say.

C conditions, N cells, G genes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.cache import PACKAGE, Arrays, Cache, source_files, source_hash
from benchmarks.environment import DECISIVE, environment, versions
from benchmarks.fits import Recipe, listening, peak_memory_mb, timed_fit, timed_prediction
from benchmarks.simple import fitted_baselines, means_of
from perturbdiff._constants import DEPTH
from perturbdiff.config import NetworkConfig, SampleConfig
from perturbdiff.data import Cells, Condition, Registry, encode
from perturbdiff.data.datasets import SimulationConfig, simulated
from perturbdiff.data.datasets._simulate import CONTROL, Simulation, Treatment
from perturbdiff.model import SetDiffusion
from perturbdiff.model._questions import Controls
from perturbdiff.model._training_data import TrainingData, prepare

FEATURES = "perturbation_features"
SIMULATOR = source_hash(sorted((PACKAGE / "data" / "datasets").glob("*.py")))
PRIORS = source_hash(source_files(rooms=("data", "prior")))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Held-out conditions of one kind."""

    name: str
    perturbations: tuple[str, ...]
    contexts: tuple[str, ...]
    keep_cells: bool = False

    def treatments(self) -> list[Treatment]:
        """Conditions in the order of answers."""
        return [Treatment(p, c) for p, c in product(self.perturbations, self.contexts)]


@dataclass(eq=False, kw_only=True)
class SimulatedWorld:
    """One simulated data set with conditions held out."""

    label: str
    config: SimulationConfig
    seed: int
    recipe: Recipe
    cache: Cache
    with_features: bool = True

    @cached_property
    def simulation(self) -> Simulation:
        """Cells and truth."""
        return simulated(self.config, seed=self.seed)

    @cached_property
    def registry(self) -> Registry:
        """What the columns mean."""
        return Registry.from_anndata(
            self.simulation.adata,
            perturbation_key="perturbation",
            control=CONTROL,
            covariate_keys=["cell_type"],
            embedding_key=FEATURES if self.with_features else None,
        )

    @cached_property
    def cells(self) -> Cells:
        """All measured cells."""
        return encode(self.simulation.adata, self.registry)

    @property
    def measured(self) -> list[str]:
        """Treated labels with cells."""
        return sorted({t.perturbation for t in self.simulation.treatments if t.members})

    def pairs(self, *, interacting: bool) -> list[str]:
        """Measured pairs that interact, or do not."""
        both = set(self.simulation.interacting)
        return [
            label
            for label in self.measured
            if "+" in label and set(label.split("+")).issubset(both) == interacting
        ]

    def answers(self, groups: Sequence[Group], holdout: Any) -> tuple[dict[str, Any], Arrays]:
        """The model's predicted means, and cells where they are kept, from the cache if there."""
        key = {
            "world": {**asdict(self.config), "seed": self.seed},
            "holdout": holdout,
            "groups": [asdict(group) for group in groups],
            "features": self.with_features,
            "simulator": SIMULATOR,
            **self.recipe.key(),
        }
        return self.cache.get(
            f"world {self.label} {self.seed}", key, lambda: self._fit(groups, holdout)
        )

    def _fit(self, groups: Sequence[Group], holdout: Any) -> tuple[dict[str, Any], Arrays]:
        adata, arrays, seconds = self.simulation.adata, {}, {}
        with listening() as lines:
            model = SetDiffusion(self.registry)
            seconds_fit = timed_fit(
                model, adata, holdout=holdout, recipe=self.recipe, seed=self.seed
            )
            for group in groups:
                pred, seconds[group.name] = timed_prediction(
                    model,
                    adata,
                    perturbations=group.perturbations,
                    contexts=[{"cell_type": context} for context in group.contexts],
                    n_cells=self.recipe.n_cells,
                    seed=self.seed,
                )
                values = np.asarray(pred.X.toarray(), dtype=np.float32)
                values = values.reshape(len(group.treatments()), self.recipe.n_cells, -1)
                arrays[f"mean {group.name}"] = values.mean(1, dtype=np.float64)
                if group.keep_cells:
                    arrays[f"cells {group.name}"] = values
                    arrays[f"cells at true mean {group.name}"] = self._at_true_mean(model, group)
        plain = {
            "seconds_fit": seconds_fit,
            "seconds_predict": max(seconds.values()),
            "steps": getattr(model.fitted, "steps", None),
            "dependence": float(model.fitted.dependence),
            "peak_memory_mb": peak_memory_mb(),
            "split_hash": model.split_hash,
            "log": lines,
            "made_with": environment(),
        }
        return plain, arrays

    def _at_true_mean(self, model: SetDiffusion, group: Group) -> np.ndarray:
        """Cells that the model makes when it is told the exact mean, which nobody knows."""
        fitted, found = model.fitted, []
        fitted.plans.clear()
        for treatment, shift in zip(group.treatments(), self.true_shifts(group), strict=True):
            context = (treatment.cell_type,)
            rows = self.cells.controls()[context]
            own = Controls(self.cells.take(rows), context, fitted.loadings, fitted.mean)
            condition = Condition(treatment.members, context)
            mean = np.maximum(own.summary.mean + shift, 0.0)
            target = replace(fitted.target(condition, own), mean=mean)
            ((counts, library_size),), _ = fitted.respond(
                [condition], [own], [target],
                n_cells=self.recipe.n_cells, config=SampleConfig(), seed=self.seed,
            )  # fmt: skip
            size = torch.maximum(library_size, counts.sum(1))
            found.append(torch.log1p(counts / size[:, None] * DEPTH).numpy())
        return np.stack(found).astype(np.float32)

    def training_data(self, holdout: Any) -> TrainingData:
        """Training cells and their summaries."""
        return prepare(
            self.simulation.adata, self.registry, holdout=holdout, n_top_genes=None,
            n_axes=NetworkConfig().n_axes,
        )  # fmt: skip

    def controls(self, data: TrainingData, context: str) -> Controls:
        """Control cells of a context."""
        rows = self.cells.controls()[(context,)]
        return Controls(self.cells.take(rows), (context,), data.loadings, data.mean)

    def simple_means(
        self, groups: Sequence[Group], holdout: Any
    ) -> dict[str, dict[str, np.ndarray | str]]:
        """Means that baselines predict, by group and baseline; a reason where there is none."""
        key = {
            "world": {**asdict(self.config), "seed": self.seed},
            "holdout": holdout,
            "groups": [asdict(group) for group in groups],
            "features": self.with_features,
            "simulator": SIMULATOR,
            "source": PRIORS,
            "packages": versions(DECISIVE),
        }
        plain, arrays = self.cache.get(
            f"simple world {self.label} {self.seed}", key, lambda: self._simple(groups, holdout)
        )
        found: dict[str, dict[str, np.ndarray | str]] = {group.name: {} for group in groups}
        for group, name, reason in plain["undefined"]:
            found[group][name] = reason
        for place, mean in arrays.items():
            group, name = place.split("|")
            found[group][name] = mean
        return found

    def _simple(self, groups: Sequence[Group], holdout: Any) -> tuple[dict[str, Any], Arrays]:
        data = self.training_data(holdout)
        baselines, arrays, undefined = fitted_baselines(data), {}, []
        for group in groups:
            means: dict[str, list[np.ndarray]] = {}
            reasons: dict[str, str] = {}
            for treatment in group.treatments():
                condition = Condition(treatment.members, (treatment.cell_type,))
                controls = self.controls(data, treatment.cell_type)
                for name, mean in means_of(baselines, controls.question(condition)).items():
                    if isinstance(mean, str):
                        reasons[name] = mean
                    else:
                        means.setdefault(name, []).append(mean)
            for name, parts in means.items():
                if name not in reasons:
                    arrays[f"{group.name}|{name}"] = np.stack(parts)
            undefined += [[group.name, name, reason] for name, reason in reasons.items()]
        return {"undefined": undefined}, arrays

    def true_shifts(self, group: Group) -> np.ndarray:
        """Exact true shifts of a group's conditions."""
        return np.stack([self.simulation.shift(t) for t in group.treatments()])

    def control_means(self, group: Group) -> np.ndarray:
        """Measured control means beside the conditions of a group."""
        rows = self.cells.controls()
        means = {
            context: np.asarray(self.cells.log1p[rows[(context,)]].mean(0, dtype=np.float64))
            for context in group.contexts
        }
        return np.stack([means[t.cell_type].ravel() for t in group.treatments()])

    def fresh_log1p(self, treatment: Treatment, n_cells: int, *, seed: int) -> np.ndarray:
        """True cells that nobody measured."""
        adata = self.simulation.sample(treatment, n_cells, seed=seed)
        return np.asarray(encode(adata, self.registry).log1p.toarray(), dtype=np.float32)
