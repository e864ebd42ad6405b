"""The simulator tells the truth: cells meet stated means, pairs add up where they should."""

from dataclasses import replace

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from perturbdiff._errors import ConfigError, UnknownLevelError
from perturbdiff.data.datasets import Simulation, SimulationConfig, Treatment, simulated
from perturbdiff.data.datasets._expectation import CountNoise, mean_log1p_curve, normal_nodes

SMALL = SimulationConfig(n_genes=80, n_contexts=3, n_cells=12, n_controls=24)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulated(SMALL, seed=3)


def log1p_cp10k(adata: anndata.AnnData) -> np.ndarray:
    library = adata.obs["library_size"].to_numpy()[:, None]
    return np.log1p(adata.X.toarray() / library * 1e4)


@pytest.mark.parametrize("dispersion", [0.0, 0.5])
def test_mean_curve_equals_the_sum_over_counts(dispersion):
    noise = CountNoise(dispersion=dispersion, library_median=1000.0, library_sd=0.0)
    rates = np.array([1e-6, 1e-4, 0.0123, 0.1])
    count = np.arange(4000)
    for rate, found in zip(rates, mean_log1p_curve(noise)(np.log(rates)), strict=True):
        mean = 1000 * rate
        shape = 1 / dispersion if dispersion else None
        pmf = stats.nbinom.pmf(count, shape, shape / (shape + mean)) if shape else None
        pmf = stats.poisson.pmf(count, mean) if pmf is None else pmf
        assert found == pytest.approx(pmf @ np.log1p(count * 10), rel=1e-6)


def test_mean_curve_averages_over_library_sizes():
    spread = CountNoise(dispersion=0.0, library_median=1000.0, library_sd=0.5)
    sizes = 1000 * np.exp(0.5 * stats.norm.ppf((np.arange(400) + 0.5) / 400))
    each = [
        mean_log1p_curve(CountNoise(dispersion=0.0, library_median=size, library_sd=0.0), step=1.0)
        for size in sizes
    ]
    expected = np.mean([curve(np.array([-6.0])) for curve in each])
    assert mean_log1p_curve(spread)(np.array([-6.0])) == pytest.approx(expected, rel=1e-3)


def test_normal_nodes_integrate_a_truncated_normal():
    node, weight = normal_nodes(0.3, np.inf)
    assert weight.sum() == pytest.approx(stats.norm.sf(0.3), abs=1e-12)
    assert weight @ node == pytest.approx(stats.norm.pdf(0.3), abs=1e-12)


@pytest.mark.parametrize(
    ("share", "treatment"),
    [
        (1.0, Treatment("control", "T1")),
        (1.0, Treatment("P1", "T2", donor="D2")),
        (1.0, Treatment("P5+P6", "T1")),
        (1.0, Treatment("P9", "T3")),
        (1.0, Treatment("dosed", "T1", dose=10.0)),
        (1.0, Treatment("timed", "T2", hours=1.0)),
        (0.4, Treatment("P3", "T1")),
    ],
)
def test_means_of_sampled_cells_converge_to_the_stated_mean(share, treatment):
    truth = simulated(replace(SMALL, responder_share=share), seed=5)
    values = log1p_cp10k(truth.sample(treatment, 6000))
    error = values.std(0) / np.sqrt(len(values))
    z = (values.mean(0) - truth.mean(treatment)) / error
    # 80 genes: the mean of the squares has a standard deviation of 0.16, the largest z is about 3.
    assert np.abs(z).max() < 4.5
    assert 0.5 < (z**2).mean() < 1.6


def test_shift_is_the_difference_of_the_means_and_visible_in_cells(simulation):
    treatment = Treatment("P2", "T2")
    difference = simulation.mean(treatment) - simulation.mean(Treatment("control", "T2"))
    np.testing.assert_array_equal(simulation.shift(treatment), difference)
    np.testing.assert_array_equal(simulation.shift(Treatment("control", "T2")), 0)
    assert np.abs(difference).max() > 0.3


def test_pairs_without_interaction_add_up_in_log_rate_and_others_do_not(simulation):
    def departure(first: str, second: str) -> float:
        alone = [simulation.log_rate_shift(Treatment(name, "T1")) for name in (first, second)]
        pair = simulation.log_rate_shift(Treatment(f"{first}+{second}", "T1"))
        return np.abs(pair - sum(alone)).max()

    assert simulation.interacting == ("P5", "P6", "P7", "P8", "P9")
    assert departure("P1", "P2") < 1e-12
    assert departure("P4", "P5") < 1e-12
    assert departure("P5", "P6") > 0.1
    assert departure("P8", "P9") > 0.1


