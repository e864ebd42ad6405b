"""pp.check: every fault of a file is listed with what to do, none raises, nothing is changed."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from perturbdiff import pp
from perturbdiff._errors import ConfigError, PerturbDiffError
from perturbdiff.data import Registry, encode

KEYS = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}


def check(adata, **changes):
    return pp.check(adata, **{**KEYS, "scale": "counts", "min_cells": 2, **changes})


def test_a_sound_file_has_facts_only_and_they_add_up(toy, caplog):
    adata = toy()
    table = check(adata)
    assert set(table["level"]) == {"fact"}
    cells = table[table["about"] == "conditions"]
    sizes = dict(zip(cells["found"], cells["n"], strict=True))
    assert sizes == {
        f"cells of {name} in {kind}": 4 for name in ("control", "A", "B") for kind in ("NK", "T")
    }
    held = table[table["about"] == "holdout"]
    assert held["what_to_do"].tolist()[0] == "holdout={'cell_type': ['NK']}"
    (depth,) = table.loc[table["about"] == "library size", "found"]
    totals = adata.X.sum(1)
    assert f"({int(np.median(np.asarray(totals))):,}" not in depth
    assert f"median; {int(totals.min())} to {int(totals.max())}" in depth
    assert not caplog.records


def duplicate_genes(adata):
    adata.var_names = ["G0", *adata.var_names[:-1]]


def fractions(adata):
    adata.X = adata.X * np.float32(0.5)


def negative(adata):
    adata.X = adata.X.toarray() - np.float32(1)


def nan(adata):
    adata.X = adata.X.toarray()
    adata.X[0, 0] = np.nan


def nothing(adata):
    adata.X = adata.X * np.float32(0)


def no_expression(adata):
    adata.X = None


def no_control(adata):
    adata.obs["condition"] = adata.obs["condition"].replace("ctrl", "A")


def near_control(adata):
    adata.obs.iloc[0, 0] = "Ctrl"


def no_column(adata):
    del adata.obs["cell_type"]


def no_perturbation(adata):
    del adata.obs["condition"]


def same_names(adata):
    adata.obs_names = ["cell"] * adata.n_obs


def a_selection(adata):
    adata.raw = adata.copy()
    adata._inplace_subset_var(adata.var_names[:5])


def only_control(adata):
    adata.obs["condition"] = "ctrl"


def no_label(adata):
    adata.obs["condition"] = None


FAULTS = {
    duplicate_genes: ("genes", "more than once", "var_names_make_unique"),
    fractions: ("expression", "fractions", ""),
    negative: ("expression", "negative", ""),
    nan: ("expression", "NaN", ""),
    nothing: ("expression", "zero everywhere", "layer"),
    no_expression: ("expression", "is empty", "layer"),
    no_control: ("controls", "no cell is labelled 'ctrl'", "Known"),
    near_control: ("controls", "'Ctrl' beside", "control=['ctrl', 'Ctrl']"),
    no_column: ("labels", "has no 'cell_type'", "Nearest|Known"),
    no_perturbation: ("labels", "has no 'condition'", "Nearest|Known"),
    same_names: ("labels", "unique names", "obs_names_make_unique"),
    a_selection: ("library size", "subset of the measured genes", "library_size_key"),
    only_control: ("conditions", "0 conditions to learn from", "Add treated cells"),
    no_label: ("controls", "no cell is labelled 'ctrl'", ""),
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_what_a_model_would_refuse_is_a_fault_of_the_table(toy, spoil):
    adata = toy()
    spoil(adata)
    table = check(adata)
    about, found, what_to_do = FAULTS[spoil]
    faults = table[table["level"] == "fault"]
    row = faults[faults["found"].str.contains(found)]
    assert row["about"].tolist() == [about]
    assert row["what_to_do"].str.contains(what_to_do, regex="|" in what_to_do).all()
    assert table["level"].tolist()[0] == "fault"
    if spoil not in (nothing, only_control):  # which only fit refuses
        with pytest.raises(PerturbDiffError):
            encode(adata, Registry.from_anndata(adata, scale="counts", **KEYS))


def test_all_faults_are_listed_at_once(toy):
    adata = toy()
    for spoil in (duplicate_genes, fractions, no_column, same_names):
        spoil(adata)
    faults = check(adata, dose_key="dose").query("level == 'fault'")
    assert len(faults) == 5
    assert {"genes", "expression", "labels"} == set(faults["about"])


def test_the_scale_must_be_declared_and_agree(toy):
    table = check(toy(), scale=None)
    (row,) = table[table["level"] == "fault"].to_dict("records")
    assert "not declared" in row["found"]
    assert "scale='counts'" in row["what_to_do"]
    assert table["found"].str.contains("whole numbers, as counts are").any()
    logs = pp.normalize(toy(), copy=True)
    wrong = check(logs, scale="counts")
    assert wrong.loc[0, "found"].startswith("scale='counts' was asked for")
    del logs.obs["library_size"]
    unsized = check(logs, scale=None)
    assert "no model can make cells" in unsized.loc[0, "found"]


def test_what_may_be_meant_is_a_warning(toy):
    adata = toy(n_each=3)
    adata.obs["condition"] = adata.obs["condition"].astype(object)
    kind, label = adata.obs["cell_type"], adata.obs["condition"]
    lost = adata.obs_names[(kind == "NK") & (label == "ctrl")]
    adata.obs.loc[lost, "condition"] = [None, "nan", "dmso"]
    adata.obs.loc[adata.obs_names[(kind == "T") & (label == "B")], "condition"] = ["b", "B", "C"]
    adata.X = adata.X.toarray()
    adata.X[-1] = 0
    adata.var_names = ["G1-1", *adata.var_names[1:]]
    table = check(adata)
    assert set(table["level"]) == {"warning", "fact"}
    said = " | ".join(table.loc[table["level"] == "warning", "found"])
    for words in (
        "1 of 18 cells without a label",
        "look like missing values, taken as they stand: 'nan'",
        "nearly the same: 'B', 'b'",
        "'dmso' beside the control label 'ctrl'",
        "no control cells in NK",
        "only 1 cell of C in T, which is left out",
        "1 cell without any count",
        "1 cell with a library size of zero",
        "names that look like copies made unique: 'G1-1'",
    ):
        assert words in said, words
    assert (table.loc[table["level"] == "warning", "what_to_do"] != "").all()


def test_what_can_be_held_out_leaves_every_perturbation_to_learn_from(toy):
    adata = toy(("ctrl", "A", "B", "A+B"))
    kind = adata.obs["cell_type"]
    adata = adata[~((kind == "T") & adata.obs["condition"].isin(["A", "A+B"]))].copy()
    held = check(adata).query("about == 'holdout'")
    assert held["found"].tolist() == [
        "contexts that can be held out: 'T'",  # only NK has cells with A
        "combinations of what is measured alone that can be held out: 'A+B'",
        "perturbations with features that can be held out: none",
    ]
    assert "embedding_key" in held["what_to_do"].tolist()[2]
    adata.uns["features"] = pd.DataFrame({"x": [0.0, 1.0]}, index=["A", "B"])
    held = check(adata, embedding_key="features").query("about == 'holdout'")
    assert held["found"].tolist()[2].endswith("'A', 'B'")
    wrong = check(adata, embedding_key="feature").query("level == 'fault'")
    assert wrong["what_to_do"].tolist() == ["Did you mean 'uns: features'?"]


def test_nothing_is_changed_and_storage_does_not_matter(toy, tmp_path):
    adata = toy()
    values, names = adata.X.toarray(), list(adata.obs)
    table = check(adata)
    assert (adata.X.toarray() == values).all()
    assert (list(adata.obs), dict(adata.uns)) == (names, {})
    adata.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    pd.testing.assert_frame_equal(check(backed), table)
    backed.file.close()


def test_a_call_that_makes_no_sense_is_refused(toy):
    with pytest.raises(ConfigError, match="a column has one role"):
        check(toy(), dose_key="cell_type")
    with pytest.raises(ConfigError, match="min_cells"):
        check(toy(), min_cells=0)
    with pytest.raises(ConfigError, match="as text"):
        check(toy(), control=())
