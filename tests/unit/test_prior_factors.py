"""Response factors are Gamma quantiles; dispersions are measured back; latent axes meet genes."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats as ss
import torch
from hypothesis import given
from hypothesis import strategies as st

from perturbdiff._random import cell_keys, gene_lanes, uniform
from perturbdiff.nn import ExpressionCodec
from perturbdiff.prior import ConditionSummary, ContextSummary, MixtureLogRatio, PriorQuestion
from perturbdiff.prior._dispersion import (
    GRID,
    ResponseDispersion,
    condition_shares,
    information,
    measure_dispersion,
    some_rows,
)
from perturbdiff.prior._draws import draw_counts
from perturbdiff.prior._factors import ResponseFactors, copula_scores
from perturbdiff.prior._transport import solve_transport

# Factors


@given(dispersion=st.floats(0.01, 8), score=st.floats(-4, 4))
def test_a_factor_is_the_quantile_of_a_gamma_distribution(dispersion, score):
    factors = ResponseFactors(torch.tensor([dispersion], dtype=torch.float64))
    found = factors.log(torch.tensor([[score]], dtype=torch.float64)).item()
    level = ss.norm.cdf(score)
    expected = ss.gamma(1 / dispersion, scale=dispersion).ppf(level)
    assert found == pytest.approx(np.log(max(expected, np.exp(-30))), abs=0.02 * (1 + dispersion))


@pytest.mark.parametrize("dispersion", [0.02, 0.3, 1.0, 3.0])
def test_factors_have_mean_one_and_the_variance_that_is_asked_for(dispersion):
    """By quadrature over the normal score, on 40,001 points."""
    score = torch.linspace(-6, 6, 40001, dtype=torch.float64)
    factors = ResponseFactors(torch.tensor([dispersion], dtype=torch.float64))
    value = factors.log(score[:, None])[:, 0].exp().numpy()
    weight = ss.norm.pdf(score.numpy())
    weight /= weight.sum()
    mean = weight @ value
    assert mean == pytest.approx(1, rel=2e-3)
    assert weight @ (value - mean) ** 2 == pytest.approx(dispersion, rel=2e-2)


def test_without_dispersion_all_cells_respond_alike():
    factors = ResponseFactors(torch.tensor([0.0, 1e-9], dtype=torch.float64))
    score = torch.tensor([[-3.0, 2.0], [5.0, -5.0]], dtype=torch.float64)
    assert torch.equal(factors.log(score), torch.zeros(2, 2).double())


def test_factors_rise_with_the_score_and_stay_finite_at_the_ends():
    factors = ResponseFactors(torch.tensor([0.1, 5.0], dtype=torch.float64))
    score = torch.linspace(-9, 9, 181, dtype=torch.float64)[:, None].expand(-1, 2)
    log = factors.log(score)
    assert log.isfinite().all()
    assert (log.diff(dim=0) >= 0).all()
    assert (log[-1] > log[90]).all()


def test_factors_are_differentiable():
    """The slope is that of the table: between nodes 1/16 apart, the difference quotient."""
    score = torch.tensor([[0.51]], dtype=torch.float64, requires_grad=True)
    factors = ResponseFactors(torch.tensor([1.0], dtype=torch.float64))
    factors.log(score).sum().backward()
    low, high = (ss.expon.ppf(ss.norm.cdf(x)) for x in (0.5, 0.5625))
    assert score.grad.item() == pytest.approx((np.log(high) - np.log(low)) / 0.0625, rel=1e-7)


def test_scores_are_normal_with_the_dependence_that_is_asked_for():
    generator = torch.Generator().manual_seed(0)
    deviation, noise = torch.randn(2, 50_000, 3, generator=generator, dtype=torch.float64)
    dependence = torch.tensor([0.0, 0.6, 1.0], dtype=torch.float64)
    score = copula_scores(deviation, noise, dependence=dependence)
    assert torch.equal(score[:, 0], noise[:, 0])
    assert torch.equal(score[:, 2], deviation[:, 2])
    for gene, wanted in enumerate(dependence.tolist()):
        found = np.corrcoef(score[:, gene], deviation[:, gene])[0, 1]
        assert found == pytest.approx(wanted, abs=4 / 50_000**0.5)
        assert score[:, gene].std() == pytest.approx(1, abs=0.02)


# Dispersion


def controls(n_cells, level, n_genes=6):
    rng = np.random.default_rng(0)
    counts = torch.from_numpy(rng.poisson(level, (n_cells, n_genes)))
    return counts, torch.full((n_cells,), 10_000.0, dtype=torch.float64)


def treated(counts, size, target, dispersion):
    """Cells that respond with this dispersion, from numbers of their own."""
    keys = cell_keys(1, "truth", 0, n_cells=len(counts))
    lanes = gene_lanes([f"G{i}" for i in range(counts.shape[1])])
    score = torch.special.ndtri(uniform(keys, lanes, step=1))
    lift = ResponseFactors(torch.full_like(target, dispersion)).log(score)
    plan = solve_transport(counts, size, target, deviation_NG=lift)
    drawn = draw_counts(counts, size, plan, uniform_NG=uniform(keys, lanes), deviation_NG=lift)
    return torch.log1p(drawn / size[:, None] * 1e4).numpy()


@pytest.mark.parametrize("dispersion", [0.1, 1.0, 3.0])
def test_a_known_dispersion_is_measured_back(dispersion):
    """Within 35 %, over six genes and 4,000 cells that were made with it."""
    counts, size = controls(4000, 0.5)
    target = torch.full((6,), 1.6, dtype=torch.float64)
    cells = treated(counts, size, target, dispersion)
    keys = cell_keys(2, "measured", 0, n_cells=500)
    lanes = gene_lanes([f"G{i}" for i in range(6)])
    even = [
        (uniform(keys, lanes, step=step).argsort(0).argsort(0).double() + 0.5) / 500
        for step in (0, 1)
    ]
    found = measure_dispersion(
        counts[:500],
        size[:500],
        mean=cells.mean(0),
        var=cells.var(0),
        score=torch.special.ndtri(even[1]),
        uniform=even[0],
    )
    assert np.exp(np.median(found)) == pytest.approx(dispersion, rel=0.35)


def test_genes_that_do_not_respond_tell_nothing():
    counts, size = controls(100, 1.0)
    now = torch.log1p(counts / size[:, None] * 1e4).mean(0).numpy()
    even = torch.full((100, 6), 0.5, dtype=torch.float64)
    mean = now + np.array([0, 0.05, -0.05, 0.5, 0, 0])
    found = measure_dispersion(
        counts, size, mean=mean, var=np.ones(6), score=0 * even, uniform=even
    )
    assert np.isnan(found).tolist() == [True, True, True, False, True, True]


def test_nothing_measured_gives_the_usual_dispersion():
    """One condition, no gene responds: D = 0.1."""
    empty = ResponseDispersion(
        log=np.full((1, 2), np.nan), information=np.zeros((1, 2)), mean=np.zeros((1, 2))
    )
    np.testing.assert_allclose(empty.predict(np.ones(1), np.ones(2)), 0.1)
    assert empty.slope == 0


def test_dispersions_are_averaged_by_shares_and_information():
    """By hand: equal means, so no slope. Weights 30 · (1 + 0.02) and 10 · (0 + 0.02), prior 10."""
    known = ResponseDispersion(
        log=np.log([[1.0], [4.0]]), information=np.array([[30.0], [10.0]]), mean=np.ones((2, 1))
    )
    weights = np.array([30.6, 0.2])
    expected = (weights @ np.log([1.0, 4.0]) + 10 * np.log(0.1)) / (weights.sum() + 10)
    found = known.predict(np.array([1.0, 0.0]), np.ones(1))
    np.testing.assert_allclose(np.log(found), expected)


def test_dispersion_falls_with_the_mean_as_it_does_over_conditions():
    """Log D = 1 - mean in both conditions: the slope is -1, and a higher mean has less."""
    mean = np.array([[0.5, 1.0], [1.5, 2.0]])
    known = ResponseDispersion(log=1 - mean, information=np.full((2, 2), 1e6), mean=mean)
    assert known.slope == pytest.approx(-1)
    found = known.predict(np.full(2, 0.5), np.array([1.0, 3.0]))
    np.testing.assert_allclose(np.log(found), [0.0, -2.0], atol=1e-3)
    rising = ResponseDispersion(log=mean, information=np.ones((2, 2)), mean=mean)
    assert rising.slope == 0


def test_dispersion_stays_in_range():
    mean = np.array([[0.0], [1.0]])
    known = ResponseDispersion(
        log=np.array([[2.0], [-3.0]]), information=np.full((2, 1), 1e6), mean=mean
    )
    ends = [known.predict(np.full(2, 0.5), np.array([x])).item() for x in (-50.0, 50.0)]
    assert ends == [pytest.approx(2 * GRID[-1]), pytest.approx(GRID[0] / 4)]


def test_information_counts_cells_up_to_400_and_the_size_of_the_shift():
    np.testing.assert_allclose(information(np.array([-0.5, 0.0, 2.0]), 1000), [200, 0, 800])
    np.testing.assert_allclose(information(np.array([1.0]), 30), [30])


def test_rows_to_measure_on_are_even_and_within():
    assert some_rows(5).tolist() == [0, 1, 2, 3, 4]
    rows = some_rows(1000)
    assert len(rows) == 120
    assert (rows[0], rows[-1]) == (0, 999)
    assert set(np.diff(rows)) == {8, 9}


def summary(members, kind):
    rng = np.random.default_rng(len(kind))
    context = ContextSummary(
        covariates=(kind,), mean=np.ones(3), var=np.ones(3), n_cells=50,
        axes=rng.normal(size=(20, 2)) + 9 * (kind == "T2"),
    )  # fmt: skip
    return ConditionSummary(
        members=members, context=context, mean=np.ones(3), var=np.ones(3), n_cells=50
    )


def test_conditions_count_by_mixture_or_by_shared_members():
    known = [summary(("A",), "T1"), summary(("A",), "T2"), summary(("B",), "T1"),
             summary(("A", "C"), "T1")]  # fmt: skip
    mixture = MixtureLogRatio().fit(known)
    order = {c.key: place for place, c in enumerate(mixture.conditions)}

    def shares(members, context):
        found = condition_shares(mixture, PriorQuestion(members=members, context=context))
        return [float(found[order[condition.key]]) for condition in known]

    here = known[0].context
    same = shares(("A",), here)
    assert sum(same) == pytest.approx(1)
    assert same[0] > 0.8 > same[1] > 0
    assert same[2:] == [0, 0]
    assert shares(("C",), here) == [0, 0, 0, 1]
    assert shares(("Z",), here) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


# Codec


@pytest.fixture
def codec():
    generator = torch.Generator().manual_seed(0)
    axes = [torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (3, 2)]
    basis = torch.linalg.qr(axes[1]).Q
    spread = torch.tensor([2.0, 0.5], dtype=torch.float64)
    made = ExpressionCodec(axes[0], encoder=basis / spread, decoder=basis * spread)
    return SimpleNamespace(codec=made, basis=basis)


def test_latent_values_are_what_the_decoder_says_of_genes(codec):
    latent = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    centre = torch.arange(8.0, dtype=torch.float64)
    cells = centre + codec.codec.deviation(latent)
    torch.testing.assert_close(codec.codec.to_latent(cells, centre), latent)


def test_control_cells_are_placed_along_the_cell_axes(codec):
    cells = torch.eye(8, dtype=torch.float64)
    found = codec.codec.cells(cells, torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(found, codec.codec.cell_axes)


@pytest.mark.parametrize("method", ["cells", "to_latent"])
def test_absent_genes_are_not_looked_at_and_axes_keep_their_length(codec, method):
    """Law 5: the sum runs over the genes present, each axis as long as before."""
    encode = getattr(codec.codec, method)
    present = torch.tensor([True] * 6 + [False] * 2)
    cells = torch.arange(16.0, dtype=torch.float64).reshape(2, 8)
    centre = cells.mean(0)
    junk = torch.where(present, cells, 1e6)
    found = encode(cells, centre, present=present)
    torch.testing.assert_close(encode(junk, centre, present=present), found)
    everything = torch.ones(8, dtype=torch.bool)
    torch.testing.assert_close(encode(cells, centre, present=everything), encode(cells, centre))
    nothing = torch.zeros(8, dtype=torch.bool)
    assert encode(cells, centre, present=nothing).isfinite().all()


def test_a_gene_weighs_as_much_whatever_is_absent(codec):
    """Half of the genes, each of them twice: the latent value is the same."""
    half = codec.codec
    doubled = ExpressionCodec(
        torch.cat([half.cell_axes, half.cell_axes]),
        encoder=torch.cat([half.encoder, half.encoder]),
        decoder=torch.cat([half.decoder, half.decoder]),
    )
    cells = torch.arange(8.0, dtype=torch.float64)[None]
    centre = torch.ones(8, dtype=torch.float64)
    present = torch.arange(16) < 8
    twice, both = torch.cat([cells, cells], 1), torch.cat([centre, centre])
    torch.testing.assert_close(
        doubled.to_latent(twice, both, present=present), doubled.to_latent(twice, both)
    )
