"""The registry as a value: vocabularies, JSON, features, and what it warns about."""

import json
import logging

import numpy as np
import pandas as pd
import pytest

from perturbdiff._errors import (
    ConfigError,
    LabelError,
    ScaleError,
    UnknownKeyError,
    UnknownLevelError,
)
from perturbdiff.data import Registry, Vocabulary


def register(adata, **changes):
    names = {
        "perturbation_key": "condition",
        "control": "ctrl",
        "covariate_keys": ["cell_type"],
        "scale": "counts",
    }
    return Registry.from_anndata(adata, **(names | changes))


def test_codes_start_at_one_and_unknown_labels_are_refused():
    vocabulary = Vocabulary(key="drug", levels=("a", "b"))
    assert vocabulary.encode(["b", "a", "b"]).tolist() == [2, 1, 2]
    assert len(vocabulary) == 2
    assert "c" not in vocabulary
    with pytest.raises(UnknownLevelError, match=r"obs\['drug'\] has 1 level unseen"):
        vocabulary.encode(["a", "c"])
    assert vocabulary.encode(["a", "c"], unknown="zero").tolist() == [1, 0]


def test_vocabularies_hold_members_sorted(toy):
    registry = register(toy(["ctrl", "C+A", "B", "ctrl+B"], cell_types=["T", "B", "NK"]))
    assert registry.perturbations.levels == ("A", "B", "C")
    assert registry.covariates == (Vocabulary(key="cell_type", levels=("B", "NK", "T")),)
    assert registry.measured_genes == tuple(f"G{n}" for n in range(12))
    assert registry.label_keys == ("condition", "cell_type")


def test_several_labels_may_mean_control(toy):
    adata = toy(["ctrl", "DMSO", "DMSO+A"])
    registry = register(adata, control=["DMSO", "ctrl"])
    assert registry.perturbations.levels == ("A",)
    assert registry.control == ("DMSO", "ctrl")


def test_a_control_that_is_not_there_is_refused_with_the_nearest(toy):
    with pytest.raises(LabelError, match=r"no cell labelled 'control'.*\. Did you mean 'ctrl'"):
        register(toy(), control="control")
    with pytest.raises(LabelError, match="'vehicle'"):
        register(toy(), control=["ctrl", "vehicle"])
    adata = toy()
    adata.obs["cell_type"] = adata.obs["cell_type"].where(adata.obs["condition"] != "ctrl")
    with pytest.raises(LabelError, match=r"No control cell \('ctrl'\) has all its labels"):
        register(adata)


def test_it_is_json_and_back(toy):
    adata = toy(["ctrl", "A", "A+B"])
    adata.uns["f"] = {"A": np.array([0.1, 1 / 3]), "Z": [1, 2]}
    adata.obs["dose"] = "1uM"
    registry = register(adata, embedding_key="f", dose_key="dose")
    registry = registry.with_genes(["G3", "G1"], mean=np.array([0.1, 2.0]), scale=[1.0, 1 / 3])
    text = json.dumps(registry.to_json())
    assert Registry.from_json(json.loads(text)) == registry
    plain = json.loads(text)
    with pytest.raises(UnknownKeyError, match="has no 'colour'"):
        Registry.from_json(plain | {"colour": 1})
    with pytest.raises(UnknownKeyError, match="has no 'separator'"):
        Registry.from_json({key: value for key, value in plain.items() if key != "separator"})
    with pytest.raises(ScaleError):
        Registry.from_json(plain | {"scale": "tpm"})


def test_selected_genes_are_checked(toy):
    registry = register(toy())
    with pytest.raises(UnknownKeyError, match="The list of measured genes has no 'G99'"):
        registry.with_genes(["G1", "G99"])
    with pytest.raises(ConfigError, match="distinct"):
        registry.with_genes(["G1", "G1"])
    with pytest.raises(ConfigError, match="one value for 2 genes"):
        registry.with_genes(["G1", "G2"], mean=[0.0])
    assert registry.with_genes(["G2"]).genes == ("G2",)
    assert registry.genes == ()


