"""Count transport and partners against SciPy's distributions and assignments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom, nbinom, poisson

from perturbdiff.prior import (
    TransportPlan,
    draw_counts,
    expected_log1p,
    optimal_partners,
    solve_transport,
)
from perturbdiff.prior._expectations import added, thinned

N_CELLS, N_GENES = 24, 9


def cells(seed=0, *, n_cells=N_CELLS, n_genes=N_GENES):
    rng = np.random.default_rng(seed)
    rates = np.exp(rng.normal(-1, 1.5, n_genes))
    counts = torch.tensor(rng.poisson(rates, (n_cells, n_genes)))
    library = torch.tensor(rng.lognormal(7.5, 0.4, n_cells))
    deviation = torch.tensor(rng.normal(0, 1, (n_cells, n_genes)))
    return counts, library, deviation


def log1p_mean(counts, library):
    return torch.log1p(counts / (library[:, None] / 1e4)).mean(0)


def plan_of(*, adds, scale, dispersion=0.0):
    return TransportPlan(
        adds=torch.tensor([adds]),
        scale=torch.tensor([scale], dtype=torch.float64),
        dispersion=torch.tensor([dispersion], dtype=torch.float64),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    factor=st.floats(0, 3),
    lift=st.floats(0, 0.5),
    deviates=st.booleans(),
    dispersion=st.sampled_from([None, 0.0, 0.7]),
)
def test_expected_mean_meets_the_target(seed, factor, lift, deviates, dispersion):
    counts, library, deviation = cells(seed)
    target = (log1p_mean(counts, library) * factor + lift).clamp_max(7.0)
    extra = {"deviation_NG": deviation if deviates else None}
    spread = None if dispersion is None else torch.full((N_GENES,), dispersion)
    plan = solve_transport(counts, library, target, **extra, dispersion_G=spread)
    reached = expected_log1p(counts, library, plan, **extra).mean(0)
    torch.testing.assert_close(reached, target, rtol=1e-7, atol=1e-7)


def test_target_equal_to_the_present_mean_changes_nothing():
    counts, library, _ = cells()
    plan = solve_transport(counts, library, log1p_mean(counts, library))
    uniform = torch.rand(counts.shape, generator=torch.Generator().manual_seed(0))
    moved = draw_counts(counts, library, plan, uniform_NG=uniform)
    assert (moved - counts).abs().float().mean() < 1e-3


def test_targets_below_zero_silence_a_gene():
    counts, library, _ = cells()
    plan = solve_transport(counts, library, torch.full((N_GENES,), -1.0))
    moved = draw_counts(counts, library, plan, uniform_NG=torch.full(counts.shape, 0.999))
    assert not moved.any()


@pytest.mark.parametrize("n", [1, 3, 40, 700])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6, 1.0])
def test_thinning_is_the_expectation_under_the_binomial(n, share):
    size = 0.21
    k = np.arange(n + 1)
    expected = (binom.pmf(k, n, share) * np.log1p(k / size)).sum()
    found = expected_log1p(
        torch.tensor([[n]]), torch.tensor([size * 1e4], dtype=torch.float64),
        plan_of(adds=False, scale=share),
    )  # fmt: skip
    assert float(found) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.2999, 0.3001, 2.0, 300.0])
@pytest.mark.parametrize("dispersion", [0.0, 0.5])
def test_addition_is_the_expectation_under_its_distribution(n, rate, dispersion):
    size = 0.21
    k = np.arange(20000)
    mass = (
        nbinom.pmf(k, 1 / dispersion, 1 / (1 + dispersion * rate))
        if dispersion
        else poisson.pmf(k, rate)
    )
    expected = (mass * np.log1p((n + k) / size)).sum()
    found = expected_log1p(
        torch.tensor([[n]]), torch.tensor([size * 1e4], dtype=torch.float64),
        plan_of(adds=True, scale=rate / size, dispersion=dispersion),
    )  # fmt: skip
    assert float(found) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("rate", [1e-5, 0.02, 0.2999])
def test_low_rates_are_summed_to_the_last_digits(n, rate):
    size = torch.tensor([0.21], dtype=torch.float64)
    k = np.arange(60)
    mass, value = poisson.pmf(k, rate), np.log1p((n + k) / 0.21)
    more = np.log1p((n + k + 1) / 0.21)  # d/dλ E f(K) = E [f(K + 1) - f(K)]
    found, slope = added(
        torch.tensor([[n]]).double(), size, torch.tensor([[rate]], dtype=torch.float64),
        dispersion_G=torch.zeros(1, dtype=torch.float64),
    )  # fmt: skip
    assert float(found) == pytest.approx((mass * value).sum(), abs=1e-9)
    assert float(slope) == pytest.approx((mass * (more - value)).sum(), abs=1e-9)


@pytest.mark.parametrize("dispersion", [0.0, 0.5])
def test_slopes_are_the_derivatives(dispersion):
    counts, library, _ = cells()
    size = library.double() / 1e4
    rate = torch.logspace(-4, 1.5, counts.numel(), dtype=torch.float64).view(counts.shape)
    rate.requires_grad_()
    spread = torch.full((counts.shape[1],), dispersion, dtype=torch.float64)
    found, slope = added(counts.double(), size, rate, dispersion_G=spread)
    (want,) = torch.autograd.grad(found.sum(), rate)
    torch.testing.assert_close(slope, want, rtol=1e-6, atol=1e-8)
    keep = torch.linspace(0, 1, 60, dtype=torch.float64, requires_grad=True)
    trials = torch.arange(1, 61).double()
    found, slope = thinned(trials, torch.full_like(trials, 0.3), keep)
    (want,) = torch.autograd.grad(found.sum(), keep)
    torch.testing.assert_close(slope, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("adds", "n", "rate", "dispersion", "quantile"),
    [
        (False, 7, 0.3, 0.0, lambda u: binom.ppf(u, 7, 0.3)),
        (False, 900, 0.7, 0.0, lambda u: binom.ppf(u, 900, 0.7)),
        (True, 2, 0.4, 0.0, lambda u: 2 + poisson.ppf(u, 0.4)),
        (True, 0, 400.0, 0.0, lambda u: poisson.ppf(u, 400.0)),
        (True, 1, 6.0, 0.5, lambda u: 1 + nbinom.ppf(u, 2, 1 / 4)),
    ],
)
def test_draws_are_quantiles(adds, n, rate, dispersion, quantile):
    uniform = np.random.default_rng(0).random(400)
    found = draw_counts(
        torch.full((400, 1), n), torch.full((400,), 1e4, dtype=torch.float64),
        plan_of(adds=adds, scale=rate, dispersion=dispersion),
        uniform_NG=torch.tensor(uniform)[:, None],
    )  # fmt: skip
    np.testing.assert_array_equal(found[:, 0].numpy(), quantile(uniform))


def test_draws_depend_on_nothing_beside_them():
    counts, library, deviation = cells(1)
    target = log1p_mean(counts, library) * 0.8 + 0.1
    plan = solve_transport(counts, library, target, deviation_NG=deviation)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(counts.shape, generator=generator, dtype=torch.float64)
    whole = draw_counts(counts, library, plan, uniform_NG=uniform, deviation_NG=deviation)
    rows, genes = torch.tensor([5, 0, 17]), torch.tensor([4, 8, 1])
    part = TransportPlan(
        adds=plan.adds[genes], scale=plan.scale[genes], dispersion=plan.dispersion[genes]
    )
    some = draw_counts(
        counts[rows][:, genes], library[rows], part, uniform_NG=uniform[rows][:, genes],
        deviation_NG=deviation[rows][:, genes],
    )  # fmt: skip
    assert torch.equal(some, whole[rows][:, genes])


def test_plan_is_equivariant_over_genes():
    counts, library, deviation = cells(2)
    target = log1p_mean(counts, library) * 1.2 - 0.1
    order = torch.tensor(np.random.default_rng(0).permutation(N_GENES))
    plan = solve_transport(counts, library, target, deviation_NG=deviation)
    moved = solve_transport(
        counts[:, order], library, target[order], deviation_NG=deviation[:, order]
    )
    torch.testing.assert_close(moved.scale, plan.scale[order], rtol=1e-9, atol=1e-9)
    assert torch.equal(moved.adds, plan.adds[order])


def test_counts_of_a_high_deviation_are_higher():
    counts, library, _ = cells(3, n_cells=2)
    counts[:] = 3
    library[:] = 2000.0
    deviation = torch.zeros(2, N_GENES, dtype=torch.float64)
    deviation[1] = 1.0
    for factor in (0.7, 1.3):
        target = log1p_mean(counts, library) * factor
        plan = solve_transport(counts, library, target, deviation_NG=deviation)
        low, high = expected_log1p(counts, library, plan, deviation_NG=deviation)
        assert (high > low).all()


def test_single_precision_agrees():
    counts, library, deviation = cells(4)
    target = log1p_mean(counts, library) * 1.1 - 0.05
    double = solve_transport(counts, library, target, deviation_NG=deviation)
    single = solve_transport(counts, library.float(), target, deviation_NG=deviation)
    assert single.scale.dtype == torch.float32
    torch.testing.assert_close(single.scale.double(), double.scale, rtol=1e-4, atol=1e-4)


def test_partners_are_the_optimal_assignment():
    rng = np.random.default_rng(0)
    treated, control = rng.normal(size=(2, 30, 3))
    cost = ((treated[:, None] - control[None]) ** 2).sum(2)
    _, expected = linear_sum_assignment(cost)
    np.testing.assert_array_equal(optimal_partners(treated, control), expected)


@pytest.mark.parametrize("block", [1000, 16])
def test_partners_do_not_depend_on_the_order_of_cells(block):
    rng = np.random.default_rng(1)
    treated, control = rng.normal(size=(40, 3)), rng.normal(size=(25, 3))
    direct = optimal_partners(treated, control, block=block)
    rows, columns = rng.permutation(40), rng.permutation(25)
    moved = optimal_partners(treated[rows], control[columns], block=block)
    np.testing.assert_array_equal(columns[moved], direct[rows])


def test_partners_of_few_controls_and_of_none_treated():
    rng = np.random.default_rng(2)
    treated, control = rng.normal(size=(50, 2)), rng.normal(size=(3, 2))
    partners = optimal_partners(treated, control, block=10)
    assert set(partners) <= {0, 1, 2}
    assert len(optimal_partners(treated[:0], control)) == 0
