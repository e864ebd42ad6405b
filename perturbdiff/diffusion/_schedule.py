"""Schedules: decreasing tensors of noise levels that end in 0."""

from math import inf, isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._errors import ConfigError


def karras_schedule(
    n_steps: int,
    sigma_min: float,
    sigma_max: float,
    *,
    rho: float = 7.0,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " levels"]:
    """Noise levels of Karras et al. (2022), "Elucidating the design space", equation 5.

    Parameters
    ----------
    n_steps
        Intervals, at least 1. With one interval the only level above 0 is ``sigma_max``.
    sigma_min, sigma_max
        Last level above 0 and first level, in units of model space.
    rho
        How much shorter the steps near ``sigma_min`` are; 1 spaces them evenly.
    dtype
        Of the result; levels are computed in float64.

    Returns
    -------
    ``n_steps + 1`` strictly decreasing levels, the last one exactly 0, on the CPU, where a sampler
    reads them without waiting for a device.

    Raises
    ------
    ConfigError
        When a number is outside its range.
    """
    if n_steps < 1:
        raise ConfigError("n_steps", n_steps, rule="must be at least 1")
    if not (isfinite(sigma_min) and sigma_min > 0):
        raise ConfigError("sigma_min", sigma_min, rule="must be finite and above 0")
    if not (isfinite(sigma_max) and sigma_max > sigma_min):
        raise ConfigError("sigma_max", sigma_max, rule="must be finite and above sigma_min")
    if not (isfinite(rho) and rho > 0):
        raise ConfigError("rho", rho, rule="must be finite and above 0")
    position = torch.linspace(0, 1, n_steps, dtype=torch.float64)
    try:
        first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    except OverflowError:
        first = last = inf
    levels = (first + position * (last - first)) ** rho
    schedule = torch.cat([levels, levels.new_zeros(1)]).to(dtype)
    if not bool((schedule.diff() < 0).all()):
        levels_of = f"{n_steps} levels from {sigma_max:g} to {sigma_min:g}"
        raise ConfigError("rho", rho, rule=f"{levels_of} cannot be told apart with it; 7 is usual")
    return schedule
