"""What the benchmark of inference makes of its measurements."""

import pytest

from benchmarks.inference import SECTIONS
from benchmarks.inference_batches import BATCHES, crossover, drawn_runs
from benchmarks.inference_obeying import AT_MOST, OBEYING
from benchmarks.inference_quotes import SHAPES, WRITTEN, summary
from benchmarks.inference_report import TOLD, told
from benchmarks.inference_written import in_turns
from perturbdiff.guidance._enforcement import NAMED

MADE = {
    "cpu": "made up", "n_cpus": 2, "gpu": "none", "packages": {"torch": "0"},
}  # fmt: skip
ROW = {
    "seconds": 2.0, "cells_per_second": 0.5, "intensity": 1.5, "share_of_rate": 0.25,
    "share_of_bandwidth": 0.5, "bound": "memory", "cache_bytes": 2**20, "operations": 4e9,
    "operations_per_second": 2e9,
}  # fmt: skip


def batches():
    rows = [{**ROW, "cells": n} for n in BATCHES]
    one = {
        "parameters": {"set_diffusion": 10, "causal_baseline": 11},
        "rows": {"set_diffusion": rows, "causal_baseline": rows},
        "whole_prediction": {
            "set_diffusion": {"1": ROW, "256": ROW}, "causal_baseline": {"1": ROW},
        },
        "crossover_batch": None,
    }  # fmt: skip
    return {"1000": one}


def test_the_crossover_is_where_the_second_stays_ahead():
    slow, fast = [1.0] * len(BATCHES), [2.0] * len(BATCHES)
    assert crossover(fast, slow) is None
    assert crossover(slow, fast) == 1
    assert crossover(slow, [2.0, 0.5, 0.5, 2.0, 2.0, 2.0]) == 64
    assert crossover(slow, [2.0] * 5 + [1.0]) is None


def test_errors_are_summed_up_by_median_and_the_worst_of_most():
    rows = [
        {"error": e, "seconds": 1.0, "low": 0.9, "high": 1.1 + e, "spread": 0.1}
        for e in (-0.3, 0.0, 0.1, 0.2, -0.05)
    ]
    found = summary(rows)
    assert found["shapes"] == 5
    assert found["median_error"] == pytest.approx(0.1)
    assert 0.2 < found["error_95"] <= 0.3
    assert found["within_range"] == pytest.approx(4 / 5)


def test_sixty_shapes_at_least_are_quoted_and_none_twice():
    assert len(SHAPES) >= 60
    assert len({tuple(shape.items()) for shape in SHAPES}) == len(SHAPES)
    assert len(set(WRITTEN)) == len(WRITTEN)


def test_twenty_constrained_shapes_at_least_are_quoted_and_every_way():
    assert len(OBEYING) >= 20
    assert len({str(shape) for shape in OBEYING}) == len(OBEYING)
    asked = {str(enforce) for _, enforce, *_ in [*OBEYING, *AT_MOST]}
    assert set(NAMED) <= asked


def test_the_report_says_where_only_the_most_is_told():
    row = {"network_calls": 10, "quoted_calls": 40}
    summed = {
        "shapes": 1, "median_error": 0.05, "error_95": 0.1, "within_range": 1.0,
        "spread_of_repeats_95": 0.0, "rows": [row, row],
    }  # fmt: skip
    found = {
        "set_diffusion": {**summed, "calls_met": 1.0, "quoting": 2.5}, "causal_baseline": summed,
        "at_most": {"rows": [row], "calls_of_the_most": 0.25, "within_range": 1.0},
        "clock": "processor",
    }  # fmt: skip
    text = "\n".join(TOLD["obeying"](found))
    assert "calls were met to the call" in text
    assert "1 predictions made 25 % of the calls" in text
    assert "1 of 2 predictions made as many calls" in text
    found["set_diffusion"]["calls_met"] = 0.5
    assert "met in 50 % of" in "\n".join(TOLD["obeying"](found))


def test_the_sibling_in_lower_precision_has_a_table():
    took = {"float32": 2e-3, "bfloat16": 1e-3, "int8": 0.8e-3}
    row = {"width": 96, "cells": 16, "seconds": took}
    score = {"pearson_shift": 0.9}
    found = {
        "speed": [{"width": 96, "sets": 1, "set_size": 32, "seconds": took}],
        "sibling": {
            "calls": [row], "whole": [row], "genes": 500, "context": "B", "width": 256,
            "train_steps": 3, "seconds": took, "lost": {"bfloat16": {"pearson_shift": 0.125}},
            "scores": {"float32": score, "bfloat16": score},
        },
    }  # fmt: skip
    text = "\n".join(TOLD["precision"](found))
    assert "### The sibling" in text
    assert "bfloat16 12.5 % (pearson_shift)" in text
    assert text.count("2.00") >= 3
    assert "1.25 to 1.25 times as fast as bfloat16" in text


def test_turns_are_taken_and_the_first_is_not_counted():
    order = []
    work = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    took = in_turns(work, "cpu", turns=2)
    assert order == ["a", "b"] * 3
    assert all(seconds >= 0 for seconds in took.values())


def test_the_report_says_what_was_measured():
    report = {
        "made_with": MADE,
        "settings": {"accelerator": "cpu", "cells": "simulated"},
        "made": {
            name: {"commit": "abcdefgh", "threads": 1, "seconds": 5.0, "note": note, "command": "x"}
            for name, note in (("machine", ""), ("batches", "while it rained"), ("other", ""))
        },
        "sections": {
            "machine": {"rates": {"float32": 1e11, "int8": None}, "bandwidth": 2e10},
            "batches": batches(),
            "other": {},
        },
    }
    text = told(report, "inference.png")
    assert "at no batch up to 1,024" in text
    assert "cannot run" in text
    assert "25.00" in text  # per cent of the rate
    assert "sections.other" in text
    assert "![" in text
    assert text.count("`x`") == 1 == text.count("while it rained")
    assert "| machine | abcdefg |" in text
    assert "![" not in told(report, None)


def test_both_regimes_of_both_models_are_drawn():
    runs = drawn_runs(batches(), "1000")
    assert [(run["name"], run["n_cells"]) for run in runs] == [
        ("set_diffusion", 1), ("set_diffusion", 1024),
        ("causal_baseline", 1), ("causal_baseline", 1024),
    ]  # fmt: skip
    assert {run["phases"][0]["name"] for run in runs} == {"denoising steps", "decode steps"}


def test_sections_that_have_words_are_sections():
    assert set(TOLD) <= set(SECTIONS)
