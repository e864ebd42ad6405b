"""Distances between distributions, against numbers worked by hand and the reference."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from perturbdiff._errors import MetricError
from perturbdiff.metrics import centred_energy_distance, energy_distance, mmd

X = np.array([[0.0], [2.0]])
Y = np.array([[1.0], [5.0]])


def test_energy_distance_by_hand():
    # Between: 1, 5, 1, 3. Within: 2 and 4, or half of that with each cell's distance to itself.
    assert energy_distance(X, Y) == pytest.approx(2 * 2.5 - 2 - 4, abs=1e-12)
    assert energy_distance(X, Y, unbiased=False) == pytest.approx(2 * 2.5 - 1 - 2, abs=1e-12)


def test_centred_energy_distance_by_hand():
    # -1, 1 and -2, 2. Between: 1, 3, 3, 1.
    assert centred_energy_distance(X, Y) == pytest.approx(2 * 2 - 2 - 4, abs=1e-12)


def test_mmd_by_hand():
    def kernel(distance, width):
        return math.exp(-(distance**2) / (2 * width**2))

    for given, width in ((1.0, 1.0), (None, 4.0)):  # the median distance of the true cells is 4
        between = [kernel(d, width) for d in (1, 5, 1, 3)]
        expected = kernel(2, width) + kernel(4, width) - 2 * sum(between) / 4
        assert mmd(X, Y, bandwidth=given) == pytest.approx(expected, abs=1e-12)


def test_energy_distance_of_many_cells_is_that_of_the_reference_script():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(500, 5)), rng.normal(0.3, size=(450, 5))
    values = []
    for seed in range(3):
        r = np.random.default_rng(seed)
        u, v = a[r.permutation(len(a))[:400]], b[r.permutation(len(b))[:400]]
        n, m = len(u), len(v)
        within = cdist(u, u).sum() / (n * (n - 1)) + cdist(v, v).sum() / (m * (m - 1))
        values.append(2 * cdist(u, v).mean() - within)
    assert energy_distance(a, b) == pytest.approx(np.mean(values), abs=1e-12)
    assert energy_distance(a, b) != energy_distance(a, b, seed=7)
    assert energy_distance(a, b, seed=7) == energy_distance(a, b, seed=7)


def test_draws_do_not_matter_where_no_cell_is_left_out():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 3)), rng.normal(size=(30, 3))
    assert energy_distance(a, b, seed=1) == energy_distance(a, b, seed=2, max_cells=None)


def test_equal_distributions_have_no_distance_on_average_only_without_self_distances():
    def average(score):
        pairs = (np.random.default_rng(seed).normal(size=(2, 20, 4)) for seed in range(200))
        return float(np.mean([score(*pair.copy()) for pair in pairs]))

    # E|X - X'| is about 2.7 here, so self-distances add about 2 * 2.7 / 20.
    assert abs(average(lambda a, b: energy_distance(a, b.copy()))) < 0.03
    assert average(lambda a, b: energy_distance(a, b.copy(), unbiased=False)) > 0.2
    assert abs(average(lambda a, b: mmd(a, b.copy()))) < 0.01


def test_too_few_cells_and_a_kernel_without_width_are_refused():
    for score in (energy_distance, centred_energy_distance, mmd):
        with pytest.raises(MetricError, match="1 predicted and 2 true cells"):
            score(X[:1], Y)
    with pytest.raises(MetricError, match="at least half of the true cells coincide"):
        mmd(X, np.zeros((3, 1)))
    with pytest.raises(MetricError, match="n_draws=0"):
        energy_distance(X, Y, n_draws=0)
