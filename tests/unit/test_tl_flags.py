"""Flags: far questions and collapsed cells are named, those like training are not."""

import logging

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import stats

import perturbdiff as ptd
from perturbdiff.data import Condition
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig
from perturbdiff.prior import ConditionSummary, ContextSummary, EffectPrior
from perturbdiff.tl._flags import (
    TOO_FEW,
    Flags,
    Population,
    bound,
    distance_between,
    log_spread,
    nearest_limit,
    spread_limit,
)
from perturbdiff.tl._uncertainty import _warn

KEYS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
}


def sampled(seed, *, n_cells=300, n_genes=60, centre=None, wide=1.0):
    """Cells around a centre."""
    rng = np.random.default_rng(seed)
    centre = np.full(n_genes, 2.0) if centre is None else centre
    return centre + wide * rng.normal(0, 0.5, (n_cells, len(centre)))


def population(cells):
    return Population(cells.mean(0), cells.var(0), len(cells))


def test_distance_is_that_of_means_whatever_the_number_of_cells():
    centre = np.full(60, 2.0) + 0.3
    one, var = population(sampled(0)), np.full(60, 0.25)
    for n_cells in (30, 300, 3000):
        far = population(sampled(1, n_cells=n_cells, centre=centre))
        # 0.3 apart in every gene, with a variance of 0.25, which is its median too.
        assert distance_between(one, far, var) == pytest.approx(0.3 / np.sqrt(0.5), abs=0.05)
        assert distance_between(far, one, var) == distance_between(one, far, var)
        same = population(sampled(2, n_cells=n_cells))
        assert distance_between(one, same, var) < 0.1
    order = np.random.default_rng(0).permutation(60)
    var = np.linspace(0.1, 0.4, 60)
    assert distance_between(one.of(order), far.of(order), var[order]) == pytest.approx(
        distance_between(one, far, var)
    )
    assert distance_between(one, one, var) == 0


def test_spread_is_the_ratio_of_variances_whatever_the_number_of_cells():
    control = population(sampled(0))
    for n_cells in (40, 400):
        for wide in (0.5, 1.0, 2.0):
            found = log_spread(population(sampled(1, n_cells=n_cells, wide=wide)), control)
            assert found == pytest.approx(2 * np.log(wide), abs=0.15)
    repeated = population(np.repeat(sampled(1)[:1], 300, axis=0))
    assert log_spread(repeated, control) < -10
    # Few cells again and again: most genes that some cells express are in none of them.
    rng = np.random.default_rng(0)
    sparse = rng.poisson(0.05, (500, 60)).astype(float)
    few = np.repeat(sparse[:4], 125, axis=0)
    assert log_spread(population(few), population(sparse)) < -5
    assert np.isnan(log_spread(population(few[:9]), population(sparse[:9])))


def test_one_in_a_hundred_of_the_same_kind_is_beyond_a_bound():
    values = np.array([1.0, 2.0, 4.0, 5.0])
    reach = stats.t.ppf(0.99, 3) * np.sqrt(1.25) * values.std(ddof=1)
    assert bound(values, side=1) == pytest.approx(3.0 + reach)
    assert bound(values, side=-1) == pytest.approx(3.0 - reach)
    assert np.isnan(bound(values[:2], side=1))
    draws = np.random.default_rng(0).normal(size=(20_000, 9))
    beyond = [row[-1] > bound(row[:-1], side=1) for row in draws]
    assert np.mean(beyond) == pytest.approx(0.01, abs=0.002)


def test_false_alarms_are_those_of_bounds_made_without_the_condition():
    place = np.append(np.random.default_rng(1).normal(size=9), 40.0)
    apart = np.abs(place[:, None] - place)
    found = nearest_limit(apart)
    nearest = np.where(np.eye(10, dtype=bool), np.inf, apart).min(1)
    assert found.value == pytest.approx(bound(nearest, side=1))
    alarms = []
    for out in range(10):
        kept = np.delete(np.arange(10), out)
        among = np.where(np.eye(9, dtype=bool), np.inf, apart[np.ix_(kept, kept)]).min(1)
        alarms.append(nearest[out] > bound(among, side=1))
    assert found.false_alarms == np.mean(alarms) == 0.1
    narrow = np.append(np.random.default_rng(2).normal(size=12), -30.0)
    assert spread_limit(narrow).false_alarms == pytest.approx(1 / 13)
    assert np.isnan(nearest_limit(apart[:2, :2]).value)