def test_a_context_names_every_covariate(toy):
    registry = register(toy())
    assert registry.context({"cell_type": "NK"}) == ("NK",)
    with pytest.raises(UnknownKeyError, match=r"has no 'celltype'\. Did you mean 'cell_type'"):
        registry.context({"celltype": "NK"})
    with pytest.raises(UnknownKeyError, match="has no 'cell_type'"):
        registry.context({})


# Features


FEATURES = {"A": [1.0, 2.0], "B": [3.0, 4.0], "unseen": [5.0, 6.0]}


def as_table(adata):
    adata.uns["f"] = pd.DataFrame.from_dict(FEATURES, orient="index")


def as_mapping(adata):
    adata.uns["f"] = {name: np.array(row) for name, row in FEATURES.items()}


def as_cells(adata):
    rows = [FEATURES.get(label, [0.0, 0.0]) for label in adata.obs["condition"]]
    adata.obsm["f"] = np.array(rows)


@pytest.mark.parametrize("store", [as_table, as_mapping, as_cells])
def test_features_are_read_from_the_place_named(toy, store):
    adata = toy()
    store(adata)
    features = register(adata, embedding_key="f").features
    assert {name: features[name] for name in "AB"} == {"A": (1.0, 2.0), "B": (3.0, 4.0)}
    assert ("unseen" in features) == (store is not as_cells)
    assert "ctrl" not in features


def test_a_perturbation_with_features_is_known_though_never_seen(toy):
    adata = toy()
    as_table(adata)
    registry = register(adata, embedding_key="f")
    assert registry.knows("unseen")
    assert registry.knows("A")
    assert not registry.knows("C")


@pytest.mark.parametrize(
    "bad",
    [
        {"A": [1.0, 2.0], "B": [3.0]},
        {"A": [1.0, np.nan]},
        {"A": {"nested": 1}},
        pd.DataFrame({"x": ["text"]}, index=["A"]),
        "text",
    ],
)
def test_features_of_another_form_are_refused(toy, bad):
    adata = toy()
    adata.uns["f"] = bad
    with pytest.raises(ConfigError, match="embedding_key = 'f'"):
        register(adata, embedding_key="f")


def test_features_that_contradict_each_other_are_refused(toy):
    adata = toy()
    adata.uns["f"] = pd.DataFrame({"x": [1.0, 2.0]}, index=["A", "A"])
    with pytest.raises(LabelError, match="more than one row for 'A'"):
        register(adata, embedding_key="f")
    adata.obsm["g"] = np.arange(adata.n_obs)[:, None]
    with pytest.raises(LabelError, match="differs between cells of 'A'"):
        register(adata, embedding_key="g")


# What may be meant


def test_labels_that_nearly_agree_are_warned_about(toy, caplog):
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        register(toy(["ctrl", "stim", "Stim "], cell_types=["B cell", "B cells"]))
    assert "obs['condition'] has labels that are nearly the same: 'Stim ', 'stim'" in caplog.text
    assert (
        "obs['cell_type'] has labels that are nearly the same: 'B cell', 'B cells'" in caplog.text
    )


def test_contexts_without_control_are_warned_about(toy, caplog):
    adata = toy()
    lone = (adata.obs["condition"] == "ctrl") & (adata.obs["cell_type"] == "NK")
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        register(adata[~lone].copy())
    assert "1 context(s) have no control cells: ('NK',)" in caplog.text


def test_a_clean_file_gives_no_warning(toy, caplog):
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        register(toy())
    assert caplog.text == ""


@pytest.mark.parametrize("label", ["Ctrl", "CTRL", "ctrl ", "c-trl", "ctrls", "A+Ctrl"])
def test_labels_that_nearly_are_control_are_refused(toy, label):
    """Their cells would be learnt as treated."""
    adata = toy(["ctrl", label, "A"])
    near = label.removeprefix("A+")
    with pytest.raises(LabelError, match=rf"has '{near}' beside the control label 'ctrl'.*rename"):
        register(adata)
    if label in ("Ctrl", "CTRL"):
        registry = register(adata, control=["ctrl", label])
        assert registry.perturbations.levels == ("A",)


def test_labels_of_other_columns_may_look_like_control(toy):
    assert register(toy(["ctrl", "A"], cell_types=["Ctrl", "T"])).control == ("ctrl",)
