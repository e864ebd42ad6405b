"""Our scores against the public packages cell-eval and pdex on the same cells."""

import warnings

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from cell_eval import MetricsEvaluator
from cell_eval.metrics import discrimination_score
from pdex import pdex

from perturbdiff.metrics import (
    compare_tables,
    de_overlap,
    direction_match,
    discrimination,
    energy_distance,
    mae_shift,
    mean_shift,
    pearson_shift,
    rank_genes,
)

G, N = 300, 70
NAMES = [f"gene{i}" for i in range(G)]
CONTROL = "non-targeting"
CONDITIONS = ["A", "B", "gene7", "weak"]
RATES = np.geomspace(0.05, 8, G)


def cells(seed, n, rates):
    """Counts through libraries of different size, as float32 log1p of counts per 10,000."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 0.3, (n, 1))
    counts = rng.poisson(rates * size)
    return np.log1p(counts / (counts.sum(1, keepdims=True) + 500) * 1e4).astype(np.float32)


def effect(seed, strength):
    rng = np.random.default_rng(seed)
    return np.exp(strength * rng.normal(size=G) * (rng.random(G) < 0.3))


EFFECTS = {name: effect(i, 0.3 if name == "weak" else 1.0) for i, name in enumerate(CONDITIONS)}
CELLS = {CONTROL: cells(99, N, RATES)}
TRUE = CELLS | {name: cells(i, N + i, RATES * EFFECTS[name]) for i, name in enumerate(CONDITIONS)}
PRED = CELLS | {
    name: cells(50 + i, N - i, RATES * EFFECTS[name] ** 0.6 * effect(70 + i, 0.6))
    for i, name in enumerate(CONDITIONS)
}


def annotated(populations, form=np.asarray):
    adata = ad.AnnData(form(np.concatenate(list(populations.values()))))
    adata.var_names = NAMES
    adata.obs_names = [f"cell{i}" for i in range(adata.n_obs)]
    adata.obs["target"] = np.repeat(list(populations), [len(side) for side in populations.values()])
    return adata


@pytest.fixture(scope="module", params=[np.asarray, sp.csr_matrix], ids=["dense", "sparse"])
def judged(request, tmp_path_factory):
    """Results of cell-eval by condition, and its tables of differential expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        evaluator = MetricsEvaluator(
            annotated(PRED, request.param),
            annotated(TRUE, request.param),
            control_pert=CONTROL,
            pert_col="target",
            num_threads=1,
            outdir=str(tmp_path_factory.mktemp("cell_eval")),
        )
        results, _ = evaluator.compute(
            profile="full", skip_metrics=["clustering_agreement"], write_csv=False
        )
    rows = {row["perturbation"]: row for row in results.iter_rows(named=True)}
    return rows, evaluator


def ours(function, name, **options):
    return function(PRED[name], TRUE[name], CELLS[CONTROL], **options)


@pytest.mark.parametrize("name", CONDITIONS)
def test_shift_scores(judged, name):
    row = judged[0][name]
    assert ours(pearson_shift, name) == pytest.approx(row["pearson_delta"], abs=1e-6)
    assert ours(mae_shift, name) == pytest.approx(row["mae"], abs=1e-6)
    assert ours(mae_shift, name) == pytest.approx(row["mae_delta"], abs=1e-6)


@pytest.mark.parametrize("name", CONDITIONS)
def test_expression_scores(judged, name):
    row = judged[0][name]
    assert ours(de_overlap, name) == pytest.approx(row["overlap_at_N"], abs=1e-6)
    for n in (50, 100):
        assert ours(de_overlap, name, n_top=n) == pytest.approx(row[f"overlap_at_{n}"], abs=1e-6)
    assert ours(direction_match, name) == pytest.approx(row["de_direction_match"], abs=1e-6)
    tables = [rank_genes(side[name], CELLS[CONTROL]) for side in (PRED, TRUE)]
    agreement = compare_tables(*tables)
    counts = row["de_nsig_counts_pred"], row["de_nsig_counts_real"]
    assert (agreement.n_pred, agreement.n_true) == counts
    assert agreement.n_true > 5


@pytest.mark.parametrize("name", CONDITIONS)
def test_tables_of_differential_expression(name):
    adata = annotated({key: side.astype(np.float64) for key, side in TRUE.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = pdex(
            adata,
            groupby="target",
            mode="ref",
            threads=1,
            is_log1p=True,
            epsilon=0.0,
            reference=CONTROL,
        )
    theirs = {
        key: frame[key].to_numpy()[frame["target"].to_numpy() == name] for key in frame.columns
    }
    assert theirs["feature"].tolist() == NAMES
    table = rank_genes(TRUE[name], CELLS[CONTROL])
    for key in ("log2_fold_change", "p_value", "fdr", "statistic"):
        np.testing.assert_allclose(getattr(table, key), theirs[key], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(table.mean, theirs["target_mean"], rtol=1e-6)
    np.testing.assert_allclose(table.control_mean, theirs["ref_mean"], rtol=1e-6)


@pytest.mark.parametrize(
    ("similarity", "metric"), [("l1", "l1"), ("l2", "l2"), ("cosine", "cosine")]
)
def test_discrimination(judged, similarity, metric):
    shifts = [
        np.stack([mean_shift(side[name], CELLS[CONTROL]) for name in CONDITIONS])
        for side in (PRED, TRUE)
    ]
    targets = [NAMES.index(name) if name in NAMES else -1 for name in CONDITIONS]
    result = discrimination(*shifts, similarity=similarity, normaliser="n", target_genes=targets)
    expected = [judged[0][name][f"discrimination_score_{metric}"] for name in CONDITIONS]
    np.testing.assert_allclose(result.scores, expected, atol=1e-6)


def test_discrimination_by_correlation_with_mixed_up_predictions(judged):
    """Predictions that belong to another condition, so that ranks are not all zero."""
    turned = CELLS | dict(zip(CONDITIONS, [PRED[name] for name in CONDITIONS[::-1]], strict=True))
    pair = type(judged[1].anndata_pair)(
        real=annotated(TRUE), pred=annotated(turned), pert_col="target", control_pert=CONTROL
    )
    shifts = [
        np.stack([mean_shift(side[name], CELLS[CONTROL]) for name in CONDITIONS])
        for side in (turned, TRUE)
    ]
    targets = [NAMES.index(name) if name in NAMES else -1 for name in CONDITIONS]
    for similarity, metric in (("pearson", "correlation"), ("l1", "l1")):
        theirs = discrimination_score(pair, metric=metric)
        result = discrimination(
            *shifts, similarity=similarity, normaliser="n", target_genes=targets
        )
        np.testing.assert_allclose(result.scores, [theirs[name] for name in CONDITIONS], atol=1e-6)
        assert result.score < 1


def test_energy_distance_from_control_cells(judged):
    """There the distances of both sides from control cells are correlated over conditions."""
    distances = [
        [
            energy_distance(side[name], CELLS[CONTROL], max_cells=None, unbiased=False)
            for name in CONDITIONS
        ]
        for side in (TRUE, PRED)
    ]
    expected = np.corrcoef(*distances)[0, 1]
    for name in CONDITIONS:
        assert judged[0][name]["pearson_edistance"] == pytest.approx(expected, abs=1e-6)
