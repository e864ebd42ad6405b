"""Training for a number of steps, and choosing that number on held-out training conditions."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, EarlyStopping

from perturbdiff._errors import TrainingError
from perturbdiff._logging import logger
from perturbdiff.config import TrainConfig
from perturbdiff.data import SetDataModule
from perturbdiff.data._sets import Population
from perturbdiff.train._progress import StepBar
from perturbdiff.train._task import SetDiffusionTask

LAST = "last.ckpt"
_LIGHTNINGS_OWN = (r"`isinstance\(treespec, LeafSpec\)` is deprecated",)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What a user may say about the trainer that ``fit`` makes.

    Parameters
    ----------
    accelerator, devices, precision
        As Lightning's; precision ``None`` is bf16 on a GPU that has it, else float32.
    progress
        Whether bars are shown.
    checkpoint_dir
        Where the last checkpoint of the final run is kept; ``None`` for nowhere.
    resume
        Go on from that checkpoint where there is one.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    precision: Any = None
    progress: bool = True
    checkpoint_dir: Path | None = None
    resume: bool = False


class _Losses(Callback):
    """Validation loss at every look."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics["val_loss"]))


class _KeepLast(Callback):
    """The state at the end of each epoch, always under one name."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LAST

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def train(
    task: SetDiffusionTask,
    data: SetDataModule,
    *,
    steps: int,
    options: TrainerOptions,
    callbacks: Sequence[Callback] = (),
    title: str = "training",
) -> SetDiffusionTask:
    """Train for a number of steps with a trainer of our own.

    Parameters
    ----------
    task, data
        What to train, on what.
    steps
        Optimiser steps.
    options
        Devices, precision, progress and checkpoints.
    callbacks
        More of them.
    title
        What the bar says.

    Returns
    -------
    The trained task, on the CPU.

    Raises
    ------
    TrainingError
        When weights are no longer finite, or the checkpoint belongs to another run.
    KeyboardInterrupt
        When the user stops it; the last checkpoint is there to go on from.
    """
    directory = options.checkpoint_dir
    keep = [] if directory is None else [_KeepLast(directory)]
    bar = [StepBar(title)] if options.progress else []
    with _quiet_lightning(), _interruptible():
        trainer = Trainer(
            max_steps=steps,
            accelerator=options.accelerator,
            devices=options.devices,
            precision=options.precision or _precision(options.accelerator),
            callbacks=[*callbacks, *keep, *bar],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            limit_val_batches=0 if data.validation is None else None,
            use_distributed_sampler=False,
        )
        trainer.fit(task, datamodule=data, ckpt_path=_last_checkpoint(options))
    if not all(bool(weight.isfinite().all()) for weight in task.averaged.parameters()):
        msg = "Training diverged: weights are not finite. Lower train.learning_rate."
        raise TrainingError(msg)
    return task.cpu()


def choose_steps(
    folds: Sequence[tuple[SetDiffusionTask, SetDataModule]],
    *,
    config: TrainConfig,
    options: TrainerOptions,
) -> int:
    """Number of steps that held-out training conditions ask for.

    Parameters
    ----------
    folds
        A fresh task and the data of each fold; tasks are trained in place.
    config
        Limits.
    options
        As in :func:`train`; folds leave no checkpoint.

    Returns
    -------
    Steps at which the loss, averaged over folds, is smallest.
    """
    curves = []
    for number, (task, data) in enumerate(folds, start=1):
        losses = _Losses()
        stop = EarlyStopping("val_loss", patience=config.patience, check_finite=True)
        fold_options = TrainerOptions(
            accelerator=options.accelerator,
            devices=options.devices,
            precision=options.precision,
            progress=options.progress,
        )
        title = f"inner fold {number} of {len(folds)}"
        train(
            task, data, steps=config.max_steps, options=fold_options, callbacks=[losses, stop],
            title=title,
        )  # fmt: skip
        logger.info("%s: %s", title, np.round(losses.values, 4))
        curves.append(losses.values)
    looks = min(len(curve) for curve in curves)
    if looks == 0:
        return config.max_steps
    mean = np.mean([curve[:looks] for curve in curves], axis=0)
    return min(config.max_steps, (int(mean.argmin()) + 1) * config.check_every)


def two_folds(populations: Sequence[Population]) -> list[tuple[list[Population], list[Population]]]:
    """Training and held-out populations of two folds, each holding out about a quarter.

    Parameters
    ----------
    populations
        Training conditions, at least 4.

    Returns
    -------
    Two pairs. Held-out parts do not overlap and hold conditions of all sizes.
    """
    by_size = sorted(populations, key=lambda population: (-len(population.x0), population.name))
    held = by_size[1::4], by_size[2::4]
    return [([p for p in by_size if p not in part], list(part)) for part in held]


def _last_checkpoint(options: TrainerOptions) -> str | None:
    if options.checkpoint_dir is None or not options.resume:
        return None
    last = options.checkpoint_dir / LAST
    return str(last) if last.exists() else None


def _precision(accelerator: str) -> Any:
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's advice on loaders and its banner, for this run only."""
    banner = logging.getLogger("lightning.pytorch")
    level = banner.level
    banner.setLevel(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            for message in _LIGHTNINGS_OWN:
                warnings.filterwarnings("ignore", message)  # noqa: TID251 - undone on leaving
            yield
    finally:
        banner.setLevel(level)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let an interruption be one: Lightning ends the process instead, and ignores the next one."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    try:
        yield
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from stopped
        raise
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGINT, handler)
