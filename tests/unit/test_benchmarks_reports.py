"""Results and reports say what was measured, whichever way it went."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.cache import write_json
from benchmarks.environment import environment
from benchmarks.fits import Recipe, summary
from benchmarks.quality import arguments, as_asked, places, shown
from benchmarks.report import (
    AIM,
    MODEL,
    MODEL_ONCE,
    REFERENCE,
    SIX,
    contexts_report,
    contexts_result,
)
from benchmarks.simple import ALL_CELLS, ONCE, TO_BEAT
from benchmarks.simulated import by_condition, conclusions, mean_scores
from perturbdiff.metrics import METRICS

OTHERS = {"mmd": 0.1, "direction_match": 0.9, "discrimination": 0.8, "ranked_first": 0.0}
BAR = REFERENCE | OTHERS
METHODS = (TO_BEAT, f"mixture_log_ratio, {ONCE}", f"mixture_log_ratio, {ALL_CELLS}")


def entry(values):
    row = {"values": values, "undefined": {}}
    return {
        "cells": dict.fromkeys(METHODS, row),
        "means": {"mixture_log_ratio": {"pearson_shift": 0.9, "mae_shift": 0.03}},
        "undefined": {"additive": "a single perturbation has no parts to add up"},
        "ceiling": row,
        "n_true": 100,
        "n_control": 90,
        "genes": ["G0"],
    }


def fit(name, seed, values, seconds=10.0):
    return {
        "held_out": name, "seed": seed, "values": values, "once": {"values": values},
        "seconds_fit": seconds, "seconds_predict": 1.0, "steps": 100, "dependence": 0.7,
        "nfe": 18, "peak_memory_mb": 500.0, "made_with": environment(),
    }  # fmt: skip


def result(fits):
    simple = {name: entry(BAR) for name in ("B", "DC", "NK")}
    data = {"file": "kang2018.h5ad", "sha256": "0" * 64, "cells": 10, "genes": 5}
    return contexts_result(
        simple, fits, several=("B", "NK"), command="python -m benchmarks.quality", recipe=Recipe(),
        data=data,
    )  # fmt: skip


def test_seeds_are_averaged_before_types():
    better = {**BAR, **AIM, "energy_distance": 0.4}
    worse = {**better, "energy_distance": 0.6}
    found = result([fit("B", 0, better), fit("B", 1, worse), fit("DC", 0, worse)])
    assert found["by_type"]["B"][MODEL]["energy_distance"] == pytest.approx(0.5)
    assert found["averages"][MODEL]["values"]["energy_distance"] == pytest.approx(0.55)
    assert found["averages"][MODEL]["n"]["energy_distance"] == 2
    assert found["averages_named"]["types"] == ["B", "NK"]


def test_verdicts_go_both_ways():
    sign = {name: 1 if METRICS[name].higher_is_better else -1 for name in SIX}
    above = {**BAR, **{name: AIM[name] + 0.01 * sign[name] for name in SIX}, "discrimination": 0.9}
    below = {**BAR, **{name: REFERENCE[name] - 0.01 * sign[name] for name in SIX}}
    won = result([fit("B", 0, above)])["verdicts"]
    assert all(won["above_baseline"].values())
    assert all(won["reaches_aim"].values())
    assert won["discrimination_reaches_aim"]
    assert won["fit_in_time"]
    lost = result([fit("B", 0, below, seconds=301.0)])["verdicts"]
    assert not any(lost["above_baseline"].values())
    assert not any(lost["above_sketch"].values())
    assert not lost["discrimination_reaches_aim"]
    assert not lost["fit_in_time"]
    assert lost["baseline_as_referenced"] == {"pearson_shift": True, "energy_distance": True}


def test_a_report_is_complete_with_and_without_a_model(tmp_path):
    without = result([])
    assert "No model was fitted" in contexts_report(without)
    found = result([fit(name, 0, BAR) for name in ("B", "DC", "NK")])
    report = contexts_report(found)
    titles = ("## What was asked", "## What was measured", "## What is concluded", "## Made with")
    for part in (*titles, MODEL_ONCE, "n/a: additive", "baseline in 0 of 6", "they agree"):
        assert part in report
    write_json(tmp_path / "result.json", found)
    assert json.loads((tmp_path / "result.json").read_text())["times"]["n_fits"] == 3
    assert summary(found["fits"])["seconds_fit_longest"] == 10.0


def test_a_part_of_the_question_does_not_replace_the_result(tmp_path):
    options = SimpleNamespace(data=Path("x/kang2018.h5ad"), out=None, cache=tmp_path)
    assert places(options, whole=True)[0].parent.name == "results"
    assert places(options, whole=False)[0].is_relative_to(tmp_path)
    options.out = tmp_path / "mine.json"
    assert places(options, whole=True) == (tmp_path / "mine.json", tmp_path / "mine.md")


def test_only_the_usual_settings_make_a_result():
    data = ["--data", "kang2018.h5ad"]
    assert as_asked(arguments(data))
    assert as_asked(arguments([*data, "--threads", "2", "--types", "B"]))
    for part in (["--steps", "20"], ["--baselines-only"], ["--seeds", "1"], ["--folds", "2"]):
        assert not as_asked(arguments([*data, *part]))


def test_a_command_is_shown_without_folders():
    words = ["--data", "/some/where/kang2018.h5ad", "--types=B,CD16 Mono", "--seeds", "3"]
    assert shown(words) == ["--data", "kang2018.h5ad", "'--types=B,CD16 Mono'", "--seeds", "3"]


def test_mean_scores_by_hand():
    true = np.array([1.0, 0.0, -1.0])
    assert mean_scores(2 * true, true) == {
        "pearson": pytest.approx(1),
        "mae": pytest.approx(2 / 3),
        "relative_error": pytest.approx(1),
    }
    assert mean_scores(np.zeros(3), true)["pearson"] == 0


def test_simulated_conclusions_compare_with_the_best_shifted_cells():
    state = {
        MODEL: {"energy_distance": 0.1},
        "mean_shift, shifted": {"energy_distance": 0.4},
        "effect_prior, shifted": {"energy_distance": 0.25},
        "true shift, shifted": {"energy_distance": 0.15},
    }

    def rows(model, other):
        row = {"pearson": 0.9, "relative_error": model, "mae": model}
        rest = {"pearson": 0.9, "relative_error": other, "mae": other}
        return {MODEL: row, "replicate": rest, "mean_shift": rest, "additive": rest}

    effects = {
        "unseen context": rows(0.1, 0.2),
        "pairs with interaction": rows(0.1, 0.4),
        "pairs without interaction": rows(0.11, 0.1),
        "unseen perturbations": rows(0.3, 0.2),
    }
    found = conclusions(state, effects)
    assert found["best_shifted"] == "effect_prior, shifted"
    assert found["energy_at_most_half"]
    assert found["energy_over_oracle"] == pytest.approx(2 / 3)
    assert found["interaction_mae_over_additive"] == pytest.approx(0.25)
    assert not found["equal_to_additive_without"]
    assert found["context_better_than_replicate"]
    assert not found["unseen_better_than_mean_shift"]


def test_ratios_are_given_for_each_condition_too():
    def row(model, shifted):
        return {MODEL: {"energy_distance": model}, "shifted": {"energy_distance": shifted}}

    states = [
        {"seed": 0, "context": "T1", "rows": {"P1": row(0.1, 0.4), "P2": row(0.3, 0.4)}},
        {"seed": 0, "context": "T2", "rows": {"P1": row(0.2, 0.4)}},
    ]
    found = by_condition(states, "shifted")
    assert found["ratios"]["world 0, P2 in T1"] == pytest.approx(0.75)
    assert found["median"] == pytest.approx(0.5)
    assert found["share_at_most_half"] == pytest.approx(2 / 3)
