"""Laws of every score: genes, cells and conditions are sets, and nothing beats the truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbdiff.metrics import (
    CONDITION_METRICS,
    METRICS,
    centred_energy_distance,
    discrimination,
    energy_distance,
    fit_projection,
    mmd,
    rank_genes,
    score_condition,
)

G = 40
seeds = st.integers(0, 2**32 - 1)


def population(rng, n, *, spread):
    """Counts with silent genes and many ties, so that equal genes and infinite folds occur."""
    rates = rng.choice([0.0, 0.05, 0.5, 2.0], G) * np.exp(spread * rng.normal(size=G))
    return np.log1p(20.0 * rng.poisson(rates, (n, G)))


def triple(seed):
    rng = np.random.default_rng(seed)
    base = population(rng, 70, spread=0.0)
    control, true, pred = base[:30], base[30:50].copy(), base[50:]
    changed = rng.permutation(G)[:15]
    true[:, changed] = population(rng, 20, spread=1.0)[:, changed]
    pred = np.where(rng.random(G) < 0.5, population(rng, 20, spread=1.0), pred)
    return pred, true, control


def all_scores(pred, true, control, project):
    return score_condition(pred, true, control, project=project)


@given(seeds)
def test_genes_are_a_set(seed):
    pred, true, control = triple(seed)
    axes = fit_projection(np.concatenate([control, pred]), n_axes=5)
    order = np.random.default_rng(seed).permutation(G)
    back = np.argsort(order)
    direct = all_scores(pred, true, control, axes)
    moved = all_scores(
        pred[:, order], true[:, order], control[:, order], lambda cells: axes(cells[:, back])
    )
    assert moved.values == pytest.approx(direct.values, abs=1e-9, nan_ok=True)
    assert moved.undefined.keys() == direct.undefined.keys()


@given(seeds)
def test_cells_are_a_set(seed):
    pred, true, control = triple(seed)
    axes = fit_projection(np.concatenate([control, pred]), n_axes=5)
    rng = np.random.default_rng(seed)
    direct = all_scores(pred, true, control, axes)
    moved = all_scores(*(rng.permutation(side) for side in (pred, true, control)), axes)
    assert moved.values == pytest.approx(direct.values, abs=1e-9, nan_ok=True)


@given(seeds)
def test_nothing_beats_the_truth(seed):
    pred, true, control = triple(seed)
    axes = fit_projection(np.concatenate([control, pred]), n_axes=5)
    best = all_scores(true.copy(), true, control, axes).values
    other = all_scores(pred, true, control, axes).values
    for name in CONDITION_METRICS:
        sign = 1 if METRICS[name].higher_is_better else -1
        # Unbiased distances may, by chance, put another below the truth.
        if METRICS[name].needs != "axes" and not np.isnan(other[name]):
            assert sign * best[name] >= sign * other[name] - 1e-9


@given(seeds, st.floats(-3, 3))
def test_distances_do_not_see_where_both_clouds_lie(seed, offset):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(15, 4)), 2 * rng.normal(size=(12, 4))
    for score in (energy_distance, centred_energy_distance, mmd):
        assert score(a + offset, b + offset) == pytest.approx(score(a, b), abs=1e-9)
    assert centred_energy_distance(a + offset, b) == pytest.approx(
        centred_energy_distance(a, b), abs=1e-9
    )
    assert energy_distance(a, b) == pytest.approx(energy_distance(b, a), abs=1e-9)


@given(seeds)
def test_energy_distance_with_self_distances_is_never_negative(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(8, 3)), rng.normal(rng.normal(), 1.0, size=(11, 3))
    assert energy_distance(a, b, unbiased=False) >= -1e-12
    assert energy_distance(a, b) <= energy_distance(a, b, unbiased=False)


@given(seeds)
def test_sides_of_the_rank_sum_change_places(seed):
    _, true, control = triple(seed)
    there, back = rank_genes(true, control), rank_genes(control, true)
    np.testing.assert_allclose(there.statistic + back.statistic, len(true) * len(control))
    np.testing.assert_allclose(there.p_value, back.p_value, atol=1e-12)
    np.testing.assert_allclose(there.log2_fold_change, -back.log2_fold_change, atol=1e-9)


@given(seeds)
def test_ranks_do_not_see_a_monotone_change_of_scale(seed):
    _, true, control = triple(seed)
    plain, bent = rank_genes(true, control), rank_genes(true**2 / 10, control**2 / 10)
    np.testing.assert_allclose(plain.statistic, bent.statistic)
    np.testing.assert_allclose(plain.p_value, bent.p_value, atol=1e-12)


@given(seeds, st.integers(2, 7))
def test_conditions_are_a_set(seed, n):
    rng = np.random.default_rng(seed)
    pred, true = rng.normal(size=(n, 9)), rng.normal(size=(n, 9))
    order = rng.permutation(n)
    for similarity in ("pearson", "cosine", "l1", "l2"):
        direct = discrimination(pred, true, similarity=similarity)
        moved = discrimination(pred[order], true[order], similarity=similarity)
        np.testing.assert_array_equal(moved.ranks, direct.ranks[order])
        assert 0 <= direct.score <= 1
