"""Cells on their way: they end where the prediction ends, and following them changes nothing."""

from inspect import unwrap

import anndata
import numpy as np
import pandas as pd
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError, LabelError, UnknownKeyError
from perturbdiff.diffusion import network_calls

ASK = {"perturbations": ["P1", "P2"], "contexts": [{"cell_type": "T1"}], "n_cells": 40, "seed": 5}
SAMPLE = ptd.SampleConfig(n_steps=3, set_size=8)


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    return ptd.tl.predict(simulated_cells, small_model, **ASK, sample=SAMPLE)


def followed(pred, model, cells, **changes):
    how = {"reference": cells, "n_cells": 11, "sample": SAMPLE, "copy": True} | changes
    return ptd.tl.trajectory(pred, model, **how)


def test_from_control_partner_over_every_step_to_the_predicted_cell(
    pred, small_model, simulated_cells
):
    gene = pred.var_names[3]
    made = followed(pred, small_model, simulated_cells, genes=[gene])
    table = made.uns["trajectory"]
    assert len(table) == 2 * 11 * (3 + 2)
    assert list(dict.fromkeys(table["step"])) == [0, 1, 2, 3, 4]
    stages = table.groupby("step")["stage"].unique().map(list)
    assert stages.tolist() == [["control"], *[["denoising"]] * 3, ["counts"]]
    levels = table[table["stage"] == "denoising"].groupby("step")["sigma"].first()
    assert levels.iloc[0] == pytest.approx(SAMPLE.sigma_max)
    assert (np.diff(levels) < 0).all()
    assert table.loc[table["stage"] != "denoising", "sigma"].isna().all()
    # The last stage is the prediction itself, in every gene and along the axes.
    end = table[table["stage"] == "counts"].set_index("cell")
    cells = made[end.index.to_list()]
    np.testing.assert_allclose(end[gene], cells[:, gene].X.toarray()[:, 0], atol=1e-6)
    logs = ptd.pp.normalize(simulated_cells, copy=True)[:, pred.var_names]
    control = logs[(logs.obs["cell_type"] == "T1") & (logs.obs["perturbation"] == "control")]
    base = control.X.toarray().astype(float).mean(0)
    axes = made.varm["trajectory"]
    np.testing.assert_allclose(axes.T @ axes, np.eye(2), atol=1e-9)
    np.testing.assert_allclose(
        end[["axis_1", "axis_2"]], (cells.X.toarray() - base) @ axes, atol=1e-5
    )
    # The first stage are control cells of the context.
    start = table[table["stage"] == "control"]
    there = (control.X.toarray() - base) @ axes
    for xy in start[["axis_1", "axis_2"]].to_numpy():
        assert np.abs(there - xy).max(1).min() < 1e-5


def test_the_last_guess_is_what_counts_are_drawn_from(pred, small_model, simulated_cells):
    made = followed(pred, small_model, simulated_cells, genes=list(pred.var_names), n_cells=40)
    table = made.uns["trajectory"]
    steps = {s: own[list(pred.var_names)].to_numpy() for s, own in table.groupby("step")}
    # Means over cells: drawing adds noise and no bias; the control partners lie elsewhere.
    end, last, start = (np.abs(steps[4] - steps[n]).mean(0) for n in (4, 3, 0))
    assert (end == 0).all()
    drawn, guess, control = (steps[n].mean(0) for n in (4, 3, 0))
    assert np.abs(drawn - guess).mean() < np.abs(drawn - control).mean()
    assert last.mean() < start.mean()


def test_following_costs_its_steps_and_leaves_all_else_as_it_was(
    pred, small_model, simulated_cells
):
    before, keys = pred.layers["counts"].copy(), set(pred.uns)
    calls = []
    watch = small_model.fitted.denoiser.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        made = followed(pred, small_model, simulated_cells)
        # The populations are known: one batch of sets a condition, and nothing else.
        assert len(calls) == 2 * network_calls(SAMPLE.sampler, SAMPLE.n_steps)
        again = ptd.tl.predict(simulated_cells, small_model, **ASK, sample=SAMPLE)
        assert len(calls) == 2 * network_calls(SAMPLE.sampler, SAMPLE.n_steps)
    finally:
        watch.remove()
    assert set(pred.uns) == keys
    assert "trajectory" not in pred.varm
    for cells in (made, again):
        assert (cells.layers["counts"] != before).nnz == 0


