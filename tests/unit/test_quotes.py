"""Quotes: what they count is what predictions do, and asking for one changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError, GeneError
from perturbdiff.guidance import Reference
from perturbdiff.model import (
    _causal_fitted,
    _constrained_course,
    _fitted,
    _quote_causal,
    _quote_constrained,
    _quote_diffusion,
    _quote_obeying,
    _quote_rest,
    _quote_written,
)
from perturbdiff.model._quote_causal import DecoderCost
from perturbdiff.model._quote_diffusion import DenoiserCost, batches
from perturbdiff.model._quote_obeying import ObeyingCost, ObeyingRest, short_sizes
from perturbdiff.model._quote_rest import Request, own_controls
from perturbdiff.profiling import Probe, _machine, watching

COLUMNS = {
    "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
    "embedding_key": "perturbation_features",
}  # fmt: skip
PILOT = 64


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """Few pilot cells, and measurements that are as short as can be, in a folder of their own."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        for module in (_fitted, _causal_fitted, _quote_diffusion, _quote_rest):
            patch.setattr(module, "PILOT_CELLS", PILOT)
        for module in (_quote_diffusion, _quote_causal):
            patch.setattr(module, "_SECONDS_EACH", 0.0)
        for module in (_quote_rest, _quote_obeying):
            patch.setattr(module, "_REPEATS", 1)
        patch.setattr(_quote_obeying, "_CELLS", (40,))
        patch.setattr(_quote_constrained, "_STEPS", (1, 2))
        patch.setattr(_quote_rest, "_MANY", PILOT)
        patch.setattr(_machine.platformdirs, "user_cache_path", lambda name: folder / name)
        patch.setattr(_machine, "_MEASURED", {})
        patch.setattr(_machine, "_SIZES", (32,))
        patch.setattr(_machine, "_SECONDS", 0.0)
        patch.setattr(_machine, "_COPY_BYTES", 1 << 12)
        yield


def sibling(adata, order):
    train = ptd.TrainConfig(
        max_steps=2, check_every=1, n_sets=2, set_size=2, n_controls=6, warmup_steps=1
    )
    network = ptd.DecoderConfig(
        n_axes=5, n_response_axes=4, width=16, n_heads=2, gene_width=4, draft_steps=2, order=order
    )
    return ptd.CausalBaseline.from_anndata(adata, **COLUMNS).fit(
        adata, holdout={"cell_type": ["T1"]}, n_top_genes=20, network=network, train=train,
        options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(simulated_cells):
    return sibling(simulated_cells, "coexpression")


ASKED = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}]}


@pytest.mark.parametrize(
    "sample",
    [
        {},
        {"n_steps": 5, "guidance_scale": 2.0},
        {"sampler": "heun", "n_steps": 4, "set_size": 8},
        {"n_steps": 3, "guidance_scale": 0.0},
    ],
)
@pytest.mark.parametrize("n_cells", [1, 200])
def test_calls_are_known_before_they_are_made(small_model, simulated_cells, sample, n_cells):
    config = ptd.SampleConfig(**sample)
    quote = small_model.quote(simulated_cells, n_cells=n_cells, sample=config)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, n_cells=n_cells, sample=config)
    assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]
    assert quote.seconds == pytest.approx(sum(quote.phases.values()))
    assert quote.low < quote.seconds < quote.high
    assert quote.memory_bytes > 0


def test_operations_are_those_that_a_probe_counts(small_model, simulated_cells):
    config = ptd.SampleConfig(n_steps=3, set_size=16)
    quote = small_model.quote(simulated_cells, n_cells=100, sample=config)
    small_model.probe_points().forget()
    points, probe = small_model.probe_points(), Probe()
    with watching(probe, points.stages), probe.counts(points.weights):
        probe.run(lambda: small_model.predict(simulated_cells, **ASKED, n_cells=100, sample=config))
    found = probe.phases["denoising steps"].work
    assert quote.work.operations == pytest.approx(found.operations, rel=0.01)
    assert quote.work.bytes == pytest.approx(found.bytes, rel=0.15)


