"""Preconditioning: the parametrisations agree, and a fit recovers mean and spread at any scale."""

import pytest
import torch
from torch import nn

from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff._random import cell_keys, normal
from perturbdiff.diffusion import (
    Preconditioned,
    State,
    denoising_loss,
    karras_schedule,
    sample,
)


def context(n_sets, n_cells, latent, dtype=torch.float64):
    number = torch.zeros(n_sets, 1, dtype=torch.int64)
    return Context(
        partner=torch.zeros(n_sets, n_cells, latent, dtype=dtype),
        has_partner=torch.zeros(n_sets, dtype=torch.bool),
        control=torch.zeros(n_sets, 1, latent, dtype=dtype),
        control_mask=torch.ones(n_sets, 1, dtype=torch.bool),
        mask=torch.ones(n_sets, n_cells, dtype=torch.bool),
        shift=torch.zeros(n_sets, latent, dtype=dtype),
        members=number,
        features=torch.zeros(n_sets, 0, dtype=dtype),
        covariates=number,
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )


class Answer(nn.Module):
    """A network that answers what it was told to, and remembers what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x_in, c_noise, context):
        self.asked = x_in, c_noise
        return self.answer


@pytest.fixture
def noised():
    keys = cell_keys(0, "x", range(3), n_cells=5)
    x0 = 1.5 * normal(keys, 4, dtype=torch.float64) + 0.3
    noise = normal(keys, 4, step=1, dtype=torch.float64)
    sigma = torch.tensor([0.01, 1.0, 60.0], dtype=torch.float64)
    return x0, noise, sigma, x0 + sigma[:, None, None] * noise


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 7.0])
def test_noise_velocity_and_clean_targets_agree(noised, sigma_data):
    """The velocity of a variance-preserving process in units of sigma_data, Salimans and Ho (2022).

    With angle tan(phi) = sigma / sigma_data it is cos(phi) noise - sin(phi) x0 / sigma_data, and
    the raw network's target is its negative; the denoised value follows from any of the three.
    """
    x0, noise, sigma, xt = noised
    angle = torch.atan2(sigma, torch.full_like(sigma, sigma_data))[:, None, None]
    velocity = angle.cos() * noise - angle.sin() * x0 / sigma_data
    denoiser = Preconditioned(Answer(-velocity), sigma_data).double()
    torch.testing.assert_close(denoiser.target(x0, xt, sigma), -velocity, rtol=1e-9, atol=1e-9)
    from_velocity = denoiser(xt, sigma, context(3, 5, 4))
    from_noise = xt - sigma[:, None, None] * noise
    torch.testing.assert_close(from_velocity, x0, rtol=0, atol=1e-9)
    torch.testing.assert_close(from_noise, x0, rtol=0, atol=1e-9)


def test_the_network_is_asked_in_unit_variance(noised):
    _, _, sigma, xt = noised
    network = Answer(torch.zeros_like(xt))
    Preconditioned(network, 2.0).double()(xt, sigma, context(3, 5, 4))
    x_in, c_noise = network.asked
    torch.testing.assert_close(x_in[1], xt[1] / 5**0.5)
    torch.testing.assert_close(c_noise, sigma.log() / 4)


def test_weighted_loss_is_the_plain_error_of_the_raw_network(noised):
    x0, _, sigma, xt = noised
    raw = normal(cell_keys(1, "raw", range(3), n_cells=5), 4, dtype=torch.float64)
    denoiser = Preconditioned(Answer(raw), 0.7).double()
    mask = torch.ones(3, 5, dtype=torch.bool)
    loss = denoising_loss(
        denoiser(xt, sigma, context(3, 5, 4)),
        x0,
        sigma=sigma,
        sigma_data=denoiser.sigma_data,
        mask=mask,
    )
    plain = ((raw - denoiser.target(x0, xt, sigma)) ** 2).mean()
    torch.testing.assert_close(loss, plain, rtol=1e-9, atol=0)


def test_one_spread_per_axis_is_axis_by_axis(noised):
    _, _, sigma, xt = noised
    raw = torch.ones_like(xt)
    spreads = torch.tensor([0.5, 1.0, 2.0, 4.0])
    together = Preconditioned(Answer(raw), spreads).double()(xt, sigma, context(3, 5, 4))
    for axis, spread in enumerate(spreads.tolist()):
        alone = Preconditioned(Answer(raw), spread).double()(xt, sigma, context(3, 5, 4))
        torch.testing.assert_close(together[..., axis], alone[..., axis], rtol=1e-12, atol=0)


def test_a_half_precision_network_still_gives_float32(noised):
    _, _, sigma, xt = noised
    denoiser = Preconditioned(Answer(torch.ones(3, 5, 4, dtype=torch.bfloat16)), 1.0)
    answer = denoiser(xt.float(), sigma.float(), context(3, 5, 4, torch.float32))
    assert answer.dtype == torch.float32


@pytest.mark.parametrize("sigma_data", [0.0, -1.0, float("nan"), float("inf")])
def test_a_spread_that_is_none_is_refused(sigma_data):
    with pytest.raises(ConfigError, match="sigma_data"):
        Preconditioned(nn.Identity(), sigma_data)


def test_the_spread_is_saved_with_the_weights():
    assert Preconditioned(nn.Identity(), 2.5).state_dict()["sigma_data"].item() == 2.5


class LinePerLevel(nn.Module):
    """A straight line for each level of a schedule: all that a Gaussian needs."""

    def __init__(self, levels):
        super().__init__()
        self.register_buffer("known", levels.log() / 4)
        self.slope = nn.Parameter(torch.zeros_like(levels))
        self.offset = nn.Parameter(torch.zeros_like(levels))

    def forward(self, x_in, c_noise, context):
        nearest = (c_noise[:, None] - self.known).abs().argmin(-1)
        return self.slope[nearest, None, None] * x_in + self.offset[nearest, None, None]


@pytest.mark.parametrize(("mean", "spread"), [(5.0, 1.0), (5.0, 3.0), (50.0, 10.0), (50.0, 30.0)])
def test_a_short_fit_recovers_mean_and_spread_at_any_scale(mean, spread):
    schedule = karras_schedule(40, 0.02 * spread, 200 * spread, dtype=torch.float64)
    denoiser = Preconditioned(LinePerLevel(schedule[:-1]), spread).double()
    keys = cell_keys(0, "training", range(40), n_cells=1000)
    known = context(40, 1000, 1)
    x0 = mean + spread * normal(keys, 1, dtype=torch.float64)
    xt = x0 + schedule[:-1, None, None] * normal(keys, 1, step=1, dtype=torch.float64)
    optimiser = torch.optim.LBFGS(
        denoiser.parameters(), max_iter=150, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        error = denoising_loss(
            denoiser(xt, schedule[:-1], known),
            x0,
            sigma=schedule[:-1],
            sigma_data=denoiser.sigma_data,
            mask=known.mask,
        )
        error.backward()
        return error

    optimiser.step(loss)
    start = State.initial(
        cell_keys(1, "test", range(4), n_cells=1000), 1, 200 * spread, dtype=torch.float64
    )
    with torch.no_grad():
        cells = sample(denoiser, start, schedule, context(4, 1000, 1)).x
    assert cells.mean().item() == pytest.approx(mean, abs=0.1 * spread)
    assert cells.std().item() == pytest.approx(spread, rel=0.1)