def test_interaction_can_be_switched_off():
    truth = simulated(replace(SMALL, interaction=0.0), seed=3)
    parts = [truth.log_rate_shift(Treatment(name, "T1")) for name in ("P5", "P6")]
    pair = truth.log_rate_shift(Treatment("P5+P6", "T1"))
    np.testing.assert_allclose(pair, sum(parts), atol=1e-12)


def test_both_kinds_of_pairs_are_measured_in_every_context(simulation):
    table = simulation.adata.obs.groupby(["perturbation", "cell_type"], observed=True).size()
    pairs = {name for name, _ in table.index if "+" in name}
    inside = {pair for pair in pairs if set(pair.split("+")) <= set(simulation.interacting)}
    assert len(inside) == 3
    assert len(pairs - inside) == 3
    assert (table.loc[sorted(pairs)] == SMALL.n_cells).all()


def test_dose_and_time_scale_the_response_by_the_stated_curves(simulation):
    full = simulation.log_rate_shift(Treatment("dosed", "T1"))
    for dose, factor in {0.5: 2 / 3, 1.0: 1.0, 3.0: 1.5}.items():
        curve = simulation.log_rate_shift(Treatment("dosed", "T1", dose=dose))
        np.testing.assert_allclose(curve, factor * full, atol=1e-12)
    for hours, factor in {4.0: 0.5, 8.0: 0.75, 24.0: 1 - 2**-6}.items():
        curve = simulation.log_rate_shift(Treatment("dosed", "T1", hours=hours))
        np.testing.assert_allclose(curve, factor / (1 - 2**-6) * full, atol=1e-12)


def test_order_of_members_and_control_as_a_member_change_nothing(simulation):
    pair, turned = Treatment("P1+P6", "T1"), Treatment("P6+control+P1", "T1")
    np.testing.assert_array_equal(simulation.mean(pair), simulation.mean(turned))
    first, second = (simulation.sample(treatment, 8) for treatment in (pair, turned))
    assert (first.X != second.X).nnz == 0
    pd.testing.assert_frame_equal(first.obs, second.obs)


def test_effects_of_unseen_perturbations_can_be_learned_from_features():
    config = replace(SMALL, n_perturbations=40, n_unseen=10)
    truth = simulated(config, seed=1)
    table = truth.adata.uns["perturbation_features"]
    seen = [f"P{i + 1}" for i in range(40)]
    effect = {name: truth.log_rate_shift(Treatment(name, "T1")) for name in table.index}
    outcome = np.stack([effect[name] for name in seen])
    weights = np.linalg.lstsq(table.loc[seen].to_numpy(), outcome, rcond=None)[0]
    assert len(truth.unseen) == 10
    for name in truth.unseen:
        assert name not in set(truth.adata.obs["perturbation"])
        np.testing.assert_allclose(table.loc[name].to_numpy() @ weights, effect[name], atol=1e-9)


def test_only_cells_high_along_the_state_respond():
    truth = simulated(replace(SMALL, responder_share=0.4), seed=2)
    treated, control = (truth.sample(Treatment(name, "T1"), 8000) for name in ("P1", "control"))
    responds = treated.obs["responder"].to_numpy()
    assert responds.mean() == pytest.approx(0.4, abs=0.02)
    x, y = log1p_cp10k(treated), log1p_cp10k(control)
    for kind, moves in ((False, False), (True, True)):
        a, b = x[responds == kind], y[control.obs["responder"].to_numpy() == kind]
        error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
        assert (np.abs((a.mean(0) - b.mean(0)) / error).max() > 8) == moves
    state = np.abs(truth.world.loadings[:, 0]).argmax()
    split = y[control.obs["responder"].to_numpy()][:, state].mean() - y[:, state].mean()
    assert np.sign(split) == np.sign(truth.world.loadings[state, 0])


