"""Predict what a perturbation does to single cells in contexts where nobody measured it.

Everything is loaded when it is first used, so importing the package is quick and silent.
"""

import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from perturbdiff._constants import VERSION as __version__  # noqa: N811 - the usual name

if TYPE_CHECKING:
    from perturbdiff import (
        config,
        data,
        guidance,
        metrics,
        model,
        pl,
        pp,
        prior,
        profiling,
        serve,
        tl,
        train,
    )
    from perturbdiff.config import (
        DecodeConfig,
        DecoderConfig,
        NetworkConfig,
        SampleConfig,
        TrainConfig,
    )
    from perturbdiff.data import Registry, datasets
    from perturbdiff.guidance import (
        All,
        Any,
        AtLeast,
        AtMost,
        BestOf,
        Branch,
        DepthFirst,
        Fix,
        FoldChange,
        GeneSetShift,
        Hard,
        KnockDown,
        LibrarySize,
        NonNegative,
        Not,
        Observed,
        Particles,
        Soft,
        StateFraction,
        Unchanged,
        Verifier,
    )
    from perturbdiff.model import (
        Additive,
        CarriedLogRatio,
        CausalBaseline,
        CopyControl,
        EffectPrior,
        GeneRidge,
        MeanShift,
        MixtureLogRatio,
        NearestContext,
        SetDiffusion,
        SimilarityShift,
        load,
        order_sensitivity,
    )
    from perturbdiff.train import TrainerOptions

_ROOMS = (
    "config", "data", "guidance", "metrics", "model", "pl", "pp", "prior", "profiling",
    "serve", "tl", "train",
)  # fmt: skip
_FROM = {
    "Registry": "perturbdiff.data",
    "TrainerOptions": "perturbdiff.train",
    **dict.fromkeys(
        (
            "All",
            "Any",
            "AtLeast",
            "AtMost",
            "BestOf",
            "Branch",
            "DepthFirst",
            "Fix",
            "FoldChange",
            "GeneSetShift",
            "Hard",
            "KnockDown",
            "LibrarySize",
            "NonNegative",
            "Not",
            "Observed",
            "Particles",
            "Soft",
            "StateFraction",
            "Unchanged",
            "Verifier",
        ),
        "perturbdiff.guidance",
    ),
    **dict.fromkeys(
        ("DecodeConfig", "DecoderConfig", "NetworkConfig", "SampleConfig", "TrainConfig"),
        "perturbdiff.config",
    ),
    **dict.fromkeys(
        (
            "Additive",
            "CarriedLogRatio",
            "CausalBaseline",
            "CopyControl",
            "EffectPrior",
            "GeneRidge",
            "MeanShift",
            "MixtureLogRatio",
            "NearestContext",
            "SetDiffusion",
            "SimilarityShift",
            "load",
            "order_sensitivity",
        ),
        "perturbdiff.model",
    ),
}

__all__ = [
    "Additive",
    "All",
    "Any",
    "AtLeast",
    "AtMost",
    "BestOf",
    "Branch",
    "CarriedLogRatio",
    "CausalBaseline",
    "CopyControl",
    "DecodeConfig",
    "DecoderConfig",
    "DepthFirst",
    "EffectPrior",
    "Fix",
    "FoldChange",
    "GeneRidge",
    "GeneSetShift",
    "Hard",
    "KnockDown",
    "LibrarySize",
    "MeanShift",
    "MixtureLogRatio",
    "NearestContext",
    "NetworkConfig",
    "NonNegative",
    "Not",
    "Observed",
    "Particles",
    "Registry",
    "SampleConfig",
    "SetDiffusion",
    "SimilarityShift",
    "Soft",
    "StateFraction",
    "TrainConfig",
    "TrainerOptions",
    "Unchanged",
    "Verifier",
    "__version__",
    "config",
    "data",
    "datasets",
    "guidance",
    "load",
    "metrics",
    "model",
    "order_sensitivity",
    "pl",
    "pp",
    "prior",
    "profiling",
    "serve",
    "tl",
    "train",
]


def __getattr__(name: str) -> object:
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
