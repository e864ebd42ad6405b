"""What a scanpy user relies on in every call of pp, tl and pl: where it writes, and what it leaves.

Each function is called once here. One that is not listed fails the first test.
"""

import inspect
from copy import deepcopy
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import perturbdiff as ptd
from perturbdiff._errors import ConfigError

KEYS = {"perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"]}
ASK = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 24}
SLOTS = ("obs", "var", "uns", "obsm", "varm", "obsp", "varp", "layers")


@pytest.fixture(scope="module")
def world(simulated_cells, small_model):
    """Cells, models, and predictions of them."""
    prior = ptd.EffectPrior.from_anndata(simulated_cells, **KEYS).fit(simulated_cells)
    wish = [ptd.AtLeast(small_model.registry.genes[0], 0.2, per="population")]
    return {
        "cells": simulated_cells,
        "model": small_model,
        "prior": prior,
        "pred": ptd.tl.predict(simulated_cells, small_model, **ASK),
        "simple": ptd.tl.predict(simulated_cells, prior, **ASK),
        "obedient": ptd.tl.predict(simulated_cells, small_model, **ASK, constraints=wish),
        "wish": wish,
    }


# What each call is given, what it writes, and into which of these.
WRITERS = {
    "pp.normalize": (
        "cells", {"obs": {"library_size"}, "uns": {"perturbdiff"}},
        lambda x, _, **k: ptd.pp.normalize(x, **k),
    ),
    "pp.select_genes": (
        "cells", {"var": {"highly_variable"}, "obs": {"library_size"}},
        lambda x, _, **k: ptd.pp.select_genes(x, **KEYS, scale="counts", n_top_genes=10, **k),
    ),
    "tl.score": (
        "pred", {"uns": {"score"}}, lambda x, w, **k: ptd.tl.score(x, reference=w["cells"], **k),
    ),
    "tl.response": (
        "pred", {"uns": {"response"}},
        lambda x, w, **k: ptd.tl.response(x, reference=w["cells"], **k),
    ),
    "tl.uncertainty": (
        "simple", {"uns": {"uncertainty", "uncertainty_flags"}},
        lambda x, w, **k: ptd.tl.uncertainty(x, w["prior"], reference=w["cells"], **k),
    ),
    "tl.trajectory": (
        "pred", {"uns": {"trajectory"}, "varm": {"trajectory"}},
        lambda x, w, **k: ptd.tl.trajectory(x, w["model"], reference=w["cells"], n_cells=4, **k),
    ),
    "tl.score_constraints": (
        "obedient", {}, lambda x, w, **k: ptd.tl.score_constraints(x, reference=w["cells"], **k),
    ),
    "tl.rank_perturbations": (
        "cells", {"uns": {"perturbation_ranking"}},
        lambda x, w, **k: ptd.tl.rank_perturbations(
            x, w["model"], target=w["wish"], contexts=ASK["contexts"], n_cells=8, **k
        ),
    ),
}  # fmt: skip
READERS = {"pp.check", "tl.predict", "tl.response_genes", "tl.summarise_scores"}


def functions(room):
    """Functions of a room, by name."""
    module = getattr(ptd, room)
    return {f"{room}.{name}": getattr(module, name) for name in module.__all__}


def test_every_function_is_listed_here():
    offered = {**functions("pp"), **functions("tl")}
    assert set(offered) == set(WRITERS) | READERS
    writing = {n for n, f in offered.items() if "copy" in inspect.signature(f).parameters}
    assert writing == set(WRITERS)
    assert set(functions("pl")) == set(PLOTS)
    for name in WRITERS:
        kinds = inspect.signature(offered[name]).parameters
        assert list(kinds)[-1] == "copy", name
        # A call that writes one table or column lets its name be chosen.
        if name not in ("pp.normalize", "tl.score_constraints"):
            assert "key_added" in kinds, name


def contents(adata):
    """Names by slot, and copies of what they hold."""
    return {slot: {key: deepcopy(value) for key, value in getattr(adata, slot).items()}
            for slot in SLOTS}  # fmt: skip


def same(one, other):
    """Whether two entries of a slot are equal."""
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, pd.DataFrame | pd.Series):
        return one.equals(other)
    if hasattr(one, "nnz"):
        return (one != other).nnz == 0
    one, other = np.asarray(one), np.asarray(other)
    exact = one.dtype.kind not in "fc"
    return bool((one == other).all()) if exact else np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("name", WRITERS)
def test_written_where_it_says_and_nowhere_else(name, world):
    which, keys, call = WRITERS[name]
    given = world[which].copy()
    before = contents(given)
    made = call(given, world, copy=True)
    assert isinstance(made, anndata.AnnData)
    assert all(same(before[slot], contents(given)[slot]) for slot in SLOTS)
    added = {
        slot: set(getattr(made, slot)) - set(before[slot])
        for slot in SLOTS
        if set(getattr(made, slot)) - set(before[slot])
    }
    assert added == {slot: names for slot, names in keys.items() if names - set(before[slot])}
    assert call(given, world) is None
    for slot, names in keys.items():
        for key in names:
            assert same(getattr(given, slot)[key], getattr(made, slot)[key])


