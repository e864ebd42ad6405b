"""Laws of the autoregressive sibling, end to end: the same door, and nothing but the question."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import yaml

import perturbdiff as ptd
from perturbdiff._errors import (
    ConfigError,
    GeneError,
    NotFittedError,
    TrainingError,
    UnknownKeyError,
    UnknownLevelError,
)
from perturbdiff.data import Condition
from perturbdiff.model import _causal_fitted, _fitted
from perturbdiff.model._causal_baseline import CAUSAL_TRAIN
from perturbdiff.model._causal_lesson import n_parameters, within_budget
from perturbdiff.model._latent import Vocabulary
from perturbdiff.nn import CausalDecoder, SetDenoiser
from perturbdiff.train import TrainerOptions

PERTURBATIONS, TYPES = ("P1", "P2", "P3"), ("T1", "T2", "T3")
COLUMNS = {
    "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
    "embedding_key": "perturbation_features",
}  # fmt: skip
SHAPE = {"n_axes": 5, "n_response_axes": 4, "width": 16, "n_heads": 2, "gene_width": 4}
TRAIN = ptd.TrainConfig(
    max_steps=6, check_every=3, n_sets=4, set_size=4, n_controls=6, warmup_steps=2
)
OPTIONS = TrainerOptions(progress=False, accelerator="cpu")
PILOT = 96
PLAIN = ptd.DecodeConfig(draft_length=0)


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    """Fewer pilot cells than usual, since they are most of the work here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", PILOT)
        patch.setattr(_causal_fitted, "PILOT_CELLS", PILOT)
        yield


def fitted(adata, order="coexpression", **changes):
    settings = {
        "holdout": {"cell_type": ["T1"]}, "n_top_genes": 30, "train": TRAIN, "options": OPTIONS,
        "network": ptd.DecoderConfig(order=order, **SHAPE),
    }  # fmt: skip
    return ptd.CausalBaseline.from_anndata(adata, **COLUMNS).fit(adata, **(settings | changes))


@pytest.fixture(scope="module")
def known(simulated_cells):
    return fitted(simulated_cells)


@pytest.fixture(scope="module", params=["coexpression", "descending"])
def model(request, simulated_cells, known):
    return known if request.param == "coexpression" else fitted(simulated_cells, request.param)


def ask(model, adata, perturbations=PERTURBATIONS, types=TYPES, **settings):
    contexts = [{"cell_type": kind} for kind in types]
    settings = {"n_cells": 40, "seed": 1} | settings
    return model.predict(adata, perturbations=list(perturbations), contexts=contexts, **settings)


def cells_of(pred, perturbation, kind):
    rows = (pred.obs["perturbation"] == perturbation) & (pred.obs["cell_type"] == kind)
    return pred[rows.to_numpy()].layers["counts"].toarray()


def same(left, right):
    return (left.layers["counts"] != right.layers["counts"]).nnz == 0


# Batching


@pytest.mark.parametrize("decoding", ["raw", "transport"])
def test_what_else_is_asked_is_invisible(model, simulated_cells, monkeypatch, decoding):
    together = ask(model, simulated_cells, decoding=decoding)
    monkeypatch.setattr(_causal_fitted, "CELLS_AT_ONCE", 96)
    model.fitted.plans.clear()
    backwards = ask(model, simulated_cells, PERTURBATIONS[::-1], TYPES[::-1], decoding=decoding)
    for name, kind in product(PERTURBATIONS, TYPES):
        difference = cells_of(together, name, kind) != cells_of(backwards, name, kind)
        assert difference.mean() <= 1e-5


@pytest.mark.parametrize(("few", "many"), [(1, 33), (64, 130)])
def test_the_first_cells_are_the_same_however_many_are_asked_for(model, simulated_cells, few, many):
    some = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=few)
    more = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=many)
    assert some.n_obs == few
    assert same(some, more[:few])


def test_seeds_and_conditions_have_randomness_of_their_own(model, simulated_cells):
    first, other = (ask(model, simulated_cells, types=["T2"], seed=seed) for seed in (1, 2))
    assert (first.layers["counts"] != other.layers["counts"]).mean() > 0.05
    assert (cells_of(first, "P1", "T2") != cells_of(first, "P2", "T2")).mean() > 0.05


# The question is read by name; control cells are a set


def test_rows_and_columns_of_the_file_may_stand_in_any_order(model, simulated_cells):
    expected = ask(model, simulated_cells, ["P1"])
    draw = np.random.default_rng(0)
    rows, genes = draw.permutation(simulated_cells.n_obs), draw.permutation(simulated_cells.n_vars)
    found = ask(model, simulated_cells[rows, genes].copy(), ["P1"])
    assert list(found.var_names) == list(expected.var_names)
    assert same(found, expected)


