"""Laws of samplers: no order, invisible padding and batching, and a Gaussian recovered.

The denoiser of a Gaussian is linear, so a sampler is an affine map of its start and of the noise it
adds. Walking the unit vectors finds that map, and with it the exact mean and covariance of what the
sampler would give for infinitely many cells: the orders below hold no sampling error.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from perturbdiff._batch import Context
from perturbdiff._random import cell_keys, normal
from perturbdiff.diffusion import SAMPLERS, State, karras_schedule, sample, stochastic_step

NAMES = sorted(SAMPLERS)
ORDERS = {"euler": 1, "heun": 2, "dpmpp_2m": 2}
LATENT = 3
SIGMA_MIN, SIGMA_MAX = 0.02, 20.0


def context(n_sets, n_cells, mask=None):
    number = torch.arange(n_sets)[:, None]
    return Context(
        partner=torch.zeros(n_sets, n_cells, LATENT).double(),
        has_partner=torch.zeros(n_sets, dtype=torch.bool),
        control=torch.zeros(n_sets, 1, LATENT).double(),
        control_mask=torch.ones(n_sets, 1, dtype=torch.bool),
        mask=torch.ones(n_sets, n_cells, dtype=torch.bool) if mask is None else mask,
        shift=number.expand(n_sets, LATENT).double(),
        members=number,
        features=torch.zeros(n_sets, 0).double(),
        covariates=number,
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )


def coupled(xt, sigma, context):
    """Cells look at the real cells of their set; sets differ by their condition."""
    level = sigma[:, None, None]
    real = context.mask[:, :, None]
    mean = torch.where(real, xt, 0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    return torch.tanh(xt / (1 + level) + context.shift[:, None]) + mean / (1 + level**2)


def start(n_sets, n_cells, dtype=torch.float64):
    keys = cell_keys(5, "law", range(n_sets), n_cells=n_cells)
    return State.initial(keys, LATENT, SIGMA_MAX, dtype=dtype)


def walk(state, known, sampler, n_steps=5):
    schedule = karras_schedule(n_steps, SIGMA_MIN, SIGMA_MAX, dtype=torch.float64)
    return sample(coupled, state, schedule, known, sampler=sampler).x


samplers = st.sampled_from(NAMES)


@settings(max_examples=20, deadline=None)
@given(sampler=samplers, order=st.permutations(range(5)))
def test_permuting_cells_permutes_the_result(sampler, order):
    state = start(2, 5)
    moved = replace(
        state, x=state.x[:, order], history=state.history[:, order], key=state.key[:, order]
    )
    direct = walk(state, context(2, 5), sampler)
    torch.testing.assert_close(
        walk(moved, context(2, 5), sampler), direct[:, order], rtol=0, atol=1e-9
    )


@settings(max_examples=20, deadline=None)
@given(sampler=samplers, n_padding=st.integers(1, 4))
def test_padding_cells_are_invisible(sampler, n_padding):
    mask = (torch.arange(4 + n_padding) < 4).expand(2, -1)
    padded = walk(start(2, 4 + n_padding), context(2, 4 + n_padding, mask), sampler)
    plain = walk(start(2, 4), context(2, 4), sampler)
    torch.testing.assert_close(padded[:, :4], plain, rtol=0, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(sampler=samplers, order=st.permutations(range(5)), cut=st.integers(1, 4))
def test_batching_and_order_of_sets_are_invisible(sampler, order, cut):
    together = walk(start(5, 3), context(5, 3), sampler)
    order = torch.tensor(order)
    state, known = start(5, 3)[order], context(5, 3)[order]
    parts = [walk(state[part], known[part], sampler) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(torch.cat(parts), together[order], rtol=0, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(sampler=samplers, few=st.integers(1, 6), more=st.integers(1, 40))
def test_the_first_cells_do_not_depend_on_how_many_are_asked_for(sampler, few, more):
    """In float32, for a denoiser that takes cells one by one."""

    def one_by_one(xt, sigma, context):
        return torch.tanh(xt) / (1 + sigma[:, None, None])

    schedule = karras_schedule(5, SIGMA_MIN, SIGMA_MAX)
    cells = [
        sample(one_by_one, start(2, n, torch.float32), schedule, context(2, n), sampler=sampler).x
        for n in (few, few + more)
    ]
    torch.testing.assert_close(cells[1][:, :few], cells[0], rtol=0, atol=1e-5)


@dataclass(frozen=True)
class Gaussian:
    """Normal distribution with known mean and covariance, and its perfect denoiser."""

    mean: torch.Tensor
    covariance: torch.Tensor

    def __call__(self, xt, sigma, context):
        noised = self.at(sigma[:, None, None])
        gain = torch.linalg.solve(noised, self.covariance.expand_as(noised))
        return self.mean + (xt - self.mean) @ gain

    def at(self, sigma):
        """Covariance at a noise level."""
        return self.covariance + sigma**2 * torch.eye(LATENT, dtype=torch.float64)

    def flow(self, sigma):
        """Exact map of the probability flow from the largest level, around the mean."""
        here, there = (sqrtm(self.at(level).numpy()) for level in (sigma, SIGMA_MAX))
        return torch.from_numpy(np.linalg.solve(there, here))


KNOWN = Gaussian(
    mean=torch.tensor([1.0, -2.0, 0.5]).double(),
    covariance=torch.tensor([[2.0, 0.8, 0.0], [0.8, 1.0, 0.3], [0.0, 0.3, 0.25]]).double(),
)


@st.composite
def gaussians(draw):
    numbers = st.floats(-1, 1, width=32)
    root = torch.tensor(draw(st.lists(numbers, min_size=9, max_size=9))).double().reshape(3, 3)
    mean = torch.tensor(draw(st.lists(numbers, min_size=3, max_size=3))).double()
    return Gaussian(mean=5 * mean, covariance=root @ root.T + 0.1 * torch.eye(3).double())


def affine(gaussian, schedule, sampler):
    """Linear part and offset of a deterministic sampler, from the origin and the unit vectors."""
    n_cells = 1 + LATENT
    x = torch.cat([torch.zeros(1, LATENT), torch.eye(LATENT)]).double()[None]
    state = replace(start(1, n_cells), x=x)
    end = sample(gaussian, state, schedule, context(1, n_cells), sampler=sampler).x[0]
    return end[1:] - end[0], end[0]


def errors(gaussian, sampler, n_steps, *, to_zero=False):
    """Error of mean (of cells that start off the centre), of covariance, at the last level."""
    schedule = karras_schedule(n_steps + 1, SIGMA_MIN, SIGMA_MAX, dtype=torch.float64)
    schedule = schedule if to_zero else schedule[:-1]
    linear, offset = affine(gaussian, schedule, sampler)
    covariance = linear.T @ gaussian.at(SIGMA_MAX) @ linear
    displaced = torch.full((LATENT,), SIGMA_MAX).double()
    mean = (gaussian.mean + displaced) @ linear + offset
    level = float(schedule[-1])
    return (
        (mean - gaussian.mean - displaced @ gaussian.flow(level)).norm().item(),
        (covariance - gaussian.at(level)).norm().item(),
        (gaussian.mean @ linear + offset - gaussian.mean).norm().item(),
    )


@pytest.mark.parametrize("sampler", sorted(ORDERS))
def test_deterministic_samplers_converge_at_their_order(sampler):
    coarse, fine = (errors(KNOWN, sampler, n_steps) for n_steps in (160, 320))
    for found, half in zip(coarse[:2], fine[:2], strict=True):
        assert np.log2(found / half) == pytest.approx(ORDERS[sampler], abs=0.15)


@settings(max_examples=15, deadline=None)
@given(gaussian=gaussians(), sampler=st.sampled_from(sorted(ORDERS)))
def test_any_gaussian_is_recovered(gaussian, sampler):
    n_steps = 2000 if sampler == "euler" else 200
    displaced, covariance, mean = errors(gaussian, sampler, n_steps)
    size = gaussian.covariance.norm().item()
    assert mean < 1e-9
    assert covariance < 0.01 * size
    assert displaced < 0.01 * size**0.5


@pytest.mark.parametrize("sampler", sorted(ORDERS))
def test_the_last_step_to_zero_costs_no_more_than_the_smallest_level(sampler):
    """Its relative error is sigma_min² / variance at most, here 0.0004 / 0.13."""
    before = errors(KNOWN, sampler, 640)[1]
    after = errors(KNOWN, sampler, 640, to_zero=True)[1]
    assert after < before + SIGMA_MIN**2 * LATENT


def test_samplers_of_the_same_order_agree_as_steps_grow():
    apart = []
    for n_steps in (100, 200, 400):
        schedule = karras_schedule(n_steps, SIGMA_MIN, SIGMA_MAX, dtype=torch.float64)
        heun, multistep = (affine(KNOWN, schedule, name)[0] for name in ("heun", "dpmpp_2m"))
        apart.append((heun - multistep).norm().item())
    assert apart[0] > 3 * apart[1] > 9 * apart[2]


def stochastic_covariance(monkeypatch, n_steps, eta):
    """Exact covariance of the stochastic sampler: its response to the start and to each draw."""
    schedule = karras_schedule(n_steps + 1, SIGMA_MIN, SIGMA_MAX, dtype=torch.float64)[:-1]
    n_cells = 1 + LATENT + n_steps * LATENT
    x = torch.zeros(1, n_cells, LATENT).double()
    x[0, 1 : 1 + LATENT] = torch.eye(LATENT)

    def one_draw_each(state):
        drawn = torch.zeros_like(state.x)
        first = 1 + LATENT * (1 + int(state.step[0]))
        drawn[0, first : first + LATENT] = torch.eye(LATENT)
        return drawn

    monkeypatch.setattr(State, "noise", one_draw_each)
    step = partial(stochastic_step, eta=eta)
    state = replace(start(1, n_cells), x=x, history=torch.zeros_like(x))
    end = sample(KNOWN, state, schedule, context(1, n_cells), sampler=step).x[0]
    linear, drawn = end[1 : 1 + LATENT] - end[0], end[1 + LATENT :] - end[0]
    mean = KNOWN.mean @ linear + end[0]
    return mean, linear.T @ KNOWN.at(SIGMA_MAX) @ linear + drawn.T @ drawn


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_the_stochastic_sampler_converges_weakly_at_second_order(monkeypatch, eta):
    truth = KNOWN.at(SIGMA_MIN)
    found = []
    for n_steps in (80, 160):
        mean, covariance = stochastic_covariance(monkeypatch, n_steps, eta)
        torch.testing.assert_close(mean, KNOWN.mean, rtol=0, atol=1e-9)
        found.append((covariance - truth).norm().item())
    assert found[1] < 0.01 * truth.norm().item()
    assert np.log2(found[0] / found[1]) == pytest.approx(2, abs=0.2)


def test_the_stochastic_sampler_forgets_its_start():
    """With its own draws: every cell starts at the mean, and the covariance comes from noise."""
    n_sets, n_cells = 40, 100
    state = start(n_sets, n_cells)
    state = replace(state, x=KNOWN.mean.expand_as(state.x))
    schedule = karras_schedule(60, SIGMA_MIN, SIGMA_MAX, dtype=torch.float64)
    cells = sample(KNOWN, state, schedule, context(n_sets, n_cells), sampler="stochastic").x
    cells = cells.reshape(-1, LATENT).numpy()
    scale = KNOWN.covariance.diagonal().sqrt().numpy()
    np.testing.assert_allclose((cells.mean(0) - KNOWN.mean.numpy()) / scale, 0, atol=4 / 4000**0.5)
    relative = (np.cov(cells.T) - KNOWN.covariance.numpy()) / np.outer(scale, scale)
    assert np.abs(relative).max() < 4 * (2 / 4000) ** 0.5 + 0.02


def test_a_perfect_denoiser_recovers_cells_end_to_end_in_float32():
    """Sampled from keyed noise with a usual number of steps; the start is the exact marginal."""
    n_sets, n_cells = 40, 100
    state = start(n_sets, n_cells, torch.float32)
    exact = KNOWN.mean + normal(state.key, LATENT, dtype=torch.float64) @ torch.linalg.cholesky(
        KNOWN.at(SIGMA_MAX)
    ).mT.to(torch.float64)
    state = replace(state, x=exact.float())

    def denoise(xt, sigma, context):
        return KNOWN(xt.double(), sigma.double(), context).float()

    schedule = karras_schedule(60, SIGMA_MIN, SIGMA_MAX)
    cells = sample(denoise, state, schedule, context(n_sets, n_cells), sampler="dpmpp_2m").x
    cells = cells.reshape(-1, LATENT).double().numpy()
    scale = KNOWN.covariance.diagonal().sqrt().numpy()
    np.testing.assert_allclose((cells.mean(0) - KNOWN.mean.numpy()) / scale, 0, atol=4 / 4000**0.5)
    relative = (np.cov(cells.T) - KNOWN.covariance.numpy()) / np.outer(scale, scale)
    assert np.abs(relative).max() < 4 * (2 / 4000) ** 0.5 + 0.02
