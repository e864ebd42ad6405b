"""Saved is the same: bundles are whole, plain, checked, and predict to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import perturbdiff as ptd
from perturbdiff._errors import BundleError, ConfigError, NotFittedError, UnknownLevelError
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig
from perturbdiff.model._bundle import (
    ARRAYS,
    CONTROLS,
    FORMAT,
    MANIFEST,
    Parts,
    read_bundle,
    write_bundle,
)

ASKED = {"perturbations": ["P1", "P3"], "contexts": [{"cell_type": "T1"}], "n_cells": 40, "seed": 5}


@pytest.fixture(scope="module")
def bundle(small_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "deep" / "bundle"
    small_model.save(path)
    return path


@pytest.fixture
def copy(bundle, tmp_path):
    """A copy of the bundle that may be damaged."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in bundle.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def same(left, right):
    """Bit-equal cells, labels and baselines' answers."""
    assert np.array_equal(left.X.toarray(), right.X.toarray())
    assert np.array_equal(left.layers["counts"].toarray(), right.layers["counts"].toarray())
    assert left.obs.astype(str).equals(right.obs.astype(str))
    ours, theirs = left.uns["perturbdiff"], right.uns["perturbdiff"]
    assert ours["bundle_checksum"] == theirs["bundle_checksum"]
    assert ours["baselines"].keys() == theirs["baselines"].keys()
    for name, value in ours["baselines"].items():
        number = np.issubdtype(getattr(value, "dtype", object), np.floating)
        assert np.array_equal(value, theirs["baselines"][name], equal_nan=number), name


def test_a_loaded_model_predicts_to_the_bit(small_model, bundle, simulated_cells):
    loaded = ptd.load(bundle)
    assert loaded.checksum == small_model.checksum
    assert (loaded.seed, loaded.split_hash) == (small_model.seed, small_model.split_hash)
    assert loaded.registry == small_model.registry
    assert loaded.fitted.steps == small_model.fitted.steps
    same(loaded.predict(simulated_cells, **ASKED), small_model.predict(simulated_cells, **ASKED))


FRESH = """
import json, random, sys
import numpy as np, torch
torch.set_num_threads(1)
random.seed(1), np.random.seed(2), torch.manual_seed(3)
def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
before = states()
import anndata
import perturbdiff as ptd
bundle, cells, out, asked = sys.argv[1:]
pred = ptd.load(bundle).predict(anndata.read_h5ad(cells), **json.loads(asked))
assert states() == before, "random state moved"
pred.write_h5ad(out)
"""


def test_a_fresh_process_predicts_to_the_bit_and_moves_no_random_state(
    small_model, bundle, simulated_cells, tmp_path
):
    simulated_cells.write_h5ad(tmp_path / "cells.h5ad")
    paths = [str(bundle), str(tmp_path / "cells.h5ad"), str(tmp_path / "pred.h5ad")]
    subprocess.run(
        [sys.executable, "-c", FRESH, *paths, json.dumps(ASKED)],
        check=True,
        cwd=Path(__file__).parents[2],
    )
    same(anndata.read_h5ad(tmp_path / "pred.h5ad"), small_model.predict(simulated_cells, **ASKED))


def test_saving_what_was_loaded_gives_the_same_bytes(bundle, tmp_path):
    ptd.load(bundle).save(tmp_path / "again")
    for file in bundle.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_combinations_features_and_doses_are_answered_from_a_bundle(small_fit, tmp_path):
    """What the priors learned from single control cells is kept as numbers, for every question."""
    config = SimulationConfig(
        n_genes=40, n_contexts=2, n_perturbations=3, n_unseen=1, n_pairs=2, n_cells=20,
        n_controls=30, doses=(0.5, 2.0), hours=(),
    )  # fmt: skip
    adata = simulated(config, seed=1).adata
    model = small_fit(adata, columns={"dose_key": "dose"}, holdout=None)
    model.save(tmp_path / "bundle")
    loaded = ptd.load(tmp_path / "bundle")
    asked = {
        "perturbations": ["P1", "P1+P2", "P1+P3", "P2+P3", "P4", "P1+P4", "dosed", "P1+dosed"],
        "doses": [1.0], "contexts": [{"cell_type": "T1"}], "n_cells": 4,
        "sample": ptd.SampleConfig(n_steps=2),
    }  # fmt: skip
    same(loaded.predict(adata, **asked), model.predict(adata, **asked))
    assert loaded.checksum == model.checksum


