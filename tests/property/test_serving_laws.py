"""Laws of step-level batching: who shares a batch, and when who joins or leaves, is invisible."""

from dataclasses import replace

import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError
from perturbdiff.diffusion import Preconditioned
from perturbdiff.serve._engine import StepBatch

WAYS = {
    "usual": ptd.SampleConfig(n_steps=6),
    "short": ptd.SampleConfig(n_steps=3, guidance_scale=2.0),
    "free": ptd.SampleConfig(n_steps=4, guidance_scale=0.0),
    "heun": ptd.SampleConfig(n_steps=4, sampler="heun"),
    "small sets": ptd.SampleConfig(n_steps=5, set_size=7),
    "stochastic": ptd.SampleConfig(n_steps=5, sampler="stochastic"),
    "euler": ptd.SampleConfig(n_steps=5, sampler="euler", guidance_scale=0.5),
}
SETS = [[0, 1, 4], [2]]


@pytest.fixture(scope="module")
def tasks(small_model, simulated_cells):
    """Two conditions, one of them a combination: their rows have another width."""
    question = small_model._ask(
        simulated_cells, ["P1", "P1+P2"], contexts=[{"cell_type": "T1"}], n_cells=64
    )
    pairs = small_model._with_controls_of(question)
    fitted = small_model.fitted
    return [fitted.task(*pair, fitted.target(*pair), n_cells=1024, seed=3) for pair in pairs]


@pytest.fixture(scope="module")
def alone(small_model, tasks):
    """What each way gives by itself."""
    sampler = small_model.fitted.sampler
    return {name: sampler.sample(tasks, SETS, way, seed=3)[0] for name, way in WAYS.items()}


def run(engine, orders, got=None):
    """All sets by name, task and number."""
    got = {} if got is None else got
    while not engine.idle:
        turn = engine.step()
        assert not turn.failed
        got |= {(orders[f.order], f.task, f.number): f.latent for f in turn.finished}
    return got


