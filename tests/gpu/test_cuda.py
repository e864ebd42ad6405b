"""On a CUDA device predictions are those of the CPU, and probes wait for what they time."""

import copy

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError
from perturbdiff.diffusion import State, karras_schedule, sample
from perturbdiff.guidance import ClassifierFreeGuidance
from perturbdiff.model import _causal_fitted, _fitted
from perturbdiff.model._quote_diffusion import made_context
from perturbdiff.profiling import Machine, Probe, _machine, watching
from perturbdiff.profiling._memory import peak_bytes, reset_peak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ASKED = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 40}


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 96)
        patch.setattr(_causal_fitted, "PILOT_CELLS", 96)
        yield


@pytest.fixture(scope="module")
def trained(simulated_cells, small_fit):
    """A network that says something: first weights answer 0, which every device agrees on."""
    train = ptd.TrainConfig(
        max_steps=40, check_every=20, n_sets=16, set_size=6, n_controls=6, warmup_steps=2
    )
    return small_fit(simulated_cells, train=train)


@pytest.fixture(scope="module")
def elsewhere(trained):
    return copy.deepcopy(trained).to("cuda")


def latents(model, device):
    """Latent responses of three sets, sampled on the device."""
    fitted = model.fitted
    context = made_context(fitted, 3, 8)
    rng = torch.Generator().manual_seed(0)
    control = torch.randn(context.control.shape, generator=rng)
    from_rng = {"control": control.to(device), "partner": torch.zeros_like(context.partner)}
    context = fitted.denoiser.network.remember(type(context)(**{**vars(context), **from_rng}))
    keys = torch.arange(24, device=device).view(3, 8)
    state = State.initial(keys, context.shift.shape[-1], 10.0)
    schedule = karras_schedule(12, 0.05, 10.0, rho=7.0)
    with torch.inference_mode():
        return sample(fitted.denoiser, state, schedule, context).x.cpu()


def test_latent_responses_agree(trained, elsewhere):
    ours, theirs = latents(trained, "cpu"), latents(elsewhere, "cuda")
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_noise_is_the_same_on_every_device():
    keys = torch.arange(1000).view(10, 100)
    here = State.initial(keys, 30, 10.0).x
    there = State.initial(keys.cuda(), 30, 10.0).x.cpu()
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)


def test_cells_agree(trained, elsewhere, simulated_cells):
    ours = trained.predict(simulated_cells, **ASKED).layers["counts"].toarray()
    theirs = elsewhere.predict(simulated_cells, **ASKED).layers["counts"].toarray()
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() <= 1e-3


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_nothing_in_the_loop_waits_for_the_device(elsewhere, guidance_scale):
    fitted = elsewhere.fitted
    context = fitted.denoiser.network.remember(made_context(fitted, 3, 8))
    state = State.initial(torch.arange(24, device="cuda").view(3, 8), context.shift.shape[-1], 10.0)
    denoise = ClassifierFreeGuidance(guidance_scale)(fitted.denoiser)
    schedule = karras_schedule(4, 0.05, 10.0, rho=7.0)

    def run():
        return sample(denoise, state, schedule, context).x

    with torch.inference_mode():
        run()  # what is loaded and made once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "float8"])
def test_lower_precision_gives_what_it_gives_here(trained, precision):
    ours, theirs = (trained.in_precision(precision) for _ in range(2))
    if precision == "float8" and torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ConfigError, match="compute capability"):
            theirs.to("cuda")
        return
    here, there = latents(ours, "cpu"), latents(theirs.to("cuda"), "cuda")
    assert here.abs().max() > 0.1
    assert (here - there).norm() / here.norm() < 0.05
    whole = latents(trained, "cpu")
    assert (whole - there).norm() / whole.norm() < 0.2


@pytest.mark.filterwarnings("ignore")  # what torch says of itself while it compiles
@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-4), ("int8", 0.15)])
def test_recorded_calls_give_what_single_kernels_give(elsewhere, precision, most):
    plain = elsewhere.in_precision(precision)
    compiled = plain.compiled()
    network, denoise = plain.fitted.denoiser, compiled.fitted.denoiser
    with torch.inference_mode():
        for n_sets in (3, 5, 5, 16, 3):
            context = network.network.remember(made_context(plain.fitted, n_sets, 8))
            rng = torch.Generator("cuda").manual_seed(n_sets)
            shape = (n_sets, 8, context.shift.shape[-1])
            xt = torch.randn(shape, generator=rng, device="cuda")
            sigma = torch.linspace(0.1, 10, n_sets, device="cuda")
            first, second = denoise(xt, sigma, context), denoise(xt + 1, sigma, context)
            for found, given in ((first, xt), (second, xt + 1)):
                expected = network(given, sigma, context)
                assert (found - expected).norm() <= most * expected.norm()


@pytest.mark.filterwarnings("ignore")  # what torch says of itself while it compiles
def test_a_compiled_model_predicts(elsewhere, simulated_cells):
    ours = elsewhere.predict(simulated_cells, **ASKED).layers["counts"].toarray()
    theirs = elsewhere.compiled().predict(simulated_cells, **ASKED).layers["counts"].toarray()
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() <= 1e-3


def test_probes_wait_for_the_device(elsewhere, simulated_cells):
    elsewhere.predict(simulated_cells, **ASKED)
    elsewhere.probe_points().forget()
    probe = Probe("cuda")
    with watching(probe, elsewhere.probe_points().stages):
        probe.run(lambda: elsewhere.predict(simulated_cells, **ASKED))
    assert sum(p.seconds for p in probe.phases.values()) == pytest.approx(probe.seconds)
    assert probe.network_calls == 18

    busy = torch.randn(4096, 4096, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def work():
        begin.record()
        for _ in range(20):
            busy @ busy
        end.record()

    work()
    waiting = Probe("cuda")
    waiting.run(work)
    assert 1000 * waiting.seconds >= begin.elapsed_time(end)


def test_a_probe_counts_on_a_device_what_it_counts_here(trained, elsewhere, simulated_cells):
    found = []
    for model, device in ((trained, "cpu"), (elsewhere, "cuda")):
        model.probe_points().forget()
        points, probe = model.probe_points(), Probe(device)
        with watching(probe, points.stages), probe.counts(points.weights):
            probe.run(lambda model=model: model.predict(simulated_cells, **ASKED))
        found.append(probe.phases["denoising steps"].work.operations)
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_a_device_is_measured():
    machine = _machine.measured("cuda", seconds=0.02)
    assert isinstance(machine, Machine)
    assert machine.rates["bfloat16"] > machine.rates["float32"] > 0
    assert machine.bandwidth > 0
    assert machine.name == torch.cuda.get_device_name()


def test_peak_memory_is_that_of_the_device():
    device = torch.device("cuda")
    reset_peak(device)
    before = peak_bytes(device)
    block = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    assert peak_bytes(device) >= before + block.numel()


def test_quotes_are_of_the_device(elsewhere, simulated_cells, tmp_path, monkeypatch):
    monkeypatch.setattr(_machine.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(_machine, "_MEASURED", {})
    quote = elsewhere.quote(simulated_cells, n_cells=40)
    assert quote.network_calls == 18
    assert quote.seconds > 0
