"""Perturbations and combinations that were measured nowhere, from others that were."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from perturbdiff.prior import (
    Additive,
    ConditionSummary,
    ContextSummary,
    EffectPrior,
    MeanShift,
    PriorQuestion,
)
from perturbdiff.prior._unmeasured import all_alone, split_unmeasured, trusted_share

N_GENES, N_CELLS = 60, 400


def screen(n_singles=20, *, pairs=(), explained=0.0, common=0.15, uneven=0.0, seed=0):
    """Singles with something in common and something that features may explain; additive pairs.

    With ``uneven`` a few singles do most of what there is.
    """
    rng = np.random.default_rng(seed)
    base = rng.uniform(0.6, 2.0, N_GENES)
    context = ContextSummary(
        covariates=(), mean=base, var=base * 0.3, n_cells=N_CELLS, axes=rng.normal(size=(30, 3))
    )
    shared, directions = rng.normal(0, common, N_GENES), rng.normal(0, 0.15, (4, N_GENES))
    features = {f"P{i:02d}": rng.normal(size=4) for i in range(n_singles)}
    shift = {
        name: shared
        + explained * value @ directions
        + (1 - explained) * rng.normal(0, 0.15 * np.exp(uneven * rng.normal()), N_GENES)
        for name, value in features.items()
    }
    conditions = []
    for members in [*((name,) for name in features), *pairs]:
        noise = rng.normal(0, np.sqrt(base * 0.3 / N_CELLS))
        mean = (base + sum(shift[name] for name in members) + noise).clip(0)
        conditions.append(
            ConditionSummary(
                members=members, context=context, mean=mean, var=base * 0.3, n_cells=N_CELLS
            )
        )
    return conditions, features


def errors(known, features, kinds=(EffectPrior, MeanShift), n_held=6):
    """Squared errors of each baseline for singles left out one by one."""
    found = {kind: [] for kind in kinds}
    for held in known[:n_held]:
        rest = [c for c in known if not set(c.members) & set(held.members)]
        for kind in kinds:
            answer = kind().fit(rest, features=features).predict_mean(held.question)
            found[kind].append(((answer - held.mean) ** 2).sum())
    return [np.mean(values) for values in found.values()]


def one_program(seed):
    """Perturbations that all move one program; features that have nothing to do with it."""
    known, names = screen(seed=seed)
    rng = np.random.default_rng(seed + 50)
    program, shared = rng.normal(0, 0.2, N_GENES), rng.normal(0, 0.1, N_GENES)
    moved = []
    for c in known:
        shift = shared + rng.normal() * program
        noise = rng.normal(0, np.sqrt(c.var / N_CELLS))
        moved.append(replace(c, mean=(c.context.mean + shift + noise).clip(0)))
    return moved, {name: rng.normal(size=4) for name in names}


@pytest.mark.parametrize("seed", [1, 7])
def test_features_that_explain_nothing_do_no_harm(seed):
    # Every gene repeats the same chance agreement, so that likelihood favours the features.
    known, features = one_program(seed)
    assert EffectPrior().fit(known, features=features).settings.by_features > 0
    prior, plain = errors(known, features, n_held=len(known))
    assert prior < 1.05 * plain


def test_features_that_explain_the_response_are_used():
    known, features = screen(explained=1.0)
    prior, plain = errors(known, features)
    assert prior < 0.5 * plain
    fitted = EffectPrior().fit(known, features=features)
    assert fitted.coefficients("perturbation")[0] > 0.5


@pytest.mark.parametrize("common", [0.0, 0.15])
def test_pair_of_measured_singles_is_additive_where_no_other_pair_is_known(common):
    # That singles say little about each other must not weaken the sum of two measured ones.
    known, features = screen(16, pairs=[("P00", "P01")], common=common, uneven=1.0)
    held, singles = known[-1], known[:-1]
    added = Additive().fit(singles).predict_mean(held.question)
    shift = added - held.context.mean
    for given in (features, {}):
        answer = EffectPrior().fit(singles, features=given).predict_mean(held.question)
        assert np.linalg.norm(answer - added) < 0.1 * np.linalg.norm(shift)


def test_how_pairs_deviate_is_learned_from_other_pairs():
    names = [f"P{i:02d}" for i in range(8)]
    pairs = list(pairwise(names))
    known, _ = screen(8, pairs=pairs)
    weak = [  # every pair does half of what its parts do
        replace(c, mean=c.context.mean + 0.5 * (c.mean - c.context.mean))
        if len(c.members) > 1
        else c
        for c in known
    ]
    held, rest = weak[-1], weak[:-1]
    prior = EffectPrior().fit(rest).predict_mean(held.question)
    added = Additive().fit(rest).predict_mean(held.question)
    assert ((prior - held.mean) ** 2).sum() < 0.2 * ((added - held.mean) ** 2).sum()


def test_unmeasured_member_of_a_pair_does_what_others_do_on_average():
    known, _ = screen(8)
    prior = EffectPrior().fit(known)
    here = known[0].context.mean
    pair, one, new = (
        prior.predict_mean(PriorQuestion(members=members, context=known[0].context)) - here
        for members in (("P00", "X"), ("P00",), ("X",))
    )
    alone = known[0].mean - here
    assert np.linalg.norm(one - alone) < 0.15 * np.linalg.norm(alone)
    assert np.linalg.norm(pair - new - alone) < 0.15 * np.linalg.norm(pair)


def test_what_is_left_out_leaves_no_trace():
    known, _ = screen(5, pairs=[("P00", "P01")])
    odd = replace(known[-1], members=("P02", "Z"))
    conditions = [*known, odd]
    assert all_alone(conditions, ("P00", "P01"))
    assert not all_alone(conditions, odd.members)
    assert not all_alone(conditions, ("P00",))
    for out, kept in split_unmeasured(conditions, combinations=False, seed=0, limit=12):
        hidden = {member for c in out for member in c.members}
        assert hidden.isdisjoint(member for c in kept for member in c.members)
        assert ("P00", "P01") not in {c.members for c in out}
    ((out, kept),) = split_unmeasured(conditions, combinations=True, seed=0, limit=12)
    assert [c.members for c in out] == [("P00", "P01")]
    assert len(kept) == len(conditions) - 1
    folds = split_unmeasured(screen(20)[0], combinations=False, seed=0, limit=12)
    assert len(folds) == 10


def test_trust_needs_more_than_luck():
    assert trusted_share([]) == 0
    assert trusted_share([(5.0, 5.0)]) == 0  # one perturbation says nothing about the next
    assert trusted_share([(1.0, 1.0)] * 4) == 1
    assert trusted_share([(0.5, 1.0)] * 4) == pytest.approx(0.5)
    assert trusted_share([(-1.0, 1.0)] * 4) == 0
    lucky = [(4.0, 1.0), *[(-0.5, 1.0)] * 6]  # on average a gain, by one perturbation alone
    assert trusted_share(lucky) == 0


def test_state_with_features_restores_answers_bit_by_bit():
    known, features = screen(8, pairs=[("P00", "P01"), ("P02", "P03")], explained=0.9)
    prior = EffectPrior().fit([c for c in known if c.members != ("P07",)], features=features)
    assert prior.settings.by_features > 0
    again = EffectPrior.from_state(prior.state())
    for members in (("P07",), ("P00", "P04"), ("P00", "P07"), ("P00",)):
        question = PriorQuestion(members=members, context=known[0].context)
        np.testing.assert_array_equal(again.predict_mean(question), prior.predict_mean(question))
