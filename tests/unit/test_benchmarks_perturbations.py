"""Folds of perturbations, features from annotation, depths recovered from a file."""

import gzip

import numpy as np
import pytest
import scipy.sparse as sp

from benchmarks.annotation import gene_features, read_gene_sets
from benchmarks.perturbations import folds_of, known_pairs, recovered_depth

LABELS = ["A", "B", "C", "D", "E", "A+B", "C+X", "Y+Z"]


def test_every_single_is_scored_once_and_its_pairs_are_hidden_with_it():
    folds = folds_of(LABELS, n_folds=2)
    assert sorted(name for fold in folds for name in fold.scored) == ["A", "B", "C", "D", "E"]
    for fold in folds:
        expected = {p for p in ("A+B", "C+X") if set(p.split("+")) & set(fold.scored)}
        assert set(fold.hidden) == expected
    assert folds == folds_of(LABELS[::-1], n_folds=2)
    assert len(folds_of(["A", "B"], n_folds=5)) == 2


def test_known_pairs_have_both_singles():
    assert known_pairs(LABELS) == ("A+B",)


def test_depth_is_recovered_from_log_values():
    rng = np.random.default_rng(0)
    counts = rng.poisson(2.0, (5, 30))
    counts[4] = 0
    depth = np.array([1000.0, 2345.0, 20000.0, 777.0, 0.0])
    log1p = np.log1p(counts / np.where(depth > 0, depth, 1.0)[:, None] * 1e4)
    found = recovered_depth(
        sp.csr_array(log1p.astype(np.float32)), sp.csr_array(counts), np.full(5, 9.0)
    )
    np.testing.assert_array_equal(found, [1000, 2345, 20000, 777, 9])


def test_gene_sets_are_read_from_both_kinds_of_file(tmp_path):
    gmt = tmp_path / "sets.gmt"
    gmt.write_text("Growth\tR1\tA\tB\nRepair\tR2\tB\n")
    table = tmp_path / "table.tsv.gz"
    with gzip.open(table, "wt") as file:
        file.write("symbol\tterm\tother\nA\tR1\tx\nB\tR1\tx\nB\tR2\ty\nB\tR2\tz\n")
    expected = {"A": {"R1"}, "B": {"R1", "R2"}}
    assert read_gene_sets(gmt) == read_gene_sets(table) == expected


@pytest.fixture
def sets():
    rng = np.random.default_rng(1)
    found = {f"G{i}": {f"T{t}" for t in rng.choice(40, 5, replace=False)} for i in range(60)}
    return found | {"TWIN": set(found["G3"])}


def test_features_depend_on_the_gene_alone(sets):
    table = gene_features(sets, ["TWIN", "G3", "G5", "unheard of"], n_features=4)
    assert list(table.index) == ["G3", "G5", "TWIN", "unheard of"]
    np.testing.assert_allclose(table.loc["TWIN"], table.loc["G3"], atol=1e-12)
    assert (table.loc["unheard of"] == 0).all()
    alone = gene_features(sets, ["G5"], n_features=4)
    np.testing.assert_allclose(alone.loc["G5"], table.loc["G5"], atol=1e-12)
    assert (np.linalg.norm(table.to_numpy(), axis=1) <= 1 + 1e-9).all()
