"""What a notebook shows of a model by itself."""

import perturbdiff as ptd


def test_a_model_says_what_it_is_about(small_model):
    assert repr(small_model) == (
        "SetDiffusion of 2 perturbations in obs['perturbation'] by cell_type, fitted on 30 genes"
    )


def test_and_in_which_way_it_calculates_where_not_the_usual(small_model):
    usual = repr(small_model)
    assert repr(small_model.in_precision("bfloat16")) == f"{usual}, in bfloat16"
    assert repr(small_model.compiled()) == f"{usual}, compiled"
    assert (
        repr(small_model.in_precision("bfloat16").compiled()) == f"{usual}, in bfloat16, compiled"
    )


def test_and_whether_it_was_fitted(toy):
    model = ptd.MeanShift.from_anndata(
        toy(labels=("ctrl", "A")), perturbation_key="condition", control="ctrl", scale="counts"
    )
    assert repr(model) == "MeanShift of 1 perturbation in obs['condition'], not fitted"
