"""The service without HTTP: answers equal the model's, limits, cancellation, failures."""

import base64
import json
import time

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff.diffusion import Preconditioned
from perturbdiff.model import _fitted
from perturbdiff.serve import ServeConfig, Service
from perturbdiff.serve._formats import from_h5ad, to_h5ad

QUICK = {"n_steps": 4}
WISH = {"kind": "at_most", "gene": "G0003", "value": 0.5}


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 96)
        yield


@pytest.fixture(scope="module")
def bundle(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "bundle"
    small_model.save(folder, include_controls=30)
    return folder


@pytest.fixture(scope="module")
def model(bundle):
    return ptd.load(bundle)


@pytest.fixture
def service(model):
    made = Service(model, ServeConfig(cost_model=False))
    yield made
    made.close()


def body(**question):
    usual = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 20}
    return json.dumps(usual | {"sample": QUICK} | question).encode()


def answers(service, wanted, *, seconds=60.0):
    """Final replies by name, and how many others there were."""
    found, progress, until = {}, [], time.monotonic() + seconds
    while len(found) < wanted:
        assert time.monotonic() < until, sorted(found)
        for reply in service.turn(0.05):
            if reply.final:
                found[reply.uid] = reply
            else:
                progress.append((reply.uid, json.loads(reply.body)))
    return found, progress


def one(service, route="predict", **question):
    service.submit("it", route, body(**question))
    found, _ = answers(service, 1)
    return found["it"].status, json.loads(found["it"].body)


def alike(left, right):
    """Counts differ by one in at most one of 100,000 entries, and everything else is the same."""
    counts = [pred.layers["counts"].toarray() for pred in (left, right)]
    difference = np.abs(counts[0] - counts[1])
    assert difference.max(initial=0) <= 1
    assert difference.sum() <= 1e-5 * difference.size
    assert left.obs.equals(right.obs)
    assert left.var_names.equals(right.var_names)
    ours, theirs = (pred.uns["perturbdiff"] for pred in (left, right))
    assert set(ours) == set(theirs)
    for name in ("model", "bundle_checksum", "seed", "sampler", "n_steps", "guidance_scale"):
        assert ours[name] == theirs[name], name
    for name, value in ours["baselines"].items():
        np.testing.assert_array_equal(value, theirs["baselines"][name])


# Law 4, and G01: one bad request never touches another

QUESTIONS = {
    "usual": {},
    "two": {
        "contexts": [{"cell_type": "T2"}, {"cell_type": "T3"}],
        "perturbations": ["P1", "P1+P2"],
    },
    "many": {"n_cells": 150, "seed": 2},
    "guided": {"sample": {"n_steps": 3, "guidance_scale": 2.0}},
    "heun": {"sample": {"n_steps": 3, "sampler": "heun", "set_size": 10}},
    "all contexts": {"contexts": None, "seed": 5},
}  # fmt: skip
BAD = {
    "unknown": {"perturbations": ["P9"]},
    "one of two": {"perturbations": ["P1", "Q"]},
    "no such context": {"contexts": [{"cell_type": "T9"}]},
    "setting": {"sample": {"nsteps": 3}},
    "huge": {"n_cells": 10**9},
    "field": {"cells": 3},
    "wish": {"constraints": [{"kind": "lambda", "code": "x"}]},
}


def solo(model, question):
    given = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 20} | question
    settings = ptd.SampleConfig(**given.pop("sample", QUICK))
    model.fitted.plans.clear()
    return model.predict(None, sample=settings, **given)


def test_answers_are_those_of_the_model_whoever_else_asks(service, model):
    asked = {**QUESTIONS, **BAD}
    for name in sorted(asked):  # the bad among the good
        service.submit(name, "predict", body(**asked[name]), form="h5ad", watched=name == "many")
        service.turn()
    found, _ = answers(service, len(asked))
    for name, question in QUESTIONS.items():
        assert found[name].status == 200, found[name].body
        alike(from_h5ad(found[name].body), solo(model, question))
    for name in BAD:
        assert found[name].status == 422, name
        assert json.loads(found[name].body)["detail"]


