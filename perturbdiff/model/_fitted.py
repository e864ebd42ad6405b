"""A fitted set diffusion model: everything that answering needs, and nothing else.

G genes, K latent axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._random import gene_lanes
from perturbdiff.config import NetworkConfig, SampleConfig
from perturbdiff.data import Condition
from perturbdiff.diffusion import Preconditioned
from perturbdiff.model._latent import Vocabulary
from perturbdiff.model._questions import Controls, partner_rows, shown_controls
from perturbdiff.model._response import CellDraws, PlanCache, ResponsePlan, solve_response
from perturbdiff.model._sampling import LatentSampler, LatentTask
from perturbdiff.nn import ExpressionCodec
from perturbdiff.prior import (
    Additive,
    Baseline,
    CarriedLogRatio,
    CopyControl,
    EffectPrior,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    SimilarityShift,
)
from perturbdiff.prior._dispersion import ResponseDispersion, condition_shares

PILOT_CELLS = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What the cells of one condition shall be like on average, and how unevenly they respond."""

    mean: Float[np.ndarray, " genes"]
    dispersion: Float[np.ndarray, " genes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Population:
    """All that the cells of one condition are made from."""

    task: LatentTask
    controls: Controls
    target: Target
    config: SampleConfig
    seed: int


@dataclass(kw_only=True, eq=False)
class Fitted:
    """Weights, priors and axes of a fitted model."""

    network: NetworkConfig
    denoiser: Preconditioned
    codec: ExpressionCodec
    vocabulary: Vocabulary
    mean: Float[np.ndarray, " genes"]
    loadings: Float[np.ndarray, "genes latent"]
    prior: EffectPrior
    mixture: MixtureLogRatio
    dispersion: ResponseDispersion
    dependence: float
    n_shown: int

    def __post_init__(self) -> None:
        self.sampler = LatentSampler(self.denoiser, self.vocabulary, self.n_shown)
        self.plans = PlanCache()

    @cached_property
    def baselines(self) -> list[Baseline]:
        """Simple answers to stand beside the model's, fitted on the same conditions."""
        kinds = (CopyControl, MeanShift, SimilarityShift, CarriedLogRatio, Additive, NearestContext)
        simple = [kind().fit(self.prior.conditions) for kind in kinds]
        return [*simple, self.mixture, self.prior]

    @property
    def lanes(self) -> Tensor:
        """Noise lane of each gene."""
        return gene_lanes(self.vocabulary.registry.genes)

    def target(self, condition: Condition, controls: Controls) -> Target:
        """Effect prior and response dispersion of a condition."""
        question = controls.question(condition)
        return Target(
            mean=self.prior.predict_mean(question),
            dispersion=self.dispersion.predict(condition_shares(self.mixture, question)),
        )

    def respond(
        self,
        conditions: Sequence[Condition],
        controls: Sequence[Controls],
        targets: Sequence[Target],
        *,
        n_cells: int,
        config: SampleConfig,
        seed: int,
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Counts and library sizes of the cells of each condition, and the network calls made.

        Parameters
        ----------
        conditions, controls, targets
            What is asked, one of each a condition.
        n_cells
            Cells a condition.
        config, seed
            How to sample.

        Returns
        -------
        A pair of counts ``[cells, genes]`` and library sizes for each condition.
        """
        size = config.set_size
        n_pilot = -(-PILOT_CELLS // size)
        n_wanted = -(-n_cells // size)
        tasks = [
            self._task(*each, n_cells=max(n_pilot, n_wanted) * size, seed=seed)
            for each in zip(conditions, controls, targets, strict=True)
        ]
        names = [
            (task.condition.name, task.digest, seed, config, str(self.sampler.device))
            for task in tasks
        ]
        cached = [self.plans.get(name) for name in names]
        sets = [
            range(n_pilot if known else 0, max(n_pilot, n_wanted) if not known else n_wanted)
            for known in cached
        ]
        latent, calls = self.sampler.sample(tasks, [list(s) for s in sets], config, seed=seed)
        out = []
        for task, control, target, name, known, new in zip(
            tasks, controls, targets, names, cached, latent, strict=True
        ):
            population = _Population(
                task=task, controls=control, target=target, config=config, seed=seed
            )
            pilot, plan = known or self._solve(population, new[:n_pilot])
            self.plans.put(name, pilot, plan)
            every = torch.cat([pilot, new]) if known else new
            out.append(self._draw(population, every, plan, n_cells=n_cells))
        return out, calls

    def _task(
        self,
        condition: Condition,
        controls: Controls,
        target: Target,
        *,
        n_cells: int,
        seed: int,
    ) -> LatentTask:
        shift = (target.mean - controls.summary.mean) @ self.loadings
        cell_scale = self.codec.cell_scale.cpu()
        return LatentTask(
            condition=condition,
            control=torch.from_numpy(controls.centred_axes).float() / cell_scale,
            shown=shown_controls(len(controls), self.n_shown, seed=seed, context=controls.context),
            partners=partner_rows(len(controls), n_cells, seed=seed, condition=condition.name),
            shift=torch.from_numpy(shift).float() / cell_scale,
            digest=controls.digest,
        )

    def _cells(
        self, population: _Population, latent: Tensor
    ) -> tuple[Tensor, CellDraws, Tensor, Tensor]:
        """Deviations, random numbers, partner counts and library sizes of whole sets."""
        task, controls = population.task, population.controls
        keys = task.keys(range(len(latent)), population.config, population.seed).flatten()
        rows = task.partners[: len(keys)]
        draws = CellDraws.of(keys, self.lanes)
        deviation = self.codec.deviation(latent.flatten(0, 1)).double().cpu()
        return deviation, draws, controls.counts(rows), controls.library_size(rows)

    def _solve(self, population: _Population, pilot: Tensor) -> tuple[Tensor, ResponsePlan]:
        """The pilot itself, and the plan under which its mean is the target."""
        deviation, draws, counts, library_size = self._cells(population, pilot)
        target = torch.from_numpy(population.target.mean)
        plan = solve_response(
            deviation,
            draws,
            counts=counts,
            library_size=library_size,
            target=target,
            dispersion=torch.from_numpy(population.target.dispersion),
            dependence=torch.full_like(target, self.dependence),
        )
        return pilot, plan

    def _draw(
        self, population: _Population, latent: Tensor, plan: ResponsePlan, *, n_cells: int
    ) -> tuple[Tensor, Tensor]:
        """Counts and library sizes of the first cells."""
        n_sets = -(-n_cells // population.config.set_size)
        deviation, draws, counts, library_size = self._cells(population, latent[:n_sets])
        drawn = plan.draw(deviation, draws, counts=counts, library_size=library_size)
        return drawn[:n_cells], library_size[:n_cells]
