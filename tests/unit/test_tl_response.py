"""Differential expression of predicted against control cells: the right cells, values, files."""

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy.stats import false_discovery_control, mannwhitneyu

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, LabelError, UnknownKeyError
from perturbdiff.tl import _response

CONTEXTS = [{"cell_type": "T2"}, {"cell_type": "T1"}]


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    """Two perturbations in two contexts; do not change it."""
    return ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1", "P2"], contexts=CONTEXTS, n_cells=30
    )


@pytest.fixture(scope="module")
def table(pred, simulated_cells):
    return ptd.tl.response(pred, reference=simulated_cells, copy=True).uns["response"]


def of(table, perturbation, kind):
    rows = (table["perturbation"] == perturbation) & (table["cell_type"] == kind)
    return table[rows].set_index("gene")


def dense(adata):
    return adata.X.toarray().astype(float)


@pytest.mark.parametrize(("perturbation", "kind"), [("P1", "T1"), ("P2", "T2")])
def test_values_are_those_of_scipy_against_controls_of_the_same_context(
    pred, table, simulated_cells, perturbation, kind
):
    found = of(table, perturbation, kind)
    assert sorted(found.index) == sorted(pred.var_names)
    genes = list(found.index)
    control = (simulated_cells.obs["perturbation"] == "control") & (
        simulated_cells.obs["cell_type"] == kind
    )
    before = dense(ptd.pp.normalize(simulated_cells, copy=True)[control, genes])
    asked = (pred.obs["perturbation"] == perturbation) & (pred.obs["cell_type"] == kind)
    after = dense(pred[asked, genes])
    np.testing.assert_allclose(found["mean"], after.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["control_mean"], before.mean(0), rtol=1e-6)
    varies = (np.ptp(np.concatenate([before, after]), axis=0)) > 0
    expected = mannwhitneyu(after, before, method="asymptotic", use_continuity=False)
    p_value = found["p_value"].to_numpy()
    np.testing.assert_allclose(p_value[varies], expected.pvalue[varies], rtol=1e-4)
    np.testing.assert_allclose(found["fdr"], false_discovery_control(p_value), rtol=1e-9)
    middle = len(after) * len(before) / 2
    assert (np.sign(found["score"])[varies] == np.sign(expected.statistic - middle)[varies]).all()
    both = (after.mean(0) > 0) & (before.mean(0) > 0)
    fold = np.log2(np.expm1(after.mean(0)) / np.expm1(before.mean(0)))
    np.testing.assert_allclose(found["log2_fold_change"][both], fold[both], atol=1e-4)
    assert found["rank"].tolist() == list(range(1, len(genes) + 1))
    assert (np.diff(found["score"]) <= 0).all()


def test_treated_cells_of_the_reference_are_not_looked_at(pred, table, simulated_cells):
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"].copy()
    again = ptd.tl.response(pred, reference=control, copy=True).uns["response"]
    pd.testing.assert_frame_equal(again, table)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_it_is_written_where_asked_and_survives_files(pred, table, simulated_cells, tmp_path):
    mine = pred.copy()
    assert ptd.tl.response(mine, reference=simulated_cells, key_added="de") is None
    assert "de" not in pred.uns
    pd.testing.assert_frame_equal(mine.uns["de"], table)
    mine.write_h5ad(tmp_path / "pred.h5ad")
    mine.write_zarr(tmp_path / "pred.zarr")
    for back in (
        anndata.read_h5ad(tmp_path / "pred.h5ad"), anndata.read_zarr(tmp_path / "pred.zarr"),
    ):  # fmt: skip
        pd.testing.assert_frame_equal(back.uns["de"], table, check_categorical=False)
        top = ptd.tl.response_genes(back, key="de", n_genes=3, fdr=1)
        assert len(top) == 12


def test_the_genes_that_change_most_by_condition(pred, table):
    mine = pred.copy()
    mine.uns["response"] = table
    top = ptd.tl.response_genes(mine, n_genes=4, fdr=0.9)
    conditions = list(dict.fromkeys(zip(table["perturbation"], table["cell_type"], strict=True)))
    assert (
        list(dict.fromkeys(zip(top["perturbation"], top["cell_type"], strict=True))) == conditions
    )
    for perturbation, kind in conditions:
        found = of(top, perturbation, kind)
        whole = of(table, perturbation, kind).query("fdr < 0.9")["score"].abs()
        assert len(found) == min(4, len(whole))
        assert found["score"].abs().tolist() == whole.nlargest(4).tolist()
    assert ptd.tl.response_genes(mine, fdr=1e-300).empty


def test_a_prediction_on_part_of_its_genes(pred, table, simulated_cells):
    part = pred[:, pred.var_names[:7]].copy()
    found = ptd.tl.response(part, reference=simulated_cells, copy=True).uns["response"]
    one, whole = of(found, "P1", "T1"), of(table, "P1", "T1")
    assert set(one.index) == set(part.var_names)
    np.testing.assert_allclose(one["p_value"], whole.loc[one.index, "p_value"])


def test_long_comparisons_are_announced_and_shown(pred, simulated_cells, monkeypatch, caplog):
    bars = []

    def bar(contexts, **settings):
        assert "when first used on a machine" in caplog.text  # said before the work
        bars.append(settings)
        for number, context in enumerate(contexts):
            bars.append(number)
            yield context

    monkeypatch.setattr(_response, "progress_bars", lambda: bar)
    with caplog.at_level("INFO", logger="perturbdiff"):
        ptd.tl.response(pred, reference=simulated_cells, copy=True)
    assert "comparing genes in 2 contexts" in caplog.text
    settings, *numbers = bars
    assert numbers == [0, 1]
    assert settings["disable"] is None  # no bar where nobody watches


def test_what_cannot_be_compared_is_refused(pred, simulated_cells):
    with pytest.raises(LabelError, match="itself a prediction"):
        ptd.tl.response(pred, reference=pred)
    elsewhere = simulated_cells[simulated_cells.obs["cell_type"] != "T1"].copy()
    with pytest.raises(LabelError, match="no control cells in the context of"):
        ptd.tl.response(pred, reference=elsewhere)
    with pytest.raises(LabelError, match=r"1 cell of P2 in T[12]; two are needed"):
        ptd.tl.response(pred[range(91)].copy(), reference=simulated_cells)
    with pytest.raises(LabelError, match="no treated cells"):
        ptd.tl.response(pred[:0].copy(), reference=simulated_cells)
    with pytest.raises(UnknownKeyError, match="response"):
        ptd.tl.response_genes(pred)
    scored = pred.copy()
    ptd.tl.response(scored, reference=simulated_cells)
    with pytest.raises(UnknownKeyError, match="Did you mean 'response'"):
        ptd.tl.response_genes(scored, key="responses")
    with pytest.raises(ConfigError, match="fdr"):
        ptd.tl.response_genes(scored, fdr=0)
    with pytest.raises(ConfigError, match="n_genes"):
        ptd.tl.response_genes(scored, n_genes=0)
