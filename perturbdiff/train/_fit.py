"""Training for a number of steps, and choosing that number on held-out training conditions."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback

from perturbdiff._constants import LAST_CHECKPOINT as LAST
from perturbdiff._errors import ConfigError, TrainingError
from perturbdiff._logging import logger
from perturbdiff.config import TrainConfig
from perturbdiff.data import SetDataModule
from perturbdiff.data._sets import Population
from perturbdiff.train._averaged import AveragedTask
from perturbdiff.train._checkpoint import fold_directory, read_checkpoint, refuse_other_run
from perturbdiff.train._progress import StepBar

Task = TypeVar("Task", bound=AveragedTask)
Cells = TypeVar("Cells", bound=Population)
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
        Where the last checkpoint is kept, of the inner folds and then of the final run, beside what
        the folds said; ``None`` for nowhere. A run that does not resume replaces what is there.
    resume
        Go on from there, to the weights of a run that was not interrupted.

    Raises
    ------
    ConfigError
        When a run shall resume and no ``checkpoint_dir`` is named.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    precision: Any = None
    progress: bool = True
    checkpoint_dir: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", Path(self.checkpoint_dir))
        if self.resume and self.checkpoint_dir is None:
            raise ConfigError("resume", self.resume, rule="needs a checkpoint_dir to go on from")


class _Looks(Callback):
    """Validation loss at every look, in checkpoints too, and a stop when it no longer falls.

    Lightning's own early stopping looks after checkpoints are written, so that one that is gone on
    from would have missed a look.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.values: list[float] = []

    @property
    def enough(self) -> bool:
        """Whether the last looks brought nothing, or there is nothing more to see."""
        if not self.values:
            return False
        waited = len(self.values) - 1 - int(np.argmin(self.values))
        return waited >= self.patience or not np.isfinite(self.values[-1])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.enough

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))
        trainer.should_stop = trainer.should_stop or self.enough

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = list(state_dict["values"])


class _KeepLast(Callback):
    """The state at the end of each epoch, always under one name."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LAST

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def train(
    task: Task,
    data: SetDataModule,
    *,
    steps: int,
    options: TrainerOptions,
    callbacks: Sequence[Callback] = (),
    title: str = "training",
) -> Task:
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
        When weights are no longer finite, or the checkpoint is damaged, belongs to another run or
        is beyond the number of steps.
    KeyboardInterrupt
        When the user stops it; the last checkpoint is there to go on from.
    """
    directory = options.checkpoint_dir
    keep = [] if directory is None else [_KeepLast(directory)]
    bar = [StepBar(title)] if options.progress else []
    last = _last_checkpoint(options, steps=steps)
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
        trainer.fit(task, datamodule=data, ckpt_path=last)
    if not all(bool(weight.isfinite().all()) for weight in task.averaged.parameters()):
        msg = "Training diverged: weights are not finite. Lower train.learning_rate."
        raise TrainingError(msg)
    return task.cpu()


def choose_steps(
    folds: Sequence[tuple[AveragedTask, SetDataModule]],
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
        As in :func:`train`; each fold keeps its checkpoint in a folder of its own and goes on from
        there.

    Returns
    -------
    Steps at which the loss, averaged over folds, is smallest.

    Raises
    ------
    TrainingError
        As :func:`train`; checkpoints of all folds are looked at before the first is trained.
    """
    places = [fold_directory(options.checkpoint_dir, number + 1) for number in range(len(folds))]
    own = [replace(options, checkpoint_dir=place) for place in places]
    for (task, data), fold_options in zip(folds, own, strict=True):
        if last := _last_checkpoint(fold_options, steps=config.max_steps):
            now = {**task.settings, "data": data.digest}
            refuse_other_run(read_checkpoint(last), now, path=last, may_change=())
    curves = []
    for number, ((task, data), fold_options) in enumerate(zip(folds, own, strict=True), start=1):
        looks = _Looks(config.patience)
        title = f"inner fold {number} of {len(folds)}"
        train(
            task, data, steps=config.max_steps, options=fold_options, callbacks=[looks],
            title=title,
        )  # fmt: skip
        logger.info("%s: %s", title, np.round(looks.values, 4))
        curves.append(looks.values)
    n_looks = min(len(curve) for curve in curves)
    if n_looks == 0:
        return config.max_steps
    mean = np.mean([curve[:n_looks] for curve in curves], axis=0)
    return min(config.max_steps, (int(mean.argmin()) + 1) * config.check_every)


def two_folds(populations: Sequence[Cells]) -> list[tuple[list[Cells], list[Cells]]]:
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


def _last_checkpoint(options: TrainerOptions, *, steps: int) -> Path | None:
    """The checkpoint to go on from, where there is one; refused when it is beyond the last step."""
    if options.checkpoint_dir is None or not options.resume:
        return None
    last = options.checkpoint_dir / LAST
    if not last.exists():
        return None
    if (done := read_checkpoint(last)["global_step"]) > steps:
        msg = (
            f"The checkpoint {last} is at step {done}, beyond the {steps} steps of this run. "
            "Allow more steps, or leave resume out to start anew."
        )
        raise TrainingError(msg)
    return last


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
