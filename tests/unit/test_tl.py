"""Scores stand beside baselines and ceiling, and compare what they say they compare."""

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from matplotlib.figure import Figure

import perturbdiff as ptd
from perturbdiff._errors import (
    ConfigError,
    ExpressionError,
    GeneError,
    GeneOverlapError,
    LabelError,
    NotFittedError,
    ScaleError,
    UnknownKeyError,
    UnknownLevelError,
)
from perturbdiff.data._comparison import compare
from perturbdiff.metrics import CONDITION_METRICS
from perturbdiff.tl._score import CEILING, TRANSPORTED

T1 = [{"cell_type": "T1"}]


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    """Two perturbations in a context whose treated cells were held out; do not change it."""
    return ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1", "P2"], contexts=T1, n_cells=40, seed=1
    )


@pytest.fixture(scope="module")
def table(pred, simulated_cells):
    return ptd.tl.score(pred, reference=simulated_cells, copy=True).uns["score"]


def row(table, method, cells, perturbation="P1"):
    found = table[
        (table["method"] == method)
        & (table["cells"] == cells)
        & (table["perturbation"] == perturbation)
    ]
    assert len(found) == 1
    return found.iloc[0]


def dense(adata):
    return adata.X.toarray().astype(float)


def shifts(pred, reference, perturbation="P1"):
    """Predicted and measured shift, by hand."""
    here = reference.obs["cell_type"] == "T1"
    genes = list(pred.var_names)
    logged = ptd.pp.normalize(reference, copy=True)[:, genes]
    control = dense(logged[here & (reference.obs["perturbation"] == "control")]).mean(0)
    treated = dense(logged[here & (reference.obs["perturbation"] == perturbation)]).mean(0)
    guess = dense(pred[pred.obs["perturbation"] == perturbation]).mean(0)
    return guess - control, treated - control


def test_predict_is_the_models_own_answer(small_model, simulated_cells, pred):
    same = small_model.predict(
        simulated_cells, perturbations=["P1", "P2"], contexts=T1, n_cells=40, seed=1
    )
    assert (same.layers["counts"] != pred.layers["counts"]).nnz == 0
    assert same.obs.equals(pred.obs)


def test_predict_asks_a_baseline_too(simulated_cells):
    columns = {
        "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
    }  # fmt: skip
    model = ptd.MeanShift.from_anndata(simulated_cells, **columns)
    with pytest.raises(NotFittedError, match="fit"):
        ptd.tl.predict(simulated_cells, model, perturbations=["P1"])
    model.fit(simulated_cells, holdout={"cell_type": ["T1"]}, n_top_genes=30)
    answer = ptd.tl.predict(simulated_cells, model, perturbations=["P1"], contexts=T1, n_cells=20)
    ptd.tl.score(answer, reference=simulated_cells)
    methods = list(dict.fromkeys(answer.uns["score"]["method"]))
    assert methods == ["mean_shift", CEILING]


def test_an_unknown_perturbation_is_refused_by_name(small_model, simulated_cells):
    with pytest.raises(UnknownLevelError, match="P1"):
        ptd.tl.predict(simulated_cells, small_model, perturbations=["P11"], contexts=T1)


def test_the_table_holds_model_baselines_and_ceiling_for_every_condition(table):
    methods = list(dict.fromkeys(zip(table["method"], table["cells"], strict=True)))
    assert methods[0] == ("set_diffusion", "generated")
    assert methods[-1] == (CEILING, "measured")
    names = {method for method, cells in methods if cells == "shifted"}
    assert {
        "copy_control", "mean_shift", "similarity_shift", "carried_log_ratio", "gene_ridge",
        "mixture_log_ratio", "additive", "nearest_context", "effect_prior",
    } <= names  # fmt: skip
    assert {method for method, cells in methods if cells == "transported"} == set(TRANSPORTED)
    assert (table.groupby(["method", "cells"]).size() == 2).all()
    assert set(CONDITION_METRICS) | {"discrimination"} <= set(table.columns)