def test_more_costs_more(small_model, simulated_cells):
    def seconds(**more):
        return small_model.quote(simulated_cells, **more).phases["denoising steps"]

    least = seconds(n_cells=1)
    twice = seconds(n_cells=1, n_steps=36)
    assert least < twice <= 2 * least
    assert seconds(n_cells=1, guidance_scale=2.0) == pytest.approx(twice)
    many = small_model.quote(simulated_cells, n_cells=64, n_conditions=8, n_contexts=2)
    few = small_model.quote(simulated_cells, n_cells=64)
    assert many.seconds > few.seconds
    assert many.network_calls == few.network_calls  # they fit into one batch


def test_a_quote_changes_nothing(small_model, simulated_cells):
    before = small_model.predict(simulated_cells, **ASKED, n_cells=40, seed=3)
    kept = len(small_model.fitted.plans)
    sampler, checksum = small_model.fitted.sampler, small_model.checksum
    small_model.quote(simulated_cells, n_cells=33, sample=ptd.SampleConfig(set_size=11))
    assert len(small_model.fitted.plans) == kept
    assert small_model.fitted.sampler is sampler
    assert small_model.checksum == checksum
    after = small_model.predict(simulated_cells, **ASKED, n_cells=40, seed=3)
    assert (before.layers["counts"] != after.layers["counts"]).nnz == 0


def test_batches_are_those_of_the_sampler():
    assert batches(64, at_once=64) == [(64, 1)]
    assert batches(130, at_once=64) == [(64, 2), (2, 1)]
    assert batches(3, at_once=64) == [(3, 1)]


def test_bytes_of_a_call_grow_with_the_sets(small_model, simulated_cells):
    cost = DenoiserCost(small_model.fitted, 8)
    one, nine = cost.work(1), cost.work(9)
    assert nine.weight_bytes == pytest.approx(one.weight_bytes)
    assert nine.activation_bytes > 5 * one.activation_bytes
    assert cost.seconds(9) > 0


# The sibling


@pytest.mark.parametrize("n_cells", [1, 40])
def test_one_call_a_gene_is_known_before(written, simulated_cells, n_cells):
    plain = ptd.DecodeConfig(draft_length=0)
    quote = written.quote(simulated_cells, n_cells=n_cells, decode=plain)
    pred = written.predict(simulated_cells, **ASKED, n_cells=n_cells, decode=plain)
    assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]
    assert "whatever the cells are" in quote.how
    assert quote.memory_bytes > 0


def test_guesses_make_a_quote_looser_and_it_says_why(written, simulated_cells):
    quote = written.quote(simulated_cells, n_cells=8)
    assert "looser" in quote.how
    assert "slowest" in quote.how
    n_genes = len(written.registry.genes)
    assert n_genes / 9 <= quote.network_calls <= n_genes + 1
    assert "decode steps" in quote.phases


def test_drawn_genes_are_expected_by_the_prior(simulated_cells):
    model = sibling(simulated_cells, "descending")
    quote = model.quote(simulated_cells, n_cells=4)
    assert "effect prior" in quote.how
    assert 1 <= quote.network_calls <= len(model.registry.genes) + 2


def test_genes_that_are_drawn_narrowly_are_counted_on_some_cells(simulated_cells):
    model, few = sibling(simulated_cells, "descending"), ptd.DecodeConfig(top_p=0.3)
    quote = model.quote(simulated_cells, n_cells=4, decode=few)
    pred = model.predict(simulated_cells, **ASKED, n_cells=4, decode=few)
    assert "drawn at this temperature" in quote.how
    assert quote.network_calls == pytest.approx(pred.uns["perturbdiff"]["nfe"], abs=2)


def test_operations_of_written_cells(written, simulated_cells):
    plain = ptd.DecodeConfig(draft_length=0, set_size=6)
    quote = written.quote(simulated_cells, n_cells=6, decode=plain)
    points, probe = written.probe_points(), Probe()
    with watching(probe, points.stages), probe.counts(points.weights):
        probe.run(lambda: written.predict(simulated_cells, **ASKED, n_cells=6, decode=plain))
    parts = [probe.phases[name].work.operations for name in ("control encoding", "decode steps")]
    assert quote.work.operations == pytest.approx(sum(parts), rel=0.02)


