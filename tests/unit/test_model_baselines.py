"""Baselines with the faces of models: the same door, partners and numbers, and no network."""

import anndata
import numpy as np
import pytest
import scipy.sparse as sp

import perturbdiff as ptd
from perturbdiff import prior
from perturbdiff._errors import (
    ConfigError,
    ExpressionError,
    GeneError,
    NotFittedError,
    ScaleError,
    SplitError,
    UndefinedBaselineError,
    UnknownLevelError,
)
from perturbdiff.data import Condition, Registry, encode
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig
from perturbdiff.model._cells import moved_cells, transported_cells
from perturbdiff.model._questions import partner_rows

COLUMNS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
    "embedding_key": "perturbation_features",
}
FACES = [
    ptd.CopyControl, ptd.MeanShift, ptd.SimilarityShift, ptd.CarriedLogRatio, ptd.MixtureLogRatio,
    ptd.GeneRidge, ptd.NearestContext, ptd.EffectPrior,
]  # fmt: skip
T1 = [{"cell_type": "T1"}]


def fitted(kind, adata, **changes):
    settings = {"holdout": {"cell_type": ["T1"]}, "n_top_genes": 30} | changes
    return kind.from_anndata(adata, **COLUMNS).fit(adata, **settings)


def stated(pred, name):
    return pred.uns["perturbdiff"]["baselines"][name][0]


def control_of(adata, genes, kind="T1"):
    """Log1p values of control cells on some genes, worked out here."""
    rows = (adata.obs["perturbation"] == "control") & (adata.obs["cell_type"] == kind)
    cells = adata[rows.to_numpy()]
    cells = cells[np.argsort(cells.obs_names)]
    depth = cells.obs["library_size"].to_numpy()[:, None]
    counts = cells.X.toarray()[:, cells.var_names.get_indexer(genes)]
    return counts, np.log1p(counts / depth * 1e4), depth[:, 0]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("cells", ["transport", "shift"])
def test_every_baseline_brings_cells_to_the_mean_it_states(face, cells, simulated_cells):
    model = fitted(face, simulated_cells)
    pred = model.predict(
        simulated_cells, perturbations=["P1"], contexts=T1, n_cells=40, seed=1, cells=cells
    )
    name = face.baseline.name
    wanted = stated(pred, name)
    _, control, _ = control_of(simulated_cells, pred.var_names)
    moved = pred.X.toarray()
    if cells == "shift":  # all 40 control cells, each once
        shift = wanted - control.mean(0)
        expected = np.maximum(control + shift, 0)
        np.testing.assert_allclose(np.sort(moved, 0), np.sort(expected, 0), atol=1e-4)
    else:
        error = 4 * moved.std(0) / 40**0.5 + 0.1
        assert (np.abs(moved.mean(0) - wanted) < error).all()
    assert pred.uns["perturbdiff"]["model"] == name


def test_the_faces_state_what_the_baselines_on_arrays_state(small_model, simulated_cells):
    """Fitted on the same cells and genes, a set diffusion model reports the same means."""
    whole = small_model.predict(
        simulated_cells, perturbations=["P1"], contexts=T1, n_cells=8,
        sample=ptd.SampleConfig(n_steps=2),
    )  # fmt: skip
    reported = whole.uns["perturbdiff"]["baselines"]
    for face in FACES:
        name = face.baseline.name
        if name in ("mixture_log_ratio", "effect_prior"):
            continue  # these look at principal axes, of which the small model has fewer
        pred = fitted(face, simulated_cells).predict(
            simulated_cells, perturbations=["P1"], contexts=T1, n_cells=8
        )
        np.testing.assert_allclose(stated(pred, name), reported[name][0], rtol=1e-5, atol=1e-6)


def test_predictions_have_the_schema_of_a_set_diffusion_model(
    small_model, simulated_cells, tmp_path
):
    asked = {"perturbations": ["P1", "P2"], "contexts": T1, "n_cells": 40, "seed": 1}
    whole = small_model.predict(simulated_cells, **asked, sample=ptd.SampleConfig(n_steps=2))
    pred = fitted(ptd.MeanShift, simulated_cells).predict(simulated_cells, **asked)
    assert list(pred.var_names) == list(whole.var_names)
    assert pred.obs.drop(columns="library_size").equals(whole.obs.drop(columns="library_size"))
    assert dict(pred.obs.dtypes) == dict(whole.obs.dtypes)
    assert pred.X.dtype == whole.X.dtype
    assert pred.layers["counts"].dtype == whole.layers["counts"].dtype
    assert pred.uns["perturbdiff"].keys() == whole.uns["perturbdiff"].keys()
    pred.write_h5ad(tmp_path / "pred.h5ad")
    again = anndata.read_h5ad(tmp_path / "pred.h5ad")
    assert (again.layers["counts"] != pred.layers["counts"]).nnz == 0


