"""How a set diffusion model is fitted: priors, inner folds, the final run.

N cells, G genes, C training conditions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import TrainingError, UndefinedBaselineError
from perturbdiff._logging import logger
from perturbdiff._random import cell_keys, gene_lanes, uniform
from perturbdiff.config import NetworkConfig, SampleConfig, TrainConfig
from perturbdiff.data import Condition, SetDataModule
from perturbdiff.data._sets import Population
from perturbdiff.metrics import Projection, centred_energy_distance
from perturbdiff.model._fitted import Fitted, Recipe, Target
from perturbdiff.model._latent import Vocabulary, latent_populations
from perturbdiff.model._predictor import require_counts
from perturbdiff.model._questions import Controls
from perturbdiff.model._response import solve_response
from perturbdiff.model._training_data import TrainingData, prior_features
from perturbdiff.prior import ConditionSummary, EffectPrior, MixtureLogRatio
from perturbdiff.prior._dispersion import (
    LEAST_SHIFT,
    ResponseDispersion,
    condition_shares,
    information,
    measure_dispersion,
    some_rows,
)
from perturbdiff.train import SetDiffusionTask, choose_steps, train
from perturbdiff.train._checkpoint import Choice, check_last, forget, remember, remembered
from perturbdiff.train._fit import TrainerOptions, two_folds

_FEWEST_CONDITIONS = 4
_DEPENDENCE = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97)
_USUAL_DEPENDENCE = 0.7
_JUDGED_CONDITIONS = 4
_JUDGED_CELLS = 256
_AXES_OF_DISTANCE = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """Training data and a model with priors fitted and first weights, ready for training."""

    data: TrainingData
    populations: list[Population]
    left_out_means: Float[np.ndarray, "conditions genes"]  # priors that never saw the condition
    fitted: Fitted
    config: TrainConfig
    seed: int

    @property
    def enough(self) -> bool:
        """Whether training conditions can be held out to check."""
        return len(self.data.conditions) >= _FEWEST_CONDITIONS

    def new_task(self) -> SetDiffusionTask:
        """A task with first weights."""
        fitted = self.fitted
        return new_task(fitted.vocabulary, fitted.network, self.config, seed=self.seed)

    def data_module(
        self, train: Sequence[Population], validation: Sequence[Population] = ()
    ) -> SetDataModule:
        """Some of the populations to learn from, some to check on."""
        return SetDataModule(train, validation, config=self.config, seed=self.seed)


def new_task(
    vocabulary: Vocabulary, network: NetworkConfig, config: TrainConfig, *, seed: int
) -> SetDiffusionTask:
    """A task with first weights."""
    registry = vocabulary.registry
    return SetDiffusionTask(
        network,
        config,
        n_perturbations=len(registry.perturbations),
        n_features=vocabulary.n_features,
        covariate_sizes=[len(v) for v in registry.covariates],
        seed=seed,
    )


def prepare_lesson(
    data: TrainingData, network: NetworkConfig, config: TrainConfig, *, seed: int
) -> Lesson:
    """Fit the priors, measure dispersions, find partners."""
    require_counts(data.cells)
    features = prior_features(data.registry.features)
    vocabulary = Vocabulary.of(data.registry, data.conditions, features)
    prior = EffectPrior().fit(data.summaries, features=features, seed=seed)
    mixture = MixtureLogRatio().fit(data.summaries, features=features, seed=seed)
    try:
        means = prior.leave_one_out(data.summaries)
    except UndefinedBaselineError:
        logger.warning("one training condition: its prior cannot be checked without it")
        means = np.stack([summary.mean for summary in data.summaries])
    dispersion = _measure(data, mixture, seed=seed)
    codec, populations = latent_populations(
        data, means, vocabulary, n_latent=network.n_response_axes
    )
    n_axes, n_latent = codec.cell_axes.shape[1], codec.encoder.shape[1]
    network = replace(network, n_axes=n_axes, n_response_axes=n_latent)
    task = new_task(vocabulary, network, config, seed=seed)
    fitted = Fitted(
        network=network,
        denoiser=task.averaged.eval(),
        codec=codec,
        vocabulary=vocabulary,
        mean=data.mean,
        loadings=data.loadings,
        prior=prior,
        mixture=mixture,
        dispersion=dispersion,
        dependence=_USUAL_DEPENDENCE,
        n_shown=config.n_controls,
    )
    return Lesson(
        data=data, populations=populations, left_out_means=means, fitted=fitted, config=config,
        seed=seed,
    )  # fmt: skip


def learn(lesson: Lesson, *, options: TrainerOptions) -> Fitted:
    """Choose steps and dependence on inner folds, then train on all conditions."""
    task, data = lesson.new_task(), lesson.data_module(lesson.populations)
    directory, settings = options.checkpoint_dir, {**task.settings, "data": data.digest}
    if directory is not None and not options.resume:
        forget(directory)
    elif directory is not None:
        check_last(directory, settings)
    steps = lesson.config.max_steps
    if lesson.enough:
        known = remembered(directory, settings) if directory and options.resume else None
        choice = known or _choose(lesson, options=options)
        if directory is not None:
            remember(directory, settings, choice)
        steps, lesson.fitted.dependence = choice.steps, choice.dependence
    else:
        logger.warning(
            "only %d training conditions: the number of steps cannot be checked on held-out "
            "conditions, training runs for train.max_steps = %d",
            len(lesson.data.conditions),
            steps,
        )
    return finished(lesson, train(task, data, steps=steps, options=options))


def _choose(lesson: Lesson, *, options: TrainerOptions) -> Choice:
    """What training conditions say that are held out in turn."""
    parts = two_folds(lesson.populations)
    folds = [(lesson.new_task(), lesson.data_module(*part)) for part in parts]
    steps = choose_steps(folds, config=lesson.config, options=options)
    held = [{population.name for population in out} for _, out in parts]
    tasks = [task for task, _ in folds]
    dependence = _choose_dependence(lesson, list(zip(tasks, held, strict=True)))
    return Choice(steps=steps, dependence=dependence)


def finished(lesson: Lesson, task: SetDiffusionTask) -> Fitted:
    """The model with the averaged weights of a trained task."""
    try:
        lesson.fitted.denoiser.load_state_dict(task.averaged.state_dict())
    except RuntimeError as error:
        msg = f"The task was not prepared for this model: {str(error).splitlines()[-1].strip()}"
        raise TrainingError(msg) from error
    lesson.fitted.steps = task.global_step
    return lesson.fitted


def _measure(data: TrainingData, mixture: MixtureLogRatio, *, seed: int) -> ResponseDispersion:
    """Response dispersion of every training condition, in the order of the mixture's conditions."""
    rows_of = dict(zip((s.key for s in data.summaries), data.conditions, strict=True))
    controls = data.cells.controls()
    lanes = gene_lanes(data.registry.genes)
    logs, weights = [], []
    for summary in mixture.conditions:
        condition = rows_of[summary.key]
        own = _controls_of(data, controls[condition.context], condition)
        rows = torch.from_numpy(some_rows(len(own)))
        keys = cell_keys(seed, f"dispersion {condition.name}", 0, n_cells=len(rows))
        score, count = (_stratified(uniform(keys, lanes, step=step)) for step in (1, 0))
        logs.append(
            measure_dispersion(
                own.counts(rows),
                own.library_size(rows),
                mean=summary.mean,
                var=summary.var,
                score=torch.special.ndtri(score),
                uniform=count,
            )
        )
        weights.append(information(summary.mean - summary.context.mean, summary.n_cells))
    return ResponseDispersion(
        log=np.stack(logs),
        information=np.stack(weights),
        mean=np.stack([summary.mean for summary in mixture.conditions]),
    )