def test_donors_differ_only_where_asked(simulation):
    def gap(truth: Simulation) -> float:
        means = [truth.mean(Treatment("control", "T1", donor=donor)) for donor in ("D1", "D2")]
        return np.abs(means[0] - means[1]).max()

    assert gap(simulation) > 0.01
    assert gap(simulated(replace(SMALL, donor_effect=0.0), seed=3)) == 0
    assert simulation.sample(Treatment("P1", "T1", donor="D2"), 5).obs["donor"].eq("D2").all()


def test_zeros_and_library_sizes_are_like_those_of_real_cells():
    adata = simulated(seed=0).adata
    library = adata.obs["library_size"].to_numpy()
    panel = np.asarray(adata.X.sum(1)).ravel()
    # Kang 2018: 0.82 to 0.96 zeros by choice of genes, coefficient of variation 0.48.
    assert 0.8 < 1 - adata.X.nnz / np.prod(adata.shape) < 0.97
    assert 0.4 < library.std() / library.mean() < 0.6
    assert np.median(library) == pytest.approx(1700, rel=0.03)
    assert (panel < library).all()
    control = (adata.obs["perturbation"] == "control").to_numpy()
    share = (panel[control] / library[control]).mean()
    assert share == pytest.approx(SimulationConfig().panel_share, rel=0.1)


def test_a_panel_larger_than_the_library_is_said_aloud(caplog):
    config = replace(SMALL, effect_size=6.0)
    adata = simulated(config).adata
    assert "Lower effect_size or panel_share" in caplog.text
    assert (np.asarray(adata.X.sum(1)).ravel() <= adata.obs["library_size"]).all()
    caplog.clear()
    simulated()
    assert caplog.text == ""


def test_labels_features_and_counts_survive_a_round_trip(simulation, tmp_path):
    simulation.adata.write_h5ad(tmp_path / "simulated.h5ad")
    back = anndata.read_h5ad(tmp_path / "simulated.h5ad")
    pd.testing.assert_frame_equal(back.obs, simulation.adata.obs)
    pd.testing.assert_frame_equal(
        back.uns["perturbation_features"], simulation.adata.uns["perturbation_features"]
    )
    assert back.uns["perturbdiff"]["scale"] == "counts"
    assert back.X.dtype == np.int32
    assert (back.X != simulation.adata.X).nnz == 0


def test_same_seed_same_cells_and_another_seed_others(simulation):
    state = np.random.get_state()[1].copy()  # noqa: NPY002 - the global state must not move
    again = simulated(SMALL, seed=3)
    other = simulated(SMALL, seed=4)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    assert (again.adata.X != simulation.adata.X).nnz == 0
    assert (other.adata.X != simulation.adata.X).nnz > 0
    treatment = Treatment("P1", "T1")
    draws = [simulation.sample(treatment, 20, seed=seed).X.toarray() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_sampled_cells_look_like_measured_ones_and_have_other_names(simulation):
    sample = simulation.sample(Treatment("control", "T1"), 10)
    assert list(sample.obs.columns) == list(simulation.adata.obs.columns)
    assert sample.var_names.equals(simulation.adata.var_names)
    assert not set(sample.obs_names) & set(simulation.adata.obs_names)
    assert simulation.adata.obs_names.is_unique
    assert (sample.obs[["dose", "hours"]] == 0).all(axis=None)


@pytest.mark.parametrize(
    ("treatment", "near"),
    [
        (Treatment("P77", "T1"), "P7"),
        (Treatment("P1", "TT1"), "T1"),
        (Treatment("P1", "T1", donor="D11"), "D1"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_known_one(simulation, treatment, near):
    with pytest.raises(UnknownLevelError, match=f"Did you mean '{near}'"):
        simulation.sample(treatment, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_genes", 0),
        ("n_unseen", -1),
        ("n_pairs", 29),
        ("doses", (1.0, 0.0)),
        ("responder_share", 0.0),
        ("panel_share", 0.9),
        ("library_median", 0.5),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^{field} = "):
        SimulationConfig(**{field: value})


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_file_holds_is_refused(seed):
    with pytest.raises(ConfigError, match=r"^seed = "):
        simulated(seed=seed)


def test_parts_can_be_left_out():
    config = replace(SMALL, doses=(), hours=(), n_pairs=0, n_unseen=0, n_donors=1)
    adata = simulated(config).adata
    assert set(adata.obs["perturbation"]) == {"control", *(f"P{i + 1}" for i in range(8))}
    assert len(adata.uns["perturbation_features"]) == 8
