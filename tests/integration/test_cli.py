"""The command line does what the API does, and refuses before it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import perturbdiff as ptd
from perturbdiff._errors import ConfigError
from perturbdiff.cli import DATASETS, _completion, _doctor, _files, _fit, _runs, _show, app
from perturbdiff.cli._options import data_and_settings
from perturbdiff.config import load_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.n_axes=5", "model.width=16", "model.n_blocks=1", "model.n_heads=2", "train.n_sets=2",
    "train.set_size=8", "train.n_controls=8", "train.max_steps=4", "train.check_every=2",
]  # fmt: skip
COLUMNS = [
    "--perturbation-key", "perturbation", "--control", "control", "--covariate-keys", "cell_type",
    "--n-top-genes", "30",
]  # fmt: skip


def settings(*changes):
    return [word for text in (*SMALL, *changes) for word in ("--set", text)]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def cells(simulated_cells, tmp_path_factory):
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    simulated_cells.write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def bundle(cells):
    path = cells.with_name("bundle")
    done = run("fit", cells, "--out", path, *COLUMNS, "--holdout", "cell_type=T1", *settings())
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def predicted(cells, bundle):
    path = cells.with_name("predicted.h5ad")
    done = run(
        "predict", cells, "--model", bundle, "--perturbations", "P1", "--perturbations", "P2",
        "--contexts", "cell_type=T1", "--n-cells", 20, "--seed", 3, "--out", path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return path


def test_fit_and_predict_are_those_of_the_api(cells, bundle, predicted):
    adata = anndata.read_h5ad(cells)
    model = ptd.load(bundle)
    same = ptd.tl.predict(
        adata, model, perturbations=["P1", "P2"], contexts=[{"cell_type": "T1"}], n_cells=20, seed=3
    )
    written = anndata.read_h5ad(predicted)
    assert written.obs["perturbation"].tolist() == ["P1"] * 20 + ["P2"] * 20
    np.testing.assert_array_equal(written.X.toarray(), same.X.toarray())
    fitted = ptd.SetDiffusion.from_anndata(
        adata, perturbation_key="perturbation", control="control", covariate_keys=["cell_type"]
    ).fit(
        adata,
        holdout={"cell_type": ["T1"]},
        n_top_genes=30,
        network=ptd.NetworkConfig(n_axes=5, width=16, n_blocks=1, n_heads=2),
        train=ptd.TrainConfig(n_sets=2, set_size=8, n_controls=8, max_steps=4, check_every=2),
        options=ptd.TrainerOptions(progress=False),
    )
    assert fitted.checksum == model.checksum


def test_the_sibling_is_fitted_and_asked_alike(cells, tmp_path):
    few = ("train.max_steps=2", "train.n_sets=2", "train.n_controls=8", "decoder.draft_steps=2")
    shape = ("decoder.n_axes=5", "decoder.width=16", "decoder.n_blocks=1", "decoder.n_heads=2")
    done = run(
        "fit", cells, "--kind", "causal_baseline", "--out", tmp_path / "bundle", *COLUMNS,
        "--holdout", "cell_type=T1", *(word for text in (*few, *shape) for word in ("--set", text)),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    out, table = tmp_path / "predicted.h5ad", tmp_path / "scores.csv"
    words = ["predict", cells, "--model", tmp_path / "bundle", "--perturbations", "P1"]
    words += ["--contexts", "cell_type=T1", "--n-cells", 20, "--seed", 3, "--out", out]
    done = run(*words, "--set", "decode.draft_length=4")
    assert done.exit_code == 0, done.output
    written = anndata.read_h5ad(out)
    assert written.uns["perturbdiff"]["draft_length"] == 4
    same = ptd.tl.predict(
        anndata.read_h5ad(cells), ptd.load(tmp_path / "bundle"), perturbations=["P1"],
        contexts=[{"cell_type": "T1"}], n_cells=20, seed=3,
        decode=ptd.DecodeConfig(draft_length=4),
    )  # fmt: skip
    np.testing.assert_array_equal(written.X.toarray(), same.X.toarray())
    assert run("score", out, "--reference", cells, "--out", table).exit_code == 0
    assert pd.read_csv(table)["method"].iloc[0] == "causal_baseline"
    wish = tmp_path / "wish.json"
    wish.write_text(json.dumps([{"kind": "at_least", "gene": written.var_names[0], "value": 2.0}]))
    words += ["--overwrite", "--constraints", wish]
    done = run(*words, "--decoding", "raw")
    assert done.exit_code == 0, done.output
    assert anndata.read_h5ad(out)[:, 0].X.toarray().min() >= 2.0 - 1e-6
    done = run(*words, "--decoding", "transport")
    assert done.exit_code == 2
    assert "Use decoding='raw'" in done.stderr
    words = words[:-2]
    assert run(*words, "--decoding", "transport").exit_code == 0
    assert anndata.read_h5ad(out).uns["perturbdiff"]["sampler"] == "autoregressive_transport"
    done = run(*words, "--overwrite", "--set", "sample.n_steps=4")
    assert done.exit_code == 2
    assert "CausalBaseline.predict has no 'sample'" in done.stderr


def test_constraints_come_from_a_file_and_are_answered_for(cells, bundle, tmp_path):
    gene = ptd.load(bundle).registry.genes[0]
    wish, out = tmp_path / "wish.json", tmp_path / "predicted.h5ad"
    wish.write_text(json.dumps([{"kind": "at_least", "gene": gene, "value": 2.0}]))
    words = ["predict", cells, "--model", bundle, "--perturbations", "P1", "--n-cells", 20]
    words += ["--contexts", "cell_type=T1", "--constraints", wish, "--out", out, "--overwrite"]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert f"{gene} >= 2 log1p per cell: holds (hard)" in done.output
    written = anndata.read_h5ad(out)
    assert written[:, gene].X.toarray().min() >= 2.0 - 1e-6
    report = written.uns["perturbdiff"]["constraints"]
    assert report["satisfied"].all()

    entry = {"kind": "fold_change", "gene": gene, "fold": 2.0, "relation": "at_least"}
    ways = ["soft", {"kind": "best_of", "n": 2}]
    wish.write_text(json.dumps({"constraints": [entry], "enforce": ways}))
    assert run(*words).exit_code == 0
    assert anndata.read_h5ad(out).uns["perturbdiff"]["constraints"]["method"][0] == "soft+best_of"

    for text, says in [
        ("{", "is no JSON"),
        ('{"kind": "at_least"}', "must hold a list of constraints"),
        ('[{"kind": "atleast"}]', "Did you mean 'at_least'?"),
        ('[{"kind": "at_least"}]', "constraint 'at_least' = {}: lacks 'gene', 'value'."),
        ('{"constraints": [], "enforced": "soft"}', "Did you mean 'enforce'?"),
        ('[{"kind": "at_least", "gene": "nowhere", "value": 1}]', "nowhere"),
    ]:
        wish.write_text(text)
        done = run(*words)
        assert done.exit_code == 2, done.output
        assert says in done.stderr
    wish.unlink()
    done = run(*words)
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr


def test_score_writes_a_table_and_pictures_and_shows_a_summary(cells, predicted, tmp_path):
    out = tmp_path / "deep" / "scores.csv"
    done = run(
        "score", predicted, "--reference", cells, "--out", out, "--pictures", tmp_path / "pictures"
    )
    assert done.exit_code == 0, done.output
    table = pd.read_csv(out)
    assert set(table["perturbation"]) == {"P1", "P2"}
    assert "set_diffusion" in done.output
    assert "split_half_ceiling" in done.output
    assert "no parts to add up" in done.output
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {
        "response.png", "embedding.png", "scores.png",
    }  # fmt: skip


def test_pictures_of_scores_call_genes_by_their_symbols(
    cells, predicted, tmp_path, monkeypatch, simulated_cells
):
    named = simulated_cells.copy()
    named.var["symbol"] = [f"symbol of {name}" for name in named.var_names]
    named.write_h5ad(tmp_path / "named.h5ad")
    seen, draw = [], ptd.pl.response

    def watched(*given, **settings):
        panels = draw(*given, **settings)
        seen.extend(text.get_text() for panel in panels for text in panel.texts)
        return panels

    monkeypatch.setattr(ptd.pl, "response", watched)
    words = ["score", predicted, "--reference", tmp_path / "named.h5ad", "--out"]
    words += [tmp_path / "scores.csv", "--pictures", tmp_path / "pictures"]
    done = run(*words, "--gene-symbols", "symbol")
    assert done.exit_code == 0, done.output
    assert any(text.startswith("symbol of ") for text in seen)
    (tmp_path / "scores.csv").unlink()
    done = run(*words, "--overwrite", "--gene-symbols", "symbols")
    assert done.exit_code == 2
    assert "Did you mean 'symbol'?" in done.stderr
    assert not (tmp_path / "scores.csv").exists()


def test_a_layer_is_an_option(cells, bundle, tmp_path, simulated_cells):
    layered = simulated_cells.copy()
    layered.layers["raw"], layered.X = layered.X, layered.X * 0
    layered.write_h5ad(tmp_path / "layered.h5ad")
    words = ["fit", tmp_path / "layered.h5ad", *COLUMNS, "--holdout", "cell_type=T1", *settings()]
    words += ["--scale", "counts", "--layer", "raw", "--out", tmp_path / "bundle"]
    done = run(*words)
    assert done.exit_code == 0, done.output
    made, plain = ptd.load(tmp_path / "bundle"), ptd.load(bundle)
    assert made.registry.layer == "raw"
    assert made.registry.genes == plain.registry.genes


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "perturbdiff", "--version"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.strip() == ptd.__version__
    assert done.returncode == 0, done.stderr


def test_scores_for_machines_are_those_of_the_table(cells, predicted, tmp_path):
    out = tmp_path / "scores.csv"
    done = run("score", predicted, "--reference", cells, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["scores"]
    table = pd.read_csv(out)
    for row in rows:
        own = table[(table["method"] == row["method"]) & (table["cells"] == row["cells"])]
        mean = own["pearson_shift"].mean()
        assert row["pearson_shift"] == (None if np.isnan(mean) else pytest.approx(mean))
    assert rows[0]["method"] == "set_diffusion"
    assert None in {row["pearson_shift"] for row in rows}  # what is not defined


def test_printed_settings_say_the_same_run(cells, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    laptop = ROOT / "configs" / "runs" / "laptop.yaml"
    for words in (["--config", laptop], [cells, *COLUMNS, "--kind", "causal_baseline"]):
        printed = run("fit", *words, "--seed", 7, "--print-config")
        assert printed.exit_code == 0, printed.output
        (tmp_path / "printed.yaml").write_text(printed.stdout)
        again = load_run(tmp_path / "printed.yaml")
        assert again.seed == 7
        assert run("fit", "--config", "printed.yaml", "--print-config").stdout == printed.stdout
    assert again.kind == "causal_baseline"
    assert again.data.source == str(cells)
    assert [path.name for path in tmp_path.iterdir()] == ["printed.yaml"]


def test_a_shipped_run_fits_by_its_path_and_takes_other_cells(cells, tmp_path):
    laptop = ROOT / "configs" / "runs" / "laptop.yaml"
    words = [cells, *COLUMNS, "--holdout", "cell_type=T1", "--out", tmp_path / "bundle"]
    done = run("fit", "--config", laptop, *words, *settings("data.library_size_key=null"))
    assert done.exit_code == 0, done.output
    assert ptd.load(tmp_path / "bundle").registry.perturbations.levels == ("P1", "P2")
    assert "Still as in" not in done.output  # all was named


def test_what_a_shipped_run_says_of_its_own_cells_is_told():
    own = {"data.source": "mine.h5ad", "data.control": ["DMSO"]}
    said = _runs.carried_over("laptop", _runs.settings_of("laptop", (), own), {*own})
    assert 'perturbation_key "condition"' in said
    assert 'holdout {"cell_type": ["NK"]}' in said
    assert "control" not in said.partition(": ")[2]
    for config, source in (("laptop", "kang2018_small"), (None, "mine.h5ad")):
        run = _runs.settings_of(config, (), {"data.source": source})
        assert _runs.carried_over(config, run, ()) == ""


def test_settings_may_stand_by_themselves(monkeypatch, tmp_path):
    laptop = ROOT / "configs" / "runs" / "laptop.yaml"
    words = ["data.path=my.h5ad", "train.max_steps=50", "data.holdout={cell_type: [B]}"]
    alone = run("fit", "--config", laptop, *words, "--print-config")
    behind = run(
        "fit", "my.h5ad", "--config", laptop, "--set", words[1], "--set", words[2], "--print-config"
    )
    assert alone.exit_code == behind.exit_code == 0, alone.output
    assert alone.stdout == behind.stdout
    assert "source: my.h5ad" in alone.stdout
    assert data_and_settings(["a.h5ad", "seed=3"]) == ("a.h5ad", ["seed=3"])
    assert data_and_settings(None) == (None, [])
    monkeypatch.chdir(tmp_path)
    Path("dose=1.h5ad").touch()
    assert data_and_settings(["dose=1.h5ad"]) == ("dose=1.h5ad", [])
    with pytest.raises(ConfigError, match="name one file or data set"):
        data_and_settings(["a.h5ad", "train.max_steps", "50"])


def test_settings_are_shown_and_saved_with_the_model_and_read_again(cells, tmp_path):
    out = tmp_path / "bundle"
    first = ["fit", cells, *COLUMNS, "--holdout", "cell_type=T1", *settings("seed=4")]
    done = run(*first, "--out", out)
    assert done.exit_code == 0, done.output
    assert "inner fold" not in done.stderr  # no bar, since nobody watches
    shown = [line for line in done.stderr.splitlines() if line.startswith("train: {max_steps: 4,")]
    assert len(shown) == 1
    assert str(tmp_path) not in (out / "run.yaml").read_text()
    assert str(cells.parent) not in (out / "run.yaml").read_text()
    kept = load_run(out, overrides=[f"data.path={cells}"])
    printed = run(*first, "--print-config")
    assert load_run(out) == load_run(out / "run.yaml")
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    assert kept == load_run(tmp_path / "printed.yaml")
    again = run("fit", "--config", out, f"data.path={cells}", "--out", tmp_path / "again", "--json")
    assert again.exit_code == 0, again.output
    answer = json.loads(again.stdout)
    assert answer["checksum"] == ptd.load(out).checksum == ptd.load(tmp_path / "again").checksum
    assert (answer["steps"], answer["kind"]) == (ptd.load(out).fitted.steps, "set_diffusion")
    assert answer["settings"]["train"]["max_steps"] == 4


def test_answers_for_machines_are_one_object(cells, bundle, tmp_path):
    gene = ptd.load(bundle).registry.genes[0]
    wish, out = tmp_path / "wish.json", tmp_path / "predicted.h5ad"
    wish.write_text(json.dumps([{"kind": "at_least", "gene": gene, "value": 2.0}]))
    words = ["predict", cells, "sample.n_steps=3", "--model", bundle, "--perturbations", "P1"]
    words += ["--n-cells", 20, "--contexts", "cell_type=T1", "--constraints", wish, "--out", out]
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    answer, written = json.loads(done.stdout), anndata.read_h5ad(out)
    assert (answer["n_cells"], answer["n_genes"]) == written.shape
    assert answer["support"]["conditions"] == written.uns["perturbdiff"]["support"]["conditions"]
    assert answer["provenance"]["n_steps"] == written.uns["perturbdiff"]["n_steps"] == 3
    assert answer["constraints"][0]["satisfied"] is True
    assert answer["support"]["supported"] == [True]
    listed = json.loads(run("datasets", "--json").stdout)["datasets"]
    assert [one["name"] for one in listed] == list(DATASETS)
    file = tmp_path / "small.h5ad"
    one = json.loads(run("datasets", "kang2018_small", "--out", file, "--json").stdout)
    assert (one["out"], one["n_cells"], one["n_genes"]) == (str(file), 2999, 1500)
    refused = run(*words, "--json")  # the file is there
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_a_fault_ends_with_1_and_shows_where(cells, tmp_path, monkeypatch):
    def broken(*_args):
        raise ArithmeticError("no such kernel")

    monkeypatch.setattr(_fit, "fitted", broken)
    done = run("fit", cells, *COLUMNS, "--out", tmp_path / "bundle")
    assert done.exit_code == 1
    assert isinstance(done.exception, ArithmeticError)
    assert not (tmp_path / "bundle").exists()


def test_bars_are_for_people(cells, tmp_path, monkeypatch):
    assert not _show.for_people()  # the tests have no terminal
    monkeypatch.setattr(_runs, "for_people", lambda: True)
    words = ["fit", cells, *COLUMNS, "--holdout", "cell_type=T1", *settings()]
    assert "inner fold 1 of 2" in run(*words, "--out", tmp_path / "bundle").stderr


def completed(words):
    """What bash would offer for the last of these words."""
    known = {
        "_PERTURBDIFF_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="perturbdiff", env=known)
    return done.stdout.split()


def test_a_shell_completes_names():
    assert completed("perturbdiff sc") == ["score"]
    assert completed("perturbdiff fit --config la") == ["laptop"]
    assert completed("perturbdiff fit kang2018_") == ["kang2018_small"]
    assert completed("perturbdiff fit --kind ca") == ["causal_baseline"]
    assert completed("perturbdiff fit dat") == ["data."]
    assert completed("perturbdiff fit train.max") == ["train.max_steps="]
    assert completed("perturbdiff serve bundle max_b") == ["max_body_mb="]
    assert completed("perturbdiff serve bundle --config st") == ["standard"]
    assert [name for name, _ in _completion.settings("sample.sampler=h")] == ["sample.sampler=heun"]
    assert [name for name, _ in _completion.settings("data.path=kang2018_")] == [
        "data.path=kang2018_small"
    ]
    assert _completion.settings("nothing.at") == []
    offered = {name for name, _ in _completion.data_or_sampling("")}
    assert offered == {*DATASETS, "sample.", "decode."}
    script = subprocess.run(
        [sys.executable, "-m", "perturbdiff.cli"], capture_output=True, text=True, check=False,
        env=os.environ | {"_PERTURBDIFF_COMPLETE": "source_bash"}, cwd=ROOT,
    )  # fmt: skip
    assert "-F _perturbdiff_completion perturbdiff" in script.stdout


def test_the_doctor_finds_a_sound_installation(monkeypatch):
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["problems"]) == (0, [])
    assert found["self_test"]["error"] == ""
    assert found["packages"]["torch"]
    assert found["memory_gb"]["total"] >= found["memory_gb"]["available"] > 0
    assert found["threads"] >= 1
    shown = run("doctor", "--no-self-test")
    assert "torch uses" in shown.output
    assert "self-test" not in shown.output


def test_the_doctor_says_what_is_broken_and_ends_with_1(monkeypatch):
    def broken(*_args, **_settings):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(ptd.SetDiffusion, "fit", broken)
    done = run("doctor")
    assert done.exit_code == 1
    assert "PROBLEM: the self-test failed: RuntimeError: no kernel for this" in done.output
    known = _doctor._version
    monkeypatch.setattr(_doctor, "_version", lambda name: None if name == "scanpy" else known(name))
    done = run("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["problems"] == ["scanpy is not installed: pip install scanpy"]


def test_a_model_that_holds_control_cells_needs_no_file(cells, tmp_path):
    held = ["--holdout", "cell_type=T1", "--holdout", "cell_type=T2"]
    done = run(
        "fit", cells, "--out", tmp_path / "bundle", *COLUMNS, *held, *settings(),
        "--include-controls", 64,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    words = ["--model", tmp_path / "bundle", "--perturbations", "P1", "--n-cells", 8, "--out"]
    for name, file in (("alone.h5ad", []), ("with.h5ad", [cells])):
        done = run("predict", *file, *words, tmp_path / name)
        assert done.exit_code == 0, done.output
    alone, same = (anndata.read_h5ad(tmp_path / name) for name in ("alone.h5ad", "with.h5ad"))
    np.testing.assert_array_equal(alone.X.toarray(), same.X.toarray())


@pytest.mark.slow
def test_demo_writes_what_it_promises(tmp_path):
    out = tmp_path / "demo"
    few = settings("data.n_top_genes=60", "n_cells=32")
    done = run("demo", "--out", out, "--holdout", "cell_type=B", *few, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["scores"][0]["method"] == "set_diffusion"
    names = {"predicted.h5ad", "scores.csv", "response.png", "embedding.png"}
    assert {path.name for path in out.iterdir()} == names
    table = pd.read_csv(out / "scores.csv")
    assert set(table["cell_type"]) == {"B"}
    assert table["method"].iloc[0] == "set_diffusion"
    pred = anndata.read_h5ad(out / "predicted.h5ad")
    assert pred.n_obs == 32
    assert set(pred.uns) == {"perturbdiff", "score"}
    again = run("demo", "--out", out, "--holdout", "cell_type=Q", *few)
    assert again.exit_code == 2
    assert {path.name for path in out.iterdir()} == names


def test_data_sets_are_listed_and_written(tmp_path):
    listed = run("datasets")
    assert all(name in listed.output for name in DATASETS)
    done = run("datasets", "kang2018_small", "--out", tmp_path / "small.h5ad")
    assert done.exit_code == 0, done.output
    assert anndata.read_h5ad(tmp_path / "small.h5ad").shape == (2999, 1500)
    assert [path.name for path in tmp_path.iterdir()] == ["small.h5ad"]


@pytest.mark.parametrize("command", ["", "demo", "fit", "predict", "score", "datasets", "doctor"])
def test_help_teaches(command):
    done = run(*command.split(), "--help")
    assert done.exit_code == 0
    for name in ("fit", "predict", "score") if not command else ():
        assert name in done.output
    if command in ("fit", "predict", "score"):
        assert f"Example: perturbdiff {command}" in " ".join(done.output.split())


# What is refused

BAD = {
    "unknown setting": (["fit", "{cells}", *COLUMNS, "--set", "train.max_step=3"], "'max_steps'"),
    "unknown setting by itself": (["fit", "{cells}", *COLUMNS, "trian.max_steps=3"], "'train'"),
    "unknown setting of a section by itself": (
        ["fit", "train.max_step=3", "--config", "demo"],
        "'max_steps'",
    ),
    "a misspelt setting of a profile": (
        ["profile", "{bundle}", "{cells}", "sample.n_step=9"],
        "'n_steps'",
    ),
    "two files": (["fit", "{cells}", "{text}", *COLUMNS], "name one file"),
    "data for the demo": (["demo", "{cells}"], "has its own data"),
    "unknown run": (["fit", "--config", "demon"], "'demo'"),
    "no such file": (["fit", "none.h5ad", *COLUMNS], "is not there"),
    "no such data set": (["fit", "kang", *COLUMNS], "kang2018"),
    "not an h5ad": (["fit", "{text}", *COLUMNS], "cannot be read"),
    "nothing named": (["fit"], "perturbdiff fit cells.h5ad --perturbation-key"),
    "no column named": (["fit", "{cells}"], "--perturbation-key"),
    "no control named": (["fit", "{cells}", "--perturbation-key", "perturbation"], "--control"),
    "unknown column": (
        ["fit", "{cells}", "--perturbation-key", "perturbations", "--control", "control"],
        "'perturbation'",
    ),
    "unknown control": (
        ["fit", "{cells}", "--perturbation-key", "perturbation", "--control", "controls"],
        "'control'",
    ),
    "unknown holdout": (["fit", "{cells}", *COLUMNS, "--holdout", "cell_type=T11"], "T1"),
    "unreadable holdout": (["fit", "{cells}", *COLUMNS, "--holdout", "T1"], "cell_type=NK"),
    "no scale": (["fit", "{unscaled}", *COLUMNS], "scale"),
    "wrong scale": (["fit", "{cells}", *COLUMNS, "--scale", "log1p_cp10k"], "scale|log1p"),
    "something is there": (["fit", "{cells}", *COLUMNS, "--out", "{text}"], "--overwrite"),
    "resume from nowhere": (["fit", "{cells}", *COLUMNS, "--resume"], "checkpoint"),
    "resume from an empty folder": (
        ["fit", "{cells}", *COLUMNS, "--checkpoint-dir", "empty", "--resume"],
        "no checkpoint in empty to go on from",
    ),
    "no such kind": (["fit", "{cells}", *COLUMNS, "--kind", "causal"], "causal_baseline"),
    "a setting of the other kind": (
        ["fit", "{cells}", *COLUMNS, "--set", "decoder.order=random"],
        "settings of a set_diffusion are model and sample",
    ),
    "a setting of the other kind yet": (
        ["fit", "{cells}", *COLUMNS, "--kind", "causal_baseline", "--set", "model.width=16"],
        "settings of a causal_baseline are decoder and decode",
    ),
    "a setting without a say": (
        [
            "predict", "{cells}", "--model", "{bundle}", "--perturbations", "P1",
            "--set", "train.max_steps=9",
        ],
        "only settings of sample",
    ),
    "a misspelt setting of sampling": (
        [
            "predict", "{cells}", "--model", "{bundle}", "--perturbations", "P1",
            "--set", "sample.n_step=9",
        ],
        "'n_steps'",
    ),
    "a decoding of the other kind": (
        [
            "predict", "{cells}", "--model", "{bundle}", "--perturbations", "P1",
            "--decoding", "raw",
        ],
        "has no 'decoding'",
    ),
    "no control cells": (
        ["predict", "--model", "{bundle}", "--perturbations", "P1"],
        "include_controls",
    ),
    "no model": (["predict", "{cells}", "--model", "none", "--perturbations", "P1"], "none"),
    "unknown perturbation": (
        ["predict", "{cells}", "--model", "{bundle}", "--perturbations", "P11"],
        "P1",
    ),
    "unknown context": (
        [
            "predict", "{cells}", "--model", "{bundle}", "--perturbations", "P1",
            "--contexts", "cell_type=T11",
        ],
        "T1",
    ),
    "no prediction": (["score", "{cells}", "--reference", "{cells}"], "reading"),
    "no kind of file": (
        ["predict", "{cells}", "--model", "{bundle}", "--perturbations", "P1", "--out", "a.txt"],
        "must end in .h5ad or .zarr",
    ),
    "no kind of table": (
        ["score", "{cells}", "--reference", "{cells}", "--out", "x.txt"],
        "out = 'x.txt': must end in .csv",
    ),
    "a folder for a table": (
        ["score", "{cells}", "--reference", "{cells}", "--out", "{folder}", "--overwrite"],
        "is a folder; name a file",
    ),
    "symbols without pictures": (
        ["score", "{cells}", "--reference", "{cells}", "--gene-symbols", "x"],
        "needs --pictures FOLDER",
    ),
    "no such layer": (["fit", "{cells}", *COLUMNS, "--scale", "counts", "--layer", "x"], "'x'"),
    "a folder that is no zarr": (["fit", "{bundle}", *COLUMNS], "no .zarr of cells"),
    "a damaged zarr": (["fit", "{damaged}", *COLUMNS], "cannot be read as .zarr"),
    "pictures into a file": (
        ["score", "{cells}", "--reference", "{cells}", "--pictures", "{text}"],
        "is a file; name a folder",
    ),
    "unknown data set": (["datasets", "kang2018_smal"], "kang2018_small"),
    "no such option": (["fit", "{cells}", "--perturbation_column", "x"], "No such option"),
    "a seed that is no number": (
        ["score", "{cells}", "--reference", "a", "--seed", "x"],
        "'--seed'",
    ),
    "an option left out": (["predict", "{cells}", "--perturbations", "P1", "--json"], "--model"),
    "no such command": (["predikt"], "predict"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case, cells, bundle, tmp_path, monkeypatch, simulated_cells
):
    words, says = BAD[case]
    text = tmp_path / "text.h5ad"
    text.write_text("not a file of cells")
    unscaled = simulated_cells.copy()
    del unscaled.uns["perturbdiff"]
    unscaled.write_h5ad(tmp_path / "unscaled.h5ad")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "damaged.zarr").mkdir()
    (tmp_path / "damaged.zarr" / "zarr.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    places = {
        "cells": cells, "bundle": bundle, "text": text, "unscaled": "unscaled.h5ad",
        "damaged": "damaged.zarr", "folder": "folder.csv",
    }  # fmt: skip
    done = run(*(word.format(**places) for word in words))
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert any(part in lines[0] for part in says.split("|")), lines
    if case in ("no such option", "a seed that is no number", "an option left out"):
        assert done.stderr.splitlines() == lines
    assert "Traceback" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_overwriting_is_asked_for(cells, bundle, predicted, tmp_path):
    out = tmp_path / "again.h5ad"
    words = ["predict", cells, "--model", bundle, "--perturbations", "P1", "--out", out]
    words += ["--contexts", "cell_type=T1", "--n-cells", 4]
    assert run(*words).exit_code == 0
    assert run(*words).exit_code == 2
    assert run(*words, "--overwrite").exit_code == 0


def test_cells_are_read_and_written_as_zarr(simulated_cells, bundle, cells, tmp_path):
    file, out = tmp_path / "cells.zarr", tmp_path / "predicted.zarr"
    _files.write(simulated_cells, file)
    words = ["predict", file, "--model", bundle, "--perturbations", "P1", "--n-cells", 4]
    words += ["--contexts", "cell_type=T1", "--out", out]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert (out / "zarr.json").is_file() or (out / ".zgroup").is_file()
    same = ptd.tl.predict(
        simulated_cells, ptd.load(bundle), perturbations=["P1"],
        contexts=[{"cell_type": "T1"}], n_cells=4,
    )  # fmt: skip
    written = anndata.read_zarr(out)
    np.testing.assert_array_equal(written.X.toarray(), same.X.toarray())
    assert run(*words).exit_code == 2
    assert run(*words, "--overwrite").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.zarr", "predicted.zarr"]
    for folder in (tmp_path, bundle):  # no folder of something else is ever replaced
        taken = folder.with_name(f"{folder.name}.zarr")
        taken.mkdir()
        done = run(*words[:-1], taken, "--overwrite")
        assert done.exit_code == 2
        assert "no .zarr of cells" in done.stderr
        taken.rmdir()
    table = tmp_path / "scores.csv"
    assert run("score", out, "--reference", file, "--out", table).exit_code == 0


def test_pictures_are_not_drawn_over(cells, predicted, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "scores.png").write_text("mine")
    words = ["score", predicted, "--reference", cells, "--out", tmp_path / "scores.csv"]
    done = run(*words, "--pictures", folder)
    assert done.exit_code == 2
    assert "holds scores.png already" in done.stderr
    assert [path.name for path in tmp_path.rglob("*.*")] == ["scores.png"]
    assert (folder / "scores.png").read_text() == "mine"
    assert run(*words, "--pictures", folder, "--overwrite").exit_code == 0
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_overwriting_a_folder_that_is_no_model_is_refused(cells, tmp_path):
    kept = tmp_path / "data" / "precious.h5ad"
    kept.parent.mkdir()
    kept.write_text("years of work")
    done = run("fit", cells, *COLUMNS, "--out", kept.parent, "--overwrite")
    assert done.exit_code == 2
    assert "no saved model" in done.stderr
    assert kept.read_text() == "years of work"


MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from perturbdiff.cli import main; main()"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("awaited", "held", "steps"), [("fold_1/last.ckpt", "T1", 40), ("last.ckpt", "T2", 600)]
)
def test_an_interrupted_fit_keeps_its_last_checkpoint_and_goes_on(
    cells, tmp_path, awaited, held, steps
):
    """In an inner fold and in the final run: what is promised then works."""
    out, kept = tmp_path / "bundle", tmp_path / "kept"
    words = [
        sys.executable, "-c", MAIN, "fit", cells, "--out", out, *COLUMNS,
        "--holdout", "cell_type=T1", "--holdout", f"cell_type={held}", "--checkpoint-dir", kept,
        *settings(f"train.max_steps={steps}", "train.patience=20"),
    ]  # fmt: skip
    words = [str(word) for word in words]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (kept / awaited).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"Go on with --checkpoint-dir {kept} --resume" in said
    assert "Traceback" not in said
    assert not out.exists()
    done = subprocess.run(
        [*words, "--resume"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ptd.load(out).fitted.steps > 0


def test_an_interruption_before_the_first_checkpoint_promises_nothing(cells, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("perturbdiff.model.SetDiffusion.fit", interrupt)
    words = ["fit", cells, *COLUMNS, "--out", tmp_path / "bundle"]
    done = run(*words, "--checkpoint-dir", tmp_path / "kept")
    assert done.exit_code == 130
    assert done.stderr.endswith(
        "Interrupted. No checkpoint was written yet: start again, without --resume.\n"
    )
    assert run(*words).stderr.splitlines()[-1] == "Interrupted."