def test_bad_questions_are_told_what_is_wrong(service):
    status, said = one(service, perturbations=["P9"])
    assert (status, said["error"]) == (422, "UnknownLevelError")
    assert "Known: 'P1'" in said["detail"]
    assert "'n_steps'" in one(service, sample={"nsteps": 3})[1]["detail"]
    assert "cells: Extra inputs" in one(service, cells=3)[1]["detail"]
    assert "n_cells" in one(service, n_cells="many")[1]["detail"]
    assert "kind" in one(service, constraints=[{}])[1]["detail"]
    assert "no 'decode'" in one(service, decode={"top_p": 0.5})[1]["detail"]


def test_same_population_is_solved_once(service, model, monkeypatch):
    solved = []
    real = type(model.fitted).solve

    def counting(self, recipe, pilot):
        solved.append(recipe.task.condition.name)
        return real(self, recipe, pilot)

    monkeypatch.setattr(type(model.fitted), "solve", counting)
    for name, n_cells in {"a": 20, "b": 130, "c": 40}.items():
        service.submit(name, "predict", body(n_cells=n_cells, seed=11), form="h5ad")
    found, _ = answers(service, 3)
    assert len(solved) == 1
    for name, n_cells in {"a": 20, "b": 130, "c": 40}.items():
        alike(from_h5ad(found[name].body), solo(model, {"n_cells": n_cells, "seed": 11}))


def test_who_waited_for_a_cancelled_request_is_answered_all_the_same(service, model):
    service.submit("first", "predict", body(seed=12), form="h5ad")
    service.submit("second", "predict", body(seed=12), form="h5ad")
    until = time.monotonic() + 30
    while not service.flow._solving and time.monotonic() < until:
        service.turn(0.05)
    service.cancel("first")
    found, _ = answers(service, 1)
    alike(from_h5ad(found["second"].body), solo(model, {"seed": 12}))
    assert not service.jobs
    assert not service.flow._solving


def test_a_request_that_comes_twice_is_answered_once(service):
    for _ in range(2):
        service.submit("it", "predict", body(seed=13))
    found, _ = answers(service, 1)
    assert found["it"].status == 200
    assert not service.jobs
    assert service.turn(0.3) == []


# Cancelling, deadlines, progress


def test_cancelled_work_stops_and_leaves_nothing(service):
    service.submit("long", "predict", body(n_cells=3000, sample={"n_steps": 40}), watched=True)
    until = time.monotonic() + 30
    while service.flow.engine.idle and time.monotonic() < until:
        service.turn(0.05)
    assert not service.flow.engine.idle
    service.cancel("long")
    assert service.flow.engine.idle
    assert not service.jobs
    assert not service.flow._orders
    assert service.turn(0.1) == []


@pytest.mark.parametrize("extra", [{}, {"constraints": [WISH], "enforce": "soft"}])
def test_a_deadline_stops_the_work(service, extra):
    service.submit(
        "late", "predict",
        body(n_cells=3000, sample={"n_steps": 500}, deadline_s=0.3, **extra),
    )  # fmt: skip
    found, _ = answers(service, 1)
    assert found["late"].status == 504
    assert "0.3 s" in json.loads(found["late"].body)["detail"]
    assert service.flow.engine.idle
    assert not service.jobs
    service.submit("next", "predict", body(**extra))  # the lane is free again
    assert answers(service, 1)[0]["next"].status == 200


def test_progress_is_told_and_the_answer_is_in_the_form_asked_for(service):
    service.submit("it", "predict", body(n_cells=100, answer_as="h5ad"), watched=True)
    found, progress = answers(service, 1)
    assert from_h5ad(found["it"].body).n_obs == 100
    steps = [said for _, said in progress if said["phase"] == "denoising"]
    assert [said["done"] for said in steps] == sorted(said["done"] for said in steps)
    assert steps[-1]["done"] == steps[-1]["of"]
    assert len(steps[0]["x0_hat"]["spread"]) == 4
    assert any(said["phase"] == "drawing" for _, said in progress)


