# ruff: noqa: PLR0917 - a step is called thousands of times by position, like a denoiser
"""Samplers: pure functions that take each set from one noise level to the next.

B sets. Levels are per set, and a ``following_B`` of 0 gives exactly ``x0_hat``; ``now_B`` is above
0. Nothing here looks at the value of a tensor, so nothing waits for a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._batch import Context, Denoiser
from perturbdiff._errors import ConfigError
from perturbdiff._typing import SamplerName
from perturbdiff.diffusion._state import State


@runtime_checkable
class Step(Protocol):
    """One interval of a schedule."""

    def __call__(
        self,
        denoise: Denoiser,
        state: State,
        now_B: Tensor,
        following_B: Tensor,
        context: Context,
    ) -> State:
        """Take the sets from level ``now_B`` to level ``following_B``."""
        ...


Hook = Callable[[State, Tensor], State | None]


def euler_step(
    denoise: Denoiser, state: State, now_B: Tensor, following_B: Tensor, context: Context
) -> State:
    """First order, one call: Karras et al. (2022), algorithm 1 without its correction; DDIM."""
    x0_hat = denoise(state.x, now_B, context).to(state.x.dtype)
    ratio = _cells(following_B / now_B)
    return _advance(state, x0_hat + ratio * (state.x - x0_hat), x0_hat, now_B)


def heun_step(
    denoise: Denoiser, state: State, now_B: Tensor, following_B: Tensor, context: Context
) -> State:
    """Second order, two calls: Karras et al. (2022), algorithm 1.

    Sets that reach 0 in this step keep the Euler estimate, since the slope there is undefined.
    """
    x0_hat = denoise(state.x, now_B, context).to(state.x.dtype)
    slope = (state.x - x0_hat) / _cells(now_B)
    length = _cells(following_B - now_B)
    predicted = state.x + length * slope
    level_B = torch.where(following_B > 0, following_B, now_B)
    again = denoise(predicted, level_B, context).to(state.x.dtype)
    corrected = state.x + length * (slope + (predicted - again) / _cells(level_B)) / 2
    x = torch.where(_cells(following_B > 0), corrected, x0_hat)
    return _advance(state, x, x0_hat, now_B)


def dpmpp_2m_step(
    denoise: Denoiser, state: State, now_B: Tensor, following_B: Tensor, context: Context
) -> State:
    """Second order, one call: DPM-Solver++(2M), Lu et al. (2022), algorithm 2.

    First order where a set has no history yet and where it reaches 0.
    """
    return stochastic_step(denoise, state, now_B, following_B, context, eta=0.0)


def stochastic_step(
    denoise: Denoiser,
    state: State,
    now_B: Tensor,
    following_B: Tensor,
    context: Context,
    *,
    eta: float = 1.0,
) -> State:
    """SDE-DPM-Solver++(2M), one call: Lu et al. (2022), "DPM-Solver++", section 5.

    Parameters
    ----------
    denoise, state, now_B, following_B, context
        As every step.
    eta
        Share of the noise that the reverse diffusion has: 1 is the diffusion itself, 0 is
        :func:`dpmpp_2m_step`.

    Returns
    -------
    The state at the next level. Noise is each cell's own, keyed by its key and step.

    Raises
    ------
    ConfigError
        When ``eta`` is below 0.
    """
    if not eta >= 0:
        raise ConfigError("eta", eta, rule="must be at least 0")
    x0_hat = denoise(state.x, now_B, context).to(state.x.dtype)
    log_ratio_B = (following_B / now_B).log()  # minus infinity where a set reaches 0
    length_B = torch.where(following_B > 0, -log_ratio_B, 0)
    before_B = (torch.where(state.history_sigma > 0, state.history_sigma, now_B) / now_B).log()
    known_B = before_B > 0
    weight_B = torch.where(known_B, length_B / (2 * torch.where(known_B, before_B, 1)), 0)
    target = x0_hat + _cells(weight_B) * (x0_hat - state.history)
    x = target + _cells(((1 + eta) * log_ratio_B).exp()) * (state.x - target)
    if eta > 0:
        spread_B = following_B * (-torch.expm1(2 * eta * log_ratio_B)).sqrt()
        x = x + _cells(spread_B) * state.noise()
    return _advance(state, x, x0_hat, now_B)


SAMPLERS: Mapping[SamplerName, Step] = MappingProxyType(
    {
        "euler": euler_step,
        "heun": heun_step,
        "dpmpp_2m": dpmpp_2m_step,
        "stochastic": stochastic_step,
    }
)


def network_calls(sampler: SamplerName, n_steps: int) -> int:
    """Calls of the denoiser along a schedule of ``n_steps`` intervals that ends in 0.

    ``2 * n_steps - 1`` for Heun, whose last step is an Euler step, and ``n_steps`` for the others.
    """
    return 2 * n_steps - 1 if sampler == "heun" else n_steps


def sample(
    denoise: Denoiser,
    state: State,
    schedule: Float[Tensor, " levels"],
    context: Context,
    *,
    sampler: str | Step = "heun",
    hook: Hook | None = None,
) -> State:
    """Take sets along a schedule.

    Parameters
    ----------
    denoise
        Estimates clean cells; guidance is already around it.
    state
        Where the sets stand, at the first level of the schedule.
    schedule
        Decreasing levels, on the CPU. It may be a part of a longer one: ``schedule[: s + 1]`` and
        then ``schedule[s:]`` give what the whole gives.
    context
        What the denoiser is told about the sets.
    sampler
        A name of ``SAMPLERS``, or a step of one's own.
    hook
        Called after each interval with the state and the level reached, one per set. What it
        returns goes on instead of the state; None changes nothing.

    Returns
    -------
    The state at the last level; where that is 0, its ``x`` are the cells.

    Raises
    ------
    ConfigError
        When there is no sampler of this name or the schedule does not decrease.
    """
    step = _named(sampler) if isinstance(sampler, str) else sampler
    if len(schedule) == 0 or not bool((schedule.diff() < 0).all()) or bool(schedule[-1] < 0):
        first = [float(level) for level in schedule[:5]]
        raise ConfigError("schedule", first, rule="must decrease at every level, and not below 0")
    ends_clean = bool(schedule[-1] == 0)
    levels = schedule.to(state.x.device, state.x.dtype, non_blocking=True)
    for number, (now, following) in enumerate(pairwise(levels.unbind()), start=2):
        # Every sampler ends in x0_hat; Euler finds it without the call that Heun would not use.
        current = euler_step if ends_clean and number == len(levels) else step
        n_sets = len(state.x)
        state = current(denoise, state, now.expand(n_sets), following.expand(n_sets), context)
        if hook is not None:
            changed = hook(state, following.expand(n_sets))
            state = state if changed is None else changed
    return state


def _named(sampler: str) -> Step:
    for name, step in SAMPLERS.items():
        if name == sampler:
            return step
    raise ConfigError("sampler", sampler, rule=f"must be one of {', '.join(SAMPLERS)}")


def _cells(level_B: Tensor) -> Tensor:
    """Per-set values against the cells and axes of each set."""
    return level_B[:, None, None]


def _advance(state: State, x: Tensor, x0_hat: Tensor, now_B: Tensor) -> State:
    return replace(state, x=x, history=x0_hat, history_sigma=now_B, step=state.step + 1)