def test_treated_cells_of_the_file_are_not_looked_at(known, simulated_cells):
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"].copy()
    assert same(ask(known, control, ["P1"]), ask(known, simulated_cells, ["P1"]))


def test_absent_genes_are_refused_or_inferred(known, simulated_cells):
    gone = list(known.registry.genes[:2])
    fewer = simulated_cells[:, ~simulated_cells.var_names.isin(gone)].copy()
    with pytest.raises(GeneError, match=gone[0]):
        ask(known, fewer)
    found = ask(known, fewer, missing_genes="infer")
    assert list(found.var_names) == list(known.registry.genes)
    assert (found[:, gone].layers["counts"].sum(0) > 0).all()
    whole = ask(known, simulated_cells, missing_genes="infer")
    assert same(whole, ask(known, simulated_cells))


def test_what_is_unknown_is_refused(known, simulated_cells):
    with pytest.raises(UnknownLevelError, match="P9"):
        ask(known, simulated_cells, ["P9"])
    with pytest.raises(ConfigError, match="decoding"):
        ask(known, simulated_cells, decoding="rough")
    with pytest.raises(ConfigError, match="seed"):
        ask(known, simulated_cells, seed=-1)
    with pytest.raises(NotFittedError, match="CausalBaseline"):
        ask(ptd.CausalBaseline.from_anndata(simulated_cells, **COLUMNS), simulated_cells)


# What comes back


@pytest.mark.parametrize("decoding", ["raw", "transport"])
def test_a_prediction_says_what_it_is(model, simulated_cells, decoding):
    pred = ask(model, simulated_cells, ["P1"], ["T1"], decoding=decoding)
    entries = pred.uns["perturbdiff"]
    assert entries["model"] == "causal_baseline"
    assert entries["bundle_checksum"] == model.checksum
    assert entries["sampler"] == f"autoregressive_{decoding}"
    assert entries["order"] == model.fitted.order.name
    assert list(entries["support"]["supported"]) == [True]
    counts = pred.layers["counts"].toarray()
    depth = pred.obs["library_size"].to_numpy()[:, None]
    assert (counts == counts.round()).all()
    assert (counts <= depth).all()
    np.testing.assert_allclose(
        pred.X.toarray(), np.log1p(counts / depth * 1e4), rtol=1e-6, atol=1e-7
    )


def test_network_calls_are_counted(known, simulated_cells, monkeypatch):
    """A prefill and one call a gene for each batch; pilot cells are known the second time."""
    monkeypatch.setattr(_causal_fitted, "CELLS_AT_ONCE", 32)
    per_batch = 1 + len(known.registry.genes)

    def calls(**settings):
        pred = ask(known, simulated_cells, ["P1"], ["T1"], decode=PLAIN, **settings)
        return pred.uns["perturbdiff"]["nfe"]

    assert calls(n_cells=40) == 2 * per_batch
    known.fitted.plans.clear()
    assert calls(decoding="transport") == PILOT // 32 * per_batch
    assert calls(decoding="transport") == 0


def test_transported_cells_have_the_mean_of_the_prior(model, simulated_cells):
    """Over the pilot cells; what is left is the noise of counts, 4 standard errors at most."""
    pred = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=PILOT, decoding="transport")
    stated = pred.uns["perturbdiff"]["baselines"]
    assert list(stated["conditions"]) == [Condition(("P1",), ("T1",)).name]
    values = pred.X.toarray()
    error = np.abs(values.mean(0) - stated["effect_prior"][0])
    assert (error < 4 * values.std(0) / PILOT**0.5 + 1e-4).all()


def test_an_untrained_decoder_starts_from_the_mean_of_the_prior(simulated_cells):
    """The library of each cell and the dispersion of each gene are accounted for."""
    still = ptd.TrainConfig(max_steps=1, check_every=1, n_sets=1, set_size=2, learning_rate=0.0)
    model = fitted(simulated_cells, train=still)
    pred = ask(model, simulated_cells, ["P1"], ["T1"], n_cells=512)
    values = pred.X.toarray()
    error = np.abs(values.mean(0) - pred.uns["perturbdiff"]["baselines"]["effect_prior"][0])
    assert (error < 5 * values.std(0) / 512**0.5 + 0.02).all()


def test_temperature_and_top_p_narrow_what_is_said(known, simulated_cells):
    cold = ptd.DecodeConfig(temperature=0.2)
    few = ptd.DecodeConfig(top_p=0.5)
    usual, narrow, nucleus = (
        ask(known, simulated_cells, ["P1"], n_cells=64, decode=way) for way in (None, cold, few)
    )
    spread = [pred.X.toarray().std(0).mean() for pred in (usual, narrow, nucleus)]
    assert spread[1] < 0.8 * spread[0]
    assert spread[2] < 0.8 * spread[0]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_decoding_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ptd.DecodeConfig(**settings)


