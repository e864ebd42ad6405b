"""A fitted model: everything that answering needs, and nothing else.

G genes, K latent axes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._errors import ConfigError, ExpressionError
from perturbdiff._random import gene_lanes
from perturbdiff._typing import PrecisionName
from perturbdiff.config import DecodeConfig, NetworkConfig, SampleConfig
from perturbdiff.data import Condition
from perturbdiff.diffusion import Compiled, Preconditioned
from perturbdiff.model._latent import Vocabulary
from perturbdiff.model._questions import EVERY, Controls, partner_rows, shown_controls
from perturbdiff.model._response import (
    ExpectedCells,
    PlanCache,
    ResponseCells,
    ResponsePlan,
    solve_response,
)
from perturbdiff.model._sampling import LatentSampler, LatentTask, Sampler
from perturbdiff.nn import ExpressionCodec, SetDenoiser
from perturbdiff.prior import (
    Additive,
    Baseline,
    CarriedLogRatio,
    CopyControl,
    EffectPrior,
    GeneRidge,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    SimilarityShift,
)
from perturbdiff.prior._dispersion import ResponseDispersion, condition_shares

PILOT_CELLS = 512
AT_ONCE = 250_000  # numbers of a dense matrix, [cells, genes], while counts are solved or drawn

Drawn = tuple[sp.csr_array, np.ndarray]  # counts [cells, genes], library sizes [cells]


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What the cells of one condition shall be like on average, and how unevenly they respond."""

    mean: Float[np.ndarray, " genes"]
    dispersion: Float[np.ndarray, " genes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """All that the cells of one condition are made from."""

    task: LatentTask
    controls: Controls
    target: Target
    config: SampleConfig | DecodeConfig
    seed: int


@dataclass(kw_only=True, eq=False)
class Responding:
    """Priors and axes of a fitted model, and the way from latent responses to counts."""

    codec: ExpressionCodec
    vocabulary: Vocabulary
    mean: Float[np.ndarray, " genes"]
    loadings: Float[np.ndarray, "genes latent"]
    prior: EffectPrior
    mixture: MixtureLogRatio
    dispersion: ResponseDispersion
    dependence: float
    n_shown: int
    steps: int = 0  # that the weights were trained for

    def __post_init__(self) -> None:
        self.plans = PlanCache()

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Makes latent responses."""

    @cached_property
    def baselines(self) -> list[Baseline]:
        """Simple answers to stand beside the model's, fitted on the same conditions."""
        kinds = (
            CopyControl, MeanShift, SimilarityShift, CarriedLogRatio, Additive, NearestContext,
            GeneRidge,
        )  # fmt: skip
        features = self.vocabulary.features
        simple = [kind().fit(self.prior.conditions, features=features) for kind in kinds]
        return [*simple, self.mixture, self.prior]

    @cached_property
    def lanes(self) -> Tensor:
        """Noise lane of each gene."""
        return gene_lanes(self.vocabulary.registry.genes)

    def target(self, condition: Condition, controls: Controls) -> Target:
        """Effect prior and response dispersion of a condition."""
        question = controls.question(condition)
        mean = self.prior.predict_mean(question)
        shares = condition_shares(self.mixture, question)
        return Target(mean=mean, dispersion=self.dispersion.predict(shares, mean))

    def respond(
        self,
        conditions: Sequence[Condition],
        controls: Sequence[Controls],
        targets: Sequence[Target],
        *,
        n_cells: int,
        config: SampleConfig | DecodeConfig,
        seed: int,
    ) -> tuple[list[Drawn], int]:
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
        A pair of sparse counts ``[cells, genes]`` and library sizes for each condition.
        """
        size = config.set_size
        n_pilot = -(-PILOT_CELLS // size)
        n_wanted = -(-n_cells // size)
        tasks = [
            self.task(*each, n_cells=max(n_pilot, n_wanted) * size, seed=seed)
            for each in zip(conditions, controls, targets, strict=True)
        ]
        names = [self.plan_name(task, config, seed=seed) for task in tasks]
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
            recipe = Recipe(task=task, controls=control, target=target, config=config, seed=seed)
            pilot, plan = known or self.solve(recipe, new[:n_pilot])
            self.plans.put(name, pilot, plan)
            every = torch.cat([pilot, new]) if known else new
            out.append(self._draw_all(recipe, every[:n_wanted], plan, n_cells=n_cells))
        return out, calls

    def plan_name(
        self, task: LatentTask, config: SampleConfig | DecodeConfig, *, seed: int
    ) -> tuple[object, ...]:
        """What the plan of a population is kept under."""
        return task.condition.name, task.digest, seed, config, str(self.sampler.device)

    def task(
        self,
        condition: Condition,
        controls: Controls,
        target: Target,
        *,
        n_cells: int,
        seed: int,
    ) -> LatentTask:
        shift = torch.from_numpy(target.mean - controls.summary.mean)
        return LatentTask(
            condition=condition,
            control=controls.along(self.codec.cell_axes.cpu()),
            shown=shown_controls(len(controls), self.n_shown, seed=seed, context=controls.context),
            partners=partner_rows(len(controls), n_cells, seed=seed, condition=condition.name),
            shift=shift.float() @ self.codec.encoder.cpu(),
            digest=controls.digest,
        )

    def cells(self, recipe: Recipe, latent: Tensor, *, first: int = 0) -> ResponseCells:
        """Sets of a recipe from number ``first`` on, ready to be turned into counts."""
        return ResponseCells.make(**self._made_from(recipe, latent, first=first))

    def _made_from(
        self, recipe: Recipe, latent: Tensor, *, first: int = 0, genes: slice = EVERY
    ) -> dict[str, Tensor]:
        """What cells are made from, on some of the genes.

        Raises
        ------
        ExpressionError
            When a latent value is not finite.
        """
        _require_finite(latent)
        task, controls = recipe.task, recipe.controls
        keys = task.keys(range(first, first + len(latent)), recipe.config, recipe.seed).flatten()
        rows = task.partners[first * recipe.config.set_size :][: len(keys)]
        return {
            "deviation": self.codec.deviation(latent.flatten(0, 1), genes).double().cpu(),
            "counts": controls.counts(rows, genes),
            "library_size": controls.library_size(rows),
            "keys": keys,
            "lanes": self.lanes[genes],
        }

    def solve(self, recipe: Recipe, pilot: Tensor) -> tuple[Tensor, ResponsePlan]:
        """The pilot itself, and the plan under which its mean is the target.

        Some genes after others: a gene's plan depends on nothing else, and what few genes need
        stays in a core's cache and in memory that the process has already.
        """
        target, dispersion = (
            torch.from_numpy(x) for x in (recipe.target.mean, recipe.target.dispersion)
        )
        dependence = torch.full_like(target, self.dependence)
        each, parts = _even(len(target), most=AT_ONCE // pilot[..., 0].numel()), []
        for start in range(0, len(target), each):
            genes = slice(start, start + each)
            parts.append(
                solve_response(
                    ExpectedCells.make(**self._made_from(recipe, pilot, genes=genes)),
                    target=target[genes],
                    dispersion=dispersion[genes],
                    dependence=dependence[genes],
                )
            )
        return pilot, ResponsePlan.of_parts(parts)

    def draw(self, recipe: Recipe, latent: Tensor, plan: ResponsePlan, *, first: int = 0) -> Drawn:
        """Counts and library sizes of sets of a recipe, from number ``first`` on."""
        cells = self.cells(recipe, latent, first=first)
        counts = plan.draw(cells).to(torch.int32)
        return sp.csr_array(counts.numpy()), cells.library_size.numpy()

    def _draw_all(
        self, recipe: Recipe, latent: Tensor, plan: ResponsePlan, *, n_cells: int
    ) -> Drawn:
        """The first cells, block after block, so that few of them are ever dense."""
        each = _even(len(latent), most=AT_ONCE // (recipe.config.set_size * len(self.mean)))
        blocks = [
            self.draw(recipe, latent[start : start + each], plan, first=start)
            for start in range(0, len(latent), each)
        ]
        counts = sp.csr_array(sp.vstack([counts for counts, _ in blocks], format="csr"))
        return counts[:n_cells], np.concatenate([size for _, size in blocks])[:n_cells]


def _even(count: int, *, most: int) -> int:
    """Size of blocks that are about equal, of at most so many, and at least 1."""
    n_blocks = -(-count // max(most, 1))
    return max(-(-count // max(n_blocks, 1)), 1)


def _require_finite(latent: Tensor) -> None:
    """Refuse cells that are no numbers."""
    if not bool(torch.isfinite(latent).all()):
        msg = (
            "The model made cells that are no finite numbers, so there is no answer. Where "
            "training diverged, fit again with a lower train.learning_rate."
        )
        raise ExpressionError(msg)


def as_drawn(counts: Tensor, library_size: Tensor) -> Drawn:
    """Dense counts as they are kept."""
    return sp.csr_array(counts.numpy()), library_size.numpy()


@dataclass(kw_only=True, eq=False)
class Fitted(Responding):
    """A fitted set diffusion model: weights beside priors and axes."""

    network: NetworkConfig
    denoiser: Preconditioned
    precision: PrecisionName = "float32"

    def lowered(self, precision: PrecisionName) -> Self:
        """The model with its network in another precision; nothing else is copied."""
        network: SetDenoiser = self.denoiser.network  # type: ignore[assignment]
        denoiser = Preconditioned(network.lowered(precision), self.denoiser.sigma_data).eval()
        denoiser = Compiled(denoiser).eval() if self.compiled else denoiser
        return replace(self, denoiser=denoiser, precision=precision)

    def check(self, config: SampleConfig) -> None:
        """Refuse guidance by a null condition that is as it was before training.

        Raises
        ------
        ConfigError
            When no set was trained without its condition.
        """
        network: SetDenoiser = self.denoiser.network  # type: ignore[assignment]
        if config.guidance_scale != 1 and not bool(network.conditioning.null.any()):
            rule = (
                "must be 1 for this model: no set was trained without its condition, which is what "
                "guidance starts from. Fit with train.drop_condition above 0"
            )
            raise ConfigError("sample.guidance_scale", config.guidance_scale, rule=rule)

    @property
    def compiled(self) -> bool:
        """Whether calls of the network are compiled."""
        return isinstance(self.denoiser, Compiled)

    @cached_property
    def sampler(self) -> LatentSampler:
        """Samples by diffusion."""
        return LatentSampler(self.denoiser, self.vocabulary, self.n_shown)
