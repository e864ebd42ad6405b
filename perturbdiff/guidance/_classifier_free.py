"""Classifier-free guidance: how strongly the condition is followed."""

from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from perturbdiff._batch import Context, Denoiser
from perturbdiff._errors import ConfigError


@dataclass(frozen=True)
class ClassifierFreeGuidance:
    """``free + scale * (conditional - free)``: Ho and Salimans (2022), with ``scale`` = 1 + w.

    Parameters
    ----------
    scale
        1 = as trained: the very same denoiser, and no call more. 0 = unconditional, one call a
        step. Above 1 = amplified, two calls a step, as between 0 and 1.

    Raises
    ------
    ConfigError
        When ``scale`` is negative or not finite.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.scale) and self.scale >= 0):
            raise ConfigError("guidance_scale", self.scale, rule="must be finite and at least 0")

    def __call__(self, denoise: Denoiser) -> Denoiser:
        """The guided denoiser."""

        def unconditional(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            return denoise(xt, sigma, context.unconditional())

        def guided(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            free = denoise(xt, sigma, context.unconditional())
            return free + self.scale * (denoise(xt, sigma, context) - free)

        if self.scale == 1.0:
            return denoise
        return unconditional if self.scale == 0.0 else guided