def test_tools_hand_on_what_an_autoregressive_model_is_asked(known, simulated_cells):
    question = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 40}
    settings = question | {"seed": 1, "decode": PLAIN, "decoding": "transport"}
    pred = ptd.tl.predict(simulated_cells, known, **settings)
    assert same(pred, known.predict(simulated_cells, **settings))
    assert pred.uns["perturbdiff"]["sampler"] == "autoregressive_transport"
    with pytest.raises(UnknownKeyError, match=r"CausalBaseline\.predict has no 'sample'"):
        ptd.tl.predict(simulated_cells, known, **question, sample=ptd.SampleConfig())
    table = ptd.tl.score(pred, reference=simulated_cells, copy=True).uns["score"]
    assert table["method"].iloc[0] == "causal_baseline"
    assert np.isfinite(table["energy_distance"].iloc[0])


# Guessing ahead


@pytest.mark.parametrize("decoding", ["raw", "transport"])
@pytest.mark.parametrize("length", [1, 6, 50])
def test_guesses_save_calls_and_change_no_cell(known, simulated_cells, decoding, length):
    """But for choices that rounding tips; 50 is more than there are genes."""
    known.fitted.plans.clear()
    ahead = ptd.DecodeConfig(draft_length=length)
    preds = [ask(known, simulated_cells, decoding=decoding, decode=way) for way in (PLAIN, ahead)]
    plain, guessed = preds
    assert guessed.uns["perturbdiff"]["nfe"] < plain.uns["perturbdiff"]["nfe"]
    assert [pred.uns["perturbdiff"]["draft_length"] for pred in preds] == [0, length]
    assert (guessed.layers["counts"] != plain.layers["counts"]).nnz <= 1e-5 * plain.X.size


def test_a_colder_choice_is_guessed_too(known, simulated_cells):
    ways = [ptd.DecodeConfig(temperature=0.5, top_p=0.9, draft_length=n) for n in (0, 4)]
    plain, guessed = (ask(known, simulated_cells, decode=way) for way in ways)
    assert (guessed.layers["counts"] != plain.layers["counts"]).nnz <= 1e-5 * plain.X.size
    assert guessed.uns["perturbdiff"]["nfe"] < plain.uns["perturbdiff"]["nfe"]


def test_guesses_are_refused_where_nothing_can_guess(simulated_cells, known):
    wanted = ptd.DecodeConfig(draft_length=6)
    assert ask(known, simulated_cells, ["P1"]).uns["perturbdiff"]["draft_length"] == 8
    for network, reason in (
        (ptd.DecoderConfig(order="descending", **SHAPE), "'descending'"),
        (ptd.DecoderConfig(draft_steps=0, **SHAPE), r"decoder\.draft_steps = 0"),
    ):
        model = fitted(simulated_cells, network=network)
        with pytest.raises(ConfigError, match=rf"decode\.draft_length = 6: .*{reason}"):
            ask(model, simulated_cells, decode=wanted)
        assert ask(model, simulated_cells, ["P1"]).uns["perturbdiff"]["draft_length"] == 0
    with pytest.raises(ConfigError, match=r"decode\.draft_length = -1: must be at least 0"):
        ptd.DecodeConfig(draft_length=-1)


# Saved is the same


def test_a_bundle_answers_as_the_model_did(model, simulated_cells, tmp_path):
    model.save(tmp_path / "bundle")
    again = ptd.load(tmp_path / "bundle")
    assert isinstance(again, ptd.CausalBaseline)
    assert again.checksum == model.checksum
    model.fitted.plans.clear()
    for decoding in ("raw", "transport"):
        asked = [ask(one, simulated_cells, ["P1"], decoding=decoding) for one in (model, again)]
        assert same(*asked)
    assert again.fitted.steps == TRAIN.max_steps
    assert (again.fitted.draft is None) == model.fitted.order.drawn


# Learning


def weights(model):
    return model.fitted.decoder.state_dict()


def equal(left, right):
    return all(torch.equal(value, right[name]) for name, value in left.items())


def test_held_out_cells_leave_no_trace(known, simulated_cells):
    scrambled = simulated_cells.copy()
    held = (scrambled.obs["cell_type"] == "T1") & (scrambled.obs["perturbation"] != "control")
    counts = scrambled.X.toarray()
    counts[held.to_numpy()] = 1
    scrambled.X = sp.csr_matrix(counts)
    assert fitted(scrambled).checksum == known.checksum