def test_the_course_of_a_batch_ends_at_its_last_gene(written, simulated_cells):
    config = ptd.DecodeConfig(draft_length=0)
    task = _quote_causal._task(written, simulated_cells, missing_genes="refuse")
    cost = DecoderCost(written.fitted, task, config)
    course = cost._course(4)
    assert sum(weight for weight, _ in course) == pytest.approx(cost.n_genes)
    assert max(reach for _, reach in course) <= cost.n_genes
    mean = sum(weight * reach for weight, reach in course) / cost.n_genes
    assert mean == pytest.approx((cost.n_genes + 1) / 2, rel=0.1)


# Under constraints


@pytest.fixture
def assumed(monkeypatch):
    """What obeying takes beside the network, where it is not what a test is about."""
    cost = ObeyingCost(each=(1.0, 0.1, 0.01, 0.001), peaks=((8.0, 90.0),), network=(), spread=0.0)
    for module in (_quote_constrained, _quote_written):
        monkeypatch.setattr(module, "obeying_cost", lambda *_, **__: cost)


def at_least(model, **more):
    return ptd.AtLeast(model.registry.genes[0], 0.5, **more)


def on_average(model):
    return ptd.AtMost(model.registry.genes[1], 0.2, per="population")


def either(model):
    return ptd.Any([on_average(model), ptd.AtMost(model.registry.genes[2], 9.0)])


WAYS = [
    (at_least, "hard"),
    (on_average, "hard"),
    (at_least, "soft"),
    (at_least, "best_of"),
    (on_average, None),
    (at_least, ptd.Branch(k=3, share=2)),
    (at_least, ptd.Branch(k=3, share=0)),
    (at_least, ptd.Branch(k=3, share=99)),
    (on_average, ptd.Particles(n=3)),
    (at_least, ["soft", ptd.BestOf(n=2), "hard"]),
]


@pytest.mark.usefixtures("assumed")
@pytest.mark.parametrize(("rule", "enforce"), WAYS)
@pytest.mark.parametrize(
    "sample",
    [{"n_steps": 5}, {"sampler": "heun", "n_steps": 3, "set_size": 8, "guidance_scale": 2.0}],
)
def test_calls_under_constraints_are_known_before(
    small_model, simulated_cells, rule, enforce, sample
):
    config, rule = ptd.SampleConfig(**sample), rule(small_model)
    asked = {"n_cells": 70, "sample": config, "constraints": rule, "enforce": enforce}
    quote = small_model.quote(simulated_cells, **asked)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]
    assert quote.seconds == pytest.approx(sum(quote.phases.values()))
    assert quote.phases["constraints"] > 0
    assert quote.low < quote.seconds < quote.high
    assert "at most" not in quote.how


@pytest.mark.usefixtures("assumed")
def test_steps_that_are_taken_again_are_counted(small_model, simulated_cells):
    genes = small_model.registry.genes[:2]
    rule = ptd.Observed(genes, np.full((40, 2), 0.7))
    asked = {
        "n_cells": 40, "constraints": rule, "sample": ptd.SampleConfig(n_steps=4, sampler="heun"),
        "enforce": ptd.Hard(resamples=2),
    }  # fmt: skip
    quote = small_model.quote(simulated_cells, **asked)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]


