"""All scores of one condition and of a table: who is compared with whom, and what is reported."""

from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff._errors import MetricError, UnknownKeyError
from perturbdiff.metrics import (
    CONDITION_METRICS,
    METRICS,
    average_scores,
    fit_projection,
    score_condition,
    score_conditions,
    split_half_ceiling,
)

G = 120
RATES = np.geomspace(0.3, 6, G)
RESPONSE = np.where(np.arange(G) % 4 == 0, 4.0, 1.0)


def cells(seed, n, *, response=None, rates=RATES):
    counts = np.random.default_rng(seed).poisson(
        rates * (1 if response is None else response), (n, G)
    )
    return np.log1p(counts / 2e3 * 1e4).astype(np.float32)


CONTROL = cells(0, 90)
TRUE = cells(1, 80, response=RESPONSE)
PROJECT = fit_projection(np.concatenate([CONTROL, cells(2, 90, response=RESPONSE**0.5)]), n_axes=10)


def scores(pred, **options):
    return score_condition(pred, TRUE, CONTROL, project=PROJECT, **options).values


def better(left, right, metric):
    return (
        left[metric] > right[metric]
        if METRICS[metric].higher_is_better
        else left[metric] < right[metric]
    )


class TestWhoIsComparedWithWhom:
    """Noise, control cells and the truth itself as predictions."""

    perfect = scores(TRUE.copy())
    copied = scores(CONTROL.copy())
    noise = scores(np.random.default_rng(5).uniform(0, 9, TRUE.shape))

    def test_the_truth_is_perfect(self):
        for metric in ("pearson_shift", "variance_explained", "de_overlap", "direction_match"):
            assert self.perfect[metric] == pytest.approx(1.0, abs=1e-9)
        assert self.perfect["mae_shift"] == 0.0
        for metric in ("energy_distance", "centred_energy_distance", "mmd"):
            assert -0.3 < self.perfect[metric] <= 0.0

    def test_copied_control_cells_show_no_effect(self):
        assert self.copied["pearson_shift"] == 0.0
        assert self.copied["mae_shift"] == pytest.approx(
            np.abs(TRUE.mean(0) - CONTROL.mean(0)).mean()
        )
        assert (self.copied["de_overlap"], self.copied["direction_match"]) == (0.0, 0.0)

    @pytest.mark.parametrize("metric", CONDITION_METRICS)
    def test_the_truth_beats_copied_control_cells(self, metric):
        assert better(self.perfect, self.copied, metric)

    # Not by MMD, which is bounded: the kernel sees nothing of clouds that are far and wide.
    @pytest.mark.parametrize(
        "metric", ["mae_shift", "energy_distance", "centred_energy_distance", "variance_explained"]
    )
    def test_noise_is_worse_than_copied_control_cells(self, metric):
        assert better(self.copied, self.noise, metric)

    def test_noise_does_not_correlate(self):
        assert abs(self.noise["pearson_shift"]) < 0.5 * self.perfect["pearson_shift"]

    @pytest.mark.parametrize(
        "same", [TRUE, TRUE[:], TRUE[::-1], TRUE[:40]], ids=["itself", "view", "reversed", "part"]
    )
    def test_one_object_on_both_sides_is_refused(self, same):
        with pytest.raises(MetricError, match="pred_cells and true_cells share memory"):
            scores(same)

    def test_one_sparse_object_on_both_sides_is_refused(self):
        truth = sp.csr_matrix(TRUE)
        with pytest.raises(MetricError, match="share memory"):
            score_condition(truth, truth, CONTROL, project=None)

    def test_control_cells_cannot_be_the_truth(self):
        with pytest.raises(MetricError, match="true_cells and control_cells share memory"):
            score_condition(TRUE, CONTROL, CONTROL, project=PROJECT)
        with pytest.raises(MetricError, match="true_cells and control_cells share memory"):
            split_half_ceiling(CONTROL, CONTROL, project=PROJECT)

    def test_different_rows_of_one_array_are_fine(self):
        both = np.concatenate([TRUE, TRUE])
        result = score_condition(both[:80], both[80:], CONTROL, project=None, metrics=["mae_shift"])
        assert result.values == {"mae_shift": 0.0}


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (np.float16, np.asarray),
        (np.float32, np.asarray),
        (np.float64, np.asarray),
        (np.int64, np.asarray),
        (np.uint8, np.asarray),
        (np.float32, sp.csr_matrix),
        (np.int64, sp.csc_array),
    ],
)
def test_dtype_and_form_leave_scores_and_input_alone(dtype, form):
    """Whole values, which every dtype holds, so that the numbers are the same."""
    sides = [np.round(side) for side in (cells(3, 70, response=RESPONSE**0.7), TRUE, CONTROL)]
    expected = score_condition(*sides, project=PROJECT).values
    pred = form(sides[0].astype(dtype))
    before = pred.copy()
    result = score_condition(pred, *sides[1:], project=PROJECT).values
    assert result == pytest.approx(expected, abs=1e-6)
    assert pred.dtype == dtype
    assert abs(pred - before).sum() == 0


