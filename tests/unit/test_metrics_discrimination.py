"""Discrimination between conditions, by hand."""

import numpy as np
import pytest

from perturbdiff._errors import MetricError
from perturbdiff.metrics import discrimination, discrimination_ceiling, spearman_brown

TRUE = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def test_ranks_by_hand():
    # L1 from (0.9, 0.3, 0): 0.4, 1.6, 2.2, 0.8. Each prediction is this one.
    pred = np.tile([0.9, 0.3, 0.0], (4, 1))
    result = discrimination(pred, TRUE, similarity="l1")
    assert result.ranks.tolist() == [0, 2, 3, 1]
    np.testing.assert_allclose(result.scores, [1, 1 / 3, 0, 2 / 3], atol=1e-12)
    assert (result.score, result.ranked_first) == (0.5, 0.25)
    # The same ranks over all conditions: a guess has (n + 1) / 2n.
    assert discrimination(pred, TRUE, similarity="l1", normaliser="n").score == 0.625


@pytest.mark.parametrize("similarity", ["pearson", "cosine", "l1", "l2"])
def test_perfect_predictions_are_told_apart_and_reversed_ones_are_not(similarity):
    assert discrimination(TRUE.copy(), TRUE, similarity=similarity).score == 1.0
    assert discrimination(-TRUE, TRUE, similarity=similarity).ranked_first == 0.0


def test_no_effect_gets_the_middle_rank_wherever_it_stands():
    for similarity in ("pearson", "cosine"):
        nothing = discrimination(np.zeros_like(TRUE) + 1e-17, TRUE, similarity=similarity)
        assert nothing.ranks.tolist() == [1.5] * 4
        assert (nothing.score, nothing.ranked_first) == (0.5, 0.0)


def test_the_targeted_gene_is_left_out():
    # Without its target (gene 1), condition 1 is nearest to itself; with it, to condition 0.
    true = np.array([[0.0, -2.0, 1.0], [1.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    pred = true.copy()
    pred[1] = [1.0, -2.0, 1.0]
    assert discrimination(pred, true, similarity="l1").ranks.tolist() == [0, 1, 0]
    kept = discrimination(pred, true, similarity="l1", target_genes=[-1, 1, -1])
    assert kept.ranks.tolist() == [0, 0, 0]


def test_undefined_questions_are_refused():
    with pytest.raises(MetricError, match="needs at least 2"):
        discrimination(TRUE[:1].copy(), TRUE[:1])
    with pytest.raises(MetricError, match=r"3 predicted and 4 true shifts.*a shift of zero"):
        discrimination(TRUE[:3].copy(), TRUE)
    with pytest.raises(MetricError, match="condition 2 has no direction"):
        discrimination(TRUE.copy(), np.vstack([TRUE[:2], np.full((1, 3), 0.4), TRUE[3:]]))
    with pytest.raises(MetricError, match="share memory"):
        discrimination(TRUE, TRUE)
    with pytest.raises(MetricError, match="Use one of pearson, l1, l2, cosine"):
        discrimination(TRUE.copy(), TRUE, similarity="manhattan")
    with pytest.raises(MetricError, match="'n' or 'n-1'"):
        discrimination(TRUE.copy(), TRUE, normaliser="m")
    with pytest.raises(MetricError, match="2 entries for 4 conditions"):
        discrimination(TRUE.copy(), TRUE, target_genes=[0, 1])


def test_ceiling_is_high_for_different_conditions_and_a_guess_for_equal_ones():
    rng = np.random.default_rng(0)
    control = {name: rng.normal(size=(40, 20)) for name in "abcdef"}
    equal = {name: rng.normal(size=(40, 20)) for name in control}
    apart = {name: cells + rng.normal(size=20) for name, cells in equal.items()}
    high = discrimination_ceiling(apart, control, seed=1)
    assert (high.score, high.ranked_first) == (1.0, 1.0)
    # Whole control cells lend their noise to both halves; halves of them do not.
    lent = discrimination_ceiling(equal, control, n_splits=20)
    free = discrimination_ceiling(equal, control, n_splits=20, split_control=True)
    assert lent.score > 0.7
    assert abs(free.score - 0.5) < 0.15
    again = discrimination_ceiling(apart, control, seed=1)
    np.testing.assert_array_equal(again.ranks, high.ranks)


def test_ceiling_refuses_conditions_that_it_cannot_halve():
    cells = {"a": np.ones((3, 2)), "b": np.ones((9, 2))}
    with pytest.raises(MetricError, match=r"without control cells: \['a', 'b'\]"):
        discrimination_ceiling(cells, {})
    with pytest.raises(MetricError, match="3 cells cannot be halved"):
        discrimination_ceiling(cells, {name: np.zeros((9, 2)) for name in cells})


def test_correction_to_full_depth_by_hand():
    assert spearman_brown(0.5) == pytest.approx(2 / 3)
    assert spearman_brown(1.0) == 1.0
    with pytest.raises(MetricError, match=r"must lie in \(0, 1\]"):
        spearman_brown(-0.2)
