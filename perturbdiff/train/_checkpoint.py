"""What a training run leaves to go on from, and whether another run may."""

import json
import pickle  # noqa: TID251 - for its error alone
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from perturbdiff._constants import CHOICE, LAST_CHECKPOINT
from perturbdiff._errors import ConfigError, TrainingError
from perturbdiff._logging import logger

KEY = "perturbdiff"
MAY_CHANGE = ("train.max_steps", "train.patience")
"""Settings that an interrupted final run and its continuation need not share."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the inner folds said, kept so that a resumed run need not repeat them."""

    steps: int
    dependence: float


def fold_directory(directory: Path | None, number: int) -> Path | None:
    """Where an inner fold keeps its checkpoint."""
    return None if directory is None else directory / f"fold_{number}"


def kept_files(directory: Path) -> list[Path]:
    """The files in a directory that a run can go on from."""
    patterns = (LAST_CHECKPOINT, CHOICE, f"fold_*/{LAST_CHECKPOINT}")
    return [path for pattern in patterns for path in sorted(directory.glob(pattern))]


def forget(directory: Path) -> None:
    """Remove what an earlier run left, and nothing else."""
    for path in kept_files(directory):
        path.unlink()
        if path.parent != directory and not any(path.parent.iterdir()):
            path.parent.rmdir()


def forget_folds(directory: Path) -> None:
    """Remove the checkpoints of inner folds whose choice is written down."""
    for path in directory.glob(f"fold_*/{LAST_CHECKPOINT}"):
        path.unlink()
        path.parent.rmdir()


def check_kept(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from nothing, from damaged files, or with other settings.

    Parameters
    ----------
    directory
        Where an earlier run kept its checkpoints.
    settings
        Some or all of the settings of the run that shall go on.

    Raises
    ------
    ConfigError
        When there is nothing to go on from.
    TrainingError
        When a file is damaged or belongs to another run; names the first difference.
    """
    files = kept_files(directory)
    if not files:
        rule = f"there is no checkpoint in {directory} to go on from; leave resume out to start"
        raise ConfigError("resume", value=True, rule=rule)
    for path in files:
        written = _read_choice(path) if path.name == CHOICE else read_checkpoint(path)
        refuse_other_run(written, settings, path=path)


def check_last(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from a final run on other cells, before any fold is trained.

    Raises
    ------
    TrainingError
        Names the first difference.
    """
    last = directory / LAST_CHECKPOINT
    if last.is_file():
        refuse_other_run(read_checkpoint(last), settings, path=last)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of a checkpoint: tensors and plain values, on the CPU.

    Raises
    ------
    TrainingError
        When it cannot be read as that.
    """
    try:
        with ZipFile(path) as archive:
            if archive.testzip() is not None:  # compares checksums; loading would not
                raise BadZipFile
        content = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251 - no pickle
        steps, states = content["global_step"], content["state_dict"]
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise TrainingError(_damaged(path)) from error
    if not isinstance(steps, int) or not isinstance(states, dict):
        raise TrainingError(_damaged(path))
    return dict(content)


def refuse_other_run(
    written: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    path: Path | None = None,
    may_change: Collection[str] = MAY_CHANGE,
) -> None:
    """Refuse a checkpoint that was written with other settings.

    Parameters
    ----------
    written
        Content of the checkpoint.
    settings
        Settings of the run that shall go on.
    path
        Where the checkpoint is, for the message.
    may_change
        Settings that are not looked at.

    Raises
    ------
    TrainingError
        Names the first difference.
    """
    notes = written.get(KEY, {})
    place = "The checkpoint" if path is None else f"The checkpoint {path}"
    for name, value in settings.items():
        if name not in may_change and notes.get(name) != value:
            msg = (
                f"{place} belongs to another run: {name} was {notes.get(name)!r} and is now "
                f"{value!r}. Give the same settings, or another checkpoint_dir."
            )
            raise TrainingError(msg)


def remember(directory: Path, settings: Mapping[str, Any], choice: Choice) -> None:
    """Write down what the inner folds said; their own checkpoints are no longer needed."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{CHOICE}.part"
    part.write_text(json.dumps({KEY: dict(settings), **asdict(choice)}, indent=1))
    part.replace(directory / CHOICE)
    forget_folds(directory)


def remembered(directory: Path, settings: Mapping[str, Any]) -> Choice | None:
    """What the inner folds of an interrupted run said, where they ran to their end.

    None where they did not, or where limits that they look at have changed since.
    """
    path = directory / CHOICE
    if not path.is_file():
        return None
    written = _read_choice(path)
    refuse_other_run(written, settings, path=path)
    if any(written[KEY].get(name) != settings[name] for name in MAY_CHANGE):
        logger.info("limits of training changed: the inner folds are run again")
        return None
    return Choice(steps=written["steps"], dependence=written["dependence"])


def _read_choice(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        sound = isinstance(content[KEY], dict) and type(content["steps"]) is int
        sound = sound and isinstance(content["dependence"], float)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(_damaged(path)) from error
    if not sound:
        raise TrainingError(_damaged(path))
    return dict(content)


def _damaged(path: Path) -> str:
    return (
        f"The checkpoint {path} is damaged, or was not written by fit. Remove it, or leave resume "
        "out to start anew."
    )