@pytest.mark.usefixtures("assumed")
@pytest.mark.parametrize("budget", [1, 7, 30])
@pytest.mark.parametrize("value", [0.0, 9.0])
def test_of_a_search_that_may_end_early_the_most_is_told(
    small_model, simulated_cells, monkeypatch, budget, value
):
    """Where nothing obeys it goes on, and where everything does it ends at once: both are inside.

    Sets that part ways need calls of their own, so the most is not always reached.
    """
    monkeypatch.setattr(_quote_constrained, "_SETS_AT_ONCE", 2)
    monkeypatch.setattr(_constrained_course, "_SETS_AT_ONCE", 2)
    rule = ptd.AtLeast(small_model.registry.genes[0], value)
    asked = {
        "n_cells": 70, "constraints": rule, "sample": ptd.SampleConfig(n_steps=6, set_size=16),
        "enforce": ptd.DepthFirst(budget=budget, redraws=1),
    }  # fmt: skip
    quote = small_model.quote(simulated_cells, **asked)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    pilot = PILOT // 16 and 6
    nfe = pred.uns["perturbdiff"]["nfe"]
    sets = float(pred.uns["perturbdiff"]["constraints"]["set_evaluations"].max())
    assert pilot + 6 <= nfe <= quote.network_calls
    load = _quote_constrained.deepest(
        asked["enforce"], _quote_constrained.Course(config=asked["sample"]), 5
    )
    assert 5 * 6 <= sets <= load.evaluations == 5 * max(budget, 6)
    assert "at most" in quote.how
    if value == 0:
        assert nfe == pilot + 6 * 3


@pytest.mark.usefixtures("assumed")
def test_one_set_that_never_obeys_takes_the_most_to_the_call(small_model, simulated_cells):
    rule = ptd.AtLeast(small_model.registry.genes[0], 9.0)
    asked = {
        "n_cells": 8, "constraints": rule, "sample": ptd.SampleConfig(n_steps=6, set_size=16),
        "enforce": ptd.DepthFirst(budget=20, redraws=1),
    }  # fmt: skip
    quote = small_model.quote(simulated_cells, **asked)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    assert pred.uns["perturbdiff"]["nfe"] == quote.network_calls == 6 + 20


@pytest.mark.usefixtures("assumed")
def test_what_is_chosen_on_the_pilot_is_told_as_the_most(small_model, simulated_cells):
    """One member is about the mean, which needs no pull; the other holds as it is, or is pulled."""
    asked = {"n_cells": 40, "constraints": either(small_model), "enforce": "hard"}
    quote = small_model.quote(simulated_cells, **asked)
    small_model.probe_points().forget()
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    assert pred.uns["perturbdiff"]["nfe"] <= quote.network_calls == 2 * 18
    assert "depends on the pilot" in quote.how


def test_what_obeying_takes_is_a_sum():
    cost = ObeyingCost(
        each=(1.0, 0.1, 0.01, 0.001), peaks=((10.0, 50.0), (30.0, 90.0)), network=(), spread=0.2
    )
    rest = _quote_rest.RestCost(
        seconds={"a": (1.0, 0.5, 7.0, 7.0)}, waiting=0.5, spread=0.1, peaks=()
    )
    found = ObeyingRest(rest=rest, cost=cost, calls=4, evaluations=20)
    request = Request(contexts=2, conditions=3, cells=50)
    phases = found.phases(request)
    assert phases == {"a": 2.0, "constraints": pytest.approx(3 * (1 + 5 + 0.04 + 0.02))}
    assert found.memory_bytes(request) == 90 + 2 * 20 + 0.5 * 2 * 50
    assert found.spread == 0.2


def test_short_runs_ask_for_no_more_cells_than_were_measured(monkeypatch):
    monkeypatch.setattr(_quote_obeying, "_CELLS", (256, 768))
    two = torch.ones(2, dtype=torch.float64)
    reference = Reference(
        genes=("A", "B"), control_log1p=two, control_depth=two, library_size=1000 * two
    )

    def bounds(n_rows):
        return [ptd.Observed(["A", "B"], np.full((n_rows, 2), 0.7)).bind(reference)]

    assert short_sizes([], 32, 40) == [256, 32]
    assert short_sizes([], 32, 257) == short_sizes([], 32, 9999) == [768, 32]
    assert short_sizes(bounds(1), 32, 40) == [256, 32]
    assert short_sizes(bounds(50), 32, 40) == [50, 32]
    assert short_sizes(bounds(20), 32, 20) == [20]
    assert short_sizes([], 32, 40, candidates=20) == [96, 32]
    assert short_sizes([], 32, 9, candidates=1000) == [32]
    assert short_sizes([], 32, 500, candidates=1000) == [512, 32]