def test_partners_are_those_of_a_set_diffusion_model(small_model, simulated_cells):
    """Library sizes tell which control cell a predicted cell started from."""
    asked = {"perturbations": ["P1"], "contexts": T1, "n_cells": 70, "seed": 4}
    whole = small_model.predict(simulated_cells, **asked, sample=ptd.SampleConfig(n_steps=2))
    pred = fitted(ptd.MeanShift, simulated_cells).predict(simulated_cells, **asked)
    assert pred.obs["library_size"].equals(whole.obs["library_size"])
    _, _, depth = control_of(simulated_cells, pred.var_names)
    rows = partner_rows(40, 70, seed=4, condition=Condition(("P1",), ("T1",)).name).numpy()
    assert np.array_equal(pred.obs["library_size"], depth[rows])
    assert sorted(rows[:40]) == list(range(40))


def test_copying_control_changes_no_count(simulated_cells):
    pred = fitted(ptd.CopyControl, simulated_cells).predict(
        simulated_cells, perturbations=["P1"], contexts=T1, n_cells=40
    )
    counts, _, _ = control_of(simulated_cells, pred.var_names)
    found = pred.layers["counts"].toarray()
    assert sorted(map(tuple, found)) == sorted(map(tuple, counts.astype(int)))


def test_the_first_cells_and_other_conditions_are_invisible(simulated_cells):
    model = fitted(ptd.MeanShift, simulated_cells)
    many = model.predict(simulated_cells, perturbations=["P2", "P1"], n_cells=1100, seed=2)
    few = model.predict(
        simulated_cells, perturbations=["P1"], contexts=T1, n_cells=45, seed=2
    ).layers["counts"]
    rows = (many.obs["perturbation"] == "P1") & (many.obs["cell_type"] == "T1")
    assert np.array_equal(few.toarray(), many[rows.to_numpy()].layers["counts"].toarray()[:45])


def test_held_out_cells_leave_no_trace(simulated_cells):
    changed = simulated_cells.copy()
    held = (changed.obs["cell_type"] == "T1") & (changed.obs["perturbation"] != "control")
    values = changed.X.toarray()
    values[held.to_numpy()] = values[held.to_numpy()][:, ::-1]
    changed.X = sp.csr_matrix(values)
    checksums = {fitted(ptd.EffectPrior, cells).checksum for cells in (simulated_cells, changed)}
    assert len(checksums) == 1
    assert fitted(ptd.EffectPrior, changed, holdout=None).checksum not in checksums


def test_shifted_cells_need_no_counts_and_transported_ones_say_that_they_do(simulated_cells):
    logged = simulated_cells.copy()
    depth = logged.obs["library_size"].to_numpy()[:, None]
    logged.X = sp.csr_matrix(np.log1p(logged.X.toarray() / depth * 1e4).astype(np.float32))
    del logged.obs["library_size"]
    logged.uns["perturbdiff"] = {"scale": "log1p_cp10k"}
    model = fitted(ptd.MeanShift, logged)
    pred = model.predict(logged, perturbations=["P1"], contexts=T1, n_cells=5, cells="shift")
    assert "counts" not in pred.layers
    with pytest.raises(ScaleError, match="Counts are needed"):
        model.predict(logged, perturbations=["P1"], contexts=T1, n_cells=5)


def test_questions_without_an_answer_say_why(simulated_cells):
    with pytest.raises(UndefinedBaselineError, match="P3"):
        fitted(ptd.SimilarityShift, simulated_cells).predict(simulated_cells, perturbations=["P3"])
    with pytest.raises(UndefinedBaselineError, match="single perturbation"):
        fitted(ptd.Additive, simulated_cells).predict(simulated_cells, perturbations=["P1"])
    with pytest.raises(UnknownLevelError, match="Did you mean"):
        fitted(ptd.MeanShift, simulated_cells).predict(simulated_cells, perturbations=["P11"])
    with pytest.raises(ConfigError, match="'transport' or 'shift'"):
        fitted(ptd.MeanShift, simulated_cells).predict(
            simulated_cells, perturbations=["P1"], cells="thin"
        )
    with pytest.raises(SplitError, match="held out"):
        fitted(ptd.MeanShift, simulated_cells, holdout={"cell_type": ["T1", "T2", "T3"]})


def test_pairs_are_the_sum_of_their_parts(simulated_cells):
    """In log1p means, clipped at zero; worked out here from the cells of T2."""
    model = fitted(ptd.Additive, simulated_cells, holdout=None)
    pred = model.predict(
        simulated_cells, perturbations=["P2+P1"], contexts=[{"cell_type": "T2"}], n_cells=5
    )
    obs = simulated_cells.obs
    depth = obs["library_size"].to_numpy()[:, None]
    log1p = np.log1p(simulated_cells[:, pred.var_names].X.toarray() / depth * 1e4)

    def mean(label):
        return log1p[((obs["perturbation"] == label) & (obs["cell_type"] == "T2")).to_numpy()].mean(
            0
        )

    expected = mean("P1") + mean("P2") - mean("control")
    np.testing.assert_allclose(stated(pred, "additive"), np.maximum(expected, 0), atol=1e-5)