@pytest.mark.parametrize("name", WRITERS)
def test_a_view_is_written_to_without_a_word_and_its_parent_is_not(name, world):
    which, keys, call = WRITERS[name]
    parent = world[which].copy()
    before = contents(parent)
    view = parent[np.arange(parent.n_obs)]
    assert call(view, world) is None
    assert not view.is_view
    for slot, names in keys.items():
        assert names <= set(getattr(view, slot))
    assert all(same(before[slot], contents(parent)[slot]) for slot in SLOTS)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_survives_both_kinds_of_file(name, world, tmp_path):
    which, _, call = WRITERS[name]
    made = call(world[which].copy(), world, copy=True)
    made.write_h5ad(tmp_path / "one.h5ad")
    made.write_zarr(tmp_path / "one.zarr")
    for back in (
        anndata.read_h5ad(tmp_path / "one.h5ad"),
        anndata.read_zarr(tmp_path / "one.zarr"),
    ):
        for slot in SLOTS:
            own, read = contents(made)[slot], contents(back)[slot]
            assert set(own) == set(read)
            assert [key for key in own if not same(own[key], read[key])] == []


# Plots


@pytest.fixture(scope="module")
def drawn(world):
    """Predictions with all tables."""
    pred, simple = world["pred"].copy(), world["simple"].copy()
    ptd.tl.score(pred, reference=world["cells"])
    ptd.tl.trajectory(pred, world["model"], reference=world["cells"], n_cells=4)
    ptd.tl.uncertainty(simple, world["prior"], reference=world["cells"])
    return world | {"pred": pred, "simple": simple}


PHASE = {
    "name": "denoising steps", "intensity": 3.0, "operations": 1e9, "operations_per_second": 2e9,
}  # fmt: skip
PROFILE = {
    "machines": {"cpu": {"rates": {"float32": 1e11}, "bandwidth": 2e10}},
    "runs": [{"name": "a model", "n_cells": 8, "phases": [PHASE]}],
}
PLOTS = {
    "pl.response": lambda w, **k: ptd.pl.response(w["pred"], reference=w["cells"], **k),
    "pl.embedding": lambda w, **k: ptd.pl.embedding(w["pred"], reference=w["cells"], **k),
    "pl.scores": lambda w, **k: ptd.pl.scores(w["pred"], metrics=["pearson_shift"], **k),
    "pl.uncertainty": lambda w, **k: ptd.pl.uncertainty(w["simple"], **k),
    "pl.trajectory": lambda w, **k: ptd.pl.trajectory(w["pred"], **k),
    "pl.constraints": lambda w, **k: ptd.pl.constraints(w["obedient"], **k),
    "pl.roofline": lambda w, **k: ptd.pl.roofline(PROFILE, **k),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_into_axes_or_a_file_and_refuses_the_rest(name, drawn, tmp_path):
    plt.close("all")  # what tests before this one left
    plot = PLOTS[name]
    panel = Figure(figsize=(5, 5)).subplots()
    got = plot(drawn, ax=panel)
    assert (got if name == "pl.roofline" else got[0]) is panel
    assert panel.get_xlabel()
    assert panel.get_ylabel() or [text.get_text() for text in panel.get_yticklabels()]
    assert plt.get_fignums() == []
    plot(drawn, save=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert plt.get_fignums() == []
    wrong = [
        (tmp_path, "is a folder"), (".", "is a folder"), (f"{tmp_path}/new/", "is a folder"),
        (".png", "no name before it"), ("picture.xyz", "must end in one of"),
    ]  # fmt: skip
    for save, message in wrong:
        with pytest.raises(ConfigError, match=message):
            plot(drawn, save=save)
    with pytest.raises(ConfigError, match="ax = 3: must be matplotlib axes"):
        plot(drawn, ax=3)
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["picture.png"]
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", sorted(set(PLOTS) - {"pl.roofline"}))
def test_a_plot_leaves_the_prediction_as_it_was(name, drawn):
    which = {"pl.uncertainty": "simple", "pl.constraints": "obedient"}.get(name, "pred")
    before = contents(drawn[which])
    PLOTS[name](drawn)
    plt.close("all")
    assert all(same(before[slot], contents(drawn[which])[slot]) for slot in SLOTS)


PREDICTORS = [
    name
    for name in ptd.__all__
    if hasattr(getattr(ptd, name), "from_anndata") and name != "Registry"
]


@pytest.mark.parametrize("name", PREDICTORS)
def test_columns_are_named_where_an_editor_sees_them(name):
    ours, registrys = (
        inspect.signature(kind.from_anndata).parameters
        for kind in (getattr(ptd, name), ptd.Registry)
    )
    assert [*ours] == [*registrys]
    assert all(ours[key].default == registrys[key].default for key in ours)
    assert all(one.kind is not one.VAR_KEYWORD for one in ours.values())
