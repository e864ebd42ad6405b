"""Laws of whole models, end to end in float32: what else is asked, and how, is invisible."""

from itertools import product

import numpy as np
import pytest
import torch
from anndata import AnnData

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, GeneError, GeneOverlapError, UnknownLevelError
from perturbdiff.data import Condition
from perturbdiff.diffusion import SAMPLERS
from perturbdiff.diffusion._samplers import network_calls
from perturbdiff.model import _fitted, _sampling
from perturbdiff.model._fitted import Recipe
from perturbdiff.model._predictor import controls_by_context

PERTURBATIONS, TYPES = ("P1", "P2", "P3"), ("T1", "T2", "T3")
QUICK = ptd.SampleConfig(n_steps=5)


PILOT = 96


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    """Fewer pilot cells than usual, since they are most of the work here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", PILOT)
        yield


@pytest.fixture
def model(small_model):
    """The model with nothing remembered."""
    small_model.fitted.plans.clear()
    small_model.fitted.sampler._memory.clear()
    return small_model


def ask(model, adata, perturbations=PERTURBATIONS, types=TYPES, **settings):
    contexts = [{"cell_type": kind} for kind in types]
    settings = {"n_cells": 40, "seed": 1, "sample": QUICK} | settings
    return model.predict(adata, perturbations=list(perturbations), contexts=contexts, **settings)


def cells_of(pred, perturbation, kind):
    rows = (pred.obs["perturbation"] == perturbation) & (pred.obs["cell_type"] == kind)
    return pred[rows.to_numpy()].layers["counts"].toarray()


def alike(left, right):
    """Counts differ by one in at most one of 100,000 entries."""
    difference = np.abs(left - right)
    assert difference.max(initial=0) <= 1
    assert difference.sum() <= 1e-5 * difference.size


@pytest.fixture(scope="module")
def together(small_model, simulated_cells, small_pilot):
    small_model.fitted.plans.clear()
    return ask(small_model, simulated_cells)


# Batching (E01)


def test_conditions_one_by_one_are_the_conditions_of_one_call(model, simulated_cells, together):
    for perturbation, kind in product(PERTURBATIONS, TYPES):
        model.fitted.plans.clear()
        alone = ask(model, simulated_cells, [perturbation], [kind])
        alike(cells_of(alone, perturbation, kind), cells_of(together, perturbation, kind))


@pytest.mark.parametrize("sets_at_once", [3, 16, 1000])
def test_order_and_batch_size_are_invisible(
    model, simulated_cells, together, monkeypatch, sets_at_once
):
    monkeypatch.setattr(_sampling, "SETS_AT_ONCE", sets_at_once)
    backwards = ask(model, simulated_cells, PERTURBATIONS[::-1], TYPES[::-1])
    for perturbation, kind in product(PERTURBATIONS, TYPES):
        alike(cells_of(backwards, perturbation, kind), cells_of(together, perturbation, kind))


def test_batches_keep_to_the_memory_budget(model, monkeypatch):
    sampler = model.fitted.sampler
    shape = model.fitted.network
    each = 4 * 32 * shape.width * (6 + 2 * shape.expansion)
    monkeypatch.setattr(_sampling, "BATCH_BYTES", 5 * each + 1)
    assert sampler.sets_at_once(32) == 5
    assert sampler.sets_at_once(320) == 1  # a set is not split
    monkeypatch.setattr(_sampling, "BATCH_BYTES", 1 << 40)
    assert sampler.sets_at_once(32) == _sampling.SETS_AT_ONCE


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_rates_agree_however_conditions_are_batched(model, simulated_cells, monkeypatch, sampler):
    """Expected values before any count is drawn, to 1e-5."""
    fitted = model.fitted
    config = ptd.SampleConfig(n_steps=3, sampler=sampler)
    question = model._ask(simulated_cells, list(PERTURBATIONS), contexts=None, n_cells=40)
    controls = controls_by_context(
        question,
        model.registry,
        loadings=fitted.loadings,
        mean=fitted.mean,
        known=fitted.prior.conditions,
    )

    def expected(conditions):
        own = [controls[condition.context] for condition in conditions]
        targets = [fitted.target(c, control) for c, control in zip(conditions, own, strict=True)]
        fitted.plans.clear()
        fitted.respond(conditions, own, targets, n_cells=40, config=config, seed=3)
        found = {}
        for condition, control, target in zip(conditions, own, targets, strict=True):
            (latent, plan) = next(
                value for key, value in fitted.plans._plans.items() if key[0] == condition.name
            )
            task = fitted.task(condition, control, target, n_cells=PILOT, seed=3)
            recipe = Recipe(task=task, controls=control, target=target, config=config, seed=3)
            found[condition] = plan.expected_log1p(fitted.cells(recipe, latent))
        return found

    whole = expected(question.conditions)
    monkeypatch.setattr(_sampling, "SETS_AT_ONCE", 7)
    parts = {c: cells for c in question.conditions for cells in expected([c]).values()}
    for condition, cells in whole.items():
        torch.testing.assert_close(parts[condition], cells, rtol=0, atol=1e-5)


@pytest.mark.parametrize("few", [1, 31, 64])
def test_the_first_cells_are_the_same_however_many_are_asked_for(model, simulated_cells, few):
    many = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=130)
    model.fitted.plans.clear()
    some = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=few)
    alike(some.layers["counts"].toarray(), many.layers["counts"].toarray()[:few])
    after = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=130)
    alike(after.layers["counts"].toarray(), many.layers["counts"].toarray())


def test_what_is_solved_once_is_counted_once(model, simulated_cells):
    """Pilot cells are one batch; then they are known, and only what is beyond them is sampled."""
    config = ptd.SampleConfig(n_steps=3, sampler="euler")
    calls = [
        ask(model, simulated_cells, ["P1"], ["T1"], n_cells=n, sample=config).uns["perturbdiff"][
            "nfe"
        ]
        for n in (40, PILOT, PILOT + 1, PILOT + 1)
    ]
    assert calls == [3, 0, 3, 3]


def test_seeds_and_conditions_have_noise_of_their_own(model, simulated_cells, together):
    other = ask(model, simulated_cells, seed=2)
    for perturbation, kind in product(PERTURBATIONS, TYPES):
        first = cells_of(together, perturbation, kind)
        assert (first != cells_of(other, perturbation, kind)).mean() > 0.05


# Cells of the question are a set


def test_rows_of_the_file_may_stand_in_any_order(model, simulated_cells, together):
    order = np.random.default_rng(0).permutation(simulated_cells.n_obs)
    shuffled = ask(model, simulated_cells[order].copy())
    assert (shuffled.layers["counts"] != together.layers["counts"]).nnz == 0
    assert shuffled.obs.astype(str).equals(together.obs.astype(str))


def test_treated_cells_of_the_file_are_not_looked_at(model, simulated_cells, together):
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"].copy()
    assert (ask(model, control).layers["counts"] != together.layers["counts"]).nnz == 0


def test_members_of_a_combination_have_no_order(model, simulated_cells):
    asked = [ask(model, simulated_cells, [label], ["T1"]) for label in ("P1+P2", "P2+control+P1")]
    assert (asked[0].layers["counts"] != asked[1].layers["counts"]).nnz == 0


# Panels


def test_permuted_genes_are_read_by_name(model, simulated_cells, together):
    order = np.random.default_rng(0).permutation(simulated_cells.n_vars)
    moved = ask(model, simulated_cells[:, order].copy())
    assert list(moved.var_names) == list(together.var_names)
    assert (moved.layers["counts"] != together.layers["counts"]).nnz == 0


def test_extra_genes_are_ignored(model, simulated_cells, together, caplog):
    more = simulated_cells.copy()
    more.var_names = [f"extra{i}" for i in range(more.n_vars)]
    both = AnnData(
        X=np.hstack([more.X.toarray()[:, :2], simulated_cells.X.toarray()]),
        obs=simulated_cells.obs,
        uns=simulated_cells.uns,
    )
    both.var_names = [*more.var_names[:2], *simulated_cells.var_names]
    with caplog.at_level("INFO", logger="perturbdiff"):
        found = ask(model, both)
    assert (found.layers["counts"] != together.layers["counts"]).nnz == 0
    assert [r.message for r in caplog.records if "ignored 2 genes" in r.message]


def test_missing_and_foreign_genes_are_refused_by_name(model, simulated_cells):
    gone = model.registry.genes[3]
    fewer = simulated_cells[:, simulated_cells.var_names != gone].copy()
    with pytest.raises(GeneError, match=gone):
        ask(model, fewer)
    foreign = simulated_cells.copy()
    foreign.var_names = [f"ENSG{i:05d}" for i in range(foreign.n_vars)]
    with pytest.raises(GeneOverlapError):
        ask(model, foreign)


def test_absent_genes_are_inferred_when_asked(model, simulated_cells, together):
    """All genes come back; what the file has is what matters, in whatever order it has it."""
    whole = ask(model, simulated_cells, missing_genes="infer")
    assert (whole.layers["counts"] != together.layers["counts"]).nnz == 0
    gone = list(model.registry.genes[:3])
    fewer = simulated_cells[:, ~simulated_cells.var_names.isin(gone)].copy()
    found = ask(model, fewer, missing_genes="infer")
    assert list(found.var_names) == list(model.registry.genes)
    assert (found[:, gone].layers["counts"].sum(0) > 0).all()
    moved = ask(model, fewer[:, ::-1].copy(), missing_genes="infer")
    assert (moved.layers["counts"] != found.layers["counts"]).nnz == 0


# Guidance


def test_guidance_off_is_free_and_the_same(model, simulated_cells):
    found = {}
    for scale in (1.0, 0.0, 2.0):
        model.fitted.plans.clear()
        config = ptd.SampleConfig(n_steps=4, sampler="euler", guidance_scale=scale)
        found[scale] = ask(model, simulated_cells, ["P1"], ["T1"], sample=config)
    plain = ask(
        model, simulated_cells, ["P1"], ["T1"], sample=ptd.SampleConfig(n_steps=4, sampler="euler")
    )
    assert (plain.layers["counts"] != found[1.0].layers["counts"]).nnz == 0
    calls = {scale: pred.uns["perturbdiff"]["nfe"] for scale, pred in found.items()}
    assert calls == {1.0: 4, 0.0: 4, 2.0: 8}


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@pytest.mark.parametrize("n_steps", [1, 5])
def test_network_calls_are_as_documented(model, simulated_cells, sampler, n_steps):
    config = ptd.SampleConfig(n_steps=n_steps, sampler=sampler)
    pred = ask(model, simulated_cells, ["P1"], ["T1"], sample=config)
    assert pred.uns["perturbdiff"]["nfe"] == network_calls(sampler, n_steps)
    assert np.isfinite(pred.X.data).all()


@pytest.mark.parametrize("set_size", [1, 5])
def test_small_sets_have_answers(model, simulated_cells, set_size):
    config = ptd.SampleConfig(n_steps=2, set_size=set_size)
    pred = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=7, sample=config)
    assert pred.n_obs == 7
    assert pred.obs["set"].max() == 6 // set_size


# What comes back


def test_a_prediction_says_what_it_is(model, simulated_cells, together):
    entries = together.uns["perturbdiff"]
    assert entries["model"] == "set_diffusion"
    assert entries["bundle_checksum"] == model.checksum
    assert entries["version"] == ptd.__version__
    assert (entries["seed"], entries["sampler"], entries["n_steps"]) == (1, "dpmpp_2m", 5)
    assert (entries["guidance_scale"], entries["scale"]) == (1.0, "log1p_cp10k")
    depth = together.obs["library_size"].to_numpy()[:, None]
    counts = together.layers["counts"].toarray()
    assert (counts >= 0).all()
    np.testing.assert_allclose(
        together.X.toarray(), np.log1p(counts / depth * 1e4), rtol=1e-6, atol=1e-7
    )


def test_the_mean_of_a_population_is_the_priors(model, simulated_cells):
    """Over the pilot cells; what is left is the noise of counts, 4 standard errors at most."""
    pred = ask(model, simulated_cells, ["P1", "P3"], ["T1"], n_cells=PILOT)
    stated = pred.uns["perturbdiff"]["baselines"]
    names = [Condition((label,), ("T1",)).name for label in ("P1", "P3")]
    assert list(stated["conditions"]) == names
    for number, label in enumerate(("P1", "P3")):
        cells = pred[(pred.obs["perturbation"] == label).to_numpy()].X.toarray()
        error = np.abs(cells.mean(0) - stated["effect_prior"][number])
        assert (error < 4 * cells.std(0) / PILOT**0.5 + 1e-4).all()


def test_unknown_labels_are_refused_by_name(model, simulated_cells):
    with pytest.raises(UnknownLevelError, match="Did you mean 'P1'"):
        ask(model, simulated_cells, ["P11"], ["T1"])
    with pytest.raises(UnknownLevelError, match="T9"):
        ask(model, simulated_cells, ["P1"], ["T9"])
    with pytest.raises(ConfigError, match="n_cells"):
        ask(model, simulated_cells, n_cells=0)
