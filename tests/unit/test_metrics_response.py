"""Scores of the mean response, against numbers worked by hand."""

import math

import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff._errors import MetricError
from perturbdiff.metrics import mae_shift, mean_shift, pearson_shift, variance_explained

CONTROL = np.array([[1.0, 0.0, 2.0], [1.0, 2.0, 0.0]])  # means 1, 1, 1
TRUE = np.array([[2.0, 3.0, 4.0], [2.0, 3.0, 6.0]])  # shifts 1, 2, 4
PRED = np.array([[2.0, 3.0, 4.0]])  # shifts 1, 2, 3


def test_mean_shift_by_hand():
    np.testing.assert_array_equal(mean_shift(TRUE, CONTROL), [1.0, 2.0, 4.0])


def test_pearson_by_hand():
    # Deviations (-1, 0, 1) and (-4, -1, 5)/3: product 3, norms sqrt(2) and sqrt(42)/3.
    assert pearson_shift(PRED, TRUE, CONTROL) == pytest.approx(9 / math.sqrt(84), abs=1e-12)


def test_pearson_ignores_size_and_offset_of_the_shift_and_sees_its_sign():
    grown = CONTROL.mean(0) + 3 * (TRUE - CONTROL.mean(0)) + 0.7
    turned = CONTROL.mean(0) - (TRUE - CONTROL.mean(0))
    assert pearson_shift(grown, TRUE, CONTROL) == pytest.approx(1.0, abs=1e-12)
    assert pearson_shift(turned, TRUE, CONTROL) == pytest.approx(-1.0, abs=1e-12)


def test_mae_by_hand():
    assert mae_shift(PRED, TRUE, CONTROL) == pytest.approx(1 / 3, abs=1e-12)


def test_control_cells_of_the_prediction_may_differ():
    own = CONTROL + np.array([0.0, 0.0, -1.0])  # predicted shifts become 1, 2, 4
    assert pearson_shift(PRED, TRUE, CONTROL, pred_control_cells=own) == pytest.approx(1.0)
    assert mae_shift(PRED, TRUE, CONTROL, pred_control_cells=own) == pytest.approx(0.0, abs=1e-12)


def test_copied_control_cells_have_no_correlation():
    with pytest.raises(MetricError, match=r"copy of the control cells.*no_effect='zero'"):
        pearson_shift(CONTROL.copy(), TRUE, CONTROL)
    assert pearson_shift(CONTROL.copy(), TRUE, CONTROL, no_effect="zero") == 0.0
    with pytest.raises(MetricError, match="use 'refuse' or 'zero'"):
        pearson_shift(PRED, TRUE, CONTROL, no_effect="one")


def test_a_true_shift_without_differences_is_refused_whatever_was_predicted():
    with pytest.raises(MetricError, match="true shift is the same for every gene"):
        pearson_shift(PRED, CONTROL + 1.0, CONTROL, no_effect="zero")


def test_variance_explained_by_hand():
    control = np.zeros((2, 3))
    true = np.array([[8.0, 4.0, 1.0], [4.0, 4.0, 1.0]])  # shifts 6, 4, 1; variances 4, 0, 0
    pred = np.array([[3.0, 1.0, 9.0], [5.0, 3.0, 1.0]])  # variances 1, 1, 16
    # Top two: 1 - (3^2 + 1^2) / (2^2 + 2^2).
    assert variance_explained(pred, true, control, n_top=2) == pytest.approx(-0.25, abs=1e-12)


def test_variance_explained_uses_all_genes_where_there_are_fewer():
    rng = np.random.default_rng(0)
    true, pred, control = rng.random((9, 5)), rng.random((9, 5)), rng.random((9, 5))
    assert variance_explained(pred, true, control) == variance_explained(
        pred, true, control, n_top=5
    )


def test_variance_explained_refuses_what_has_no_variance():
    with pytest.raises(MetricError, match="at least 2 cells a side"):
        variance_explained(PRED, TRUE, CONTROL)
    with pytest.raises(MetricError, match="same true variance"):
        variance_explained(TRUE + 1.0, np.ones((4, 3)), CONTROL)


@pytest.mark.parametrize(
    ("pred", "what"),
    [
        (np.ones(3), r"shape \(3,\)"),
        (np.ones((0, 3)), "is empty"),
        (np.array([[np.nan, 1.0, 2.0]]), "1 value.* NaN"),
        (np.array([["a", "b", "c"]]), "not real numbers"),
        (np.ones((2, 4)), "4 columns and true_cells has 3.*Align both by gene name"),
    ],
)
def test_bad_cells_are_refused_by_name(pred, what):
    with pytest.raises(MetricError, match=what):
        mae_shift(pred, TRUE, CONTROL)


@pytest.mark.parametrize("form", [sp.csr_matrix, sp.csc_matrix, sp.csr_array])
def test_sparse_cells_score_the_same(form):
    sparse = [form(cells) for cells in (PRED, TRUE, CONTROL)]
    assert pearson_shift(*sparse) == pearson_shift(PRED, TRUE, CONTROL)