def test_before_fit_there_is_no_answer(simulated_cells):
    model = ptd.MeanShift.from_anndata(simulated_cells, **COLUMNS)
    with pytest.raises(NotFittedError, match="not fitted"):
        model.predict(simulated_cells, perturbations=["P1"])
    with pytest.raises(NotFittedError, match="not fitted"):
        _ = model.fitted


def test_tools_take_baselines_for_models(simulated_cells):
    pred = ptd.tl.predict(
        simulated_cells, fitted(ptd.MeanShift, simulated_cells), perturbations=["P1"], contexts=T1,
        n_cells=40,
    )  # fmt: skip
    ptd.tl.score(pred, reference=simulated_cells)
    assert "mean_shift" in set(pred.uns["score"]["method"])


def test_a_baseline_has_no_network_in_another_precision(simulated_cells):
    with pytest.raises(ConfigError, match="a MeanShift has no such network"):
        fitted(ptd.MeanShift, simulated_cells).in_precision("bfloat16")


# Cells from a mean


def test_transported_cells_meet_the_mean_over_the_pilot():
    rng = np.random.default_rng(0)
    counts = sp.csr_array(rng.poisson(1.0, (30, 4)).astype(np.int32))
    depth = np.full(30, 10_000.0)
    mean = np.array([0.2, 0.7, 1.0, 2.0])
    found, size = transported_cells(
        counts, depth, mean, genes=list("abcd"), condition="c", n_cells=512, seed=0
    )
    assert found.shape == (512, 4)
    assert np.array_equal(size, np.full(512, 10_000.0))
    values = np.log1p(found.toarray())
    assert (np.abs(values.mean(0) - mean) < 4 * values.std(0) / 512**0.5).all()


def test_transported_cells_follow_genes_by_name():
    rng = np.random.default_rng(0)
    counts = sp.csr_array(rng.poisson(1.0, (30, 4)).astype(np.int32))
    depth, mean = np.full(30, 10_000.0), np.array([0.2, 0.7, 1.0, 2.0])
    order = [2, 0, 3, 1]
    direct, _ = transported_cells(
        counts, depth, mean, genes=list("abcd"), condition="c", n_cells=40, seed=0
    )
    moved, _ = transported_cells(
        sp.csr_array(counts[:, order]), depth, mean[order], genes=list("cadb"), condition="c",
        n_cells=40, seed=0,
    )  # fmt: skip
    assert np.array_equal(moved.toarray(), direct.toarray()[:, order])


def test_moved_cells_are_clipped_at_zero():
    log1p = sp.csr_array(np.array([[1.0, 0.0, 0.5]], dtype=np.float32))
    moved = moved_cells(log1p, np.array([-2.0, 0.3, 0.1]), condition="c", n_cells=3, seed=0)
    np.testing.assert_allclose(moved.toarray(), [[0.0, 0.3, 0.6]] * 3, atol=1e-6)


def test_faces_and_arrays_share_their_names():
    for face in [*FACES, ptd.Additive]:
        assert face.baseline is getattr(prior, face.__name__)


# Kept and asked like any other model


@pytest.mark.parametrize("face", FACES)
def test_a_loaded_baseline_answers_to_the_bit(face, simulated_cells, tmp_path):
    model = fitted(face, simulated_cells, seed=3)
    model.save(tmp_path / "bundle")
    loaded = ptd.load(tmp_path / "bundle")
    assert type(loaded) is face
    assert (loaded.checksum, loaded.seed, loaded.split_hash) == (
        model.checksum, 3, model.split_hash,
    )  # fmt: skip
    ask = {"perturbations": ["P1", "P2"], "contexts": T1, "n_cells": 20, "seed": 1}
    ours, theirs = (each.predict(simulated_cells, **ask) for each in (model, loaded))
    assert (ours.layers["counts"] != theirs.layers["counts"]).nnz == 0
    assert np.array_equal(stated(ours, face.kind), stated(theirs, face.kind))
    loaded.save(tmp_path / "again")
    for file in (tmp_path / "bundle").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_an_unfitted_baseline_has_nothing_to_save(simulated_cells, tmp_path):
    with pytest.raises(NotFittedError, match="not fitted"):
        ptd.MeanShift.from_anndata(simulated_cells, **COLUMNS).save(tmp_path / "bundle")


