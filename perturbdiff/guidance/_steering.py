"""Constraints around a denoiser: a soft pull along the gradient, a firm pull towards projections.

B sets, S cells, K latent axes, G genes that the constraints look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._batch import Context, Denoiser
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._enforcement import Soft
from perturbdiff.guidance._logic import Bound
from perturbdiff.guidance._reference import CellValues

_FARTHEST = 3.0  # that a cell is moved in one step, in units of latent spread
_TINY = 1e-12


@runtime_checkable
class Reveal(Protocol):
    """What latent values mean in user space, for one batch of sets."""

    @property
    def decoder(self) -> Float[Tensor, "genes latent"]:
        """What each latent axis says about each gene."""
        ...

    def deviation(
        self, x0: Float[Tensor, "sets cells latent"]
    ) -> Float[Tensor, "sets cells genes"]:
        """What latent values say of each gene."""
        ...

    def values(self, deviation: Float[Tensor, "sets cells genes"]) -> CellValues:
        """Expected values of the cells; each depends on the deviation of its own gene only."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftGuidance:
    """``x0_hat - strength * E / <g, u> * u``, with g the gradient of the energy E on ``x0_hat``.

    The direction u is g, or ``J g`` with J the derivative of the network: up to the noise level J
    is the covariance of clean cells given noised ones, so cells move where the network is unsure.
    The length is that of Polyak (1969): it takes a linear energy to zero, whatever its units.

    Parameters
    ----------
    soft
        Settings.
    bounds
        What shall hold; each has a gradient.
    reveal
        What latent values mean.
    levels
        Largest and smallest noise level at which to act.
    """

    soft: Soft
    bounds: Sequence[Bound]
    reveal: Reveal
    levels: tuple[float, float]

    def __call__(self, denoise: Denoiser) -> Denoiser:
        """The guided denoiser."""
        most, least = self.levels

        def guided(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            acts = (sigma <= most) & (sigma >= least)
            if not bool(acts.any()):
                return denoise(xt, sigma, context)
            through = self.soft.through_network
            with torch.enable_grad():
                start = xt.detach().requires_grad_(through)
                x0_hat = denoise(start, sigma, context)
                place = x0_hat if through else x0_hat.detach().requires_grad_()
                energy = self._energy(place)
                (slope,) = torch.autograd.grad(energy.sum(), place, retain_graph=through)
                way = slope
                if through:
                    (way,) = torch.autograd.grad(x0_hat, start, grad_outputs=slope)
            gain = (slope * way).sum((1, 2))
            length = torch.where(gain > _TINY, energy / gain.clamp_min(_TINY), 0.0)
            move = length[:, None, None] * way
            size = move.norm(dim=2, keepdim=True)
            move = move * (_FARTHEST / size.clamp_min(_FARTHEST))
            weight = self.soft.strength * acts[:, None, None]
            moved: Tensor = (x0_hat - weight * move).detach().to(xt.dtype)
            return moved

        return denoise if self.soft.strength == 0 else guided

    def _energy(self, x0: Tensor) -> Tensor:
        cells = self.reveal.values(self.reveal.deviation(x0))
        return torch.stack([bound.energy(cells) for bound in self.bounds]).sum(0).to(x0.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionPull:
    """Moves ``x0_hat`` so that expected values agree with their projections, as far as it can.

    With d the change that the projections ask for, J the derivative of expected values, R their
    noise and ``τ² = σ² / (1 + σ²)`` the variance of clean cells given noised ones,
    ``x0_hat + τ² Jᵀ (τ² J Jᵀ + R)⁻¹ d``: Song et al. (2023), "Pseudoinverse-guided diffusion
    models", equation 7. Other genes follow along the latent axes, so cells stay coherent.

    Parameters
    ----------
    bounds
        What shall hold of each cell.
    reveal
        What latent values mean.
    noise
        Variance R of each gene's values around what is expected.
    """

    bounds: Sequence[Bounds]
    reveal: Reveal
    noise: Float[Tensor, " genes"]

    def __call__(self, denoise: Denoiser) -> Denoiser:
        """The guided denoiser."""

        def pulled(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            x0_hat = denoise(xt, sigma, context)
            return x0_hat + self._move(x0_hat.detach(), sigma).to(x0_hat.dtype)

        return pulled

    def _move(self, x0_hat: Tensor, sigma: Tensor) -> Tensor:
        with torch.enable_grad():
            deviation = self.reveal.deviation(x0_hat).detach().requires_grad_()
            cells = self.reveal.values(deviation)
            (slope,) = torch.autograd.grad(cells.log1p.sum(), deviation)
        now = CellValues(
            log1p=cells.log1p.detach(), library_size=cells.library_size, number=cells.number
        )
        wanted = now
        for bound in self.bounds:
            wanted = CellValues(
                log1p=bound.clamped(wanted), library_size=now.library_size, number=now.number
            )
        gap = wanted.log1p - now.log1p
        decoder = self.reveal.decoder.to(gap)
        asked = gap != 0
        weight = torch.where(asked, slope.to(gap) / self.noise.to(gap), 0.0)
        variance = (sigma**2 / (1 + sigma**2))[:, None, None].to(gap)
        precision = torch.einsum("bsg,gk,gl->bskl", weight * slope, decoder, decoder)
        eye = torch.eye(decoder.shape[1], dtype=gap.dtype, device=gap.device)
        right = (weight * gap) @ decoder
        move = torch.linalg.solve(precision + eye / variance[..., None], right)
        size = move.norm(dim=2, keepdim=True)
        limited: Tensor = move * (_FARTHEST / size.clamp_min(_FARTHEST))
        return limited