def test_every_score_has_a_name_a_direction_and_a_definition():
    assert tuple(scores(cells(3, 60))) == CONDITION_METRICS
    assert set(METRICS) - set(CONDITION_METRICS) == {"discrimination", "ranked_first"}
    for name, info in METRICS.items():
        assert info.name == name
        assert info.best == (1.0 if info.higher_is_better else 0.0)
        assert info.definition.endswith(".")
    assert METRICS["de_overlap"].cell_eval == "overlap_at_N"


def test_numbers_behind_the_scores_are_reported():
    result = score_condition(cells(3, 60), TRUE, CONTROL, project=PROJECT, seed=4)
    assert (result.n_pred, result.n_true, result.n_control, result.n_genes) == (60, 80, 90, G)
    assert (result.scale, result.seed, result.undefined) == ("log1p_cp10k", 4, {})
    assert 20 <= result.n_significant <= G


def test_undefined_scores_say_why_and_leave_the_others():
    alone = score_condition(TRUE[:1].copy(), TRUE, CONTROL, project=None)
    assert "project=fit_projection" in alone.undefined["energy_distance"]
    assert "at least 2 cells" in alone.undefined["variance_explained"]
    assert np.isnan(alone.values["energy_distance"])
    assert alone.values["mae_shift"] > 0
    negative = score_condition(cells(3, 60) - 0.5, TRUE, CONTROL, project=PROJECT)
    assert set(negative.undefined) == {"de_overlap", "direction_match"}
    assert "clip the prediction" in negative.undefined["de_overlap"]


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(MetricError, match="pred_cells is declared log1p_cp10k"):
        scores(np.expm1(TRUE))
    with pytest.raises(MetricError, match="Declare 'log1p_cp10k' or 'cp10k'"):
        scores(TRUE.copy(), scale="counts")
    with pytest.raises(UnknownKeyError, match="Did you mean 'mae_shift'"):
        scores(TRUE.copy(), metrics=["mae_shifts"])
    with pytest.raises(MetricError, match="at least 2 training cells"):
        fit_projection(CONTROL[:1])
    wrong = score_condition(TRUE.copy(), TRUE, CONTROL, project=lambda x: x[:3], metrics=["mmd"])
    assert "one row a cell" in wrong.undefined["mmd"]


def test_axes_are_those_of_principal_component_analysis():
    points = np.random.default_rng(0).normal(size=(50, 6))
    axes = fit_projection(points, n_axes=6)(points)
    np.testing.assert_allclose(axes.mean(0), 0, atol=1e-12)
    covariance = np.cov(axes.T)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-10)
    assert fit_projection(points, n_axes=99)(points).shape == (50, 6)
    half = fit_projection(sp.csr_matrix(points.astype(np.float32)), n_axes=2)
    np.testing.assert_allclose(np.abs(half(points)), np.abs(axes[:, :2]), atol=1e-4)


