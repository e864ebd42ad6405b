"""pp.select_genes: the genes of a fitted model, whatever the held-out cells are."""

import anndata as ad
import numpy as np
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, SplitError, UnknownLevelError

KEYS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
    "scale": None,
}
HELD = {"cell_type": ["T1"]}


@pytest.fixture
def cells(simulated_cells):
    return simulated_cells.copy()


def chosen(adata, **changes):
    asked = {**KEYS, "holdout": HELD, "n_top_genes": 12, **changes}
    new = ptd.pp.select_genes(adata, copy=True, **asked)
    return new.var_names[new.var["highly_variable"]].tolist()


def test_they_are_the_genes_of_a_model_fitted_with_the_same_words(cells):
    found = chosen(cells)
    assert 12 <= len(found) < cells.n_vars  # genes of equal dispersion come together
    for kind in (ptd.MeanShift, ptd.EffectPrior):
        model = kind.from_anndata(cells, **KEYS).fit(cells, holdout=HELD, n_top_genes=12)
        assert found == list(model.registry.genes)


def test_held_out_cells_leave_no_trace_and_others_do(cells):
    before = chosen(cells)
    held = (cells.obs["cell_type"] == "T1") & (cells.obs["perturbation"] != "control")
    values = cells.X.toarray()
    rng = np.random.default_rng(0)
    scrambled = cells.copy()
    # Few counts, so that library sizes in obs stay true; in other genes than they were in.
    noise = rng.permutation(values[held].ravel()).reshape(-1, values.shape[1])
    scrambled.X = values.copy()
    scrambled.X[np.flatnonzero(held)] = np.minimum(noise, values[held].max(1, keepdims=True))
    scrambled.obs["library_size"] = np.maximum(scrambled.X.sum(1), values.sum(1)) + 1e4
    sized = cells.copy()
    sized.obs["library_size"] = scrambled.obs["library_size"].to_numpy()
    assert (values != scrambled.X).any()
    assert chosen(scrambled) == chosen(sized)
    assert chosen(scrambled, holdout=None) != chosen(sized, holdout=None)
    assert chosen(cells, holdout={"cell_type": ["T2"]}) != before


def test_what_is_written_and_what_is_not(cells):
    del cells.obs["library_size"]
    totals = np.asarray(cells.X.sum(1)).ravel()
    names = list(cells.var)
    new = ptd.pp.select_genes(cells, **KEYS, n_top_genes=5, key_added="ours", copy=True)
    assert list(cells.var) == names
    assert "library_size" not in cells.obs
    assert ptd.pp.select_genes(cells, **KEYS, n_top_genes=5, key_added="ours") is None
    assert cells.var["ours"].tolist() == new.var["ours"].tolist()
    assert (cells.var["ours"].dtype, cells.var["ours"].sum()) == (bool, 5)
    np.testing.assert_array_equal(cells.obs["library_size"], totals)


def test_a_file_cut_to_the_chosen_genes_gives_the_same_answer(cells):
    del cells.obs["library_size"]
    ask = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 8}
    whole = ptd.EffectPrior.from_anndata(cells, **KEYS).fit(cells, holdout=HELD, n_top_genes=12)
    expected = whole.predict(cells, **ask)
    ptd.pp.select_genes(cells, **KEYS, holdout=HELD, n_top_genes=12)
    cut = cells[:, cells.var["highly_variable"]].copy()
    model = ptd.EffectPrior.from_anndata(cut, **KEYS).fit(cut, holdout=HELD, n_top_genes=None)
    assert (model.predict(cut, **ask).X != expected.X).nnz == 0


def test_all_genes_may_be_chosen_and_the_file_still_be_used(cells):
    del cells.obs["library_size"]
    ptd.pp.select_genes(cells, **KEYS)
    assert cells.var["highly_variable"].all()
    assert ptd.MeanShift.from_anndata(cells, **KEYS).fit(cells, n_top_genes=None)


def test_what_cannot_be_is_refused(cells, tmp_path):
    with pytest.raises(UnknownLevelError, match="T1"):
        chosen(cells, holdout={"cell_type": ["t1"]})
    with pytest.raises(SplitError, match="All 6 treated conditions"):
        chosen(cells, holdout={"cell_type": ["T1", "T2", "T3"]})
    with pytest.raises(ConfigError, match="n_top_genes"):
        chosen(cells, n_top_genes=1)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    with pytest.raises(ConfigError, match="backed"):
        ptd.pp.select_genes(backed, **KEYS)
    assert chosen(backed) == chosen(cells)
    backed.file.close()
