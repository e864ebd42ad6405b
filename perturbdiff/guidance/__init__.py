"""Guidance: denoiser in, denoiser out."""

from perturbdiff.guidance._classifier_free import ClassifierFreeGuidance
from perturbdiff.guidance._wrapping import CountCalls, Wrapper, wrap

__all__ = ["ClassifierFreeGuidance", "CountCalls", "Wrapper", "wrap"]