class TestCeiling:
    """One half of the treated cells stands for the prediction of the other."""

    def test_halves_agree_better_than_another_response_does(self):
        ceiling = split_half_ceiling(TRUE, CONTROL, project=PROJECT, n_splits=3)
        other = scores(cells(3, 80, response=RESPONSE**0.5))
        for metric in ("pearson_shift", "mae_shift", "energy_distance", "variance_explained"):
            assert better(ceiling.values, other, metric)
        assert abs(ceiling.values["energy_distance"]) < 0.2
        assert (ceiling.n_half, ceiling.n_splits, ceiling.undefined) == (40, 3, {})
        assert set(ceiling.values) == set(ceiling.spread) == set(CONDITION_METRICS)

    def test_a_split_is_what_the_docstring_says(self):
        rows = np.random.default_rng([7, 0]).permutation(80)
        by_hand = score_condition(
            TRUE[rows[:40]], TRUE[rows[40:]], CONTROL, project=PROJECT, seed=7
        )
        ceiling = split_half_ceiling(TRUE, CONTROL, project=PROJECT, n_splits=1, seed=7)
        assert ceiling.values == pytest.approx(by_hand.values, abs=1e-12)
        assert set(ceiling.spread.values()) == {0.0}

    def test_the_odd_cell_is_left_out_and_the_seed_decides(self):
        odd = split_half_ceiling(TRUE[:79], CONTROL, project=None, metrics=["mae_shift"], seed=1)
        assert odd.n_half == 39
        again = split_half_ceiling(TRUE[:79], CONTROL, project=None, metrics=["mae_shift"], seed=1)
        other = split_half_ceiling(TRUE[:79], CONTROL, project=None, metrics=["mae_shift"], seed=2)
        assert odd.values == again.values != other.values

    def test_undefined_scores_say_why(self):
        ceiling = split_half_ceiling(TRUE, CONTROL, project=None, n_splits=1)
        assert "fit_projection" in ceiling.undefined["mmd"]
        with pytest.raises(MetricError, match="3 cells cannot be halved"):
            split_half_ceiling(TRUE[:3], CONTROL, project=PROJECT)
        with pytest.raises(MetricError, match="n_splits is 0"):
            split_half_ceiling(TRUE, CONTROL, project=PROJECT, n_splits=0)


class TestTable:
    """Several conditions, and those that were not predicted."""

    true: ClassVar = {
        name: cells(i, 50, response=np.roll(RESPONSE, i)) for i, name in enumerate("abc", 10)
    }
    control: ClassVar = {name: cells(i, 50) for i, name in enumerate("abc", 20)}
    pred: ClassVar = {
        name: cells(i, 50, response=np.roll(RESPONSE, i - 20)) for i, name in enumerate("abc", 30)
    }

    def test_averages_are_those_of_the_conditions(self):
        table = score_conditions(self.pred, self.true, self.control, project=PROJECT)
        each = [
            score_condition(self.pred[name], self.true[name], self.control[name], project=PROJECT)
            for name in "abc"
        ]
        assert table.averages["pearson_shift"] == pytest.approx(
            np.mean([one.values["pearson_shift"] for one in each])
        )
        assert table.n_averaged == dict.fromkeys(METRICS, 3)
        assert table.averages["discrimination"] == table.discrimination.score == 1.0
        assert table.missing == ()

    def test_a_condition_that_was_not_predicted_counts_as_no_effect(self):
        part = {name: self.pred[name] for name in "ac"}
        table = score_conditions(
            part, self.true, self.control, project=dict.fromkeys("abc", PROJECT)
        )
        whole = score_conditions(self.pred, self.true, self.control, project=PROJECT)
        assert table.missing == ("b",)
        assert table.conditions["b"].values["pearson_shift"] == 0.0
        assert table.averages["pearson_shift"] == pytest.approx(
            sum(whole.conditions[name].values["pearson_shift"] for name in "ac") / 3
        )
        assert table.discrimination.scores.tolist() == [1.0, 0.5, 1.0]

    def test_a_score_that_is_undefined_somewhere_says_how_many_are_averaged(self):
        silent = {**self.true, "b": self.control["b"].copy()}
        kept = {
            name: score_condition(self.pred[name], silent[name], self.control[name], project=None)
            for name in "abc"
        }
        averages, numbers = average_scores(kept)
        assert (numbers["de_overlap"], numbers["mae_shift"], numbers["mmd"]) == (2, 3, 0)
        assert np.isnan(averages["mmd"])

    def test_names_must_match(self):
        with pytest.raises(MetricError, match="without true cells: 'z'"):
            score_conditions({"z": self.pred["a"]}, self.true, self.control, project=PROJECT)
        with pytest.raises(MetricError, match="without control cells: 'a'"):
            score_conditions({}, {"a": self.true["a"]}, {}, project=PROJECT)
        with pytest.raises(MetricError, match="no true condition"):
            score_conditions({}, {}, {}, project=PROJECT)
        with pytest.raises(MetricError, match="same metrics"):
            average_scores({})

    def test_one_condition_has_no_discrimination(self):
        one = {"a": self.true["a"]}
        table = score_conditions({"a": self.pred["a"]}, one, self.control, project=PROJECT)
        assert table.discrimination is None
        assert "discrimination" not in table.averages