def test_constraints_cost_more_and_are_measured_once(small_model, simulated_cells, monkeypatch):
    rule = on_average(small_model)
    plain = small_model.quote(simulated_cells, n_cells=40)
    obeying = small_model.quote(simulated_cells, n_cells=40, constraints=rule, enforce="best_of")
    assert obeying.network_calls > plain.network_calls
    assert obeying.work.operations > plain.work.operations
    assert "constraints" not in plain.phases
    monkeypatch.setattr(_quote_obeying, "_Runs", None)  # nothing runs again
    more = small_model.quote(
        simulated_cells, n_cells=80, n_conditions=3, constraints=rule, enforce="best_of"
    )
    assert more.seconds > obeying.seconds
    assert more.network_calls == 3 * obeying.network_calls


def test_functions_are_quoted_too_and_run_each_time(
    small_model, simulated_cells, caplog, monkeypatch
):
    monkeypatch.setattr(_quote_constrained, "_STEPS", (1,))
    monkeypatch.setattr(_quote_obeying, "_CELLS", (16,))
    seen = []

    def never(log1p, genes):
        seen.append(len(log1p))
        return False

    asked = {"n_cells": 16, "constraints": never, "enforce": ptd.BestOf(n=2)}
    first = small_model.quote(simulated_cells, **asked)
    count = len(seen)
    assert count > 0
    small_model.quote(simulated_cells, **asked)
    assert len(seen) == 2 * count
    small_model.probe_points().forget()
    assert not caplog.records  # short runs that miss are nobody's business
    pred = small_model.predict(simulated_cells, **ASKED, **asked)
    assert first.network_calls == pred.uns["perturbdiff"]["nfe"]


def test_wishes_that_cannot_be_are_refused_before_anything_runs(small_model, written, monkeypatch):
    for module in (_quote_constrained, _quote_written):
        monkeypatch.setattr(module, "rest_cost", None)
    gene = small_model.registry.genes[0]
    for model in (small_model, written):
        with pytest.raises(GeneError, match="GHOST"):
            model.quote(n_cells=5, constraints=ptd.AtLeast("GHOST", 1.0))
        both = [ptd.AtLeast(gene, 2.0), ptd.AtMost(gene, 1.0)]
        with pytest.raises(ConstraintError, match=gene):
            model.quote(n_cells=5, constraints=both)
        with pytest.raises(ConfigError, match="there are none"):
            model.quote(n_cells=5, enforce="hard")
    with pytest.raises(ConstraintError, match="masking"):
        written.quote(n_cells=5, constraints=ptd.AtLeast(gene, 1.0), decoding="transport")
    with pytest.raises(ConfigError, match="'raw' or 'transport'"):
        written.quote(n_cells=5, decoding="beam")


PLAIN = ptd.DecodeConfig(draft_length=0, set_size=16)


@pytest.mark.parametrize("n_cells", [5, 100])
def test_calls_of_transported_cells_are_known_before(written, simulated_cells, n_cells):
    asked = {"n_cells": n_cells, "decode": PLAIN, "decoding": "transport"}
    quote = written.quote(simulated_cells, **asked)
    written.probe_points().forget()
    pred = written.predict(simulated_cells, **ASKED, **asked)
    assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]


