"""Guidance and instruments take a denoiser and return one, so they stack in a readable order."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from perturbdiff._batch import Context, Denoiser

Wrapper = Callable[[Denoiser], Denoiser]


def wrap(denoise: Denoiser, *wrappers: Wrapper) -> Denoiser:
    """The denoiser inside all wrappers, the first of them innermost."""
    for wrapper in wrappers:
        denoise = wrapper(denoise)
    return denoise


@dataclass(kw_only=True)
class CountCalls:
    """Counts the calls that reach what it is put around; innermost, that is the network.

    Put it around nothing and it costs nothing.
    """

    nfe: int = 0

    def __call__(self, denoise: Denoiser) -> Denoiser:
        def counted(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            self.nfe += 1
            return denoise(xt, sigma, context)

        return counted