def _stratified(uniform_NG: Tensor) -> Tensor:
    """Evenly spread numbers in the order of random ones."""
    return (uniform_NG.argsort(0).argsort(0).double() + 0.5) / len(uniform_NG)


def _choose_dependence(lesson: Lesson, folds: Sequence[tuple[SetDiffusionTask, set[str]]]) -> float:
    """The dependence at which held-out training conditions have the shape nearest to the truth.

    Cells of the largest conditions of each fold are generated around their true mean, so that shape
    alone counts, by the network that never saw them; genes that do not respond stay as they are.
    """
    data = lesson.data
    rows, controls = data.cells.conditions(), data.cells.controls()
    project = Projection(data.mean, data.loadings[:, :_AXES_OF_DISTANCE].T)
    distances = []
    for task, names in folds:
        judge = replace(lesson.fitted, denoiser=task.averaged.eval())
        held = [
            (condition, summary)
            for condition, summary in zip(data.conditions, data.summaries, strict=True)
            if condition.name in names
        ]
        held.sort(key=lambda pair: (-pair[1].n_cells, pair[0]))
        for condition, summary in held[:_JUDGED_CONDITIONS]:
            own = _controls_of(data, controls[condition.context], condition)
            truth = project(data.cells.log1p[rows[condition]].toarray().astype(np.float64))
            made = _shapes(lesson, judge, own, condition=condition, summary=summary)
            distances.append(
                [centred_energy_distance(project(x), truth, seed=lesson.seed) for x in made]
            )
    table = np.array(distances)
    logger.info("centred energy distance by dependence %s: %s", _DEPENDENCE, table.mean(0).round(4))
    return _DEPENDENCE[_simplest(table)]