def test_the_same_seed_gives_the_same_bundle_and_another_seed_another(
    small_model, small_fit, simulated_cells
):
    shuffled = simulated_cells[np.random.default_rng(0).permutation(simulated_cells.n_obs)].copy()
    assert small_fit(shuffled).checksum == small_model.checksum
    assert small_fit(simulated_cells, seed=1).checksum != small_model.checksum


def test_held_out_cells_leave_no_trace(small_model, small_fit, simulated_cells):
    """Their values are scrambled among cells and genes; all that is saved stays the same."""
    scrambled = simulated_cells.copy()
    held = (scrambled.obs["cell_type"] == "T1") & (scrambled.obs["perturbation"] != "control")
    rows = np.flatnonzero(held)
    rng = np.random.default_rng(1)
    values = scrambled.X.toarray()
    values[rows] = rng.permuted(rng.permutation(values[rows]), axis=1)
    scrambled.X = sp.csr_matrix(values)
    scrambled.obs.loc[held, "library_size"] *= 2
    assert (scrambled.X != simulated_cells.X).nnz > 100
    assert small_fit(scrambled).checksum == small_model.checksum


def test_a_bundle_holds_no_cells_no_paths_and_nothing_to_run(bundle, simulated_cells):
    assert {file.suffix for file in bundle.iterdir()} == {".json", ".safetensors"}
    for file in bundle.glob("*.json"):
        json.loads(file.read_text())
        assert str(bundle.parent) not in file.read_text()
        assert str(Path.home()) + "/" not in file.read_text()
        assert "cell " not in file.read_text()  # names of cells start so
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest["format"] == FORMAT
    assert manifest["version"] == ptd.__version__
    assert set(manifest["files"]) | {MANIFEST} == {file.name for file in bundle.iterdir()}
    n_cells = simulated_cells.n_obs
    n_control = simulated_cells.obs.query("perturbation == 'control'").shape[0]
    shapes = {name: tuple(array.shape) for name, array in read_bundle(bundle).arrays.items()}
    assert shapes["prior.context.axes"][0] == 0
    most = max(size for name, shape in shapes.items() if "denoiser" not in name for size in shape)
    assert most < min(n_control, n_cells) / 2


def test_nothing_is_overwritten_and_nothing_unfinished_is_left(bundle, small_model, tmp_path):
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    with pytest.raises(BundleError, match="never overwrites"):
        small_model.save(bundle)
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BundleError, match="never overwrites"):
        small_model.save(tmp_path / "file")
    assert [file.name for file in bundle.parent.iterdir()] == [bundle.name]


