"""The command that profiles saved models."""

import json

import pytest
from typer.testing import CliRunner

import perturbdiff as ptd
from perturbdiff.cli._app import app
from perturbdiff.model import _fitted
from perturbdiff.profiling import _machine

FILES = {"profile.json", "profile.md", "trace.json", "roofline.png"}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(_fitted, "PILOT_CELLS", 32)
    monkeypatch.setattr(_machine.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(_machine, "_MEASURED", {})
    monkeypatch.setattr(_machine, "_SIZES", (32,))
    monkeypatch.setattr(_machine, "_SECONDS", 0.0)
    monkeypatch.setattr(_machine, "_COPY_BYTES", 1 << 12)


@pytest.fixture(scope="module")
def bundle(simulated_cells, small_fit, tmp_path_factory):
    shape = ptd.NetworkConfig(n_axes=5, n_response_axes=4, width=64, n_blocks=2, n_heads=2)
    path = tmp_path_factory.mktemp("saved") / "bundle"
    small_fit(simulated_cells, network=shape).save(path, include_controls=20)
    return path


def run(*words):
    return CliRunner().invoke(app, ["profile", *map(str, words)])


def test_a_report_is_written_and_not_over_another(bundle, tmp_path):
    out = tmp_path / "report"
    words = (bundle, "--n-cells", 1, "--n-cells", 40, "--repeats", 1, "--out", out)
    done = run(*words, "--set", "sample.n_steps=2")
    assert done.exit_code == 0, done.output
    assert {file.name for file in out.iterdir()} == FILES
    assert "denoising steps" in done.output
    runs = json.loads((out / "profile.json").read_text(encoding="utf-8"))["runs"]
    assert [(one["name"], one["n_cells"], one["network_calls"]) for one in runs] == [
        ("bundle", 1, 2), ("bundle", 40, 2),
    ]  # fmt: skip
    done = run(*words, "sample.n_steps=2", "--overwrite", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert set(answer["files"]) == FILES
    assert [one["network_calls"] for one in answer["report"]["runs"]] == [2, 2]
    again = run(*words)
    assert again.exit_code == 2
    assert "holds a report" in again.output


def test_what_cannot_be_profiled_is_refused(bundle, simulated_cells, tmp_path):
    columns = {"perturbation_key": "perturbation", "control": "control"}
    simple = ptd.MeanShift.from_anndata(
        simulated_cells, **columns, covariate_keys=["cell_type"]
    ).fit(simulated_cells, n_top_genes=20)
    simple.save(tmp_path / "simple")
    done = run(bundle, "--against", tmp_path / "simple", "--out", tmp_path / "report")
    assert done.exit_code == 2
    assert "no network to profile" in " ".join(done.output.split())
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "name a folder" in run(bundle, "--out", tmp_path / "file").output
