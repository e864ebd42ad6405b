"""Questions: what is asked, in which contexts, with which control cells, and what is refused."""

import pytest

from perturbdiff._errors import (
    ConfigError,
    LabelError,
    UnknownKeyError,
    UnknownLevelError,
)
from perturbdiff.data import Condition, Registry, ask


def register(adata, **changes):
    names = {
        "perturbation_key": "condition",
        "control": "ctrl",
        "covariate_keys": ["cell_type"],
        "scale": "counts",
    }
    return Registry.from_anndata(adata, **(names | changes))


def test_every_perturbation_in_every_context_with_its_controls(toy):
    adata = toy()
    question = ask(adata, register(adata), perturbations=["B", "A", "A+B", "B+A"], n_cells=8)
    assert [str(c) for c in question.conditions] == [
        "B in NK",
        "B in T",
        "A in NK",
        "A in T",
        "A and B in NK",
        "A and B in T",
    ]
    assert question.controls.is_control.all()
    rows = question.control_rows(question.conditions[1])
    assert [question.controls.names[row] for row in rows] == [f"cell00{n}" for n in range(4)]


def test_only_the_contexts_asked_for(toy):
    adata = toy()
    question = ask(
        adata, register(adata), perturbations=["A"], contexts=[{"cell_type": "NK"}], n_cells=8
    )
    assert question.conditions == (Condition(("A",), ("NK",)),)
    assert question.controls.contexts == (("NK",),)
    assert len(question.controls) == 4


def test_a_context_may_leave_a_covariate_open(toy):
    adata = toy(n_each=4)
    adata.obs["donor"] = ["d1", "d2"] * (adata.n_obs // 2)
    registry = register(adata, covariate_keys=["cell_type", "donor"])
    question = ask(adata, registry, perturbations=["A"], contexts=[{"cell_type": "T"}], n_cells=1)
    assert [c.context for c in question.conditions] == [("T", "d1"), ("T", "d2")]


def test_a_bare_label_is_one_perturbation(toy):
    adata = toy()
    conditions = ask(adata, register(adata), perturbations="A", n_cells=1).conditions
    assert {c.members for c in conditions} == {("A",)}


def test_other_labels_of_the_file_do_not_matter(toy):
    registry = register(toy(["ctrl", "A"]))
    query = toy(["ctrl", "another drug", "nan"])
    query.obs["dose"] = "unreadable"
    question = ask(query, registry, perturbations=["A"], n_cells=1)
    assert len(question.controls) == 8


def test_unknown_perturbations_are_refused_by_name(toy):
    adata = toy(["ctrl", "KLF1", "MAP2K6"])
    registry = register(adata)
    with pytest.raises(UnknownLevelError, match=r"'KLF'\. Did you mean 'KLF1'"):
        ask(adata, registry, perturbations=["KLF1", "KLF"], n_cells=1)
    with pytest.raises(UnknownLevelError, match="'TP53'"):
        ask(adata, registry, perturbations=["KLF1+TP53"], n_cells=1)
    with pytest.raises(LabelError, match="'ctrl' is control"):
        ask(adata, registry, perturbations=["ctrl"], n_cells=1)


def test_unknown_contexts_are_refused_by_name(toy):
    adata = toy()
    registry = register(adata)

    def contexts(levels, file=adata, **options):
        return ask(file, registry, perturbations=["A"], contexts=[levels], n_cells=1, **options)

    with pytest.raises(UnknownKeyError, match=r"has no 'celltype'\. Did you mean 'cell_type'"):
        contexts({"celltype": "NK"})
    with pytest.raises(UnknownLevelError, match=r"'NKK'\. Did you mean 'NK'"):
        contexts({"cell_type": "NKK"})
    other = toy(cell_types=["T", "DC"])
    with pytest.raises(LabelError, match=r"No control cells of {'cell_type': 'NK'} in the file"):
        contexts({"cell_type": "NK"}, other)
    with pytest.raises(UnknownLevelError, match=r"unseen in training: 'DC'"):
        contexts({"cell_type": "DC"}, other)
    new = contexts({"cell_type": "DC"}, other, new_contexts="infer")
    assert new.conditions == (Condition(("A",), ("DC",)),)


def test_a_file_without_control_cells_is_refused(toy):
    registry = register(toy())
    with pytest.raises(LabelError, match=r"no control cells \('ctrl'\) to start from"):
        ask(toy(["A", "B"]), registry, perturbations=["A"], n_cells=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n_cells": 0}, "n_cells = 0"),
        ({"n_cells": 1, "perturbations": []}, "perturbations"),
        ({"n_cells": 1, "doses": [1.0]}, "not told of a column of doses"),
        ({"n_cells": 1, "times": [1.0]}, "not told of a column of times"),
    ],
)
def test_questions_that_make_no_sense_are_refused(toy, options, field):
    adata = toy()
    with pytest.raises(ConfigError, match=field):
        ask(adata, register(adata), **({"perturbations": ["A"]} | options))


def test_doses_and_times_are_asked_for_in_the_units_of_the_model(toy):
    adata = toy(["ctrl", "A", "B"], cell_types=["T"])
    adata.obs["dose"] = ["0uM"] * 4 + ["1uM"] * 8
    adata.obs["hour"] = 6
    registry = register(adata, dose_key="dose", time_key="hour")
    question = ask(adata, registry, perturbations=["A+B"], doses=[1, 10.0], times=[6], n_cells=1)
    assert [(c.doses, c.time) for c in question.conditions] == [
        ((1.0, 1.0), 6.0),
        ((10.0, 10.0), 6.0),
    ]
    with pytest.raises(ConfigError, match="the model needs doses"):
        ask(adata, registry, perturbations=["A"], times=[6], n_cells=1)
    with pytest.raises(ConfigError, match="finite and not negative"):
        ask(adata, registry, perturbations=["A"], doses=[-1.0], times=[6], n_cells=1)
