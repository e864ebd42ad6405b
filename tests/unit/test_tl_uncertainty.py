"""Intervals contain as many measured shifts of held-out contexts as they say."""

import anndata
import numpy as np
import pandas as pd
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, MetricError
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig

KEYS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
}


@pytest.fixture(scope="module")
def world():
    config = SimulationConfig(
        n_genes=40, n_contexts=8, n_perturbations=1, n_unseen=0, n_pairs=0, n_cells=60,
        n_controls=80, doses=(), hours=(),
    )  # fmt: skip
    return simulated(config, seed=1).adata


def fitted(world, held):
    model = ptd.EffectPrior.from_anndata(world, **KEYS)
    return model.fit(world, holdout={"cell_type": held}, n_top_genes=None)


@pytest.fixture(scope="module")
def answers(world):
    """Models, each without one context, and their predictions of it."""
    found = {}
    for number in range(1, 9):
        kind = f"T{number}"
        model = fitted(world, [kind])
        ask = {"perturbations": ["P1"], "contexts": [{"cell_type": kind}], "n_cells": 96}
        found[kind] = model, ptd.tl.predict(world, model, **ask)
    return found


def measured(world, kind, genes):
    logs = ptd.pp.normalize(world, copy=True)[:, genes]
    of = logs.obs["cell_type"] == kind
    treated, control = (
        logs[of & (logs.obs["perturbation"] == label)].X.toarray().astype(float).mean(0)
        for label in ("P1", "control")
    )
    return treated - control


def test_intervals_cover_what_they_promise_on_held_out_contexts(world, answers):
    covered = []
    for kind, (model, pred) in answers.items():
        table = ptd.tl.uncertainty(pred, model, reference=world, copy=True).uns["uncertainty"]
        truth = measured(world, kind, list(table["gene"]))
        covered.append(((table["lower"] <= truth) & (truth <= table["upper"])).mean())
    assert 0.85 <= np.mean(covered) <= 0.95


def test_wider_for_more_and_made_of_both_errors(world, answers, tmp_path):
    model, pred = answers["T1"]
    low, high = (
        ptd.tl.uncertainty(pred, model, reference=world, level=level, copy=True).uns["uncertainty"]
        for level in (0.5, 0.95)
    )
    assert (high["upper"] - high["lower"] >= low["upper"] - low["lower"]).all()
    half = (high["upper"] - high["lower"]) / 2
    np.testing.assert_allclose(half, np.hypot(high["prior_error"], high["set_error"]))
    assert (high["set_error"] > 0).any()
    np.testing.assert_allclose(
        high["shift"], ptd.tl.response(pred, reference=world, copy=True).uns["response"]
        .set_index("gene").loc[high["gene"]].eval("mean - control_mean").to_numpy(), atol=1e-6,
    )  # fmt: skip
    mine = pred.copy()
    assert ptd.tl.uncertainty(mine, model, reference=world, key_added="bounds") is None
    mine.write_h5ad(tmp_path / "pred.h5ad")
    back = anndata.read_h5ad(tmp_path / "pred.h5ad").uns["bounds"]
    pd.testing.assert_frame_equal(back, mine.uns["bounds"])
    del mine.obs["set"]
    ptd.tl.uncertainty(mine, model, reference=world)
    assert (mine.uns["uncertainty"]["set_error"] == 0).all()


def test_a_saved_model_gives_the_same_intervals(world, answers, tmp_path):
    model, pred = answers["T1"]
    model.save(tmp_path / "bundle")
    again = ptd.load(tmp_path / "bundle")
    tables = [
        ptd.tl.uncertainty(pred, one, reference=world, copy=True).uns["uncertainty"]
        for one in (model, again)
    ]
    pd.testing.assert_frame_equal(*tables)


def test_what_has_no_interval_is_refused(world, answers):
    _, pred = answers["T1"]
    few = fitted(world, [f"T{number}" for number in range(1, 5)])
    with pytest.raises(MetricError, match=r"need 5 training conditions or more.*has 4"):
        ptd.tl.uncertainty(pred, few, reference=world)
    simple = ptd.MeanShift.from_anndata(world, **KEYS).fit(world, n_top_genes=None)
    with pytest.raises(ConfigError, match="no effect prior"):
        ptd.tl.uncertainty(pred, simple, reference=world)
    other = ptd.EffectPrior.from_anndata(world, **KEYS).fit(world, n_top_genes=10)
    with pytest.raises(ConfigError, match="other genes"):
        ptd.tl.uncertainty(pred, other, reference=world)
    with pytest.raises(ConfigError, match=r"'bundle': is no model.*perturbdiff\.load"):
        ptd.tl.uncertainty(pred, "bundle", reference=world)
    with pytest.raises(ConfigError, match="level"):
        ptd.tl.uncertainty(pred, few, reference=world, level=1.0)