def test_a_loaded_model_follows_the_same_cells(pred, small_model, simulated_cells, tmp_path):
    small_model.save(tmp_path / "bundle")
    tables = [
        followed(pred, model, simulated_cells).uns["trajectory"]
        for model in (small_model, ptd.load(tmp_path / "bundle"))
    ]
    pd.testing.assert_frame_equal(*tables, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_written_to_files_and_back(pred, small_model, simulated_cells, tmp_path):
    mine = pred.copy()
    assert followed(mine, small_model, simulated_cells, key_added="way", copy=False) is None
    mine.write_h5ad(tmp_path / "pred.h5ad")
    mine.write_zarr(tmp_path / "pred.zarr")
    for back in (
        anndata.read_h5ad(tmp_path / "pred.h5ad"),
        anndata.read_zarr(tmp_path / "pred.zarr"),
    ):
        pd.testing.assert_frame_equal(back.uns["way"], mine.uns["way"])
        np.testing.assert_array_equal(back.varm["way"], mine.varm["way"])


def test_a_part_with_the_first_cells_of_each_condition_is_followed(
    pred, small_model, simulated_cells
):
    whole = followed(pred, small_model, simulated_cells).uns["trajectory"]
    number = pred.obs.groupby("perturbation", observed=True).cumcount()
    part = followed(pred[number < 11].copy(), small_model, simulated_cells).uns["trajectory"]
    assert part["cell"].tolist() == whole["cell"].tolist()


@pytest.mark.parametrize("kept", [slice(1, None), slice(None, None, 2), slice(41, None)])
def test_cells_that_were_dropped_are_named(pred, small_model, simulated_cells, kept):
    part = pred[kept].copy()
    lost = sorted(set(pred.obs_names) - set(part.obs_names))[0]
    with pytest.raises(LabelError, match=f"cells were dropped: '{lost}'.*n_cells="):
        followed(part, small_model, simulated_cells)


def test_what_cannot_be_followed_is_refused_in_words(pred, small_model, simulated_cells):
    wrong = [
        ({"sample": None}, LabelError, "come out otherwise"),
        ({"genes": ["nowhere"]}, UnknownKeyError, "no 'nowhere'"),
        ({"n_cells": 0}, ConfigError, "n_cells"),
    ]
    for changes, kind, message in wrong:
        with pytest.raises(kind, match=message):
            followed(pred, small_model, simulated_cells, **changes)
    with pytest.raises(ConfigError, match="genes = 3: must be names of genes"):
        unwrap(ptd.tl.trajectory)(pred, small_model, reference=simulated_cells, genes=3)
    with pytest.raises(ConfigError, match=r"opened with perturbdiff\.load"):
        followed(pred, "bundle", simulated_cells)
    simple = ptd.MeanShift.from_anndata(
        simulated_cells, perturbation_key="perturbation", control="control",
        covariate_keys=["cell_type"],
    ).fit(simulated_cells)  # fmt: skip
    with pytest.raises(ConfigError, match="no denoising steps"):
        followed(pred, simple, simulated_cells)
    other = ptd.tl.predict(
        simulated_cells, simple, perturbations=["P1"], contexts=ASK["contexts"], n_cells=8
    )
    with pytest.raises(ConfigError, match="not the one that made"):
        followed(other, small_model, simulated_cells)
    with pytest.raises(ConfigError, match="fewer than those of the model"):
        followed(pred[:, :20].copy(), small_model, simulated_cells)
    bound = ptd.tl.predict(
        simulated_cells, small_model, **ASK, sample=SAMPLE,
        constraints=[ptd.AtLeast(pred.var_names[0], 0.5, per="population")],
    )  # fmt: skip
    with pytest.raises(ConstraintError, match=r"pl\.constraints"):
        followed(bound, small_model, simulated_cells)
    with pytest.raises(UnknownKeyError, match="reading"):
        followed(simulated_cells, small_model, simulated_cells)
