"""Faults that users of neighbouring tools met at intake and with labels, none of them here."""

import logging

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from perturbdiff._errors import (
    ConfigError,
    ExpressionError,
    GeneError,
    LabelError,
    ScaleError,
    UnknownKeyError,
)
from perturbdiff.data import Condition, Registry, ask, canonical, decode, encode

OLD_FILES = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::anndata.OldFormatWarning")


def register(adata, **changes):
    names = {
        "perturbation_key": "condition",
        "control": "ctrl",
        "covariate_keys": ["cell_type"],
        "scale": "counts",
    }
    return Registry.from_anndata(adata, **(names | changes))


def read_back(adata, tmp_path):
    adata.write_h5ad(tmp_path / "cells.h5ad")
    return ad.read_h5ad(tmp_path / "cells.h5ad")


# A02: labels used as storage keys


@pytest.mark.parametrize("label", ["(+/-)-ibuprofen", "CTLA4/PD1", "..", "a" * 300, "β-œstradiol"])
def test_a_label_is_a_value_and_survives_a_file_unchanged(toy, tmp_path, label):
    adata = toy(["ctrl", label], cell_types=["HepG2/C3A", "HepG2-C3A"])
    adata.uns["features"] = pd.DataFrame({"f": [0.5]}, index=[label])
    registry = register(adata, embedding_key="features")
    cells = encode(adata, registry)
    pred = decode(
        cells.counts,
        cells.library_size,
        registry,
        conditions=cells.distinct,
        condition=cells.condition,
        provenance={"conditions": [c.name for c in cells.distinct], "nothing": [], "seed": 3},
    )
    back = read_back(pred, tmp_path)
    assert set(back.obs["condition"]) == {"ctrl", label}
    assert set(back.obs["cell_type"]) == {"HepG2/C3A", "HepG2-C3A"}
    assert sorted(back.uns["perturbdiff"]) == ["conditions", "nothing", "scale", "seed"]
    assert registry.features == {label: (0.5,)}
    assert Registry.from_json(registry.to_json()) == registry
    assert encode(back, registry).distinct == cells.distinct


def test_a_label_as_a_key_of_provenance_is_refused(toy):
    adata = toy()
    registry, cells = register(adata), encode(adata, register(adata))
    with pytest.raises(ConfigError, match="keep labels as values"):
        decode(
            cells.counts,
            cells.library_size,
            registry,
            conditions=cells.distinct,
            condition=cells.condition,
            provenance={"scores": {"CTLA4/PD1": 1.0}},
        )


# A03: uniqueness assumed, not checked


def doubled():
    obs = pd.DataFrame({"condition": ["ctrl", "A"] * 6}, index=[f"c{n}" for n in range(12)])
    var = pd.DataFrame(index=list("ABBCDE"))
    with pytest.warns(UserWarning, match="not unique"):
        return ad.AnnData(X=sp.csc_matrix(np.ones((12, 6), np.float32)), obs=obs, var=var)


def test_duplicated_genes_are_refused_in_training_and_in_a_query():
    bad = doubled()
    good = bad[:, [0, 1, 3, 4, 5]].copy()
    expected = r"1 name more than once: 'B'\. Call adata\.var_names_make_unique\(\)"
    with pytest.raises(GeneError, match=expected):
        register(bad, covariate_keys=[])
    with pytest.raises(GeneError, match=expected):
        encode(bad, register(good, covariate_keys=[]))
    with pytest.raises(GeneError, match=expected):
        ask(bad, register(good, covariate_keys=[]), perturbations=["A"], n_cells=1)


def test_duplicated_names_of_cells_are_refused(toy):
    adata = toy()
    registry = register(adata)
    adata.obs_names = ["same", "same", *adata.obs_names[2:]]
    with pytest.raises(LabelError, match=r"'same'. Call adata\.obs_names_make_unique"):
        encode(adata, registry)


# A05: unguarded division, unchecked range of values


def test_an_empty_control_cell_stays_finite_and_is_counted(toy, caplog):
    adata = toy(["ctrl", "A"], cell_types=["T"], n_each=20)
    adata.X = adata.X.toarray()
    adata.X[3] = 0
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        cells = encode(adata, register(adata))
    assert "1 of 40 cells have no counts at all" in caplog.text
    assert cells.n_empty == 1
    assert np.isfinite(cells.log1p.toarray()).all()
    assert cells.log1p.toarray()[3].sum() == 0
    assert cells.library_size[3] == 0


@OLD_FILES
@pytest.mark.parametrize("scale", ["counts", "log1p_cp10k"])
def test_scaled_values_are_refused_with_a_hint(case_files, scale):
    adata = ad.read_h5ad(case_files / "01_anndata_v0.5.0.h5ad")
    keys = {"perturbation_key": "phase", "control": "G1", "covariate_keys": ["bulk_labels"]}
    expected = r"negative values \(lowest -2\.032\).*adata\.raw holds non-negative fractions"
    with pytest.raises(ExpressionError, match=expected):
        register(adata, scale=scale, **keys)
    raw = adata.raw.to_adata()
    raw.obs = adata.obs
    cells = encode(raw, register(raw, scale="log1p_cp10k", **keys))
    assert cells.log1p.shape == (700, 765)
    assert cells.counts is None