def test_every_missing_value_has_its_reason(table):
    numbers = table[[*CONDITION_METRICS, "discrimination"]]
    assert (table["undefined"][numbers.isna().any(axis=1)] != "").all()
    lacking = row(table, "additive", "shifted")
    assert np.isnan(lacking["pearson_shift"])
    assert "no parts to add up" in lacking["undefined"]


def test_means_are_compared_as_by_hand(pred, table, simulated_cells):
    guess, truth = shifts(pred, simulated_cells)
    scored = row(table, "set_diffusion", "generated")
    assert scored["pearson_shift"] == pytest.approx(np.corrcoef(guess, truth)[0, 1], abs=1e-6)
    assert scored["mae_shift"] == pytest.approx(np.abs(guess - truth).mean(), abs=1e-6)
    assert (scored["n_pred"], scored["n_true"], scored["n_control"]) == (40, 30, 40)
    copied = row(table, "copy_control", "shifted")
    assert copied["pearson_shift"] == 0
    assert copied["mae_shift"] == pytest.approx(np.abs(truth).mean(), abs=1e-6)


def test_a_baseline_is_scored_by_the_mean_that_it_stated(pred, table, simulated_cells):
    _, truth = shifts(pred, simulated_cells)
    stated = pred.uns["perturbdiff"]["baselines"]
    number = list(stated["conditions"]).index('[["P1"], ["T1"]]')
    shift = stated["mean_shift"][number] - stated["copy_control"][number]
    scored = row(table, "mean_shift", "shifted")
    assert scored["pearson_shift"] == pytest.approx(np.corrcoef(shift, truth)[0, 1], abs=1e-6)
    moved = row(table, "mixture_log_ratio", "transported")
    plain = row(table, "mixture_log_ratio", "shifted")
    assert moved["pearson_shift"] == pytest.approx(plain["pearson_shift"], abs=0.1)
    assert moved["pearson_shift"] != plain["pearson_shift"]


def as_prediction(pred, cells):
    """The prediction with other cells of P1 in T1."""
    answer = pred[pred.obs["perturbation"] == "P1"].copy()
    rows = np.resize(np.arange(cells.shape[0]), answer.n_obs)
    answer.X = cells[rows]
    del answer.layers["counts"]
    return answer


def test_truth_beats_noise_and_noise_loses_to_copied_controls(pred, simulated_cells):
    logged = ptd.pp.normalize(simulated_cells, copy=True)[:, list(pred.var_names)]
    obs = logged.obs
    true = logged[(obs["cell_type"] == "T1") & (obs["perturbation"] == "P1")].X
    rng = np.random.default_rng(0)
    scores = {}
    for name, cells in (("true", true), ("noise", rng.uniform(0, 4, true.shape))):
        answer = as_prediction(pred, cells)
        ptd.tl.score(answer, reference=simulated_cells)
        scores[name] = row(answer.uns["score"], "set_diffusion", "generated")
        copied = row(answer.uns["score"], "copy_control", "shifted")
    # The true cells fill the prediction one and a third times, so that the means differ a little.
    assert scores["true"]["pearson_shift"] > 0.95
    assert scores["true"]["energy_distance"] < copied["energy_distance"] / 3
    assert scores["noise"]["energy_distance"] > copied["energy_distance"]


def test_order_of_the_reference_does_not_matter(pred, table, simulated_cells):
    order = np.random.default_rng(0).permutation(simulated_cells.n_obs)
    genes = simulated_cells.var_names[::-1]
    other = simulated_cells[order][:, genes].copy()
    shuffled = ptd.tl.score(pred, reference=other, copy=True).uns["score"]
    pd.testing.assert_frame_equal(table, shuffled, rtol=1e-9, atol=1e-9)


