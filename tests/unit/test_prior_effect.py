"""The Gaussian process against its definition, and what the effect prior does at its edges."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from perturbdiff._errors import UndefinedBaselineError
from perturbdiff.prior import (
    ConditionSummary,
    ContextSummary,
    EffectPrior,
    MeanShift,
    PriorQuestion,
)
from perturbdiff.prior import _process as process_module
from perturbdiff.prior._donors import novelty
from perturbdiff.prior._process import (
    NUGGET,
    KernelSettings,
    ResponseProcess,
    cell_noise,
    level,
    make_kernel,
)
from perturbdiff.prior._ridge import Example, shared_ridge, split_groups, split_levels


def context(name, mean, *, n_cells=200):
    rng = np.random.default_rng(len(name))
    return ContextSummary(
        covariates=(name,), mean=mean, var=mean + 0.05, n_cells=n_cells,
        axes=np.outer(np.linspace(-1, 1, 20), [1.0, 0.5]) + rng.normal(size=2),
    )  # fmt: skip


def world(n_contexts, *, n_genes=30, seed=0, differ=0.5, members=("A",), n_cells=200):
    """Responses that depend linearly on where a context lies."""
    rng = np.random.default_rng(seed)
    base, common = rng.normal(0.8, 0.4, n_genes).clip(0.1), rng.normal(0, 0.5, n_genes)
    direction, interaction = rng.normal(size=(2, n_genes))
    out = []
    for i in range(n_contexts):
        place = rng.normal()
        mean = (base + differ * place * direction * 0.3).clip(0.05)
        where = context(f"T{i}", mean, n_cells=n_cells)
        treated = (mean + common + differ * place * interaction).clip(0)
        noise = rng.normal(0, np.sqrt((treated + 0.05) / n_cells))
        out.append(
            ConditionSummary(
                members=members, context=where, mean=(treated + noise).clip(0),
                var=treated + 0.05, n_cells=n_cells,
            )
        )  # fmt: skip
    return out


def test_process_is_the_conditional_mean_of_its_gaussian(monkeypatch):
    monkeypatch.setattr(process_module, "AMPLITUDES", np.array([0.7]))
    known, settings = world(4), KernelSettings()
    held, known = known[0], known[1:]
    process = ResponseProcess.fit(known, features={}, settings=settings)
    kernel = make_kernel(known, {}, settings)
    questions = [c.question for c in known]
    by_condition, by_gene = cell_noise(known)
    ratio = np.stack([level(c.mean) - level(c.context.mean) for c in known])
    cross = kernel([held.question], questions)[0]
    answer, evidence = [], 0.0
    for g in range(ratio.shape[1]):
        cov = 0.7 * (kernel(questions, questions) + NUGGET * np.eye(3))
        cov = cov + by_gene[g] * np.diag(by_condition)
        answer.append(0.7 * cross @ np.linalg.solve(cov, ratio[:, g]))
        evidence += multivariate_normal(np.zeros(3), cov).logpdf(ratio[:, g])
    np.testing.assert_allclose(process.log_ratio(held.question), answer, rtol=1e-9)
    # Up to a constant that no setting changes.
    constant = ratio.shape[1] * (1.5 * np.log(2 * np.pi) + 0.5 * np.log(by_condition).sum())
    assert process.evidence == pytest.approx(evidence + constant, rel=1e-9)


def test_kernel_is_positive_and_a_combination_resembles_its_parts():
    singles = world(3, members=("A",)) + world(3, members=("B",))
    pair = PriorQuestion(members=("A", "B"), context=singles[0].context)
    other = PriorQuestion(members=("C",), context=singles[0].context)
    features = {"A": np.array([1.0, 0.0]), "B": np.array([0.0, 1.0]), "C": np.array([1.0, 0.1])}
    settings = KernelSettings(common=0.1, by_features=0.4)
    kernel = make_kernel(singles, features, settings)
    questions = [*(c.question for c in singles), pair, other]
    gram = kernel(questions, questions)
    np.testing.assert_allclose(gram, gram.T)
    assert np.linalg.eigvalsh(gram).min() > -1e-9
    to_a = kernel([pair, other], [singles[0].question])[:, 0]
    to_b = kernel([pair, other], [singles[3].question])[:, 0]
    assert to_a[0] > 0
    assert to_a[1] > to_b[1]  # C is described like A


def test_contexts_that_differ_in_nothing_are_averaged():
    known = world(6, differ=0.0, n_cells=2000)
    asked = known[0].question
    prior = EffectPrior().fit(known[1:]).predict_mean(asked)
    plain = MeanShift().fit(known[1:]).predict_mean(asked)
    assert np.abs(prior - plain).max() < 0.05


def test_response_that_follows_the_context_is_learned():
    known = world(9, seed=2, differ=1.0, n_cells=2000)
    error = dict.fromkeys((EffectPrior, MeanShift), 0.0)
    for i, held in enumerate(known):
        rest = known[:i] + known[i + 1 :]
        for kind in error:
            answer = kind().fit(rest).predict_mean(held.question)
            error[kind] += ((answer - held.mean) ** 2).sum()
    assert error[EffectPrior] < 0.5 * error[MeanShift]


def donors(types=("T", "B", "Mono"), *, n_genes=120, n_cells=60):
    """Two donors of each type, alike but for noise; two perturbations, the same in all types."""
    rng = np.random.default_rng(3)
    base = rng.normal(0.8, 0.4, n_genes).clip(0.2)
    responses = {m: rng.normal(0, 0.4, n_genes) * (rng.random(n_genes) < 0.3) for m in "AB"}
    out = []
    for number, kind in enumerate(types):
        here = (base + rng.normal(0, 0.6, n_genes)).clip(0.05)
        for donor in ("d1", "d2"):

            def seen(mean):
                spread = np.sqrt((mean + 0.3) / n_cells)
                return (mean + rng.normal(0, spread)).clip(0)

            where = ContextSummary(
                covariates=(kind, donor), mean=seen(here), var=here + 0.3, n_cells=n_cells,
                axes=rng.normal(3 * number, 0.3, (20, 2)),
            )  # fmt: skip
            for member, response in responses.items():
                treated = (here + response).clip(0)
                out.append(
                    ConditionSummary(
                        members=(member,), context=where, mean=seen(treated), var=treated + 0.3,
                        n_cells=n_cells,
                    )
                )  # fmt: skip
    return out


@pytest.mark.parametrize("held", ["T", "B", "Mono"])
def test_a_type_that_no_donor_shows_is_not_drawn_to_the_types_that_are_known(held):
    """What a twin of the other donor tells of control noise says nothing of another type."""
    conditions = donors()
    kept = [c for c in conditions if c.context.covariates[0] != held]
    error = dict.fromkeys((EffectPrior, MeanShift), 0.0)
    for kind in error:
        fitted = kind().fit(kept)
        for c in conditions:
            if c.context.covariates[0] == held:
                error[kind] += np.abs(fitted.predict_mean(c.question) - c.mean).mean()
    assert error[EffectPrior] < 1.15 * error[MeanShift]


def test_conditions_are_left_out_as_the_question_is():
    """By hand: which levels are new to a question, and what is left out for it."""
    conditions = donors()
    kept = [c for c in conditions if c.context.covariates != ("Mono", "d1")]
    asked = {c.context.covariates: c.question for c in conditions if c.members == ("A",)}
    assert novelty(kept, asked["Mono", "d1"]) == ()
    assert novelty(kept, asked["T", "d1"]) == ()
    types = [c for c in conditions if c.context.covariates[0] != "Mono"]
    assert novelty(types, asked["Mono", "d1"]) == (0,)
    one = [c for c in types if c.context.covariates[1] != "d1"]
    assert novelty(one, asked["Mono", "d1"]) == (0, 1)
    assert novelty(one, asked["T", "d1"]) == (1,)
    for out, left in split_levels(types, (0,), seed=0, limit=12):
        assert {(c.members, c.context.covariates[0]) for c in out} == {
            (out[0].members, out[0].context.covariates[0])
        }
        assert len(out) == 2
        assert sorted(c.key for c in [*out, *left]) == sorted(c.key for c in types)
    for out, left in split_levels(conditions, (0, 1), seed=0, limit=12):
        (gone,) = out
        assert not any(
            c.members == gone.members and set(c.context.covariates) & set(gone.context.covariates)
            for c in left
        )
        assert len(left) == 2 + 6  # the other donor of two types, and all of the other perturbation


def test_coefficients_of_every_case_are_kept():
    prior = EffectPrior().fit(donors())
    state = prior.state()
    names = {name for name in state if name.startswith("coefficients.")}
    assert names == {
        f"coefficients.{case}"
        for case in (
            "context", "combination", "perturbation", "context.0", "context.1", "context.0.1",
        )
    }  # fmt: skip
    assert not np.array_equal(state["coefficients.context"], state["coefficients.context.0"])


def test_noisy_conditions_count_less():
    known = world(4, differ=0.0, n_cells=2000)
    odd = ConditionSummary(
        members=("A",), context=context("T9", known[0].context.mean, n_cells=4),
        mean=known[0].mean + 1.0, var=known[0].var, n_cells=4,
    )  # fmt: skip
    asked = known[0].question
    prior = EffectPrior().fit([*known[1:], odd]).predict_mean(asked)
    plain = MeanShift().fit([*known[1:], odd]).predict_mean(asked)
    assert np.abs(prior - known[0].mean).mean() < 0.5 * np.abs(plain - known[0].mean).mean()


def test_one_condition_answers_but_cannot_be_left_out():
    known = world(2)
    prior = EffectPrior().fit(known[:1])
    assert np.isfinite(prior.predict_mean(known[1].question)).all()
    np.testing.assert_array_equal(prior.coefficients("context"), 0)
    with pytest.raises(UndefinedBaselineError, match="no other one"):
        prior.leave_one_out()


def test_ridge_recovers_exact_coefficients_and_ignores_empty_features():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20, 3))
    features[:, 2] = 0
    example = Example(features, features @ np.array([2.0, -1.0, 0.0]), 1.0)
    found = shared_ridge([example], np.full(3, 1e-12))
    np.testing.assert_allclose(found, [2, -1, 0], atol=1e-9)
    shrunk = shared_ridge([example], np.full(3, 10.0))
    assert np.abs(shrunk).sum() < 0.5 * np.abs(found).sum()
    np.testing.assert_array_equal(shared_ridge([], np.ones(3)), 0)


def test_groups_are_left_out_whole():
    known = world(3, members=("A",)) + world(3, members=("B",))
    by_context = split_groups(known, axis="context", seed=0, limit=30)
    assert [len(out) for out, _ in by_context] == [1] * 6
    by_perturbation = split_groups(known, axis="perturbation", seed=0, limit=30)
    assert [{c.members for c in out} for out, _ in by_perturbation] == [{("A",)}, {("B",)}]
    many = world(13, members=("A",))
    folds = split_groups(many, axis="context", seed=0, limit=12)
    assert len(folds) == 10
    assert sum(len(out) for out, _ in folds) == 13
    assert split_groups(many, axis="perturbation", seed=0, limit=12) == []