def test_a_failed_save_leaves_nothing(tmp_path):
    parts = Parts(kind="x", plain={"bad": float("nan")}, arrays={"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="JSON"):
        write_bundle(parts, tmp_path / "bundle")
    good = Parts(kind="x", plain={"fine": 1, "sub/bad": 2}, arrays={"a": torch.zeros(2)})
    with pytest.raises(OSError, match="No such file"):
        write_bundle(good, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [ARRAYS, "registry.json", "prior.json", "settings.json"])
def test_damage_is_refused_by_name(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"damaged: {name} .*Copy the whole folder again"):
        ptd.load(copy)


def test_missing_files_and_folders_are_refused_by_name(copy, tmp_path):
    (copy / "prior.json").unlink()
    with pytest.raises(BundleError, match=r"lacks prior\.json"):
        ptd.load(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(BundleError, match=r"not a bundle: it has no manifest\.json"):
        ptd.load(copy)
    with pytest.raises(BundleError, match="There is no folder"):
        ptd.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="holds nothing"):
        ptd.load(tmp_path / "empty")


def rewritten(path, **changes):
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


def test_a_newer_format_is_refused_before_anything_else_is_read(copy):
    (copy / ARRAYS).unlink()
    rewritten(copy, format=FORMAT + 1, version="9.9")
    with pytest.raises(BundleError, match=rf"format {FORMAT + 1}, written by perturbdiff 9\.9"):
        ptd.load(copy)


def test_another_kind_is_refused_by_name(copy):
    rewritten(copy, kind="crystal_ball")
    with pytest.raises(BundleError, match="'crystal_ball'; known kinds: 'set_diffusion'"):
        ptd.load(copy)


@pytest.mark.parametrize(
    "changes",
    [{"format": "1"}, {"format": 0}, {"files": {}}, {"kind": None}, {"files": {"../x": "0"}}],
)
def test_a_manifest_that_makes_no_sense_is_damaged(copy, changes):
    rewritten(copy, **changes)
    with pytest.raises(BundleError, match="damaged: manifest"):
        ptd.load(copy)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "{}"])
def test_a_manifest_that_cannot_be_read_is_damaged(copy, text):
    (copy / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="damaged: manifest"):
        ptd.load(copy)


def test_parts_that_do_not_make_a_model_are_refused(tmp_path, bundle):
    parts = read_bundle(bundle)
    fewer = {name: array for name, array in parts.arrays.items() if name != "mean"}
    lacking = Parts(kind=parts.kind, plain=parts.plain, arrays=fewer)
    write_bundle(lacking, tmp_path / "lacking")
    with pytest.raises(BundleError, match="lacks what a set_diffusion is made of"):
        ptd.load(tmp_path / "lacking")


def test_a_bundle_opens_on_the_cpu(bundle):
    fitted = ptd.load(bundle).fitted
    devices = {weight.device.type for weight in fitted.denoiser.parameters()}
    assert devices | {fitted.codec.encoder.device.type} == {"cpu"}


def test_a_model_that_was_not_fitted_has_nothing_to_save(simulated_cells, tmp_path):
    model = ptd.SetDiffusion.from_anndata(
        simulated_cells, perturbation_key="perturbation", control="control"
    )
    with pytest.raises(NotFittedError, match="not fitted"):
        model.save(tmp_path / "bundle")
    with pytest.raises(NotFittedError, match="not fitted"):
        model.predict(simulated_cells, perturbations=["P1"])
    assert not list(tmp_path.iterdir())


def test_the_checksum_tells_content_apart():
    def checksum(kind="k", plain=None, arrays=None):
        plain = {"a": [1, 2.5]} if plain is None else plain
        arrays = {"x": torch.arange(4.0)} if arrays is None else arrays
        return Parts(kind=kind, plain=plain, arrays=arrays).checksum

    others = [
        checksum(kind="l"),
        checksum(plain={"a": [1, 2.6]}),
        checksum(plain={"b": [1, 2.5]}),
        checksum(arrays={"y": torch.arange(4.0)}),
        checksum(arrays={"x": torch.arange(4.0).double()}),
        checksum(arrays={"x": torch.arange(4.0).reshape(2, 2)}),
        checksum(arrays={"x": torch.arange(4.0) + 1e-7}),
    ]
    assert len({checksum(), *others}) == 8
    strided = torch.arange(8.0)[::2] / 2
    assert checksum(arrays={"x": strided}) == checksum()


# Control cells that go with a model


@pytest.fixture(scope="module")
def stocked(small_model, tmp_path_factory):
    """Saved with as many control cells as there are."""
    path = tmp_path_factory.mktemp("stocked") / "bundle"
    small_model.save(path, include_controls=512)
    return path