def test_axes_never_see_the_cells_that_were_predicted(pred, simulated_cells):
    comparison = compare(pred, simulated_cells)
    changed = simulated_cells.copy()
    held = (changed.obs["cell_type"] == "T1") & (changed.obs["perturbation"] != "control")
    matrix = changed.X.toarray()
    matrix[held.to_numpy()] = matrix[held.to_numpy()][:, ::-1]
    changed.X = matrix
    before, after = comparison.axes(5), compare(pred, changed).axes(5)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)


def test_scores_survive_a_file_and_a_file_scores_the_same(pred, table, simulated_cells, tmp_path):
    pred.write_h5ad(tmp_path / "pred.h5ad")
    back = anndata.read_h5ad(tmp_path / "pred.h5ad")
    assert ptd.tl.score(back, reference=simulated_cells) is None
    back.write_h5ad(tmp_path / "scored.h5ad")
    again = anndata.read_h5ad(tmp_path / "scored.h5ad").uns["score"]
    for column in table.columns:
        if table[column].dtype == object:
            assert again[column].astype(str).tolist() == table[column].tolist()
        else:
            np.testing.assert_allclose(again[column], table[column], rtol=1e-12)
    summary = ptd.tl.summarise_scores(back)
    assert summary.index[0] == ("set_diffusion", "generated")


def test_a_copy_leaves_the_prediction_as_it_was(pred, simulated_cells):
    before = set(pred.uns)
    scored = ptd.tl.score(pred, reference=simulated_cells, key_added="mine", copy=True)
    assert set(scored.uns) == before | {"mine"}
    assert set(pred.uns) == before


def test_summary_averages_over_conditions(pred, table, simulated_cells):
    scored = ptd.tl.score(pred, reference=simulated_cells, copy=True)
    summary = ptd.tl.summarise_scores(scored)
    values = [row(table, "mean_shift", "shifted", p)["mae_shift"] for p in ("P1", "P2")]
    assert summary.loc[("mean_shift", "shifted"), "mae_shift"] == pytest.approx(np.mean(values))
    assert summary.loc[("additive", "shifted"), "n_conditions"] == 0
    with pytest.raises(UnknownKeyError, match="score"):
        ptd.tl.summarise_scores(pred)


def test_genes_that_are_dropped_count_as_unchanged(pred, table, simulated_cells, caplog):
    """F05: leaving out the genes that are predicted worst must not make a score better."""
    guess, truth = shifts(pred, simulated_cells)
    kept = np.argsort(np.abs(guess - truth))[:20]
    kept.sort()
    part = pred[:, kept].copy()
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.tl.score(part, reference=simulated_cells)
    assert "lacks 10 of the 30 genes" in caplog.text
    scored = row(part.uns["score"], "set_diffusion", "generated")
    filled = np.where(np.isin(np.arange(30), kept), guess, 0)
    assert scored["mae_shift"] == pytest.approx(np.abs(filled - truth).mean(), abs=1e-6)
    assert scored["pearson_shift"] == pytest.approx(np.corrcoef(filled, truth)[0, 1], abs=1e-6)
    assert (scored["n_genes"], scored["n_genes_pred"]) == (30, 20)
    assert np.isfinite(scored[[*CONDITION_METRICS]].astype(float)).all()
    others = part.uns["score"]["method"] != "set_diffusion"
    same = [name for name in table.columns if name != "n_genes_pred"]
    pd.testing.assert_frame_equal(part.uns["score"][others][same], table[others][same])


def test_dropping_the_genes_that_change_most_never_helps(pred, table, simulated_cells):
    guess, truth = shifts(pred, simulated_cells)
    changed = np.argsort(-np.abs(truth))[:15]
    part = pred[:, np.setdiff1d(np.arange(30), changed)].copy()
    ptd.tl.score(part, reference=simulated_cells)
    less = row(part.uns["score"], "set_diffusion", "generated")
    whole = row(table, "set_diffusion", "generated")
    assert (whole["n_genes"], whole["n_genes_pred"]) == (30, 30)
    assert np.corrcoef(guess, truth)[0, 1] > 0.5  # so that there is something to lose
    for name, sign in (("pearson_shift", 1), ("mae_shift", -1), ("energy_distance", -1)):
        assert sign * less[name] < sign * whole[name], name


