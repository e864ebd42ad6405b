"""Laws of the priors: genes and conditions are sets, a left-out condition is never seen."""

import json
from dataclasses import replace

import numpy as np
import pytest

from perturbdiff.prior import (
    Additive,
    CarriedLogRatio,
    CopyControl,
    EffectPrior,
    GeneRidge,
    MeanShift,
    MixtureLogRatio,
    NearestContext,
    PriorQuestion,
    SimilarityShift,
    summarise_condition,
    summarise_context,
)

BASELINES = [
    CopyControl,
    MeanShift,
    SimilarityShift,
    CarriedLogRatio,
    MixtureLogRatio,
    NearestContext,
    GeneRidge,
    EffectPrior,
]
N_GENES, N_AXES = 40, 6


def make_world(seed=0, *, n_contexts=5, perturbations=(("A",), ("B",)), shuffled=False):
    """Contexts and conditions drawn from Poisson cells; rows may be shuffled without a trace."""
    rng = np.random.default_rng(seed)
    order = np.random.default_rng(seed + 1)
    base = rng.normal(0, 1, N_GENES)
    response = {name: rng.normal(0, 0.8, N_GENES) for name in "ABCDEFGH"}
    loadings = rng.normal(0, 1, (N_GENES, N_AXES))
    conditions = []

    def cells(rate, n):
        values = np.log1p(rng.poisson(np.exp(rate), (n, N_GENES)))
        return values[order.permutation(n)] if shuffled else values

    for i in range(n_contexts):
        level = base + rng.normal(0, 0.6, N_GENES)
        control = cells(level, 60)
        context = summarise_context(control, control @ loadings, covariates=(f"T{i}",))
        for members in perturbations:
            rate = level + sum(response[name] for name in members)
            conditions.append(summarise_condition(cells(rate, 50), context, members=members))
    return conditions


def with_genes(condition, order):
    """The same condition with its genes in another order."""
    context = condition.context
    context = replace(context, mean=context.mean[order], var=context.var[order])
    return replace(condition, context=context, mean=condition.mean[order], var=condition.var[order])


FEATURES = {"A": np.array([1.0, 0.0]), "B": np.array([0.2, 1.0]), "C": np.array([1.0, 1.0])}


def answers(baseline, conditions, questions):
    """All predictions of a freshly fitted baseline."""
    fitted = baseline().fit(conditions, features=FEATURES)
    return np.stack([fitted.predict_mean(question) for question in questions])


@pytest.mark.parametrize("baseline", BASELINES)
def test_permuting_genes_permutes_the_answer(baseline):
    world = make_world()
    order = np.random.default_rng(3).permutation(N_GENES)
    train, held = world[2:], world[:2]
    direct = answers(baseline, train, [c.question for c in held])
    moved = answers(
        baseline,
        [with_genes(c, order) for c in train],
        [with_genes(c, order).question for c in held],
    )
    np.testing.assert_allclose(moved, direct[:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_order_of_conditions_is_invisible(baseline):
    world = make_world()
    train, questions = world[2:], [c.question for c in world[:2]]
    direct = answers(baseline, train, questions)
    np.testing.assert_array_equal(answers(baseline, train[::-1], questions), direct)


@pytest.mark.parametrize("baseline", BASELINES)
def test_order_of_cells_is_invisible(baseline):
    world, moved = make_world(), make_world(shuffled=True)
    direct = answers(baseline, world[2:], [c.question for c in world[:2]])
    again = answers(baseline, moved[2:], [c.question for c in moved[:2]])
    np.testing.assert_allclose(again, direct, rtol=0, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_answers_are_finite_and_not_negative(baseline):
    world = make_world(4)
    mean = answers(baseline, world[2:], [c.question for c in world[:2]])
    assert np.isfinite(mean).all()
    assert (mean >= 0).all()


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_held_out_response_is_not_needed(baseline):
    world = make_world()
    question = replace(world[0], mean=world[0].mean + np.nan).question
    assert np.isfinite(answers(baseline, world[2:], [question])).all()


def test_a_combination_is_a_set_of_members():
    singles = make_world(perturbations=(("A",), ("B",)))
    context = singles[0].context
    for kind in (Additive, EffectPrior):
        fitted = kind().fit(singles, features=FEATURES)
        one, two = (
            fitted.predict_mean(PriorQuestion(members=members, context=context))
            for members in (("A", "B"), ("B", "A"))
        )
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("perturbations", ["AB", "ABCDEFGH"])
def test_leaving_out_never_sees_the_condition(perturbations):
    # Four contexts with eight perturbations are 32 groups: ten folds instead of one at a time.
    world = make_world(n_contexts=4, perturbations=[(name,) for name in perturbations])
    direct = EffectPrior().fit(world, features=FEATURES).leave_one_out(world)
    scrambled = replace(world[3], mean=world[3].mean[::-1].copy(), var=world[3].var + 1)
    changed = [*world[:3], scrambled, *world[4:]]
    again = EffectPrior().fit(changed, features=FEATURES).leave_one_out(changed)
    np.testing.assert_array_equal(again[3], direct[3])
    assert np.abs(again[0] - direct[0]).max() > 1e-6


def test_leaving_out_is_fitting_without():
    world = make_world()
    left_out = EffectPrior().fit(world, features=FEATURES).leave_one_out(world[::-1])[::-1]
    for i in (0, 4):
        rest = [c for j, c in enumerate(world) if j != i]
        alone = answers(EffectPrior, rest, [world[i].question])[0]
        np.testing.assert_array_equal(left_out[i], alone)


def test_other_doses_are_left_out_with_a_condition():
    world = [replace(c, numbers=(1.0,)) for c in make_world()]
    twin = replace(world[0], numbers=(2.0,))
    left_out = EffectPrior().fit([*world, twin], features=FEATURES).leave_one_out([world[0]])
    alone = answers(EffectPrior, world[1:], [world[0].question])
    np.testing.assert_array_equal(left_out, alone)


def test_state_restores_the_prior_bit_by_bit():
    world = make_world(perturbations=(("A",), ("B",), ("A", "B")))
    prior = EffectPrior().fit(world[3:], features=FEATURES, seed=5)
    errors = prior.left_out_errors()
    state = prior.state()
    plain = {k: v for k, v in state.items() if not isinstance(v, np.ndarray)}
    arrays = {k: v.copy() for k, v in state.items() if isinstance(v, np.ndarray)}
    again = EffectPrior.from_state({**json.loads(json.dumps(plain)), **arrays})
    np.testing.assert_array_equal(again.left_out_errors(), errors)
    unseen = PriorQuestion(members=("C",), context=world[0].context)
    for question in [*(c.question for c in world[:3]), unseen]:
        np.testing.assert_array_equal(again.predict_mean(question), prior.predict_mean(question))