def same_as_alone(got, alone):
    for name, latents in alone.items():
        for task, numbers in enumerate(SETS):
            for place, number in enumerate(numbers):
                torch.testing.assert_close(
                    got[name, task, number], latents[task][place], atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("n_sets", [1, 5, 64])
@pytest.mark.parametrize("steps_between", [0, 1, 2])
def test_a_shared_batch_gives_what_each_gives_alone(
    small_model, tasks, alone, n_sets, steps_between
):
    engine, orders, got = StepBatch(small_model.fitted.sampler, n_sets=n_sets), {}, {}
    for name, way in WAYS.items():
        orders[engine.submit(tasks, SETS, way, seed=3)] = name
        for _ in range(steps_between):
            turn = engine.step()
            got |= {(orders[f.order], f.task, f.number): f.latent for f in turn.finished}
    same_as_alone(run(engine, orders, got), alone)


def test_sets_with_other_steps_and_guidance_share_calls(small_model, tasks):
    engine = StepBatch(small_model.fitted.sampler)
    for n_steps, scale in ((6, 1.0), (3, 2.0), (4, 0.0)):
        way = ptd.SampleConfig(n_steps=n_steps, guidance_scale=scale)
        engine.submit(tasks, SETS, way, seed=3)
    run(engine, dict.fromkeys(range(9)))
    assert engine.tally.calls == 6  # as many as the longest needs alone
    assert max(engine.tally.fill) == 12


@pytest.mark.parametrize("after", [0, 1, 3])
def test_who_leaves_changes_nothing_for_the_others(small_model, tasks, alone, after):
    engine = StepBatch(small_model.fitted.sampler)
    orders = {engine.submit(tasks, SETS, way, seed=3): name for name, way in WAYS.items()}
    leaver = engine.submit(tasks, [list(range(8)), []], WAYS["usual"], seed=9)
    got = {}
    for _ in range(after):
        turn = engine.step()
        got |= {(orders[f.order], f.task, f.number): f.latent for f in turn.finished}
    engine.cancel(leaver)
    same_as_alone(run(engine, orders, got), alone)
    assert leaver not in orders


def test_a_small_order_does_not_wait_for_a_large_one(small_model, tasks):
    engine = StepBatch(small_model.fitted.sampler, n_sets=8)
    large = engine.submit(tasks, [list(range(32)), []], WAYS["usual"], seed=0)
    engine.step()
    small = engine.submit(tasks, [[0, 1], []], WAYS["usual"], seed=1)
    finished = []
    for _ in range(WAYS["usual"].n_steps):
        finished += [found.order for found in engine.step().finished]
    assert finished.count(small) == 2  # in as many steps as alone
    assert finished.count(large) <= 16
    assert engine.set_steps_left > 0


def test_what_is_watched_tells_its_steps_and_what_it_looks_like(small_model, tasks, alone):
    engine = StepBatch(small_model.fitted.sampler)
    order = engine.submit(tasks, SETS, WAYS["usual"], seed=3, watched=True)
    engine.submit(tasks, SETS, WAYS["short"], seed=3)
    seen = []
    while not engine.idle:
        seen += engine.step().seen
    assert [one.order for one in seen] == [order] * 6
    assert [one.done for one in seen] == [4, 8, 12, 16, 20, 24]
    assert {one.of for one in seen} == {24}
    assert seen[0].moved is None
    assert all(one.moved > 0 for one in seen[1:])
    cells = torch.cat([latent.flatten(0, 1) for latent in alone["usual"]])
    torch.testing.assert_close(seen[-1].spread, cells.std(0, correction=0), atol=1e-5, rtol=1e-4)


def test_an_error_in_a_shared_call_fails_only_its_cause(small_model, tasks, alone):
    sampler = small_model.fitted.sampler
    engine = StepBatch(
        replace(sampler, denoiser=Fragile(sampler.denoiser.network, sampler.denoiser.sigma_data))
    )
    bad = replace(tasks[0], control=torch.full_like(tasks[0].control, 77.0), digest="bad")
    orders = {engine.submit(tasks, SETS, way, seed=3): name for name, way in WAYS.items()}
    broken = engine.submit([bad], [[0, 1]], WAYS["usual"], seed=3)
    got, failed = {}, {}
    while not engine.idle:
        turn = engine.step()
        failed |= turn.failed
        got |= {(orders[f.order], f.task, f.number): f.latent for f in turn.finished}
    assert list(failed) == [broken]
    assert "no memory" in str(failed[broken])
    same_as_alone(got, alone)


class Fragile(Preconditioned):
    """A denoiser that breaks off at certain partners."""

    def forward(self, xt, sigma, context):
        if bool((context.partner == 77.0).any()):
            msg = "no memory for this one"
            raise RuntimeError(msg)
        return super().forward(xt, sigma, context)


def test_an_order_that_cannot_begin_fails_by_itself(small_model, tasks, alone):
    engine = StepBatch(small_model.fitted.sampler)
    orders = {engine.submit(tasks, SETS, way, seed=3): name for name, way in WAYS.items()}
    few = replace(tasks[0], partners=tasks[0].partners[:3])
    broken = engine.submit([few], [[5]], WAYS["usual"], seed=3)
    first = engine.step()
    assert list(first.failed) == [broken]
    got = {(orders[f.order], f.task, f.number): f.latent for f in first.finished}
    same_as_alone(run(engine, orders, got), alone)


def test_an_order_of_no_sets_is_done(small_model, tasks):
    engine = StepBatch(small_model.fitted.sampler)
    engine.submit(tasks, [[], []], WAYS["usual"], seed=0)
    assert engine.idle
    turn = engine.step()
    assert not turn.finished
    assert not turn.seen


def test_a_batch_holds_at_least_one_set(small_model):
    with pytest.raises(ConfigError, match=r"serve\.n_sets = 0: must be at least 1"):
        StepBatch(small_model.fitted.sampler, n_sets=0)