@pytest.fixture(scope="module")
def world():
    config = SimulationConfig(
        n_genes=60, n_contexts=8, n_perturbations=1, n_unseen=0, n_pairs=0, n_cells=60,
        n_controls=80, doses=(), hours=(),
    )  # fmt: skip
    return simulated(config, seed=1).adata


@pytest.fixture(scope="module")
def held(world):
    """A model without one context, and its prediction of it."""
    model = ptd.EffectPrior.from_anndata(world, **KEYS)
    model.fit(world, holdout={"cell_type": ["T3"]}, n_top_genes=None)
    ask = {"perturbations": ["P1"], "contexts": [{"cell_type": "T3"}], "n_cells": 96}
    return model, ptd.tl.predict(world, model, **ask)


def flags_of(pred, model, reference):
    made = ptd.tl.uncertainty(pred, model, reference=reference, copy=True)
    (row,) = made.uns["uncertainty_flags"].to_dict("records")
    table = made.uns["uncertainty"]
    assert (table["supported"] == row["supported"]).all()
    assert (table["collapsed"] == row["collapsed"]).all()
    return row


def test_a_held_out_context_raises_no_flag(world, held, caplog):
    model, pred = held
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        row = flags_of(pred, model, world)
    assert (row["supported"], row["reason"], row["collapsed"]) == (True, "", False)
    assert row["context_distance"] <= row["context_limit"]
    assert row["spread"] >= row["spread_limit"]
    assert 0 <= row["context_false_alarms"] <= 1
    assert np.isnan(row["perturbation_limit"])
    assert not caplog.records


def test_a_foreign_context_is_out_of_support(world, held, caplog):
    model, _ = held
    strange = world.copy()
    here = (strange.obs["cell_type"] == "T3").to_numpy()
    dense = strange.X.toarray()
    dense[here] = dense[here][:, np.random.default_rng(0).permutation(strange.n_vars)]
    strange.X = dense
    pred = ptd.tl.predict(
        strange, model, perturbations=["P1"], contexts=[{"cell_type": "T3"}], n_cells=96
    )
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        row = flags_of(pred, model, strange)
    assert not row["supported"]
    assert "farther from those of any context" in row["reason"]
    assert row["context_distance"] > 1.5 * row["context_limit"]
    (line,) = [one.getMessage() for one in caplog.records if "do not rely on" in one.getMessage()]
    assert "P1 in T3" in line


def test_cells_that_repeat_one_have_collapsed(world, held, caplog):
    model, pred = held
    same = pred.copy()
    del same.layers["counts"]
    same.X = pred.X[np.zeros(pred.n_obs, dtype=int)]
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        row = flags_of(same, model, world)
    assert row["collapsed"]
    assert row["supported"]
    assert row["spread"] < 1e-3
    (line,) = [one.getMessage() for one in caplog.records]
    assert "mode collapse" in line
    mean = same.copy()
    dense = pred.X.toarray()
    mean.X = dense.mean(0) + 0.3 * (dense - dense.mean(0))
    assert flags_of(mean, model, world)["collapsed"]


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_flags_are_written_to_files_and_drawn(world, held, tmp_path):
    model, pred = held
    mine = pred.copy()
    del mine.layers["counts"]
    mine.X = pred.X[np.zeros(pred.n_obs, dtype=int)]
    ptd.tl.uncertainty(mine, model, reference=world, key_added="bounds")
    mine.write_h5ad(tmp_path / "pred.h5ad")
    mine.write_zarr(tmp_path / "pred.zarr")
    for name, read in (("pred.h5ad", anndata.read_h5ad), ("pred.zarr", anndata.read_zarr)):
        back = read(tmp_path / name)
        pd.testing.assert_frame_equal(back.uns["bounds_flags"], mine.uns["bounds_flags"])
    (panel,) = ptd.pl.uncertainty(mine, key="bounds", save=tmp_path / "bars.png")
    assert panel.get_title() == "P1\nT3\ncells too much alike (mode collapse)"
    model.save(tmp_path / "bundle")
    ptd.tl.uncertainty(mine, ptd.load(tmp_path / "bundle"), reference=world, key_added="again")
    pd.testing.assert_frame_equal(mine.uns["again_flags"], mine.uns["bounds_flags"])


