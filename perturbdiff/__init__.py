"""Predict what a perturbation does to single cells in contexts where nobody measured it.

Everything is loaded when it is first used, so importing the package is quick and silent.
"""

import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perturbdiff._constants import VERSION as __version__  # noqa: N811 - the usual name

if TYPE_CHECKING:
    from perturbdiff import config, data, metrics, model, pl, pp, prior, tl, train
    from perturbdiff.config import NetworkConfig, SampleConfig, TrainConfig
    from perturbdiff.data import Registry, datasets
    from perturbdiff.model import (
        Additive,
        CarriedLogRatio,
        CopyControl,
        EffectPrior,
        GeneRidge,
        MeanShift,
        MixtureLogRatio,
        NearestContext,
        SetDiffusion,
        SimilarityShift,
        load,
    )
    from perturbdiff.train import TrainerOptions

_ROOMS = ("config", "data", "metrics", "model", "pl", "pp", "prior", "tl", "train")
_FROM = {
    "Registry": "perturbdiff.data",
    "TrainerOptions": "perturbdiff.train",
    **dict.fromkeys(("NetworkConfig", "SampleConfig", "TrainConfig"), "perturbdiff.config"),
    **dict.fromkeys(
        (
            "Additive",
            "CarriedLogRatio",
            "CopyControl",
            "EffectPrior",
            "GeneRidge",
            "MeanShift",
            "MixtureLogRatio",
            "NearestContext",
            "SetDiffusion",
            "SimilarityShift",
            "load",
        ),
        "perturbdiff.model",
    ),
}

__all__ = [
    "Additive",
    "CarriedLogRatio",
    "CopyControl",
    "EffectPrior",
    "GeneRidge",
    "MeanShift",
    "MixtureLogRatio",
    "NearestContext",
    "NetworkConfig",
    "Registry",
    "SampleConfig",
    "SetDiffusion",
    "SimilarityShift",
    "TrainConfig",
    "TrainerOptions",
    "__version__",
    "config",
    "data",
    "datasets",
    "load",
    "metrics",
    "model",
    "pl",
    "pp",
    "prior",
    "tl",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return _imported(f"perturbdiff.{name}")
    if name == "datasets":
        return _imported("perturbdiff.data.datasets")
    if name in _FROM:
        return getattr(_imported(_FROM[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def _imported(name: str) -> ModuleType:
    """The module; packages below us that draw numbers when imported leave no trace of it."""
    state = random.getstate()
    try:
        return import_module(name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted(__all__)
