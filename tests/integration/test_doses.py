"""Models that were told of doses and times: ranked, served and profiled like the others."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import perturbdiff as ptd
from perturbdiff._errors import ConfigError
from perturbdiff.cli._app import app
from perturbdiff.data.datasets import SimulationConfig, simulated
from perturbdiff.model import _fitted
from perturbdiff.profiling import _machine
from perturbdiff.serve import Client, ServeConfig, Service

ASKED = {"perturbations": ["P1", "dosed"], "contexts": [{"cell_type": "T1"}], "n_cells": 12}
NUMBERS = {"doses": [0.5, 2.0], "times": [6.0, 24.0]}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(_fitted, "PILOT_CELLS", 32)
    monkeypatch.setattr(_machine.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(_machine, "_MEASURED", {})
    monkeypatch.setattr(_machine, "_SIZES", (32,))
    monkeypatch.setattr(_machine, "_SECONDS", 0.0)
    monkeypatch.setattr(_machine, "_COPY_BYTES", 1 << 12)


@pytest.fixture(scope="module")
def dosed():
    config = SimulationConfig(
        n_genes=40, n_contexts=2, n_perturbations=2, n_unseen=0, n_pairs=0, n_cells=20,
        n_controls=30, doses=(0.5, 2.0), hours=(6.0, 24.0),
    )  # fmt: skip
    return simulated(config, seed=1).adata


@pytest.fixture(scope="module")
def bundle(dosed, small_fit, tmp_path_factory):
    columns = {"dose_key": "dose", "time_key": "hours"}
    folder = tmp_path_factory.mktemp("saved") / "bundle"
    shape = ptd.NetworkConfig(n_axes=5, n_response_axes=4, width=64, n_blocks=2, n_heads=2)
    model = small_fit(dosed, columns=columns, holdout=None, network=shape)
    model.save(folder, include_controls=20)
    return folder


@pytest.fixture(scope="module")
def model(bundle):
    return ptd.load(bundle)


def rank(asked, through, model):
    wish = [ptd.AtLeast(model.registry.genes[0], 0.5, per="population")]
    sample = ptd.SampleConfig(n_steps=2, set_size=6)
    question = {**ASKED, **NUMBERS, "target": wish, "sample": sample} | asked
    return ptd.tl.rank_perturbations(model._reservoir, through, copy=True, **question).uns[
        "perturbation_ranking"
    ]


def test_a_ranking_names_doses_and_times(model):
    table = rank({}, model, model)
    assert len(table) == 8  # every perturbation at every dose and time
    assert set(zip(table["perturbation"], table["dose"], table["hours"], strict=True)) == {
        (label, dose, time)
        for label in ASKED["perturbations"] for dose in (0.5, 2.0) for time in (6.0, 24.0)
    }  # fmt: skip
    alone = rank({"doses": [2.0], "times": [24.0]}, model, model)
    same = table[(table["dose"] == 2.0) & (table["hours"] == 24.0)]
    np.testing.assert_allclose(
        alone.sort_values("perturbation")["energy"], same.sort_values("perturbation")["energy"]
    )
    with pytest.raises(ConfigError, match="the model needs doses"):
        rank({"doses": None}, model, model)


def test_a_server_ranks_at_doses_and_times(model, monkeypatch):
    service = Service(model, ServeConfig(cost_model=False))

    class Answer:
        def __init__(self, reply):
            self.status, self.body = reply.status, reply.body

        def json(self):
            assert self.status == 200, self.body
            return json.loads(self.body)

    def asked(method, path, body=None, *, accept="*/*"):
        service.submit("it", path.removeprefix("/"), body)
        while True:
            for reply in service.turn(0.05):
                if reply.final:
                    return Answer(reply)

    with Client("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "_asked", asked)
        client._about = {
            "perturbation_key": "perturbation", "layer": None, "library_size_key": None,
            "control": ["control"], "covariates": {"cell_type": ["T1", "T2"]},
        }  # fmt: skip
        table = rank({}, client, model)
    service.close()
    pd.testing.assert_frame_equal(table, rank({}, model, model), check_exact=False, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "seen"),
    [(["--doses", "2.0", "--times", "6", "--times", "24"], 2), ([], 1)],
    ids=["named", "first known"],
)
def test_a_model_with_doses_and_times_is_profiled(bundle, tmp_path, monkeypatch, words, seen):
    asked, predict = [], ptd.SetDiffusion.predict

    def watched(self, *given, **question):
        asked.append(pred := predict(self, *given, **question))
        return pred

    monkeypatch.setattr(ptd.SetDiffusion, "predict", watched)
    out = tmp_path / "report"
    done = CliRunner().invoke(
        app,
        ["profile", str(bundle), *words, "--n-cells", "4", "--repeats", "1", "--out", str(out),
         "--set", "sample.n_steps=2", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert all(pred.n_obs == 4 * seen for pred in asked)
    if words:
        assert set(asked[0].obs["dose"]) == {2.0}
        assert set(asked[0].obs["hours"]) == {6.0, 24.0}


def test_doses_that_a_model_was_not_told_of_are_refused(small_model, tmp_path):
    small_model.save(tmp_path / "bundle", include_controls=20)
    words = ["profile", str(tmp_path / "bundle"), "--out", str(tmp_path / "report"), "--doses", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "not told of a column of doses" in " ".join(done.output.split())


def test_fit_takes_columns_of_doses_times_and_library_sizes(dosed, tmp_path):
    dosed.write_h5ad(tmp_path / "cells.h5ad")
    done = CliRunner().invoke(
        app,
        ["fit", str(tmp_path / "cells.h5ad"), "--perturbation-key", "perturbation",
         "--control", "control", "--covariate-keys", "cell_type", "--dose-key", "dose",
         "--time-key", "hours", "--library-size-key", "library_size", "--print-config"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for column in ("dose_key: dose", "time_key: hours", "library_size_key: library_size"):
        assert column in done.output
