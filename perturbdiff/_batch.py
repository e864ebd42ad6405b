"""What travels between data, network and sampler: sets of cells and what is known about them.

B sets, S cells a set, R control cells, K latent axes, F perturbation features, C covariates,
M members of a combination.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Sets:
    """Moving, picking, joining and repeating along the axis of sets, for a dataclass of tensors.

    Fields are tensors whose first axis is the sets, such dataclasses themselves, or None.
    """

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        changes = {
            name: value._map(function) if isinstance(value, Sets) else function(value)
            for name, value in values.items()
            if value is not None
        }
        return replace(self, **changes)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """The same sets on another device."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def __getitem__(self, index: Tensor | slice) -> Self:
        """The picked sets, as sets: an index is a slice or a tensor with one axis."""
        return self._map(lambda value: value[index])

    def repeat(self, count: int) -> Self:
        """Each set ``count`` times, copies next to each other."""
        return self._map(lambda value: value.repeat_interleave(count, dim=0))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One batch out of several of equal shape."""
        columns = {
            field.name: [getattr(part, field.name) for part in parts]
            for field in fields(cls)  # type: ignore[arg-type]
        }
        return cls(
            **{
                name: type(values[0]).join(values)
                if isinstance(values[0], Sets)
                else torch.cat(values)
                for name, values in columns.items()
                if values[0] is not None
            }
        )


@dataclass(frozen=True, kw_only=True)
class Context(Sets):
    """What the denoiser is told about each set; masks are True where a cell is real."""

    partner: Float[Tensor, "sets cells axes"]  # control cell of each generated cell, centred
    has_partner: Bool[Tensor, " sets"]  # False: generate without one
    control: Float[Tensor, "sets controls axes"]  # control cells of the context, centred
    control_mask: Bool[Tensor, "sets controls"]
    mask: Bool[Tensor, "sets cells"]
    shift: Float[Tensor, "sets latent"]  # effect prior, in latent units
    members: Int[Tensor, "sets members"]  # identities in the combination; 0 = padding or unknown
    features: Float[Tensor, "sets features"]  # perturbation features, dose and time
    covariates: Int[Tensor, "sets covariates"]  # levels; 0 = unknown
    conditional: Bool[Tensor, " sets"]  # False: null condition, for classifier-free guidance
    memory: Float[Tensor, "sets blocks 2 keys width"] | None = None  # encoded control cells

    def unconditional(self) -> Self:
        """The same sets with the null condition."""
        return replace(self, conditional=torch.zeros_like(self.conditional))


@dataclass(frozen=True, kw_only=True)
class SetBatch(Sets):
    """Sets to learn from: clean latent values and the context they were seen in."""

    x0: Float[Tensor, "sets cells latent"]
    context: Context


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