def test_weights_trained_elsewhere_are_adopted(known, simulated_cells):
    model = ptd.CausalBaseline.from_anndata(simulated_cells, **COLUMNS)
    settings = {"holdout": {"cell_type": ["T1"]}, "n_top_genes": 30, "train": TRAIN}
    task, data = model.prepare_training(
        simulated_cells, network=ptd.DecoderConfig(**SHAPE), **settings
    )
    with pytest.raises(NotFittedError, match="prepare_training"):
        ptd.CausalBaseline.from_anndata(simulated_cells, **COLUMNS).adopt(task)
    trained = ptd.train.train(task, data, steps=TRAIN.max_steps, options=OPTIONS)
    assert equal(weights(model.adopt(trained)), weights(known))
    model.prepare_training(
        simulated_cells, network=ptd.DecoderConfig(**SHAPE, hidden=9), **settings
    )
    with pytest.raises(TrainingError, match="not prepared"):
        model.adopt(trained)


def test_an_interrupted_fit_ends_with_the_same_weights(known, simulated_cells, tmp_path):
    short = ptd.TrainConfig(**(vars(TRAIN) | {"max_steps": 3}))
    kept = {"checkpoint_dir": tmp_path, "progress": False, "accelerator": "cpu"}
    fitted(simulated_cells, train=short, options=TrainerOptions(**kept))
    resume = TrainerOptions(**kept, resume=True)
    assert equal(weights(fitted(simulated_cells, options=resume)), weights(known))
    with pytest.raises(TrainingError, match=r"network\.order"):
        fitted(simulated_cells, "random", options=resume)


def test_inner_folds_choose_the_number_of_steps(simulated_cells):
    model = fitted(simulated_cells, inner_folds=True, holdout={"cell_type": ["T1"]})
    assert model.fitted.steps in (3, 6)


@pytest.mark.parametrize("n_genes", [500, 2000])
@pytest.mark.parametrize("order", ["coexpression", "descending"])
def test_the_siblings_have_as_many_parameters(simulated_cells, n_genes, order):
    registry = ptd.Registry.from_anndata(simulated_cells, **COLUMNS)
    vocabulary = Vocabulary.of(registry, [], {})
    sizes = {
        "n_perturbations": len(registry.perturbations), "n_features": vocabulary.n_features,
        "covariate_sizes": [len(v) for v in registry.covariates],
    }  # fmt: skip
    network = within_budget(ptd.DecoderConfig(order=order), vocabulary, n_genes)
    decoder = CausalDecoder(
        network, axes=torch.zeros(n_genes, network.n_axes), log_dispersion=torch.zeros(n_genes),
        first_count=torch.arange(network.n_bins), last_count=100, **sizes,
    )  # fmt: skip
    denoiser = SetDenoiser(ptd.NetworkConfig(), **sizes)
    assert n_parameters(decoder) == pytest.approx(n_parameters(denoiser), rel=0.05)


def test_the_shipped_settings_are_the_defaults():
    folder = Path(__file__).resolve().parents[2] / "configs"
    decoder = yaml.safe_load((folder / "decoder" / "standard.yaml").read_text())
    assert ptd.DecoderConfig(**decoder) == ptd.DecoderConfig()
    train = yaml.safe_load((folder / "train" / "causal.yaml").read_text())
    assert ptd.TrainConfig(**train) == CAUSAL_TRAIN


# What the order is worth


QUESTION = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 64}
FIT = {"holdout": {"cell_type": ["T1"]}, "n_top_genes": 30, "options": OPTIONS}


def test_sets_of_genes_have_no_order_that_could_matter(simulated_cells):
    network = ptd.NetworkConfig(n_axes=5, n_response_axes=4, width=16, n_heads=2)
    found = ptd.order_sensitivity(
        ptd.SetDiffusion.from_anndata(simulated_cells, **COLUMNS), simulated_cells,
        ask=QUESTION, fit=FIT | {"train": TRAIN, "network": network},
        orders=("vocabulary", "random"),
    )  # fmt: skip
    assert found["model"] == "set_diffusion"
    assert found["orders"]["mean_shift_difference"] < 1e-5
    assert found["orders"]["energy_distance"] < 1e-5
    assert found["seeds"]["mean_shift_difference"] > 1e-3


def test_an_imposed_order_matters(simulated_cells):
    model = ptd.CausalBaseline.from_anndata(simulated_cells, **COLUMNS)
    train = ptd.TrainConfig(**(vars(TRAIN) | {"learning_rate": 1e-2}))
    found = ptd.order_sensitivity(
        model, simulated_cells, ask=QUESTION, orders=("vocabulary", "random"),
        fit=FIT | {"train": train, "network": ptd.DecoderConfig(**SHAPE)},
    )  # fmt: skip
    assert found["compared"] == {"orders": ["vocabulary", "random"], "seeds": [0, 1]}
    assert found["orders"]["mean_shift_difference"] > 1e-3
    assert found["orders"]["energy_distance"] > 1e-4
    with pytest.raises(ConfigError, match="orders"):
        ptd.order_sensitivity(model, simulated_cells, ask=QUESTION, orders=("random",))