# Control cells


def test_control_cells_may_be_sent(service, model, simulated_cells):
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"].copy()
    sent = base64.b64encode(to_h5ad(control)).decode()
    service.submit("it", "predict", body(control_cells=sent), form="h5ad")
    found, _ = answers(service, 1)
    want = model.predict(
        control, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=20,
        sample=ptd.SampleConfig(**QUICK),
    )  # fmt: skip
    alike(from_h5ad(found["it"].body), want)


def test_missing_control_cells_are_named(small_model):
    service = Service(small_model, ServeConfig(cost_model=False))
    status, said = one(service)
    service.close()
    assert status == 422
    assert "control_cells" in said["detail"]
    assert "include_controls" in said["detail"]


@pytest.mark.parametrize("sent", ["not base64!", base64.b64encode(b"no file").decode()])
def test_files_that_cannot_be_read_are_refused(service, sent):
    status, said = one(service, control_cells=sent)
    assert status == 422
    assert "control_cells" in said["detail"]


def test_one_gene_too_few_is_refused_by_name(service, simulated_cells):
    genes = list(service.model.registry.genes)
    few = simulated_cells[:, [name for name in simulated_cells.var_names if name != genes[3]]]
    status, said = one(service, control_cells=base64.b64encode(to_h5ad(few.copy())).decode())
    assert (status, said["error"]) == (422, "GeneError")
    assert genes[3] in said["detail"]


# Constraints, rankings, quotes


def test_constrained_requests_are_the_models_own_answers(service, model):
    gene = model.registry.genes[2]
    wish = {"kind": "at_most", "gene": gene, "value": 0.5}
    service.submit("it", "predict", body(constraints=[wish]), form="h5ad")
    found, _ = answers(service, 1)
    want = model.predict(
        None, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=20,
        sample=ptd.SampleConfig(**QUICK), constraints=ptd.AtMost(gene, 0.5),
    )  # fmt: skip
    have = from_h5ad(found["it"].body)
    np.testing.assert_array_equal(have.X.toarray(), want.X.toarray())
    assert "constraints" in have.uns["perturbdiff"]


def test_constraints_nested_without_end_are_refused(service):
    wish = WISH
    for _ in range(40):
        wish = {"kind": "not", "member": wish}
    status, said = one(service, constraints=[wish])
    assert status == 422
    assert "nested" in said["detail"]
    deep = b'{"perturbations": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    service.submit("deep", "predict", deep)
    assert answers(service, 1)[0]["deep"].status == 422


def test_perturbations_are_ranked_as_the_model_ranks_them(service, model):
    gene = model.registry.genes[2]
    wish = {"kind": "at_least", "gene": gene, "value": 0.1}
    asked = {"target": [wish], "n_cells": 20, "contexts": [{"cell_type": "T1"}], "sample": QUICK}
    service.submit("it", "rank", json.dumps(asked).encode())
    found, _ = answers(service, 1)
    rows = json.loads(found["it"].body)["ranking"]
    want = ptd.tl.rank_perturbations(
        model._reservoir, model, target=[ptd.AtLeast(gene, 0.1)], n_cells=20,
        contexts=[{"cell_type": "T1"}], sample=ptd.SampleConfig(**QUICK), copy=True,
    )  # fmt: skip
    table = want.uns["perturbation_ranking"]
    assert [row["perturbation"] for row in rows] == table["perturbation"].tolist()
    assert [row["energy"] for row in rows] == pytest.approx(table["energy"].tolist())


def test_a_quote_runs_nothing_and_grows_with_what_is_asked(service):
    _, small = one(service, "quote", seed=77)
    _, large = one(service, "quote", seed=77, n_cells=20_000)
    assert service.flow.engine.tally.calls == 0
    assert large["seconds"] > small["seconds"] > 0
    assert large["memory_bytes"] > small["memory_bytes"] > 0
    one(service, seed=77)
    assert one(service, "quote", seed=77)[1]["solve"] == 0  # it is solved now