@OLD_FILES
def test_nan_in_expression_is_refused(case_files):
    adata = ad.read_h5ad(case_files / "03_cellxgene_nan.h5ad")
    with pytest.raises(ExpressionError, match="2556 NaN or infinite values"):
        register(adata, perturbation_key="louvain", control="B cells", covariate_keys=[])


@OLD_FILES
def test_a_one_cell_label_is_warned_about_and_an_unused_category_ignored(case_files, caplog):
    adata = ad.read_h5ad(case_files / "03_cellxgene_nan.h5ad")
    adata.X = np.ones(adata.shape, np.float32)
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        registry = register(adata, perturbation_key="louvain", control="B cells", covariate_keys=[])
    assert "1 condition(s) have a single cell: 'Dendritic cells" in caplog.text
    assert "Megakaryocytes" not in registry.perturbations.levels
    assert len(registry.perturbations) == 6


def test_layers_of_another_tool_give_one_answer(case_files):
    adata = ad.read_h5ad(case_files / "06_anndataR_example.h5ad")
    keys = {"perturbation_key": "leiden", "control": "0", "covariate_keys": []}
    read = [
        encode(adata, register(adata, layer=layer, **keys))
        for layer in ("counts", "csc_counts", "dense_counts")
    ]
    assert read[0].log1p.shape == (50, 100)
    assert [cells.counts.sum() for cells in read] == [adata.obs["total_counts"].sum()] * 3
    for cells in read[1:]:
        assert (cells.counts != read[0].counts).nnz == 0
        assert (cells.log1p != read[0].log1p).nnz == 0


def test_another_depth_than_declared_is_refused_with_the_layer_that_helps(case_files):
    adata = ad.read_h5ad(case_files / "06_anndataR_example.h5ad")
    expected = r"gives 19[34] per cell \(median\)\. Usable here: layer='counts' holds whole numbers"
    with pytest.raises(ScaleError, match=expected):
        register(
            adata, perturbation_key="leiden", control="0", covariate_keys=[], scale="log1p_cp10k"
        )


def test_nullable_columns_with_a_missing_value_leave_one_cell_out(case_files, caplog):
    adata = ad.read_h5ad(case_files / "06_anndataR_example.h5ad")
    keys = {"perturbation_key": "leiden", "control": "0", "layer": "counts"}
    registry = register(adata, covariate_keys=["BoolNA"], **keys)
    assert registry.covariates[0].levels == ("False", "True")
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        cells = encode(adata, registry)
    assert len(cells) == 49
    assert "left out 1 of 50 cells" in caplog.text
    dosed = encode(adata, register(adata, covariate_keys=[], dose_key="IntNA", **keys))
    missing_and_treated = adata.obs["IntNA"].isna() & (adata.obs["leiden"] != "0")
    assert dosed.n_missing_labels == missing_and_treated.sum()
    assert {c.doses for c in dosed.conditions()} == {(42.0,)}


# A07: hard-wired keys


def test_only_named_keys_are_read_and_a_missing_one_lists_what_is_there(toy):
    adata = toy()
    adata.obsm["X_pca"] = np.zeros((adata.n_obs, 2))
    adata.layers["umi"] = adata.X.copy()
    with pytest.raises(UnknownKeyError, match=r"has no 'X_hvg'.*'obsm: X_pca'"):
        register(adata, embedding_key="X_hvg")
    with pytest.raises(UnknownKeyError, match=r"adata\.layers has no 'X_hvg'.*'umi'"):
        register(adata, layer="X_hvg")
    del adata.X
    with pytest.raises(ExpressionError, match=r"adata\.X is empty. Name a layer; there are: 'umi'"):
        register(adata)
    assert len(encode(adata, register(adata, layer="umi"))) == adata.n_obs


# B01: the perturbed gene is not among the measured ones


def test_a_perturbed_gene_need_not_be_measured(shared):
    adata = ad.read_h5ad(shared / "data" / "norman2019_k562.h5ad")
    registry = register(
        adata,
        perturbation_key="perturbation",
        control="control",
        layer="counts",
        library_size_key="ncounts",
        dose_key="dose",
    )
    members = registry.perturbations.levels
    assert len(members) == 28
    assert not set(members) & set(adata.var_names)
    cells = encode(adata, registry)
    assert len(cells.conditions()) == 27
    pair = Condition(("KLF1", "MAP2K6"), ("k562",), (1.0, 1.0))
    assert len(cells.conditions()[pair]) == 100
    with pytest.raises(ScaleError, match="highly_variable"):
        encode(
            adata,
            register(adata, perturbation_key="perturbation", control="control", layer="counts"),
        )


# B03: no canonical form


