"""Baselines as cells, and scores of a held-out condition."""

import numpy as np
import pytest
import scipy.sparse as sp

from benchmarks.cache import Cache
from benchmarks.contexts import ContextStudy, seeds_of
from benchmarks.fits import Recipe
from benchmarks.held_out import half_shifts, true_shift
from benchmarks.simple import KINDS, TO_BEAT


@pytest.fixture(scope="module")
def study(toy, tmp_path_factory):
    """Four cell types with one perturbation, eight cells each."""
    folder = tmp_path_factory.mktemp("study")
    adata = toy(("ctrl", "stim"), cell_types=("B", "DC", "NK", "T"), n_each=8, n_genes=150)
    counts = adata.X.toarray()
    counts[adata.obs["condition"] == "stim", 3] += 9.0
    adata.X = sp.csr_matrix(counts)
    adata.write_h5ad(folder / "toy.h5ad")
    return ContextStudy(
        path=folder / "toy.h5ad",
        perturbation_key="condition",
        control="ctrl",
        context_key="cell_type",
        recipe=Recipe(n_top_genes=None),
        cache=Cache(folder / "cache"),
    )


@pytest.fixture(scope="module")
def held(study):
    return study._view("NK")


def test_a_true_shift_ranks_first_and_its_opposite_last(held):
    own = held.true_shifts[held.own]
    assert held.told_apart(own) == {"discrimination": 1.0, "ranked_first": 1.0}
    assert held.told_apart(-own) == {"discrimination": 0.0, "ranked_first": 0.0}
    scores = held.score_mean(held.control_cells.mean(0, dtype=np.float64) + own)
    assert scores["pearson_shift"] == pytest.approx(1)
    assert scores["mae_shift"] == pytest.approx(0, abs=1e-9)


def test_a_control_mean_has_no_direction(held):
    scores = held.score_mean(held.control_cells.mean(0, dtype=np.float64))
    assert scores["pearson_shift"] == 0
    assert scores["discrimination"] == 0.5


def test_shifted_cells_are_control_cells_within_the_scale(held):
    base = held.control_cells.mean(0, dtype=np.float64)
    np.testing.assert_array_equal(held.shifted(base), held.control_cells)
    far = held.shifted(base + 20)
    np.testing.assert_allclose(far, np.log1p(1e4), rtol=1e-6)
    assert (held.shifted(base - 20) == 0).all()


def test_transported_cells_meet_the_mean(held):
    target = held.truth.mean(0, dtype=np.float64)
    cells = held.transported(target, n_cells=400)
    assert cells.shape == (400, held.truth.shape[1])
    spread = cells.std(0) / 20
    error = np.abs(cells.mean(0) - target)
    assert (error <= 6 * spread + 1e-3).all()
    assert len(held.transported(target, n_cells=None)) == len(held.controls) == 8


def test_halves_of_an_even_population_average_to_the_whole():
    rng = np.random.default_rng(0)
    treated, control = (sp.csr_array(rng.poisson(1.0, (10, 6)).astype(float)) for _ in range(2))
    halves = half_shifts([treated, control], [control, treated], n_splits=3)
    assert halves.shape == (3, 2, 2, 6)
    whole = np.tile(true_shift(treated, control), (3, 1))
    np.testing.assert_allclose(halves.mean(1)[:, 0], whole, atol=1e-12)
    assert not np.allclose(halves[:, 0], halves[:, 1])


def test_every_baseline_is_scored_or_says_why_not(study):
    simple = study.simple("NK")
    names = {kind.name for kind in KINDS}
    assert set(simple["means"]) | set(simple["undefined"]) == names
    assert "no parts to add up" in simple["undefined"]["additive"]
    assert TO_BEAT in simple["cells"]
    assert simple["n_true"] == simple["n_control"] == 8
    assert 0 <= simple["ceiling"]["values"]["discrimination"] <= 1
    assert study.simple("NK") == simple  # from the cache


def test_the_question_names_the_split(study):
    wanted = study.wanted("NK")
    assert wanted.perturbations == ("stim",)
    assert wanted.contexts == ({"cell_type": "NK"},)
    assert wanted.split_hash == study.simple("NK")["split_hash"] != study.wanted("B").split_hash


def test_only_named_contexts_have_several_seeds():
    assert seeds_of(["B", "DC"], several=("B", "NK"), n_seeds=3) == {"B": 3, "DC": 1}


def test_files_with_several_perturbations_are_refused(toy, study, tmp_path):
    toy(("ctrl", "a", "b")).write_h5ad(tmp_path / "many.h5ad")
    many = ContextStudy(
        path=tmp_path / "many.h5ad",
        perturbation_key="condition",
        control="ctrl",
        context_key="cell_type",
        recipe=Recipe(),
        cache=study.cache,
    )
    with pytest.raises(ValueError, match="one perturbation"):
        _ = many.conditions
