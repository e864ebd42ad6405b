"""Differential expression and its agreement, against scipy and against numbers worked by hand."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, mannwhitneyu

from perturbdiff._errors import MetricError
from perturbdiff.metrics import DETable, compare_tables, de_overlap, direction_match, rank_genes


def cells(seed, n, rates):
    """Sparse-looking log1p values with many ties, as counts give."""
    counts = np.random.default_rng(seed).poisson(rates, (n, len(rates)))
    return np.log1p(counts * 10.0)


def table(fold, fdr, genes=None, p_value=None):
    fold, fdr = np.asarray(fold, float), np.asarray(fdr, float)
    return DETable(
        log2_fold_change=fold,
        p_value=fdr if p_value is None else np.asarray(p_value, float),
        fdr=fdr,
        statistic=np.zeros_like(fold),
        mean=np.ones_like(fold),
        control_mean=np.ones_like(fold),
        scale="log1p_cp10k",
        genes=None if genes is None else tuple(genes),
    )


@pytest.mark.parametrize(("n", "m"), [(40, 25), (3, 60), (1, 1)])
def test_rank_sums_equal_those_of_scipy(n, m):
    rates = np.geomspace(0.01, 8, 60)
    rates[:3] = 0  # silent genes
    treated, control = cells(0, n, rates * 1.5), cells(1, m, rates)
    ours = rank_genes(treated, control)
    tested = np.ptp(np.concatenate([treated, control]), axis=0) > 0
    result = mannwhitneyu(treated[:, tested], control[:, tested], method="asymptotic")
    expected = np.ones(len(rates))
    expected[tested] = result.pvalue
    np.testing.assert_allclose(ours.statistic[tested], result.statistic, rtol=0, atol=1e-9)
    np.testing.assert_allclose(ours.p_value, expected, rtol=1e-9)
    np.testing.assert_allclose(ours.fdr, false_discovery_control(expected), rtol=1e-9)
    assert (ours.p_value[~tested] == 1).all()


def test_fold_changes_by_hand():
    treated = np.log1p([[3.0, 2.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0]])
    control = np.log1p([[1.0, 8.0, 5.0, 0.0], [0.0, 8.0, 5.0, 0.0]])
    # Mean log1p of gene 0 among controls is log(2)/2, so its mean is sqrt(2) - 1.
    expected = [np.log2(3 / (np.sqrt(2) - 1)), -2.0, -np.inf, 0.0]
    np.testing.assert_allclose(rank_genes(treated, control).log2_fold_change, expected, atol=1e-12)
    finite = rank_genes(treated, control, pseudo_count=1.0).log2_fold_change
    np.testing.assert_allclose(finite, [np.log2(4 / np.sqrt(2)), np.log2(3 / 9), np.log2(1 / 6), 0])


def test_equal_means_have_no_sign_from_rounding():
    values = np.random.default_rng(0).random((50, 8))
    table_of_rows = rank_genes(np.flip(values, 0).copy(), values)
    assert (table_of_rows.log2_fold_change == 0).all()


def test_overlap_and_direction_by_hand():
    true = table([3, -2, 1, 0.5, 9], [0.01, 0.01, 0.01, 0.01, 0.5])
    pred = table([2, 5, 1, 0.1, 7], [0.01, 0.01, 0.9, 0.01, 0.01])
    result = compare_tables(pred, true)
    # N is 4; all four significant predicted genes count, three of them true; gene 1 turns round.
    assert (result.overlap, result.direction_match) == (0.75, 0.75)
    assert (result.n_true, result.n_pred, result.n_compared, result.n_absent) == (4, 4, 4, 0)
    # First two: 0 and 1 against 4 and 1.
    assert compare_tables(pred, true, n_top=2).overlap == 0.5
    assert compare_tables(pred, true, n_top=99).overlap == 0.75


def test_ties_that_do_not_all_fit_are_averaged_or_go_by_p_value():
    fdr = [0.01] * 3 + [0.9] * 3
    true = table([3, 2, 1, 0, 0, 0], fdr)
    tied = table([np.inf] * 6, [0.01] * 6, p_value=[0.3, 0.3, 0.3, 0.1, 0.2, 0.2])
    # Any 3 of 6 may be taken, 1.5 of the true 3 on average; by p-value genes 3, 4, 5 are.
    assert compare_tables(tied, true).overlap == pytest.approx(0.5)
    assert compare_tables(tied, true, ties="p_value").overlap == 0.0


def test_no_significant_prediction_overlaps_with_nothing():
    assert compare_tables(table([1, 1], [0.9, 0.9]), table([1, 2], [0.01, 0.9])).overlap == 0.0


def test_nothing_significant_in_the_truth_is_refused():
    nothing = table([1, 2], [0.5, 0.9])
    with pytest.raises(MetricError, match=r"No gene of the truth is significant .* \(2 tested\)"):
        compare_tables(table([1, 2], [0.01, 0.01]), nothing)
    same = cells(0, 30, np.full(20, 1.0))
    with pytest.raises(MetricError, match="Leave this condition out"):
        de_overlap(cells(1, 30, np.full(20, 9.0)), same[:15].copy(), same[15:].copy())


def test_genes_that_the_prediction_lacks_count_as_unchanged():
    """A predicted table without the two genes it would get wrong, out of four that truly change."""
    names = ["a", "b", "c", "d", "e"]
    true = table([3, -2, 1, 2, 0], [0.01, 0.01, 0.01, 0.01, 0.9], genes=names)
    full = table([3, 2, 1, -2, 0], [0.01] * 4 + [0.9], genes=names)
    part = full.take(np.array([2, 4, 0]))
    assert compare_tables(full, true).direction_match == 0.5
    kept = compare_tables(part, true)
    assert (kept.direction_match, kept.n_compared, kept.n_absent) == (0.5, 2, 2)
    assert kept.overlap == 0.5
    assert compare_tables(part, true, absent="drop").direction_match == 1.0  # the inflated figure


def test_tables_that_cannot_be_aligned_are_refused():
    named = table([1, 2], [0.01, 0.01], genes=["a", "b"])
    with pytest.raises(MetricError, match="Give both their gene names"):
        compare_tables(table([1, 2, 3], [0.01] * 3), table([1, 2], [0.01, 0.01]))
    with pytest.raises(MetricError, match="Give both their gene names"):
        compare_tables(table([1, 2], [0.01, 0.01]), named)
    with pytest.raises(MetricError, match=r"no gene in common.*'a', 'b'"):
        compare_tables(table([1, 2], [0.01, 0.01], genes=["A", "B"]), named)
    other = table([1, 2], [0.01, 0.01], genes=["b", "z"])
    first = table([1, 2], [0.01, 0.9], genes=["a", "b"])
    with pytest.raises(MetricError, match="none of the truly significant genes"):
        compare_tables(other, first, absent="drop")
    for wrong in ({"absent": "ignore"}, {"ties": "position"}):
        with pytest.raises(MetricError, match="'no_effect' or 'drop', and 'average' or 'p_value'"):
            compare_tables(named, named, **wrong)
    with pytest.raises(MetricError, match="n_top is 0"):
        compare_tables(named, named, n_top=0)


def test_names_must_be_one_each():
    treated, control = cells(0, 5, np.ones(2)), cells(1, 5, np.ones(2))
    with pytest.raises(MetricError, match=r"2 names .1 different. for 2 columns"):
        rank_genes(treated, control, genes=["a", "a"])
    assert rank_genes(treated, control, genes=["a", "b"]).genes == ("a", "b")
    with pytest.raises(MetricError, match="must not be negative"):
        rank_genes(treated, control, pseudo_count=-1.0)


class TestScale:
    """A declared scale wins; what it cannot be is refused; nothing is logged twice."""

    rates = np.r_[np.full(100, 0.3), np.full(100, 3.0)]

    @property
    def sides(self):
        counts = [np.random.default_rng(i).poisson(self.rates * (i + 1), (50, 200)) for i in (0, 1)]
        return [side / side.sum(1, keepdims=True) * 1e4 for side in counts]

    def test_logged_and_unlogged_values_give_the_same_table(self):
        unlogged = rank_genes(*self.sides, scale="cp10k")
        logged = rank_genes(*(np.log1p(side) for side in self.sides))
        np.testing.assert_allclose(logged.log2_fold_change, unlogged.log2_fold_change, atol=1e-9)
        np.testing.assert_allclose(logged.p_value, unlogged.p_value, atol=1e-12)
        assert (logged.scale, unlogged.scale) == ("log1p_cp10k", "cp10k")

    def test_a_hundred_genes_give_the_rows_of_the_whole_table(self):
        logged = [np.log1p(side) for side in self.sides]
        part = rank_genes(*(side[:, 50:150] for side in logged))
        whole = rank_genes(*logged).take(np.arange(50, 150))
        np.testing.assert_allclose(part.log2_fold_change, whole.log2_fold_change, atol=1e-12)
        np.testing.assert_allclose(part.p_value, whole.p_value, atol=1e-12)

    @pytest.mark.parametrize("declared", ["counts", "log1p", "CP10K"])
    def test_an_unknown_scale_is_refused(self, declared):
        with pytest.raises(MetricError, match="Declare 'log1p_cp10k' or 'cp10k'"):
            rank_genes(*self.sides, scale=declared)

    def test_values_that_the_scale_cannot_hold_are_refused(self):
        with pytest.raises(MetricError, match=r"declared log1p_cp10k .* from 0 to 9\.21"):
            rank_genes(*self.sides)
        counts = np.random.default_rng(0).poisson(5, (20, 30))
        with pytest.raises(MetricError, match="Normalise it, declare the right scale"):
            rank_genes(counts, counts.copy())
        with pytest.raises(MetricError, match=r"run from -0\.1"):
            rank_genes(np.full((2, 2), -0.1), np.ones((2, 2)))
        with pytest.raises(MetricError, match="declared cp10k"):
            rank_genes(np.full((2, 2), 2e4), np.ones((2, 2)), scale="cp10k")

    def test_small_whole_numbers_are_taken_as_declared(self):
        treated, control = np.array([[3, 0], [2, 1]]), np.array([[1, 1], [0, 2]])
        fold = rank_genes(treated, control).log2_fold_change
        expected = np.log2(np.expm1([2.5, 0.5]) / np.expm1([0.5, 1.5]))
        np.testing.assert_allclose(fold, expected, atol=1e-12)


def test_functions_of_cells_go_through_the_same_tables():
    rates = np.geomspace(0.2, 4, 40)
    up = np.where(np.arange(40) % 3 == 0, 3.0, 1.0)
    control, true = cells(0, 60, rates), cells(1, 60, rates * up)
    pred = cells(2, 60, rates * np.where(np.arange(40) % 6 == 0, 3.0, 0.8))
    result = compare_tables(rank_genes(pred, control), rank_genes(true, control))
    assert 0 < result.overlap < 1
    assert 0 < result.direction_match < 1
    assert de_overlap(pred, true, control) == result.overlap
    assert direction_match(pred, true, control) == result.direction_match
