"""Simple baselines against answers worked by hand, and the questions they refuse."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression

from perturbdiff._errors import NotFittedError, UndefinedBaselineError
from perturbdiff.prior import (
    Additive,
    CarriedLogRatio,
    ConditionSummary,
    ContextSummary,
    CopyControl,
    EffectPrior,
    GeneRidge,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    PriorQuestion,
    SimilarityShift,
    apply_log_ratio,
    log_ratio,
    shifted_cells,
    summarise_condition,
    summarise_context,
)
from perturbdiff.prior._donors import number_shares

AXES = np.zeros((2, 2))


def context(name, mean, *, n_cells=100, axes=AXES):
    mean = np.array(mean, dtype=float)
    return ContextSummary(covariates=(name,), mean=mean, var=mean + 0.1, n_cells=n_cells, axes=axes)


def condition(members, where, mean, *, n_cells=100, numbers=()):
    mean = np.array(mean, dtype=float)
    return ConditionSummary(
        members=tuple(members), context=where, mean=mean, var=mean + 0.1, n_cells=n_cells,
        numbers=numbers,
    )  # fmt: skip


T1, T2, T3 = context("T1", [1, 0, 2]), context("T2", [2, 1, 0]), context("T3", [1, 0, 1.5])
KNOWN = [condition("A", T1, [2, 0, 2]), condition("A", T2, [2, 2, 0])]
ASKED = PriorQuestion(members=("A",), context=T3)


def test_copy_control():
    np.testing.assert_array_equal(CopyControl().fit([]).predict_mean(ASKED), T3.mean)


def test_mean_shift_averages_shifts():
    np.testing.assert_allclose(MeanShift().fit(KNOWN).predict_mean(ASKED), [1.5, 0.5, 1.5])


def test_mean_shift_never_goes_below_zero():
    down = [condition("A", T1, [0, 0, 0])]
    np.testing.assert_allclose(MeanShift().fit(down).predict_mean(ASKED), [0, 0, 0])


def test_mean_shift_of_a_new_perturbation_is_that_of_all_others_here():
    known = [condition("A", T3, [2, 0, 1.5]), condition("B", T3, [1, 1, 1.5]), *KNOWN]
    question = PriorQuestion(members=("C",), context=T3)
    np.testing.assert_allclose(MeanShift().fit(known).predict_mean(question), [1.5, 0.5, 1.5])


def test_nearest_context_takes_one_shift():
    np.testing.assert_allclose(NearestContext().fit(KNOWN).predict_mean(ASKED), [2, 0, 1.5])


def test_similarity_reduces_to_the_average_where_sharpness_cannot_be_learned():
    # Two donors: leaving one out leaves a single one, so no sharpness is better than another.
    np.testing.assert_allclose(SimilarityShift().fit(KNOWN).predict_mean(ASKED), [1.5, 0.5, 1.5])


def test_log_ratio_is_re_applied_at_the_new_level():
    control, treated = np.log1p([10.0]), np.log1p([20.0])
    here = np.log1p([1.0])
    expected = np.log1p(1.1 * 20.1 / 10.1 - 0.1)
    np.testing.assert_allclose(apply_log_ratio(here, log_ratio(treated, control)), expected)
    known = [condition("A", context("T1", control), treated)]
    question = PriorQuestion(members=("A",), context=context("T2", here))
    for kind in (CarriedLogRatio, MixtureLogRatio):
        np.testing.assert_allclose(kind().fit(known).predict_mean(question), expected)


def test_mixture_shares_follow_the_classifier_and_the_size_of_donors():
    rng = np.random.default_rng(0)
    clouds = [rng.normal(centre, 1, (30, 3)) for centre in (0.0, 2.0, 0.6)]
    first, second, asked = (
        summarise_context(rng.random((30, 4)), axes, covariates=(f"T{i}",))
        for i, axes in enumerate(clouds)
    )
    first = replace(first, n_cells=400)
    known = [
        condition("A", first, rng.random(4), n_cells=500),
        condition("A", second, rng.random(4), n_cells=500),
    ]
    axes = np.concatenate([first.axes, second.axes])
    scale = np.sqrt(axes.var(0).sum())
    model = LogisticRegression(C=2.5, class_weight="balanced", tol=1e-8, max_iter=1000)
    model.fit(axes / scale, np.repeat([0, 1], 30))
    share = model.predict_proba(asked.axes / scale).mean(0) * np.array([400 / 450, 30 / 80])
    share = share / share.sum()
    question = PriorQuestion(members=("A",), context=asked)
    fitted = MixtureLogRatio().fit(known)
    np.testing.assert_allclose(fitted.shares(question, fitted.conditions), share, atol=1e-3)
    share = fitted.shares(question, fitted.conditions)
    ratio = np.stack([log_ratio(c.mean, c.context.mean) for c in known])
    expected = apply_log_ratio(asked.mean, share @ ratio)
    np.testing.assert_allclose(fitted.predict_mean(question), expected)


def test_additive_sums_shifts_measured_here():
    known = [condition("A", T3, [2, 0, 1.5]), condition("B", T3, [1, 1, 0]), *KNOWN]
    question = PriorQuestion(members=("A", "B"), context=T3)
    np.testing.assert_allclose(Additive().fit(known).predict_mean(question), [2, 1, 0])


def test_additive_borrows_a_shift_from_elsewhere():
    known = [*KNOWN, condition("B", T3, [1, 1, 1])]
    question = PriorQuestion(members=("A", "B"), context=T3)
    np.testing.assert_allclose(Additive().fit(known).predict_mean(question), [1.5, 1.5, 1])


def test_closer_doses_count_more():
    doses = [condition("A", T1, [1, 1, 1], numbers=(value,)) for value in (0.0, np.expm1(3.0))]
    asked = PriorQuestion(members=("A",), context=T3, numbers=(float(np.expm1(1.0)),))
    np.testing.assert_allclose(number_shares(doses, asked), [1, 0.25])
    same = PriorQuestion(members=("A",), context=T3, numbers=(0.0,))
    np.testing.assert_allclose(number_shares(doses, same), [1, 0])
    without = PriorQuestion(members=("A",), context=T3)
    np.testing.assert_allclose(number_shares(doses, without), [1, 1])


def test_shifted_cells_are_clipped_to_the_scale():
    most = np.log1p(1e4)
    assert shifted_cells(np.array([[9.0]]), np.array([1.0])) == pytest.approx(most)
    cells = np.array([[0.0, 1.0], [2.0, 0.5]])
    np.testing.assert_array_equal(shifted_cells(cells, np.array([-1.0, 0.5])), [[0, 1.5], [1, 1]])


@pytest.mark.parametrize("storage", [sp.csr_matrix, sp.csr_array, np.asarray])
def test_summaries_are_those_of_the_dense_matrix(storage):
    rng = np.random.default_rng(0)
    cells = rng.poisson(0.5, (300, 5)).astype(np.float32)
    axes = rng.normal(size=(300, 2))
    summary = summarise_context(storage(cells), axes, covariates=["T"])
    np.testing.assert_allclose(summary.mean, cells.astype(float).mean(0))
    np.testing.assert_allclose(summary.var, cells.astype(float).var(0))
    assert summary.n_cells == 300
    assert summary.axes.shape == (250, 2)
    treated = summarise_condition(storage(cells), summary, members=["A"], numbers=[1])
    assert treated.numbers == (1.0,)
    expected = 2 * cells.astype(float).var(0) / 300
    np.testing.assert_allclose(treated.noise, expected)


@pytest.mark.parametrize(
    "kind", [SimilarityShift, CarriedLogRatio, MixtureLogRatio, NearestContext]
)
def test_nothing_to_carry_over_is_said(kind):
    question = PriorQuestion(members=("C",), context=T3)
    with pytest.raises(UndefinedBaselineError, match="'C' was measured in no training context"):
        kind().fit(KNOWN).predict_mean(question)


def test_additive_refuses_singles_and_unknown_members():
    fitted = Additive().fit(KNOWN)
    with pytest.raises(UndefinedBaselineError, match="no parts to add"):
        fitted.predict_mean(ASKED)
    with pytest.raises(UndefinedBaselineError, match="'B' was never measured alone"):
        fitted.predict_mean(PriorQuestion(members=("A", "B"), context=T3))


def test_ridge_and_effect_prior_say_when_there_is_nothing_to_learn_from():
    with pytest.raises(UndefinedBaselineError, match="no training condition"):
        GeneRidge().fit([]).predict_mean(ASKED)
    with pytest.raises(UndefinedBaselineError, match="no training condition can be left out"):
        GeneRidge().fit(KNOWN[:1]).predict_mean(ASKED)
    with pytest.raises(UndefinedBaselineError, match="at least one training condition"):
        EffectPrior().fit([])


def test_an_unfitted_baseline_says_so():
    with pytest.raises(NotFittedError, match="call fit first"):
        MeanShift().predict_mean(ASKED)
