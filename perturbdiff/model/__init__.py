"""Models: what a user fits, asks and saves."""

from perturbdiff.model._baselines import (
    Additive,
    CarriedLogRatio,
    CopyControl,
    EffectPrior,
    GeneRidge,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    SimilarityShift,
)
from perturbdiff.model._causal_baseline import CausalBaseline
from perturbdiff.model._load import load
from perturbdiff.model._order_sensitivity import order_sensitivity
from perturbdiff.model._set_diffusion import SetDiffusion

__all__ = [
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
]