def test_a_prediction_of_other_genes_is_refused(pred, simulated_cells):
    other = pred.copy()
    other.var_names = [f"ENSG{number}" for number in range(30)]
    with pytest.raises(GeneOverlapError, match="None of the 30 genes"):
        ptd.tl.score(other, reference=simulated_cells)


def test_what_looks_logged_twice_is_said(pred, simulated_cells, caplog):
    reference = simulated_cells.copy()
    ptd.pp.normalize(reference)
    del reference.obs["library_size"]
    bare = pred.copy()
    del bare.layers["counts"]
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.tl.score(bare, reference=reference, copy=True)
    assert "logged twice" not in caplog.text
    again = bare.copy()
    again.X = again.X.log1p()
    reference.X = reference.X.log1p()
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.tl.score(again, reference=reference, copy=True)
    assert "X of the prediction holds nothing above 2.1" in caplog.text
    assert caplog.text.count("it looks logged twice") == 2


def test_conditions_that_are_dropped_are_named(pred, simulated_cells, caplog):
    part = pred[pred.obs["perturbation"] == "P2"].copy()
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.tl.score(part, reference=simulated_cells)
    assert "of 1 of its 2 conditions" in caplog.text
    assert "not compared: 'P1 in T1'" in caplog.text
    found = part.uns["score"]
    assert set(found["perturbation"]) == {"P2"}
    assert "only one condition" in row(found, "mean_shift", "shifted", "P2")["undefined"]


def test_a_label_column_with_the_name_of_a_score_column_is_kept_apart(toy):
    adata = toy(n_each=8)
    adata.obs["method"] = adata.obs.pop("cell_type")
    columns = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["method"]}
    model = ptd.MeanShift.from_anndata(adata, **columns, scale="counts").fit(adata)
    answer = model.predict(adata, perturbations=["A"], n_cells=8)
    ptd.tl.score(answer, reference=adata)
    assert set(answer.uns["score"]["obs_method"]) == {"T", "NK"}
    assert "mean_shift" in set(answer.uns["score"]["method"])


# What is refused


def test_a_prediction_is_no_reference(pred, simulated_cells):
    with pytest.raises(LabelError, match="itself a prediction"):
        ptd.tl.score(pred, reference=pred)
    for call in (ptd.tl.score, ptd.tl.response):
        with pytest.raises(LabelError, match="the two were exchanged"):
            call(simulated_cells, reference=pred)


def test_other_files_are_no_predictions(pred, simulated_cells):
    joined = anndata.concat([pred, pred], index_unique="-")
    for cells in (simulated_cells, joined):
        with pytest.raises(
            UnknownKeyError, match=r"no prediction of tl\.predict.*has no 'reading'"
        ):
            ptd.tl.score(cells, reference=simulated_cells)


def test_what_was_not_measured_is_named(pred, simulated_cells):
    obs = simulated_cells.obs
    here = obs["cell_type"] == "T1"
    without = simulated_cells[~(here & (obs["perturbation"] == "P2"))]
    with pytest.raises(LabelError, match=r"no treated cells to compare with.*P2 in T1"):
        ptd.tl.score(pred, reference=without)
    without = simulated_cells[~(here & (obs["perturbation"] == "control"))]
    with pytest.raises(LabelError, match=r"no control cells.*P1 in T1"):
        ptd.tl.score(pred, reference=without)


def test_a_reference_without_the_genes_is_refused(pred, simulated_cells):
    with pytest.raises(GeneError, match="Give a reference that has them") as caught:
        ptd.tl.score(pred, reference=simulated_cells[:, simulated_cells.var_names[:5]])
    assert "infer" not in str(caught.value)


