"""How the autoregressive sibling is fitted: inner folds where asked for, then the final run."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from perturbdiff._errors import TrainingError
from perturbdiff._typing import PrecisionName
from perturbdiff.data._counts import CountDataModule
from perturbdiff.model._causal_fitted import CausalFitted
from perturbdiff.model._causal_lesson import CausalLesson
from perturbdiff.nn import CausalDecoder, DraftDecoder
from perturbdiff.train import CausalTask, TrainerOptions, choose_steps, train, two_folds
from perturbdiff.train._checkpoint import check_kept, forget
from perturbdiff.train._draft import fit_draft
from perturbdiff.train._seeding import seeded

_DEPENDENCE = 0.9
"""Of counts on latent responses, where counts are transported; best on inner folds of Kang 2018."""

_DRAFT_CELLS = 2  # a step of the draft: more make it no better a guesser, only slower to teach


def learn(lesson: CausalLesson, *, options: TrainerOptions, inner_folds: bool) -> CausalFitted:
    """Choose the number of steps if asked to, then train on all conditions."""
    task, steps = lesson.new_task(), lesson.config.max_steps
    data, directory = lesson.data_module(lesson.populations), options.checkpoint_dir
    if directory is not None:
        if options.resume:
            check_kept(directory, task.settings)
        else:
            forget(directory)
    if inner_folds and lesson.shared.enough:
        folds = [
            (lesson.new_task(), lesson.data_module(*part)) for part in two_folds(lesson.populations)
        ]
        steps = choose_steps(folds, config=lesson.config, options=options)
    return finished(lesson, train(task, data, steps=steps, options=options))


def finished(lesson: CausalLesson, task: CausalTask) -> CausalFitted:
    """The model with the averaged weights of a trained task."""
    shared, decoder = lesson.shared.fitted, lesson.new_task().averaged.eval()
    try:
        decoder.load_state_dict(task.averaged.state_dict())
    except RuntimeError as error:
        msg = f"The task was not prepared for this model: {str(error).splitlines()[-1].strip()}"
        raise TrainingError(msg) from error
    names = ("codec", "vocabulary", "mean", "loadings", "prior", "mixture", "dispersion", "n_shown")
    return CausalFitted(
        **{name: getattr(shared, name) for name in names},
        dependence=_DEPENDENCE,
        steps=task.global_step,
        network=lesson.network,
        decoder=decoder,
        draft=_draft(lesson, decoder),
        bins=lesson.bins,
        order=lesson.order,
        log_dispersion=lesson.log_dispersion,
    )


def _draft(lesson: CausalLesson, decoder: CausalDecoder) -> DraftDecoder | None:
    """What guesses the decoder, taught on the cells that it was; none where genes are drawn."""
    n_steps, seed = lesson.network.draft_steps, lesson.seed
    if lesson.order.drawn or not n_steps:
        return None
    config = replace(
        lesson.config, n_sets=1, set_size=_DRAFT_CELLS, max_steps=n_steps, check_every=n_steps
    )
    batches = CountDataModule(lesson.populations, config=config, seed=seed).train_dataloader()
    return fit_draft(
        decoder, batches, bins=lesson.bins, order=lesson.order, seed=seed, n_steps=n_steps
    )


def restored_draft(
    decoder: CausalDecoder, weights: Mapping[str, Tensor], *, precision: PrecisionName
) -> DraftDecoder | None:
    """The draft that these are the weights of; none where there are none."""
    if not weights:
        return None
    with seeded(0):
        draft = DraftDecoder(decoder.config.width, decoder.n_bins).lowered(precision)
    draft.load_state_dict(weights)
    return draft.eval()
