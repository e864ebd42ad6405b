"""Settings in YAML: files load, names and types are checked, overrides are the last word."""

from pathlib import Path

import pytest

from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.config import (
    DataConfig,
    DecodeConfig,
    DecoderConfig,
    NetworkConfig,
    RunConfig,
    SampleConfig,
    ServeConfig,
    TrainConfig,
    load_run,
)
from perturbdiff.config._labels import read_context, read_labels
from perturbdiff.config._runs import shipped_configs
from perturbdiff.serve import load_serve_config

RUNS = sorted((shipped_configs() / "runs").glob("*.yaml"))


def test_there_are_shipped_runs():
    assert {path.stem for path in RUNS} >= {"demo", "kang2018"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_loads_by_name_and_by_path(path):
    run = load_run(path.stem)
    assert load_run(path) == run
    assert run.data.columns["perturbation_key"] == "condition"


def test_the_standard_settings_are_the_defaults():
    run = load_run("kang2018")
    assert (run.model, run.train, run.sample) == (NetworkConfig(), TrainConfig(), SampleConfig())


def test_nothing_named_is_the_defaults():
    assert load_run(None) == RunConfig()
    assert RunConfig().train == TrainConfig()


def test_sections_may_be_written_out_or_named_beside_the_file(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("max_steps: 7\nlearning_rate: 1e-4\n")
    (tmp_path / "run.yaml").write_text(
        "data: {perturbation_key: drug, control: [dmso, water], covariate_keys: line}\n"
        "model: {width: 64}\ntrain: mine\nsample: standard\nseed: 3\n"
    )
    run = load_run(tmp_path / "run.yaml")
    assert run.data == DataConfig(
        perturbation_key="drug", control=("dmso", "water"), covariate_keys=("line",)
    )
    assert run.model == NetworkConfig(width=64)
    # YAML takes 1e-4 for text.
    assert run.train == TrainConfig(max_steps=7, learning_rate=1e-4)
    assert run.sample == SampleConfig()
    assert run.seed == 3


def test_overrides_win_over_the_file():
    run = load_run(
        "demo", overrides=["train.max_steps=9", "data.holdout={cell_type: [B]}", "seed=5"]
    )
    assert (run.train.max_steps, run.data.holdout, run.seed) == (9, {"cell_type": ("B",)}, 5)
    assert run.train.check_every == load_run("demo").train.check_every
    assert load_run("demo", overrides=["train=standard"]).train == load_run("kang2018").train
    assert load_run(None, overrides=["data.separator=null"]).data.separator is None


def test_cells_have_two_names(tmp_path):
    assert load_run("laptop", overrides=["data.path=my.h5ad"]).data.source == "my.h5ad"
    (tmp_path / "run.yaml").write_text("data: {path: mine.h5ad}\n")
    assert load_run(tmp_path / "run.yaml").data.source == "mine.h5ad"
    assert load_run(tmp_path).data.source == "mine.h5ad"  # as in the folder of a saved model
    (tmp_path / "run.yaml").write_text("data: {path: mine.h5ad, source: yours.h5ad}\n")
    with pytest.raises(ConfigError, match="says the same"):
        load_run(tmp_path / "run.yaml")


def test_a_run_says_how_it_is_served(tmp_path):
    assert load_run("laptop").serve == ServeConfig() == load_serve_config("laptop")
    path = tmp_path / "run.yaml"
    path.write_text("data: kang2018_small\nserve: {max_cells: 50}\n")
    assert load_run(path).serve.max_cells == 50
    assert load_serve_config(path, overrides=("port=9000",)) == ServeConfig(max_cells=50, port=9000)
    with pytest.raises(UnknownKeyError, match="Did you mean 'max_cells'"):
        load_run(path, overrides=["serve.max_cell=3"])
    with pytest.raises(UnknownKeyError, match="Did you mean 'standard'"):
        load_serve_config("standart")


def test_the_sibling_has_settings_of_its_own():
    sibling = ["kind=causal_baseline", "decoder.order=random", "decode.draft_length=3"]
    run = load_run(None, overrides=[*sibling, "train.max_steps=9"])
    assert run.decoder == DecoderConfig(order="random")
    assert run.decode == DecodeConfig(draft_length=3)
    usual = load_run(None, overrides=["train=causal"]).train
    assert usual != TrainConfig()
    assert load_run(None, overrides=["kind=causal_baseline"]).train == usual
    assert run.train == TrainConfig(**(vars(usual) | {"max_steps": 9}))
    assert load_run("demo", overrides=["kind=causal_baseline"]).train.max_steps == 500
    standard = load_run(None, overrides=["kind=causal_baseline", "decoder=standard"])
    assert standard.decoder == DecoderConfig()


@pytest.mark.parametrize(
    ("override", "error", "says"),
    [
        ("train.max_step=9", UnknownKeyError, "Did you mean 'max_steps'"),
        ("trian.max_steps=9", UnknownKeyError, "Did you mean 'train'"),
        ("train.max_steps=many", ConfigError, "train.max_steps = 'many': must be a whole number"),
        ("train.max_steps=true", ConfigError, "must be a whole number"),
        ("train.max_steps=0", ConfigError, "must be at least 1"),
        ("train.learning_rate=fast", ConfigError, "must be a number"),
        ("kind=causal", ConfigError, "must be one of set_diffusion, causal_baseline"),
        ("decoder.order=rising", ConfigError, "must be one of vocabulary"),
        ("sample.sampler=ddim", ConfigError, "must be one of euler, heun"),
        ("model=3", ConfigError, "must be settings by name"),
        ("seed=0.5", ConfigError, "must be a whole number"),
        ("n_cells=0", ConfigError, "must be at least 1"),
        ("seed.low=1", ConfigError, "is no section"),
        ("max_steps", ConfigError, "must look like"),
        ("data.source=[", ConfigError, "cannot be read"),
        ("data.holdout=NK", ConfigError, "must be names with values"),
        ("data.control={a: b}", ConfigError, "must be a list"),
    ],
)
def test_what_is_wrong_is_named(override, error, says):
    with pytest.raises(error, match=says):
        load_run("demo", overrides=[override])


def test_files_that_are_not_there_or_not_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        load_run(tmp_path / "none.yaml")
    with pytest.raises(UnknownKeyError, match="Did you mean 'demo'"):
        load_run("demon")
    for text, says in (("a: [", "is not YAML"), ("- 1", "settings by name"), ("1: 2", "by name")):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_run(path)
    (tmp_path / "run.yaml").write_text("train: shorter\n")
    with pytest.raises(UnknownKeyError, match="Did you mean 'short'"):
        load_run(tmp_path / "run.yaml")


def test_data_without_columns_is_refused_when_they_are_needed():
    with pytest.raises(ConfigError, match="perturbation_key"):
        _ = DataConfig().columns
    with pytest.raises(ConfigError, match="control"):
        _ = DataConfig(perturbation_key="drug").columns


def test_an_empty_file_is_the_defaults(tmp_path: Path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_run(path) == RunConfig()


def test_labels_and_contexts_on_one_line():
    assert read_labels(["cell_type=NK", "cell_type=B=2", "donor= 1 "]) == {
        "cell_type": ["NK", "B=2"],
        "donor": ["1"],
    }
    assert read_labels(None) is None
    assert read_context("cell_type=NK,donor=1") == {"cell_type": "NK", "donor": "1"}
    assert read_context('{"cell_type": "T cell, CD4"}') == {"cell_type": "T cell, CD4"}
    for text, says in (("NK", "must look like"), ("a=1,a=2", "more than once"), ("{a", "be read")):
        with pytest.raises(ConfigError, match=says):
            read_context(text)