def test_one_true_cell_leaves_scores_undefined_with_reasons(pred, simulated_cells):
    obs = simulated_cells.obs
    treated = (obs["cell_type"] == "T1") & (obs["perturbation"] == "P1")
    keep = ~treated | (np.cumsum(treated) == 1)
    scored = ptd.tl.score(pred, reference=simulated_cells[keep], copy=True).uns["score"]
    lonely = row(scored, "set_diffusion", "generated")
    assert np.isfinite(lonely["mae_shift"])
    assert np.isnan(lonely["energy_distance"])
    assert "energy_distance" in lonely["undefined"]
    assert row(scored, CEILING, "measured")["undefined"]


def test_values_that_are_no_numbers_are_refused_before_they_are_drawn(pred, simulated_cells):
    spoilt = pred.copy()
    spoilt.X.data[:3] = np.nan
    for call in (ptd.pl.embedding, ptd.pl.response, ptd.tl.score, ptd.tl.response):
        with pytest.raises(ExpressionError, match="3 values that are NaN or infinite"):
            call(spoilt, reference=simulated_cells)


def scaled(values):
    return sp.csr_matrix(values.toarray() - values.toarray().mean(0))


def with_one_below_zero(values):
    values = values.copy()
    values.data[0] = -3
    return values


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (scaled, ExpressionError, "negative values.*looks scaled"),
        (with_one_below_zero, ExpressionError, "1 negative value,"),
        (sp.csr_matrix.log1p, ScaleError, "40 of 40 cells: X, layers.* second logarithm"),
        (lambda values: values.toarray().astype(np.float16), ScaleError, "half precision"),
        (lambda values: values * 0, ScaleError, "not log1p of its counts per 10,000 in 40 of 40"),
    ],
)
def test_cells_that_were_changed_are_refused(pred, simulated_cells, change, error, words):
    changed = pred[pred.obs["perturbation"] == "P1"].copy()
    changed.X = change(changed.X)
    for call in (ptd.pl.embedding, ptd.pl.response, ptd.tl.score, ptd.tl.response):
        with pytest.raises(error, match=words):
            call(changed, reference=simulated_cells)


def test_one_changed_cell_or_library_size_is_counted(pred, simulated_cells):
    changed = pred.copy()
    changed.X.data[3] += 0.01
    with pytest.raises(ScaleError, match="in 1 of 80 cells"):
        ptd.tl.response(changed, reference=simulated_cells)
    changed = pred.copy()
    changed.obs["library_size"] *= 2
    with pytest.raises(ScaleError, match=r"or obs\['library_size'\] was changed"):
        ptd.tl.response(changed, reference=simulated_cells)


def test_values_that_no_count_says_are_scored(small_model, simulated_cells):
    gene = small_model.registry.genes[0]
    made = ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1"], contexts=T1, n_cells=16,
        constraints=[ptd.Observed([gene], np.full((16, 1), 1.234567))],
    )  # fmt: skip
    counts = made[:, gene].layers["counts"].toarray()
    assert (counts != np.rint(counts)).any()
    ptd.tl.score(made, reference=simulated_cells)
    ptd.tl.response(made, reference=simulated_cells)


def test_a_number_of_panels_that_does_not_fit_is_refused(pred, simulated_cells):
    with pytest.raises(ConfigError, match="2 panels"):
        ptd.pl.response(pred, reference=simulated_cells, ax=Figure().subplots())


def test_joined_or_relabelled_predictions_are_refused(small_model, simulated_cells, pred):
    other = ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1"], contexts=[{"cell_type": "T2"}],
        n_cells=20,
    )  # fmt: skip
    both = anndata.concat([pred, other], uns_merge="first", index_unique="-")
    with pytest.raises(LabelError, match=r"of 'P1 in T2', which it was not.*score each"):
        ptd.tl.score(both, reference=simulated_cells)
    relabelled = pred.copy()
    relabelled.obs["perturbation"] = "control"
    with pytest.raises(LabelError, match="no treated cells"):
        ptd.tl.score(relabelled, reference=simulated_cells)
