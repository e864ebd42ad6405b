"""Parts of constrained generation: known answers, independent libraries."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression

import perturbdiff as ptd
from benchmarks.constraint_tasks import SET_SIZE, best_of, first_that_obey, kinds, tasks
from perturbdiff._batch import Context
from perturbdiff.guidance import CellValues, Reference
from perturbdiff.guidance._enforcement import Soft
from perturbdiff.guidance._steering import ProjectionPull, SoftGuidance
from perturbdiff.model._constrained_observed import completed_target
from perturbdiff.model._constrained_plan import truncated_uniform
from perturbdiff.model._constrained_report import moved_by
from perturbdiff.model._response import ResponseCells, ResponsePlan
from perturbdiff.prior import TransportPlan
from perturbdiff.prior._factors import ResponseFactors

ONE = torch.ones(2, dtype=torch.float64)


class Linear:
    """Cells whose log values are linear in their latent place."""

    decoder = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)

    def deviation(self, x0):
        return x0.double() @ self.decoder.mT

    def values(self, deviation):
        shape = deviation.shape[:-1]
        return CellValues(
            log1p=deviation + 1.0,
            library_size=torch.full(shape, 1e4, dtype=torch.float64),
            number=torch.arange(shape[-1]).expand(shape),
        )


@pytest.fixture
def reference():
    return Reference(genes=("A", "B"), control_log1p=ONE, control_depth=ONE, library_size=1e4 * ONE)


def still(x, sigma, context):
    return x


def context(n_sets, n_cells):
    return Context(
        partner=torch.zeros(n_sets, n_cells, 1),
        has_partner=torch.ones(n_sets, dtype=torch.bool),
        control=torch.zeros(n_sets, 3, 1),
        control_mask=torch.ones(n_sets, 3, dtype=torch.bool),
        mask=torch.ones(n_sets, n_cells, dtype=torch.bool),
        shift=torch.zeros(n_sets, 2),
        members=torch.zeros(n_sets, 1, dtype=torch.int64),
        features=torch.zeros(n_sets, 0),
        covariates=torch.zeros(n_sets, 1, dtype=torch.int64),
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_soft_step_takes_a_linear_violation_to_zero_in_any_unit(reference, scale):
    bound = ptd.AtLeast("A", 2.0, per="population").bind(reference)
    bound = type(bound)(**{**vars_of(bound), "spread": torch.tensor([1 / scale])})
    guided = SoftGuidance(soft=Soft(), bounds=[bound], reveal=Linear(), levels=(10.0, 0.1))(still)
    x = torch.zeros(3, 5, 2)
    moved = guided(x, torch.ones(3), context(3, 5))
    torch.testing.assert_close(moved[..., 0], torch.ones(3, 5))  # value 1 + 1 = 2
    assert bool((moved[..., 1] == 0).all())
    outside = guided(x, torch.full((3,), 0.01), context(3, 5))
    assert torch.equal(outside, x)


def vars_of(bound):
    names = ("text", "genes", "weights", "lower", "upper", "unit", "per")
    return {name: getattr(bound, name) for name in names}


def test_a_pull_is_the_posterior_mean_of_a_gaussian(reference):
    bound = ptd.Fix("A", 3.0).bind(reference)
    noise = torch.tensor([0.5, 0.5], dtype=torch.float64)
    pull = ProjectionPull(bounds=[bound], reveal=Linear(), noise=noise)(still)
    sigma = 2.0
    variance = sigma**2 / (1 + sigma**2)
    moved = pull(torch.zeros(1, 4, 2, dtype=torch.float64), torch.tensor([sigma]), context(1, 4))
    # prior N(0, variance), one measurement of 2 with noise 0.5
    expected = variance / (variance + 0.5) * 2.0
    torch.testing.assert_close(moved[0, :, 0], torch.full((4,), expected, dtype=torch.float64))


def test_logistic_regressions_have_the_gradient_of_their_probability(reference):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    for labels in (x[:, 0] > 0, np.digitize(x[:, 0], [-0.5, 0.5])):
        classifier = LogisticRegression().fit(x, labels)
        state = classifier.classes_[-1]
        bound = ptd.StateFraction(classifier, state, 0.5).bind(reference)
        assert bound.differentiable
        values = torch.from_numpy(x[:10]).requires_grad_()
        found = bound.probability(values)
        np.testing.assert_allclose(found.detach(), classifier.predict_proba(x[:10])[:, -1])
        (slope,) = torch.autograd.grad(found.sum(), values)
        assert float(slope[:, 0].min()) > 0


def test_counts_within_a_range_have_the_truncated_distribution():
    n = 4000
    genes = torch.tensor([1.0, 0.4], dtype=torch.float64)  # Poisson added; binomial kept
    cells = ResponseCells(
        deviation=torch.zeros(n, 2, dtype=torch.float64),
        counts=torch.tensor([[0, 10]]).expand(n, -1).contiguous(),
        library_size=torch.full((n,), 1e4, dtype=torch.float64),
        uniform=((torch.arange(n) + 0.5) / n).double()[:, None].expand(-1, 2).contiguous(),
        noise=torch.zeros(n, 2, dtype=torch.float64),
    )
    plan = ResponsePlan(
        centre=torch.zeros(2, dtype=torch.float64),
        spread=ONE,
        factors=ResponseFactors(torch.zeros(2, dtype=torch.float64)),
        dependence=torch.zeros(2, dtype=torch.float64),
        transport=TransportPlan(
            adds=torch.tensor([True, False]), scale=genes, dispersion=torch.zeros(2).double()
        ),
    )
    low = torch.tensor([[1.0, 3.0]]).double().expand(n, -1)
    high = torch.tensor([[np.inf, 6.0]]).double().expand(n, -1)
    moved = truncated_uniform(cells, plan, low=low, high=high)
    drawn = plan.draw(type(cells)(**{**cells.__dict__, "uniform": moved})).numpy()
    for column, law, least, most in [
        (0, stats.poisson(1.0), 1, 40),
        (1, stats.binom(10, 0.4), 3, 6),
    ]:
        assert drawn[:, column].min() == least
        assert drawn[:, column].max() <= most
        for k in range(least, least + 4):
            mass = law.pmf(k) / (law.cdf(most) - law.cdf(least - 1))
            assert (drawn[:, column] == k).mean() == pytest.approx(mass, abs=2 / n)


def test_what_a_panel_says_carries_over_only_where_something_does():
    rng = np.random.default_rng(0)
    shift, base = rng.normal(size=300), np.full(300, 5.0)
    target, genes = base + 0.5 * shift, np.arange(150)
    truth = base + shift  # responds twice as strongly as the prior says
    found = completed_target(target, truth[:150], genes, control=base, shifts=[shift])
    np.testing.assert_allclose(found, truth, atol=0.02)
    noise = target + rng.normal(size=300)
    kept = completed_target(target, noise[:150], genes, control=base, shifts=[shift])
    assert np.abs(kept[150:] - target[150:]).mean() < 0.1
    np.testing.assert_array_equal(kept[:150], noise[:150])


def test_tasks_of_the_benchmark_have_the_rates_that_they_say():
    rng = np.random.default_rng(0)
    n_sets = 100
    cells = rng.poisson(2.0, (n_sets * SET_SIZE, 20)).astype(np.float64)
    cells += rng.normal(0, 0.5, (n_sets, 1, 1)).repeat(SET_SIZE, 1).reshape(-1, 1)
    control = rng.poisson(1.0, (400, 20)).astype(np.float64)
    genes = [f"G{number}" for number in range(20)]
    sets = cells.reshape(n_sets, SET_SIZE, 20)
    found = tasks(kinds(genes, cells, control), sets, (0.5, 0.1))
    assert len({task.kind.name for task in found}) == 7
    for task in found:
        assert task.share(sets) >= task.rate - 1e-3  # more where sets are alike
    tenth = next(task for task in found if task.rate == 0.1)
    assert tenth.obeys(sets).sum() == 10
    assert tenth.conditional(sets).shape == (10 * SET_SIZE, 20)
    assert tenth.conditional(sets[~tenth.obeys(sets)]) is None
    taken = first_that_obey(tenth, sets, 20)
    assert tenth.obeys(taken).tolist() == [
        bool(tenth.obeys(sets[start : start + 20]).any()) for start in range(0, n_sets, 20)
    ]
    every_cell = next(task for task in found if task.kind.gene is not None)
    kept = every_cell.conditional(sets)
    assert (kept[:, every_cell.kind.gene] >= every_cell.threshold - 1e-6).all()
    assert len(kept) == every_cell.share(sets) * n_sets * SET_SIZE


def test_the_chance_of_a_draw_is_that_over_all_choices():
    assert best_of(1, 4, 1) == 0.25
    assert best_of(1, 4, 2) == pytest.approx(0.5)
    assert best_of(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert (best_of(0, 4, 3), best_of(4, 4, 1)) == (0, 1)


def test_cells_that_were_not_moved_are_no_distance_away():
    def cells(values):
        n = len(values)
        return CellValues(
            log1p=torch.from_numpy(values),
            library_size=torch.full((n,), 1e4, dtype=torch.float64),
            number=torch.arange(n),
        )

    values = np.random.default_rng(0).normal(size=(60, 4))
    before, axes = cells(values), np.eye(4)
    assert moved_by(before, before, axes) == pytest.approx(0, abs=1e-12)
    assert moved_by(before, cells(values + 0.01), axes) == pytest.approx(0, abs=0.01)
    far = moved_by(before, cells(values + 3), axes)
    own = np.linalg.norm(values[:, None] - values, axis=-1).sum() / (60 * 59)
    other = np.linalg.norm(values[:, None] - values - 3, axis=-1)
    expected = 2 * (other.sum() - other.trace()) / (60 * 59) - 2 * own
    assert far == pytest.approx(expected)
