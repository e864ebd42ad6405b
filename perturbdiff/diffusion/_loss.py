"""What a denoiser is trained on: the weighted denoising error, and the distribution of the set."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._random import normal


def sample_sigmas(
    keys: Int[Tensor, " sets"],
    *,
    step: int = 0,
    log_mean: float = -1.2,
    log_std: float = 1.2,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " sets"]:
    """Log-normal noise levels to train at: Karras et al. (2022), table 1.

    Parameters
    ----------
    keys
        Key of each set.
    step
        Training step, so that levels change between steps.
    log_mean, log_std
        Mean and standard deviation of the logarithm. The defaults of the paper are meant for a
        ``sigma_data`` of 0.5; with another, shift the mean by ``log(sigma_data / 0.5)``.
    dtype
        Of the result.

    Returns
    -------
    One level per set, in units of model space.
    """
    return (log_mean + log_std * normal(keys, 1, step=step, dtype=dtype)[:, 0]).exp()


def denoising_loss(
    x0_hat: Float[Tensor, "sets cells latent"],
    x0: Float[Tensor, "sets cells latent"],
    *,
    sigma: Float[Tensor, " sets"],
    sigma_data: Float[Tensor, "*axes"] | float,
    mask: Bool[Tensor, "sets cells"],
) -> Float[Tensor, ""]:
    """Squared error, weighted so that the raw network's own error counts alike at every level.

    Parameters
    ----------
    x0_hat, x0
        Denoised and clean values.
    sigma
        Noise level of each set.
    sigma_data
        Standard deviation of clean values, as in :class:`Preconditioned`.
    mask
        True where a cell is real; the others count nowhere.

    Returns
    -------
    Mean over real cells and axes of ``(sigma² + sigma_data²) / (sigma * sigma_data)²`` times the
    squared error: Karras et al. (2022), equation 8. Zero when no cell is real.
    """
    level = sigma[:, None, None]
    weight = (level**2 + sigma_data**2) / (level * sigma_data) ** 2
    difference = torch.where(mask[:, :, None], x0_hat - x0, 0)
    return (weight * difference**2).mean(-1).sum() / mask.sum().clamp(min=1)


def energy_distance_loss(
    x_hat: Float[Tensor, "sets cells latent"],
    x: Float[Tensor, "sets cells latent"],
    mask: Bool[Tensor, "sets cells"],
    *,
    paired: bool = True,
) -> Float[Tensor, " sets"]:
    """Energy distance between two sets of cells, unbiased and differentiable.

    Parameters
    ----------
    x_hat, x
        The two sets.
    mask
        True where a cell is real, in both.
    paired
        Whether cell *i* of ``x_hat`` was made from cell *i* of ``x`` (by denoising). Then the
        distance between the two is left out, as a cell's distance to itself is, which keeps the
        estimate unbiased and makes it exactly 0 for a perfect denoiser. False: the sets are
        independent, and each may be in any order.

    Returns
    -------
    ``2 E|x_hat - x| - E|x_hat - x_hat'| - E|x - x'|`` of each set, the squared distance of Székely
    and Rizzo (2013) with means over pairs of different cells. Below 0 at times, since its
    expectation is 0 when both distributions are the same. Zero where fewer than 2 cells are real.
    Cells at the same place have gradient 0.
    """
    # Padding may hold anything, and 0 times infinity would reach the gradient of real cells.
    x_hat, x = (torch.where(mask[:, :, None], cells, 0) for cells in (x_hat, x))
    apart = ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    real = mask[:, :, None] & mask[:, None, :]
    within = real & apart
    across = within if paired else real
    return (
        2 * _mean_distance(x_hat, x, across)
        - _mean_distance(x_hat, x_hat, within)
        - _mean_distance(x, x, within)
    ) * (mask.sum(-1) > 1)


def _mean_distance(left: Tensor, right: Tensor, pairs: Tensor) -> Tensor:
    """Mean over the marked pairs; by differences, since products lose small distances."""
    distance = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.where(pairs, distance, 0).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1)