def test_the_order_of_members_and_control_as_a_member_do_not_matter(toy):
    adata = toy(["ctrl", "KLF1+MAP2K6", "KLF1+ctrl", "ctrl+MAP2K6", "KLF1", "MAP2K6 + KLF1"])
    cells = encode(adata, register(adata))
    assert {c.members for c in cells.distinct} == {(), ("KLF1",), ("MAP2K6",), ("KLF1", "MAP2K6")}
    asked = [
        ask(adata, register(adata), perturbations=[label], n_cells=8).conditions
        for label in ("KLF1+MAP2K6", "MAP2K6+KLF1", "MAP2K6+ctrl+KLF1")
    ]
    assert asked[0] == asked[1] == asked[2]
    assert [c.name for c in asked[0]] == [c.name for c in asked[1]]


def test_the_separator_is_settable():
    assert canonical("B&A", separator="&") == ("A", "B")
    assert canonical("B+A", separator="&") == ("B+A",)
    assert canonical("B+A", separator=None) == ("B+A",)


# B06: a missing value taken as a class


def test_missing_labels_are_left_out_and_never_control(toy, caplog):
    adata = toy(["ctrl", "A"], cell_types=["T"], n_each=10)
    labels = adata.obs["condition"].to_numpy().copy()
    labels[[0, 1, 12]], labels[13] = [np.nan, None, " "], pd.NA
    labels[[14, 15, 16]] = ["nan", "None", "unassigned"]
    adata.obs["condition"] = pd.Series(labels, index=adata.obs_names, dtype=object)
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        cells = encode(adata, register(adata))
    assert cells.n_missing_labels == 4
    assert "left out 4 of 20 cells without a label" in caplog.text
    assert (
        "look like missing values and are taken as they stand: 'None', 'nan', 'unass" in caplog.text
    )
    assert cells.is_control.sum() == 8
    assert {c.members for c in cells.conditions()} == {("A",), ("None",), ("nan",), ("unassigned",)}


def test_a_file_without_any_label_is_refused(toy):
    adata = toy()
    registry = register(adata)
    adata.obs["condition"] = pd.Series(np.nan, index=adata.obs_names, dtype=object)
    with pytest.raises(
        LabelError, match=r"No cell of the file has all its labels \(condition, cell"
    ):
        encode(adata, registry)


# B07: one column in two roles


@pytest.mark.parametrize("role", ["covariate_keys", "dose_key", "time_key", "library_size_key"])
def test_a_column_has_one_role(toy, role):
    key = ["condition"] if role == "covariate_keys" else "condition"
    with pytest.raises(ConfigError, match="already the perturbation_key"):
        register(toy(), **{role: key})


def test_a_covariate_named_twice_or_as_bare_text_is_refused(toy):
    with pytest.raises(ConfigError, match=r"obs\['cell_type'\] is named twice"):
        register(toy(), covariate_keys=["cell_type", "cell_type"])
    with pytest.raises(ConfigError, match="list of columns"):
        register(toy(), covariate_keys="cell_type")


@pytest.mark.parametrize("covariates", [[], ["cell_type"]])
def test_one_key_or_none_is_enough(toy, covariates):
    cells = encode(toy(), register(toy(), covariate_keys=covariates))
    assert {len(c.context) for c in cells.distinct} == {len(covariates)}


# B09: types decided at write time; a required key that nobody documented


def test_doses_of_mixed_types_are_one_number_each_and_can_be_written(toy, tmp_path):
    adata = toy(["ctrl", "A"], cell_types=["T"], n_each=5)
    adata.obs["dose"] = pd.Series(
        [None] * 5 + ["10", 1, 0.1, None, "1e-1"], index=adata.obs_names, dtype=object
    )
    registry = register(adata, dose_key="dose")
    cells = encode(adata, registry)
    sizes = {c.doses: len(rows) for c, rows in cells.conditions().items()}
    assert sizes == {(0.1,): 2, (1.0,): 1, (10.0,): 1}
    assert cells.is_control.sum() == 5
    pred = decode(
        cells.counts,
        cells.library_size,
        registry,
        conditions=cells.distinct,
        condition=cells.condition,
    )
    assert encode(read_back(pred, tmp_path), registry).distinct == cells.distinct


def test_a_dose_that_is_no_number_is_refused_with_rows(toy):
    adata = toy(["ctrl", "A"], cell_types=["T"], n_each=2)
    adata.obs["dose"] = pd.Series([0, 0, "low", "1"], index=adata.obs_names, dtype=object)
    with pytest.raises(
        LabelError, match=r"obs\['dose'\] is not a number.*'low' \(cell 'cell002'\)"
    ):
        register(adata, dose_key="dose")


def test_a_dose_is_optional_and_one_named_but_absent_is_reported(toy):
    assert register(toy()).dose_key is None
    with pytest.raises(UnknownKeyError, match=r"adata\.obs has no 'dosage'.*'condition'"):
        register(toy(), dose_key="dosage")
