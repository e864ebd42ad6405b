"""Samplers: exact calls, hooks, mixed levels, forks, and nothing that waits for a device."""

import dataclasses
from functools import partial

import pytest
import torch

from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff._random import cell_keys, normal
from perturbdiff.diffusion import (
    SAMPLERS,
    State,
    dpmpp_2m_step,
    euler_step,
    heun_step,
    karras_schedule,
    network_calls,
    sample,
    stochastic_step,
)

NAMES = sorted(SAMPLERS)


def context(n_sets, n_cells=4, latent=3):
    number = torch.zeros(n_sets, 1, dtype=torch.int64)
    return Context(
        partner=torch.zeros(n_sets, n_cells, latent),
        has_partner=torch.zeros(n_sets, dtype=torch.bool),
        control=torch.zeros(n_sets, 1, latent),
        control_mask=torch.ones(n_sets, 1, dtype=torch.bool),
        mask=torch.ones(n_sets, n_cells, dtype=torch.bool),
        shift=torch.zeros(n_sets, latent),
        members=number,
        features=torch.zeros(n_sets, 0),
        covariates=number,
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )


def start(n_sets=2, n_cells=4, latent=3, dtype=torch.float64):
    keys = cell_keys(0, "start", range(n_sets), n_cells=n_cells)
    return State.initial(keys, latent, 20.0, dtype=dtype)


def curved(xt, sigma, context):
    """A denoiser without a closed form, whose cells look at one another."""
    level = sigma[:, None, None]
    return torch.tanh(xt / (1 + level)) + xt.mean(1, keepdim=True) / (1 + level**2)


class Counting:
    def __init__(self):
        self.levels = []

    def __call__(self, xt, sigma, context):
        self.levels.append(sigma)
        return curved(xt, sigma, context)


@pytest.fixture
def schedule():
    return karras_schedule(10, 0.05, 20.0, dtype=torch.float64)


@pytest.mark.parametrize("sampler", NAMES)
@pytest.mark.parametrize("n_steps", [1, 3, 7, 53, 999])
def test_calls_are_exactly_as_many_as_documented(sampler, n_steps):
    denoise = Counting()
    state = sample(
        denoise,
        start(1, 1, 1),
        karras_schedule(n_steps, 0.002, 20.0),
        context(1, 1, 1),
        sampler=sampler,
    )
    documented = 2 * n_steps - 1 if sampler == "heun" else n_steps
    assert len(denoise.levels) == documented == network_calls(sampler, n_steps)
    assert state.step.tolist() == [n_steps]
    assert bool(state.x.isfinite().all())
    assert all(float(level) > 0 for level in denoise.levels)


@pytest.mark.parametrize("sampler", NAMES)
def test_the_last_state_is_the_last_estimate(sampler, schedule):
    state = sample(curved, start(), schedule, context(2), sampler=sampler)
    assert torch.equal(state.x, state.history)