def _simplest(distance: Float[np.ndarray, "conditions candidates"]) -> int:
    """The first candidate within one standard error of the best (Breiman et al., 1984)."""
    best = distance.mean(0).argmin()
    worse = distance - distance[:, [best]]
    error = (
        worse.std(0, ddof=1) / np.sqrt(len(worse)) if len(worse) > 1 else np.zeros(len(worse[0]))
    )
    return int(np.flatnonzero(worse.mean(0) <= error)[0])


def _shapes(
    lesson: Lesson,
    judge: Fitted,
    own: Controls,
    *,
    condition: Condition,
    summary: ConditionSummary,
) -> Iterator[Float[np.ndarray, "cells genes"]]:
    """Log1p values of cells of a condition around its true mean, one array a dependence."""
    question = own.question(condition)
    known = np.array([other.key != summary.key for other in judge.mixture.conditions])
    shares = condition_shares(judge.mixture, question) * known
    target = Target(mean=summary.mean, dispersion=judge.dispersion.predict(shares, summary.mean))
    config, seed = SampleConfig(), lesson.seed
    task = judge.task(condition, own, target, n_cells=_JUDGED_CELLS, seed=seed)
    sets = list(range(_JUDGED_CELLS // config.set_size))
    (latent,), _ = judge.sampler.sample([task], [sets], config, seed=seed)
    recipe = Recipe(task=task, controls=own, target=target, config=config, seed=seed)
    cells = judge.cells(recipe, latent)
    responds = torch.from_numpy(np.abs(summary.mean - summary.context.mean) > LEAST_SHIFT)
    counts, some = cells.counts.clone(), cells.of_genes(responds)
    for dependence in _DEPENDENCE:
        plan = solve_response(
            some,
            target=torch.from_numpy(target.mean)[responds],
            dispersion=torch.from_numpy(target.dispersion)[responds],
            dependence=torch.full((int(responds.sum()),), dependence, dtype=torch.float64),
        )
        counts[:, responds] = plan.draw(some)
        yield torch.log1p(counts / cells.library_size[:, None] * DEPTH).numpy()


def _controls_of(
    data: TrainingData, rows: Int[np.ndarray, " cells"], condition: Condition
) -> Controls:
    return Controls(data.cells.take(rows), condition.context, data.loadings, data.mean)