@pytest.mark.parametrize("cells", ["transport", "shift"])
@pytest.mark.parametrize("face", [ptd.CopyControl, ptd.MeanShift, ptd.EffectPrior])
def test_absent_genes_are_refused_or_inferred(face, cells, simulated_cells):
    """At the level of known contexts; here they have the mean that is stated."""
    model = fitted(face, simulated_cells)
    genes = list(model.registry.genes)
    part = simulated_cells[:, genes[:20]]
    ask = {"perturbations": ["P1"], "contexts": T1, "n_cells": 200, "cells": cells}
    with pytest.raises(GeneError, match="missing_genes='infer'"):
        model.predict(part, **ask)
    pred = model.predict(part, **ask, missing_genes="infer")
    assert list(pred.var_names) == genes
    moved, wanted = pred.X.toarray()[:, 20:], stated(pred, face.kind)[20:]
    assert wanted.max() > 0.3
    error = 4 * moved.std(0) / 200**0.5 + 0.1
    assert (np.abs(moved.mean(0) - wanted) < error).all()


@pytest.mark.parametrize("face", [ptd.EffectPrior, ptd.MeanShift])
def test_a_prediction_of_all_genes_is_read_again_by_the_door(face):
    """Counts are added, and no cell has more of them than its library; also without provenance."""
    config = SimulationConfig(
        n_genes=150, n_contexts=3, n_perturbations=2, n_unseen=0, n_pairs=0, n_cells=30,
        n_controls=40, doses=(), hours=(),
    )  # fmt: skip
    adata = simulated(config, seed=3).adata
    adata.uns["perturbation_features"] = {"P1": [0.0], "P2": [1.0]}
    adata.obs["library_size"] = np.asarray(adata.X.sum(1)).ravel()
    model = fitted(face, adata, n_top_genes=None)
    pred = model.predict(adata, perturbations=["P1", "P2"], contexts=T1, n_cells=64)
    total = np.asarray(pred.layers["counts"].sum(1)).ravel()
    size = pred.obs["library_size"].to_numpy()
    _, _, depth = control_of(adata, pred.var_names)
    kept = total < size
    assert 0 < kept.sum() < len(kept)
    assert np.isin(size[kept], depth).all()
    assert np.array_equal(size[~kept], total[~kept])
    exact = np.log1p(pred.layers["counts"].toarray() / size[:, None] * 1e4).astype(np.float32)
    assert np.array_equal(pred.X.toarray(), exact)
    again = encode(pred, model.registry)
    assert (again.counts != pred.layers["counts"][again.rows]).nnz == 0
    assert np.array_equal(again.log1p.toarray(), pred.X.toarray()[again.rows])
    columns = {name: key for name, key in COLUMNS.items() if name != "embedding_key"}
    plain = anndata.AnnData(X=pred.layers["counts"].astype(float), obs=pred.obs, var=pred.var)
    plain.obs["perturbation"] = plain.obs["perturbation"].cat.rename_categories({"P2": "control"})
    registry = Registry.from_anndata(plain, **columns, scale="counts")
    assert np.array_equal(encode(plain, registry).library_size, size[again.rows])


def test_promised_values_keep_their_library_sizes_and_are_read_again(simulated_cells):
    """As after constraints; a measured file with such sizes is still refused."""
    model = fitted(ptd.MeanShift, simulated_cells)
    pred = model.predict(simulated_cells, perturbations=["P1"], contexts=T1, n_cells=8)
    pred.obs["library_size"] = np.asarray(pred.layers["counts"].sum(1)).ravel() / 2
    pred.X = sp.csr_matrix(
        np.log1p(
            pred.layers["counts"].toarray() / pred.obs["library_size"].to_numpy()[:, None] * 1e4
        )
    )
    again = encode(pred, model.registry)
    assert np.array_equal(again.log1p.toarray(), pred.X.toarray()[again.rows].astype(np.float32))
    del pred.uns["perturbdiff"]["reading"]
    with pytest.raises((ExpressionError, ScaleError)):
        encode(pred, model.registry)


def test_a_second_fit_remembers_nothing_of_the_first(simulated_cells):
    once = fitted(ptd.MeanShift, simulated_cells, holdout={"cell_type": ["T2"]}, n_top_genes=12)
    twice = fitted(ptd.MeanShift, simulated_cells)
    assert twice.registry.genes != once.registry.genes
    twice.fit(simulated_cells, holdout={"cell_type": ["T2"]}, n_top_genes=12)
    assert twice.registry == once.registry


@pytest.mark.parametrize("empty", [{}, [], ()])
def test_an_empty_holdout_holds_nothing_out(simulated_cells, empty):
    """As ``data.holdout={}`` does on the command line."""
    all_cells = fitted(ptd.MeanShift, simulated_cells, holdout=None)
    assert fitted(ptd.MeanShift, simulated_cells, holdout=empty).checksum == all_cells.checksum
