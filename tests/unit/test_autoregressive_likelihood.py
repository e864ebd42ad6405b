"""Losses of bins and of counts, against independent libraries."""

import numpy as np
import pytest
import torch
from scipy import stats

from perturbdiff.autoregressive import bin_loss, count_loss, smoothed_targets


def test_wide_bins_lend_to_their_neighbours_and_single_counts_to_nobody():
    targets = smoothed_targets(8, 0.3)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    torch.testing.assert_close(targets[:5], torch.eye(8)[:5])
    # Bin 5 of 5, 6, 7: a half and a quarter to the others, in proportion.
    torch.testing.assert_close(targets[5, 5:], torch.tensor([0.7, 0.2, 0.1]))
    torch.testing.assert_close(targets[6, 5:], torch.tensor([0.15, 0.7, 0.15]))
    torch.testing.assert_close(smoothed_targets(6, 0.3), torch.eye(6))


def test_without_smoothing_it_is_cross_entropy():
    logits = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    bins = torch.arange(15).view(5, 3) % 8
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), bins.flatten(), reduction="none"
    )
    found = bin_loss(logits, bins, smoothed_targets(8, 0.0))
    torch.testing.assert_close(found.flatten(), expected)


@pytest.mark.parametrize("dispersion", [0.01, 0.5, 4.0])
def test_counts_cost_what_a_negative_binomial_says(dispersion):
    mean = torch.tensor([0.05, 1.0, 30.0], dtype=torch.float64)[:, None]
    counts = torch.tensor([0, 1, 7, 100])
    log_dispersion = torch.full((3, 4), np.log(dispersion), dtype=torch.float64)
    found = count_loss(mean.log().expand(3, 4), log_dispersion, counts.expand(3, 4))
    shape = 1 / dispersion
    expected = -stats.nbinom.logpmf(counts, shape, shape / (shape + mean))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
