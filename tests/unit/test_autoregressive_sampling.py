"""Choosing a bin with one uniform number, and a gene with one each."""

import math

import pytest
import torch

from perturbdiff._errors import ConfigError
from perturbdiff._random import gene_lanes, uniform
from perturbdiff.autoregressive import Sampling

SHARE = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
N = 20_000


def numbers(width: int = 1) -> torch.Tensor:
    """Uniform numbers as cells have them."""
    return uniform(torch.arange(N), gene_lanes([f"g{i}" for i in range(width)]))


def shares(chosen: torch.Tensor) -> torch.Tensor:
    return torch.bincount(chosen, minlength=4) / N


def close(found, expected) -> bool:
    """Within four standard errors of a share."""
    return bool(((found - expected).abs() <= 4 * (expected * (1 - expected) / N).sqrt()).all())


def test_a_uniform_number_is_inverted_by_hand():
    given = torch.tensor([1e-9, 0.4999, 0.5001, 0.7999, 0.8001, 0.9499, 0.9501, 1 - 1e-12])
    chosen = Sampling().choose(SHARE.log().expand(8, 4), given.double())
    assert chosen.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_divides_logits():
    tempered = Sampling(temperature=2.0).probabilities(SHARE.log())
    root = SHARE.sqrt()
    torch.testing.assert_close(tempered, root / root.sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, 4), (0.96, 4), (0.95, 3), (0.9, 3), (0.51, 2), (0.5, 1), (1e-6, 1)]
)
def test_top_p_keeps_the_smallest_sufficient_set_wherever_it_stands(top_p, kept):
    place = torch.tensor([2, 0, 3, 1])
    share = Sampling(top_p=top_p).probabilities(SHARE[place].log())
    expected = torch.where(torch.arange(4) < kept, SHARE, 0)[place]
    torch.testing.assert_close(share, expected / expected.sum(), atol=1e-12, rtol=0)


def test_top_p_never_chooses_what_it_left_out():
    logits = SHARE[[3, 0, 1, 2]].log().float().expand(3, 4)
    ends = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert set(Sampling(top_p=0.8).choose(logits, ends).tolist()) == {1, 2}


def test_choices_follow_the_distribution():
    logits = SHARE.log()
    assert close(shares(Sampling().choose(logits.expand(N, 4), numbers()[:, 0])), SHARE)
    named = Sampling().choose_named(logits.expand(N, 4), numbers(4))
    assert close(shares(named), SHARE)
    assert not close(shares(named), torch.full((4,), 0.25, dtype=torch.float64))


def test_a_named_choice_stays_with_its_name():
    place = torch.tensor([2, 0, 3, 1])
    logits, given = SHARE.log().expand(N, 4), numbers(4)
    moved = Sampling().choose_named(logits[:, place], given[:, place])
    assert torch.equal(place[moved], Sampling().choose_named(logits, given))


def test_greedy_takes_the_most_likely():
    greedy, logits = Sampling(greedy=True), torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert greedy.choose(logits, torch.tensor([0.99, 0.99])).tolist() == [1, 0]
    assert greedy.choose_named(logits, torch.full((2, 3), 0.99)).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e39, 1e300])
def test_any_temperature_leaves_a_distribution(temperature):
    """The coldest choice is the likeliest, the hottest any that is possible."""
    logits = torch.tensor([0.5, 2.0, 1.0, -math.inf])
    found = Sampling(temperature=temperature).probabilities(logits)
    cold, hot = [0.0, 1, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0]
    expected = torch.tensor(cold if temperature < 1 else hot, dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_choices_that_are_masked_are_never_made():
    logits = torch.tensor([0.0, -math.inf, 0.0]).expand(N, 3)
    assert not (Sampling().choose(logits, numbers()[:, 0]) == 1).any()
    assert not (Sampling().choose_named(logits, numbers(3)) == 1).any()


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_settings_are_refused(setting):
    with pytest.raises(ConfigError, match=rf"sampling\.{next(iter(setting))}"):
        Sampling(**setting)
