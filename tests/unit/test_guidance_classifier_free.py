"""Guidance: one convention for its scale, and no cost where it is off."""

import pytest
import torch

from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff._random import cell_keys
from perturbdiff.diffusion import SAMPLERS, State, karras_schedule, network_calls, sample
from perturbdiff.guidance import ClassifierFreeGuidance, CountCalls, wrap


@pytest.fixture
def context():
    number = torch.zeros(2, 1, dtype=torch.int64)
    return Context(
        partner=torch.zeros(2, 3, 4),
        has_partner=torch.zeros(2, dtype=torch.bool),
        control=torch.zeros(2, 1, 4),
        control_mask=torch.ones(2, 1, dtype=torch.bool),
        mask=torch.ones(2, 3, dtype=torch.bool),
        shift=torch.ones(2, 4),
        members=number,
        features=torch.zeros(2, 0),
        covariates=number,
        conditional=torch.ones(2, dtype=torch.bool),
    )


@pytest.fixture
def state():
    return State.initial(cell_keys(0, "start", range(2), n_cells=3), 4, 20.0, dtype=torch.float64)


def denoise(xt, sigma, context):
    pulled = context.shift[:, None] * context.conditional[:, None, None]
    return (xt.sin() + pulled) / (1 + sigma[:, None, None])


def one_step(scale, state, context):
    guided = ClassifierFreeGuidance(scale)(denoise)
    return guided(state.x, torch.full((2,), 20.0).double(), context)


def test_scale_1_is_the_very_same_denoiser():
    assert ClassifierFreeGuidance()(denoise) is denoise
    assert ClassifierFreeGuidance(1.0)(denoise) is denoise


def test_scales_0_1_and_2_against_separate_passes(state, context):
    sigma = torch.full((2,), 20.0).double()
    held = denoise(state.x, sigma, context)
    free = denoise(state.x, sigma, context.unconditional())
    assert torch.equal(one_step(0.0, state, context), free)
    assert torch.equal(one_step(1.0, state, context), held)
    torch.testing.assert_close(one_step(2.0, state, context), 2 * held - free)
    assert not torch.equal(held, free)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_guidance_is_continuous_at_its_special_values(off, state, context):
    near = one_step(off + 1e-10, state, context)
    torch.testing.assert_close(near, one_step(off, state, context), rtol=0, atol=1e-9)


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@pytest.mark.parametrize(("scale", "factor"), [(0.0, 1), (1.0, 1), (0.5, 2), (3.0, 2)])
def test_calls_reaching_the_network_are_counted(sampler, scale, factor, state, context):
    probe = CountCalls()
    guided = wrap(denoise, probe, ClassifierFreeGuidance(scale))
    sample(guided, state, karras_schedule(6, 0.1, 20.0), context, sampler=sampler)
    assert probe.nfe == factor * network_calls(sampler, 6)


def test_off_is_free(state, context):
    schedule = karras_schedule(6, 0.1, 20.0)
    probe = CountCalls()
    off = wrap(denoise, probe, ClassifierFreeGuidance(1.0))
    guided, plain = (sample(each, state, schedule, context).x for each in (off, denoise))
    assert torch.equal(guided, plain)
    assert probe.nfe == 11
    assert wrap(denoise) is denoise


def test_the_first_wrapper_is_the_innermost(context):
    inner, outer = CountCalls(), CountCalls()

    def twice(inside):
        def called(xt, sigma, context):
            return (inside(xt, sigma, context) + inside(xt, sigma, context)) / 2

        return called

    wrapped = wrap(lambda xt, sigma, context: xt, inner, twice, outer)
    wrapped(torch.zeros(2, 3, 4), torch.ones(2), context)
    assert (inner.nfe, outer.nfe) == (2, 1)


@pytest.mark.parametrize("scale", [-0.5, float("nan"), float("inf")])
def test_a_scale_without_meaning_is_refused(scale):
    with pytest.raises(ConfigError, match="guidance_scale"):
        ClassifierFreeGuidance(scale)
