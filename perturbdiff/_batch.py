"""What travels between data, network and sampler: sets of cells and what is known about them.

B sets, S cells a set, R control cells, K latent axes, F perturbation features, C covariates, M members of a combination.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Sets:
    """Moving, picking and joining along the axis of sets, for a dataclass of tensors."""

    def _map(self, function: object) -> Self:
        changes = {
            field.name: function(getattr(self, field.name))  # type: ignore[operator]
            for field in fields(self)  # type: ignore[arg-type]
        }
        return replace(self, **changes)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """The same sets on another device."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def __getitem__(self, index: Tensor | slice) -> Self:
        return self._map(lambda value: value[index])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One batch out of several of equal shape."""
        return cls(
            **{
                field.name: torch.cat([getattr(part, field.name) for part in parts])
                for field in fields(cls)  # type: ignore[arg-type]
            }
        )


@dataclass(frozen=True, kw_only=True)
class Context(_Sets):
    """What the denoiser is told about each set; masks are True where a cell is real."""

    partner: Float[Tensor, "sets cells latent"]  # control cell of each generated cell, centred
    has_partner: Bool[Tensor, " sets"]  # False: generate without one
    control: Float[Tensor, "sets controls latent"]  # control cells of the context, centred
    control_mask: Bool[Tensor, "sets controls"]
    mask: Bool[Tensor, "sets cells"]
    shift: Float[Tensor, "sets latent"]  # effect prior, in latent units
    members: Int[Tensor, "sets members"]  # identities in the combination; 0 = padding or unknown
    features: Float[Tensor, "sets features"]  # perturbation features, dose and time
    covariates: Int[Tensor, "sets covariates"]  # levels; 0 = unknown
    conditional: Bool[Tensor, " sets"]  # False: null condition, for classifier-free guidance

    def unconditional(self) -> Self:
        """The same sets with the null condition."""
        return replace(self, conditional=torch.zeros_like(self.conditional))


@dataclass(frozen=True, kw_only=True)
class SetBatch(_Sets):
    """Sets to learn from: clean latent values and the context they were seen in."""

    x0: Float[Tensor, "sets cells latent"]
    context: Context

    def to(self, device: torch.device | str) -> Self:
        """The same sets on another device."""
        return replace(self, x0=self.x0.to(device, non_blocking=True), context=self.context.to(device))


@runtime_checkable
class Denoiser(Protocol):
    """``(xt, sigma, context) → x0_hat``; preconditioning is inside."""

    def __call__(
        self,
        xt: Float[Tensor, "sets cells latent"],
        sigma: Float[Tensor, " sets"],
        context: Context,
    ) -> Float[Tensor, "sets cells latent"]:
        """Estimate the clean values."""
        ...