def test_a_model_with_control_cells_answers_by_context_alone(small_model, stocked, simulated_cells):
    loaded = ptd.load(stocked)
    same(loaded.predict(None, **ASKED), small_model.predict(simulated_cells, **ASKED))
    every = ptd.tl.predict(None, loaded, perturbations=["P1"], n_cells=4)
    assert set(every.obs["cell_type"]) == {"T1", "T2", "T3"}
    assert loaded.checksum == small_model.checksum
    with pytest.raises(UnknownLevelError, match="T1"):
        loaded.predict(perturbations=["P1"], contexts=[{"cell_type": "T11"}])


def test_the_manifest_lists_the_control_cells_and_nothing_names_them(stocked, bundle):
    manifest = json.loads((stocked / MANIFEST).read_text())
    assert manifest["controls"] == [{"context": [f"T{n}"], "cells": 40} for n in (1, 2, 3)]
    assert "controls" not in json.loads((bundle / MANIFEST).read_text())
    assert {f.name for f in stocked.iterdir()} - {f.name for f in bundle.iterdir()} == {CONTROLS}
    assert b"cell " not in (stocked / CONTROLS).read_bytes()


def test_a_reservoir_is_a_part_of_the_control_cells_and_can_be_saved_again(
    small_model, stocked, simulated_cells, tmp_path
):
    """Fewer cells: the same from the fitted and from the loaded model, and from any order."""
    small_model.save(tmp_path / "few", include_controls=15)
    ptd.load(stocked).save(tmp_path / "again", include_controls=15)
    contents = [(tmp_path / name / CONTROLS).read_bytes() for name in ("few", "again")]
    assert contents[0] == contents[1]
    few = ptd.load(tmp_path / "few")
    assert few._reservoir.n_obs == 45
    control = simulated_cells[simulated_cells.obs["perturbation"] == "control"]
    whole = {tuple(row) for row in control[:, few.registry.genes].X.toarray().astype(int)}
    assert {tuple(row) for row in few._reservoir.layers["counts"].toarray()} <= whole
    pred = few.predict(None, **ASKED)
    assert set(pred.obs["library_size"]) <= set(few._reservoir.obs["library_size"])
    ptd.load(stocked).save(tmp_path / "none")
    assert not (tmp_path / "none" / CONTROLS).exists()


def test_without_control_cells_it_says_what_is_missing(small_model, bundle, tmp_path):
    with pytest.raises(ConfigError, match=r"adata = None: .*include_controls"):
        small_model.predict(None, **ASKED)
    loaded = ptd.load(bundle)
    with pytest.raises(ConfigError, match="no control cells of its own"):
        loaded.predict(**ASKED)
    with pytest.raises(BundleError, match="no control cells with counts to include"):
        loaded.save(tmp_path / "more", include_controls=5)
    with pytest.raises(ConfigError, match="include_controls = 0: must be at least 1"):
        small_model.save(tmp_path / "zero", include_controls=0)
    assert not list(tmp_path.iterdir())


def test_damaged_control_cells_are_refused_by_name(stocked, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in stocked.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == CONTROLS:
            content[-1] ^= 1
        (copy / file.name).write_bytes(content)
    with pytest.raises(BundleError, match="damaged: controls"):
        ptd.load(copy)


def test_baselines_go_with_control_cells_too(simulated_cells, tmp_path):
    """Also where there are no covariates."""
    model = ptd.MeanShift.from_anndata(
        simulated_cells, perturbation_key="perturbation", control="control"
    ).fit(simulated_cells, n_top_genes=30)
    model.save(tmp_path / "bundle", include_controls=1000)
    ask = {"perturbations": ["P1"], "n_cells": 30}
    ours, theirs = (
        model.predict(simulated_cells, **ask),
        ptd.load(tmp_path / "bundle").predict(**ask),
    )
    assert (ours.layers["counts"] != theirs.layers["counts"]).nnz == 0