@pytest.mark.parametrize("sampler", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_kept(sampler, dtype):
    def half(xt, sigma, context):
        return curved(xt, sigma, context).bfloat16()

    state = sample(
        half, start(dtype=dtype), karras_schedule(4, 0.1, 20.0), context(2), sampler=sampler
    )
    assert (state.x.dtype, state.history.dtype, state.history_sigma.dtype) == (dtype,) * 3


def test_euler_worked_by_hand():
    # From 4 to 1 towards an estimate of 2: a quarter of the way off remains.
    state = dataclasses.replace(start(1, 1, 1), x=torch.full((1, 1, 1), 10.0).double())
    levels = torch.tensor([4.0]).double(), torch.tensor([1.0]).double()
    after = euler_step(lambda xt, *_: torch.full_like(xt, 2.0), state, *levels, context(1, 1, 1))
    assert after.x.item() == 2 + 8 / 4
    assert (after.history.item(), after.history_sigma.item(), after.step.item()) == (2.0, 4.0, 1)


def test_heun_worked_by_hand():
    # x0_hat = 0 at 4, 3 at 1: slopes 8/4 = 2 and (2 - 3)/1 = -1, mean 1/2, over an interval of -3.
    state = dataclasses.replace(start(1, 1, 1), x=torch.full((1, 1, 1), 8.0).double())
    levels = torch.tensor([4.0]).double(), torch.tensor([1.0]).double()
    answers = iter([0.0, 3.0])
    after = heun_step(
        lambda xt, *_: torch.full_like(xt, next(answers)), state, *levels, context(1, 1, 1)
    )
    assert after.x.item() == 8 - 3 * 0.5


def test_dpmpp_2m_worked_by_hand():
    # Levels 8, 4, 1: the interval before is log 2, this one log 4, so the estimate is carried on by
    # log 4 / (2 log 2) = 1 times its last change: 3 + (3 - 1) = 5, of which x keeps a quarter.
    state = dataclasses.replace(
        start(1, 1, 1),
        x=torch.full((1, 1, 1), 9.0).double(),
        history=torch.full((1, 1, 1), 1.0).double(),
        history_sigma=torch.tensor([8.0]).double(),
    )
    levels = torch.tensor([4.0]).double(), torch.tensor([1.0]).double()
    after = dpmpp_2m_step(lambda xt, *_: torch.full_like(xt, 3.0), state, *levels, context(1, 1, 1))
    assert after.x.item() == pytest.approx(5 + (9 - 5) / 4, abs=1e-12)


def test_stochastic_worked_by_hand():
    # Without history, ratio 1/4, eta 1: keep (1/4)^2 of the offset, add noise of (1 - (1/4)^2)^0.5.
    state = dataclasses.replace(start(1, 1, 1), x=torch.full((1, 1, 1), 10.0).double())
    levels = torch.tensor([4.0]).double(), torch.tensor([1.0]).double()
    after = stochastic_step(
        lambda xt, *_: torch.full_like(xt, 2.0), state, *levels, context(1, 1, 1)
    )
    noise = normal(state.key, 1, step=1, dtype=torch.float64)
    assert after.x.item() == pytest.approx(2 + 8 / 16 + (15 / 16) ** 0.5 * noise.item(), abs=1e-12)


def test_without_noise_the_stochastic_sampler_is_the_deterministic_one(schedule):
    quiet = sample(curved, start(), schedule, context(2), sampler=partial(stochastic_step, eta=0.0))
    assert torch.equal(quiet.x, sample(curved, start(), schedule, context(2), sampler="dpmpp_2m").x)
    nearly = sample(
        curved, start(), schedule, context(2), sampler=partial(stochastic_step, eta=1e-14)
    )
    torch.testing.assert_close(nearly.x, quiet.x, rtol=0, atol=1e-5)


def test_first_and_last_step_of_2m_are_first_order():
    schedule = torch.tensor([20.0, 1.0, 0.0]).double()
    quick = sample(curved, start(), schedule, context(2), sampler="dpmpp_2m").x
    euler = sample(curved, start(), schedule, context(2), sampler="euler").x
    torch.testing.assert_close(quick, euler, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sampler", NAMES)
def test_a_schedule_may_be_walked_in_parts(sampler, schedule):
    whole = sample(curved, start(), schedule, context(2), sampler=sampler)
    parts = sample(curved, start(), schedule[:5], context(2), sampler=sampler)
    parts = sample(curved, parts, schedule[4:], context(2), sampler=sampler)
    assert torch.equal(whole.x, parts.x)
    assert torch.equal(sample(curved, whole, schedule[-1:], context(2), sampler=sampler).x, whole.x)


@pytest.mark.parametrize("sampler", NAMES)
def test_sets_at_different_steps_share_a_batch(sampler, schedule):
    """One set joins six steps late; the other reaches 0 while it is still under way."""
    step = SAMPLERS[sampler]
    alone = [
        sample(curved, start()[at : at + 1], schedule, context(1), sampler=sampler).x
        for at in (0, 1)
    ]
    early, late = start()[:1], start()[1:]
    early = sample(curved, early, schedule[:7], context(1), sampler=sampler)
    both = State.join([early, late])
    for now in range(6, 10):
        levels = [schedule[[at, at - 6]] for at in (now, now + 1)]
        both = step(curved, both, *levels, context(2))
    torch.testing.assert_close(both.x[:1], alone[0], rtol=0, atol=1e-12)
    late = sample(curved, both[1:], schedule[4:], context(1), sampler=sampler)
    torch.testing.assert_close(late.x, alone[1], rtol=0, atol=1e-12)
    assert both.step.tolist() == [10, 4]


@pytest.mark.parametrize("sampler", NAMES)
def test_copies_stay_copies_and_forks_part(sampler, schedule):
    half = sample(curved, start(), schedule[:5], context(2), sampler=sampler)
    whole = sample(curved, half, schedule[4:], context(2), sampler=sampler).x
    copies = sample(curved, half.repeat(3), schedule[4:], context(6), sampler=sampler).x
    torch.testing.assert_close(copies, whole.repeat_interleave(3, 0), rtol=0, atol=1e-12)
    forks = sample(curved, half.fork(3), schedule[4:], context(6), sampler=sampler).x
    torch.testing.assert_close(forks[::3], whole, rtol=0, atol=1e-12)
    apart = (forks[1::3] - forks[2::3]).abs().amin()
    if sampler == "stochastic":
        assert apart > 0
    else:
        torch.testing.assert_close(forks, copies, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sampler", NAMES)
def test_nothing_waits_for_a_device(sampler):
    """On a device without values, reading one raises."""
    state = sample(
        curved,
        start().to("meta"),
        karras_schedule(5, 0.1, 20.0),
        context(2).to("meta"),
        sampler=sampler,
    )
    assert state.x.device.type == "meta"
    with pytest.raises(RuntimeError):
        bool(state.x.sum() > 0)


@pytest.mark.parametrize("sampler", NAMES)
def test_what_a_hook_returns_goes_on(sampler, schedule):
    reached = []

    def hook(state, sigma):
        reached.append(float(sigma[0]))
        return (
            dataclasses.replace(state, x=torch.zeros_like(state.x)) if len(reached) == 4 else None
        )

    hooked = sample(curved, start(), schedule, context(2), sampler=sampler, hook=hook)
    assert reached == schedule[1:].tolist()
    middle = sample(curved, start(), schedule[:5], context(2), sampler=sampler)
    middle = dataclasses.replace(middle, x=torch.zeros_like(middle.x))
    expected = sample(curved, middle, schedule[4:], context(2), sampler=sampler)
    assert torch.equal(hooked.x, expected.x)


def test_a_hook_that_only_looks_changes_nothing(schedule):
    seen = []
    hooked = sample(curved, start(), schedule, context(2), hook=lambda *told: seen.append(told))
    assert torch.equal(hooked.x, sample(curved, start(), schedule, context(2)).x)
    assert len(seen) == 10


def test_an_error_in_a_hook_surfaces_and_leaves_nothing_behind(schedule):
    class StopHereError(Exception):
        pass

    def hook(state, sigma):
        if int(state.step[0]) == 3:
            raise StopHereError

    state = start()
    before = state.x.clone()
    with pytest.raises(StopHereError):
        sample(curved, state, schedule, context(2), hook=hook)
    assert torch.equal(state.x, before)
    again = sample(curved, state, schedule, context(2))
    assert torch.equal(again.x, sample(curved, start(), schedule, context(2)).x)


def test_an_unknown_sampler_is_refused_with_the_known_ones(schedule):
    with pytest.raises(ConfigError, match="dpmpp_2m"):
        sample(curved, start(), schedule, context(2), sampler="ddim")


@pytest.mark.parametrize(
    "levels", [[], [1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [1.0, -0.5], [1, float("nan")]]
)
def test_a_schedule_that_does_not_decrease_is_refused(levels):
    with pytest.raises(ConfigError, match="schedule"):
        sample(curved, start(), torch.tensor(levels), context(2))


@pytest.mark.parametrize("eta", [-0.1, float("nan")])
def test_a_negative_share_of_noise_is_refused(eta, schedule):
    with pytest.raises(ConfigError, match="eta"):
        sample(curved, start(), schedule, context(2), sampler=partial(stochastic_step, eta=eta))


def test_the_initial_state_is_noise_at_the_largest_level():
    keys = cell_keys(0, "start", range(2), n_cells=5)
    state = State.initial(keys, 3, 20.0)
    assert torch.equal(state.x, 20.0 * normal(keys, 3))
    assert state.step.tolist() == [0, 0]
    assert not torch.equal(state.noise(), normal(keys, 3))
