"""A denoiser whose call is compiled: kernels fused, and replayed as a CUDA graph on a GPU."""

import inspect
import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._batch import Context
from perturbdiff.diffusion._preconditioning import Preconditioned

logger = logging.getLogger(__name__)


def fixed_size(n_sets: int) -> int:
    """The number of sets that so many are filled up to: a power of two, or one and a half of it.

    Up to 1,024 these are 20, and less than a third of what runs is filling.
    """
    power = 1 << max(n_sets - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and n_sets <= 3 * power // 4 else power


class Compiled(Preconditioned):
    """The same denoiser with its whole call compiled by ``torch.compile``, when it is first made.

    On a processor one compilation serves every number of sets. On a CUDA device each number of them
    is recorded as a graph and replayed, so that hundreds of small kernels are launched at once;
    there sets are filled up to ``fixed_size``, so that graphs stay few. Filling changes no
    answer: sets know nothing of each other. Where a gradient is asked for, or operators are
    counted, nothing is compiled.

    Parameters
    ----------
    denoiser
        As it was trained; weights are shared with it.
    graphs
        Whether calls are filled up and recorded; ``None`` where the weights are on a CUDA device.
    """

    def __init__(self, denoiser: Preconditioned, *, graphs: bool | None = None) -> None:
        super().__init__(denoiser.network, 1.0)
        self.sigma_data = denoiser.sigma_data
        self.graphs = graphs
        self._calls: dict[bool, Callable[..., Tensor]] = {}

    def __copy__(self) -> Self:
        """Another one around the same weights, which needs no compilation of its own."""
        made = type(self)(self, graphs=self.graphs).train(self.training)
        made._calls = self._calls
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What is compiled belongs to these very weights: a pickled or deep copy starts anew."""
        return {**self.__dict__, "_calls": {}}

    def forward(
        self,
        xt: Float[Tensor, "sets cells latent"],
        sigma: Float[Tensor, " sets"],
        context: Context,
    ) -> Float[Tensor, "sets cells latent"]:
        """As that of :class:`Preconditioned`, but for rounding."""
        if (torch.is_grad_enabled() and xt.requires_grad) or _watched():
            return super().forward(xt, sigma, context)
        sigma = sigma.contiguous()  # else levels that are one for all sets are compiled apart
        if not (self.graphs or (self.graphs is None and xt.is_cuda)):
            return self._call(graphs=False)(xt, sigma, context)
        n_sets = len(xt)
        if (size := fixed_size(n_sets)) > n_sets:
            rows = torch.arange(size, device=xt.device).clamp_(max=n_sets - 1)
            xt, sigma, context = xt[rows], sigma[rows], context[rows]
        # The graph writes its next answer where this one is.
        return self._call(graphs=True)(xt, sigma, context)[:n_sets].clone()

    def _call(self, *, graphs: bool) -> Callable[..., Tensor]:
        if graphs not in self._calls:
            logger.info("The denoiser is compiled, once; its first calls take some seconds each.")
            mode = "reduce-overhead" if graphs else "default"
            call = MethodType(_of_its_own(Preconditioned.forward), self)
            self._calls[graphs] = torch.compile(call, dynamic=True, mode=mode)
        return self._calls[graphs]


def _watched() -> bool:
    """Whether operators are looked at one by one; torch would never compile again after that."""
    return bool(torch._C._len_torch_dispatch_stack())


def _of_its_own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with a code object of its own.

    torch keeps at most eight compilations of a code object, and goes on uncompiled beyond them:
    models would take them from each other.
    """
    known = cast("FunctionType", inspect.unwrap(function))
    return FunctionType(known.__code__.replace(), known.__globals__, known.__name__)