def test_the_cost_model_is_asked_where_it_has_measured(service, monkeypatch):
    said = {"seconds": 2.0, "memory_bytes": 5.0}

    class Said:
        def to_json(self):
            return said

    monkeypatch.setattr(type(service.model), "quote", lambda self, **asked: Said())
    service.measure()
    _, quote = one(service, "quote")
    assert quote["afresh"] == said
    assert quote["memory_bytes"] == 5.0


def test_the_cost_model_is_told_of_constraints(service, model, monkeypatch):
    asked = {}

    class Said:
        def to_json(self):
            return {"memory_bytes": 5.0, "network_calls": 7}

    def quote(_, **named):
        asked.update(named)
        return Said()

    monkeypatch.setattr(type(model), "quote", quote)
    service.measure()
    enforce = {"kind": "best_of", "n": 3}
    status, said = one(service, "quote", constraints=[WISH], enforce=enforce, n_cells=33)
    assert status == 200
    assert said["afresh"]["network_calls"] == 7
    assert asked["constraints"] == [ptd.AtMost("G0003", 0.5)]
    assert asked["enforce"] == [ptd.BestOf(n=3)]
    assert asked["n_cells"] == 33

    def fails(_, **named):
        raise ConstraintError("G0003: cannot be")

    monkeypatch.setattr(type(model), "quote", fails)
    status, said = one(service, "quote", constraints=[WISH])
    assert status == 422
    assert "cannot be" in said["detail"]


# Limits


@pytest.mark.parametrize(
    ("limits", "question", "words"),
    [
        ({"max_cells": 30}, {"n_cells": 40}, "40 cells; at most 30"),
        ({"max_cells": 50}, {"contexts": None}, "60 cells; at most 50"),
        ({"max_set_steps": 10}, {}, "steps of sets; at most 10"),
    ],
)
def test_too_much_is_refused_before_any_work(model, limits, question, words):
    service = Service(model, ServeConfig(cost_model=False, **limits))
    status, said = one(service, seed=99, **question)
    service.close()
    assert status == 422
    assert words in said["detail"]
    assert service.flow.engine.tally.calls == 0


MANY = 10**9


@pytest.mark.parametrize("route", ["predict", "quote"])
@pytest.mark.parametrize(
    "enforce",
    [
        {"kind": "best_of", "n": MANY},
        {"kind": "particles", "n": MANY},
        {"kind": "branch", "k": MANY},
        {"kind": "depth_first", "budget": MANY},
        {"kind": "hard", "resamples": MANY},
        {"kind": "soft", "redraws": MANY},
        [{"kind": "soft"}, {"kind": "best_of", "n": MANY}],
        {"kind": "best_of", "n": 10**4000},
    ],
)
def test_what_a_search_multiplies_counts_as_size(service, enforce, route):
    status, said = one(service, route, constraints=[WISH], enforce=enforce)
    assert status == 422
    assert "; at most 200000. Ask for fewer" in said["detail"]


def test_steps_of_what_runs_as_a_whole_count_too(service):
    target = {"target": [WISH], "sample": {"n_steps": MANY}}
    service.submit("it", "rank", json.dumps(target).encode())
    found, _ = answers(service, 1)
    assert "steps of sets; at most 200000" in json.loads(found["it"].body)["detail"]


def test_a_quote_counts_candidates(service):
    few, many = (
        one(service, "quote", constraints=[WISH], enforce={"kind": "best_of", "n": n})[1]["seconds"]
        for n in (1, 50)
    )
    assert many > few


@pytest.mark.parametrize(
    ("sent", "words"),
    [("", "is empty"), (" ", "is empty"), ("!!!!", "is no base64"), ("abc", "is no base64")],
)
def test_control_cells_that_are_none_are_refused(service, sent, words):
    assert one(service)[0] == 200  # the same question is known without them
    status, said = one(service, control_cells=sent)
    assert status == 422
    assert f"control_cells: {words}" in said["detail"]