@pytest.mark.usefixtures("assumed")
@pytest.mark.parametrize(("rule", "turns"), [(at_least, 1), (on_average, 4)])
def test_calls_of_written_cells_under_constraints(
    written, simulated_cells, monkeypatch, rule, turns
):
    """Masks need one more turn, always; sets that miss up to three, if none ever obeys."""
    for module in (_quote_written, _causal_fitted):
        monkeypatch.setattr(module, "CELLS_AT_ONCE", 32)
    asked = {"n_cells": 70, "decode": PLAIN, "constraints": rule(written)}
    quote = written.quote(simulated_cells, **asked)
    pred = written.predict(simulated_cells, **ASKED, **asked)
    nfe, once = pred.uns["perturbdiff"]["nfe"], 3 * (1 + len(written.registry.genes))
    if turns == 1:
        assert quote.network_calls == nfe == 2 * once
        assert "most" not in quote.how
    else:
        assert nfe <= quote.network_calls == turns * once
        assert "up to 4 turns" in quote.how
        assert quote.low < quote.seconds - 0.9 * quote.phases["decode steps"] / turns
    assert quote.phases["constraints"] > 0


@pytest.mark.usefixtures("assumed")
def test_sets_that_never_obey_take_the_most(written, simulated_cells):
    def never(log1p, genes):
        return False

    for decoding, n_cells in (("raw", 40), ("transport", 40)):
        asked = {"n_cells": n_cells, "decode": PLAIN, "constraints": never, "decoding": decoding,
                 "enforce": ptd.BestOf(n=3)}  # fmt: skip
        quote = written.quote(simulated_cells, **asked)
        written.probe_points().forget()
        pred = written.predict(simulated_cells, **ASKED, **asked)
        assert quote.network_calls == pred.uns["perturbdiff"]["nfe"]


# Where there is nothing to measure on, and what makes no sense


def test_control_cells_are_needed(small_model, tmp_path):
    small_model.save(tmp_path / "bare")
    small_model.save(tmp_path / "stocked", include_controls=20)
    with pytest.raises(ConfigError, match="give a file"):
        ptd.load(tmp_path / "bare").quote(n_cells=10)
    stocked = ptd.load(tmp_path / "stocked")
    assert stocked.quote(n_cells=10).seconds > 0
    assert own_controls(stocked) is stocked._reservoir
    assert own_controls(small_model).n_obs > 0  # those that it was fitted on


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n_cells": 0}, "at least 1"),
        ({"n_contexts": 2}, "at most n_conditions = 1"),
        ({"n_steps": 0}, "at least 1"),
        ({"guidance_scale": -1.0}, "at least 0"),
    ],
)
def test_nonsense_is_refused(small_model, asked, words):
    with pytest.raises(ConfigError, match=words):
        small_model.quote(**asked)


def test_a_request_counts_what_takes_time():
    with pytest.raises(ConfigError, match="whole number"):
        Request.of(1, 2.5, 1)
    request = Request(contexts=2, conditions=3, cells=10)
    assert request.features == (1.0, 2, 3, 30)
    cost = _quote_rest.RestCost(
        seconds={"a": (1.0, 0.0, 2.0, 0.1)}, waiting=0.5, spread=0.0,
        peaks=((1.0, 5.0), (20.0, 40.0), (40.0, 60.0)),
    )  # fmt: skip
    assert cost.phases(request) == {"a": pytest.approx(10.0)}
    assert cost.memory_bytes(request) == 20 + 0.5 * 20
    alone = replace(request, conditions=1)
    found = [cost.memory_bytes(replace(alone, cells=n)) for n in (1, 20, 40, 100)]
    assert found == [5, 40, 60, 120]
    assert cost.phases(replace(request, cells=0))["a"] == 7


def test_coefficients_are_found_again():
    features = np.array([[1.0, 1, 1, 32], [1, 1, 1, 1024], [1, 4, 4, 128]])
    found = _quote_rest._solved(features, features @ np.array([0.5, 0.0, 0.25, 0.001]))
    assert features @ np.array(found) == pytest.approx(features @ np.array([0.5, 0.0, 0.25, 0.001]))


def test_what_no_prediction_would_hold_is_not_quoted(small_model, written, simulated_cells):
    said = []
    for model in (small_model, written):
        for ask, words in ((model.quote, {}), (model.predict, ASKED)):
            with pytest.raises(ConfigError, match="the answer alone needs some") as caught:
                ask(simulated_cells, n_cells=10**12, **words)
            said.append(str(caught.value))
    assert said[::2] == said[1::2]
