"""Counts to bins and back, by known answers."""

import pytest
import torch

from perturbdiff.autoregressive import ExpressionBins


def numbers(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def counts():
    return (numbers(4000).log().neg() * 12).long()


def test_small_counts_have_bins_of_their_own_and_come_back_as_they_were(counts):
    bins = ExpressionBins.fit(counts, 16)
    small = torch.arange(5)
    assert bins.encode(small).tolist() == [0, 1, 2, 3, 4]
    assert bins.decode(small, numbers(5)).tolist() == [0, 1, 2, 3, 4]


def test_every_count_comes_back_in_its_bin(counts):
    bins = ExpressionBins.fit(counts, 12)
    place = bins.encode(counts)
    again = bins.decode(place, numbers(len(counts)))
    assert torch.equal(bins.encode(again), place)
    assert bool(torch.isin(again, counts).all())
    assert len(bins) <= 12


def test_edges_cut_the_sum_of_counts_into_equal_parts():
    """3 wide bins of 5 × 60, 30 × 10 and 300 × 1: each is a third of what lies above 4."""
    counts = torch.tensor([5] * 60 + [30] * 10 + [300])
    bins = ExpressionBins.fit(counts, 8)
    assert bins.first_count.tolist() == [0, 1, 2, 3, 4, 5, 30]
    finer = ExpressionBins.fit(counts, 40)
    assert finer.first_count.tolist() == [0, 1, 2, 3, 4, 5, 30, 300]
    assert finer.last_count == 300


def test_within_a_bin_counts_are_drawn_as_they_were_seen():
    counts = torch.tensor([5] * 300 + [9] * 100)
    bins = ExpressionBins.fit(counts, 6)
    drawn = bins.decode(torch.full((20_000,), 5), numbers(20_000))
    assert drawn.unique().tolist() == [5, 9]
    assert float((drawn == 9).float().mean()) == pytest.approx(0.25, abs=0.01)


def test_the_error_of_the_round_trip_falls_with_the_number_of_bins(counts):
    draws = numbers(len(counts), seed=1)
    errors = [ExpressionBins.fit(counts, n).round_trip_error(counts, draws) for n in (6, 12, 60)]
    assert errors[0] > errors[1] > errors[2]
    low = torch.tensor([0, 1, 2, 3, 4])
    assert ExpressionBins.fit(low, 6).round_trip_error(low, numbers(5)) == 0
    one = ExpressionBins.fit(torch.tensor([5, 9]), 6)
    error = one.round_trip_error(torch.tensor([5]), torch.tensor([0.9]))
    assert error == pytest.approx(torch.tensor(10 / 6, dtype=torch.float64).log().item())


def test_bins_are_their_state(counts):
    bins = ExpressionBins.fit(counts, 16)
    again = ExpressionBins.from_state(bins.state())
    assert torch.equal(again.encode(counts), bins.encode(counts))
    assert torch.equal(again.seen, bins.to("cpu").seen)