def test_a_full_house_says_when_to_come_again(model):
    service = Service(model, ServeConfig(cost_model=False, max_requests=2))
    for name in "abc":
        service.submit(name, "predict", body(seed=ord(name)))
    found, _ = answers(service, 3)
    service.close()
    assert found["c"].status == 429
    assert int(found["c"].headers["Retry-After"]) >= 1
    assert found["a"].status == found["b"].status == 200


def test_more_work_than_may_wait_is_refused(model):
    service = Service(model, ServeConfig(cost_model=False, max_wait_s=1e-3))
    for name in "ab":
        service.submit(name, "predict", body(seed=ord(name)))
    found, _ = answers(service, 2)
    service.close()
    assert sorted(reply.status for reply in found.values()) == [200, 429]


def test_what_is_remembered_is_bounded(model):
    service = Service(model, ServeConfig(cost_model=False, cached_controls=2, cached_plans=2))
    for seed in range(4):
        one(service, seed=seed, contexts=[{"cell_type": f"T{1 + seed % 3}"}])
    service.close()
    assert service.reader.memo.weight <= 2
    assert len(service.flow.plans) == 2


# No NaN in an answer


def test_cells_that_are_no_numbers_fail_their_own_request(model, monkeypatch, caplog):
    class Broken(Preconditioned):
        def forward(self, xt, sigma, context):
            out = super().forward(xt, sigma, context)
            odd = context.members[:, :1, None] == 2
            return torch.where(odd, torch.nan, out)

    service = Service(model, ServeConfig(cost_model=False))
    sound = service.flow.engine.sampler.denoiser
    monkeypatch.setattr(
        service.flow.engine.sampler, "denoiser", Broken(sound.network, sound.sigma_data)
    )
    for name in ("P1", "P2"):
        service.submit(name, "predict", body(perturbations=[name], seed=31), form="h5ad")
    found, _ = answers(service, 2)
    service.close()
    statuses = {name: reply.status for name, reply in found.items()}
    assert statuses == {"P1": 200, "P2": 500}
    assert "no finite numbers" in json.loads(found["P2"].body)["detail"]
    assert "request failed" in caplog.text


def test_only_models_with_networks_are_served(simulated_cells):
    columns = {"perturbation_key": "perturbation", "control": "control"}
    simple = ptd.MeanShift.from_anndata(simulated_cells, **columns).fit(simulated_cells)
    with pytest.raises(ConfigError, match="'mean_shift': cannot be served"):
        Service(simple)


def test_the_sibling_is_served_too(simulated_cells):
    columns = {"perturbation_key": "perturbation", "control": "control"}
    model = ptd.CausalBaseline.from_anndata(
        simulated_cells, covariate_keys=["cell_type"], **columns
    ).fit(
        simulated_cells,
        n_top_genes=8,
        network=ptd.DecoderConfig(n_axes=4, width=16, n_blocks=1, n_heads=2, n_bins=6),
        train=ptd.TrainConfig(max_steps=2, n_sets=2, set_size=2, n_controls=4, warmup_steps=1),
        options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"].copy()
    sent = base64.b64encode(to_h5ad(control)).decode()
    asked = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 5}
    service = Service(model, ServeConfig(cost_model=False))
    service.submit(
        "it", "predict", json.dumps(asked | {"control_cells": sent}).encode(), form="h5ad"
    )
    slow = {"n_cells": 5000, "control_cells": sent, "deadline_s": 0.05}
    service.submit("late", "predict", json.dumps(asked | slow).encode())
    service.submit("other", "predict", body(control_cells=sent))  # a setting of the sibling's
    service.submit("rank", "rank", json.dumps({"target": [WISH], "control_cells": sent}).encode())
    found, _ = answers(service, 4)
    service.close()
    assert {name: reply.status for name, reply in found.items()} == {
        "it": 200, "late": 504, "other": 422, "rank": 422,
    }  # fmt: skip
    want = model.predict(control, **asked)
    alike(from_h5ad(found["it"].body), want)