def summaries(asked, *, n_genes=20):
    """Conditions by members and context, from seeds of their names."""
    found = []
    for members, where in asked:
        rng = np.random.default_rng(len(where) + ord(where[-1]))
        cells = sampled(ord(where[-1]), n_cells=50, centre=rng.uniform(1, 3, n_genes))
        context = ContextSummary(
            covariates=(where,), mean=cells.mean(0), var=cells.var(0), n_cells=50,
            axes=cells[:, :3],
        )  # fmt: skip
        shift = sum(np.random.default_rng(ord(name[0])).normal(0, 0.2, n_genes) for name in members)
        found.append(
            ConditionSummary(
                members=members,
                context=context,
                mean=context.mean + shift,
                var=context.var,
                n_cells=50,
            )
        )
    return found


def judged(asked, question, *, features=None):
    """Reason why a question is out of support of some conditions."""
    known = summaries(asked)
    prior = EffectPrior().fit(known, features=features or {}, seed=0)
    flags = Flags(prior, np.arange(20))
    (one,) = summaries([question])
    control = Population(one.context.mean, one.context.var, 50)
    cells = Population(one.mean, one.var, 50)
    return flags.judge(Condition(question[0], (question[1],)), cells, control)


def test_what_was_never_left_out_is_out_of_support():
    spread = [(("A",), f"c{n}") for n in range(5)]
    assert judged(spread, (("A",), "c2"))["supported"]
    pair = judged([*spread, (("B",), "c0"), (("B",), "c1")], (("A", "B"), "c0"))
    assert "no combination was learnt from" in pair["reason"]
    new = judged(spread, (("B",), "c0"))
    assert "errors of unseen ones are unknown" in new["reason"]
    singles = [((name,), "c0") for name in "ABCDEF"]
    assert judged(singles, (("G",), "c0"))["supported"]
    elsewhere = judged(singles, (("A",), "c9"))
    assert "in two contexts" in elsewhere["reason"]
    assert "too few contexts" in elsewhere["reason"]


def test_what_cannot_be_told_is_not_said_to_be_far(caplog):
    conditions = [Condition(("A",), (place,)) for place in ("c0", "c1", "c2")]
    reasons = (TOO_FEW, f"{TOO_FEW}; far", "")
    found = [{"supported": not reason, "reason": reason, "collapsed": False} for reason in reasons]
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        _warn(conditions, found)
    far, untold = [one.getMessage() for one in caplog.records]
    assert "do not rely on" in far
    assert "c1" in far
    assert not {"c0", "c2"} & {*far.replace(",", " ").split()}
    assert untold == f"{TOO_FEW}, so nothing speaks for: 'A in c0'"


def test_features_far_from_all_others_are_out_of_support():
    singles = [((name,), "c0") for name in "ABCDEF"]
    rng = np.random.default_rng(0)
    features = {name: rng.normal(size=4) for name in "ABCDEFG"}
    near = judged(singles, (("G",), "c0"), features=features)
    assert near["supported"]
    assert near["perturbation_distance"] < near["perturbation_limit"]
    far = judged(singles, (("G",), "c0"), features={**features, "G": np.full(4, 30.0)})
    assert "features are farther" in far["reason"]


def test_doses_beyond_those_learnt_from_are_out_of_support(world, held):
    model, pred = held
    mine = pred.copy()
    notes = mine.uns["perturbdiff"]["support"]
    mine.uns["perturbdiff"]["support"] = {**notes, "reason": np.array(["dose of P1 is outside"])}
    row = flags_of(mine, model, world)
    assert (row["supported"], row["reason"]) == (False, "dose of P1 is outside")
