"""The report on constraints says what was reached and what was not."""

from benchmarks.constraint_report import picture, report_of, verdicts
from benchmarks.constraint_tasks import ways

CURVE = {"1": 0.01, "2": 0.02, "4": 0.04, "8": 0.08, "16": 0.14}


def way(share, distance, cost):
    return {
        "satisfied_sets": share, "satisfied": share == 1, "energy_distance": distance,
        "energy_distance_to_unconstrained": 0.1, "cost": cost, "calls_per_set": 18 * cost,
        "seconds_per_set": 0.1 * cost, "sibling_draws_in_that_time": 1,
        "sibling_in_that_time": 0.01, "supported": True,
    }  # fmt: skip


def made_up(*, share=1.0, distance=0.2):
    def row(rate, per_cell):
        found = {name: way(share, distance, 4.0) for name in ways()}
        found["hard"] = {"refused": "cannot"} if rate == 0.5 else way(1.0, 0.1, 0.0)
        masking = way(1.0, 0.1, 1.0) if per_cell else None
        return {
            "task": f"kind, {rate:.0%}", "kind": "kind", "rate": rate, "per_cell": per_cell,
            "true_rate": rate, "n_true_cells": 320, "unconstrained": 0.2, "curve": CURVE,
            "ways": found,
            "sibling": {
                "rate": 0.01, "curve": CURVE, "best_of_distance": None, "masking": masking
            },
        }  # fmt: skip

    mae = {"without": 0.3, "observed": 0.2, "ridge": 0.25}
    one = {
        "name": "world", "context": {"cell_type": "T1"}, "seconds_per_set": 0.02,
        "calls_per_trajectory": 18, "sibling_calls_per_set": 400.0, "sibling_seconds_per_set": 1.0,
        "tasks": [row(rate, per_cell) for rate in (0.5, 0.1, 0.01) for per_cell in (False, True)],
        "observed": {"mae_of_cells": mae, "mae_of_means": mae | {"observed": 0.4}},
        "command": "python -m benchmarks.constraints", "n_sets": 12, "n_free_sets": 512,
        "n_sibling_sets": 40,
        "made_with": {"commit": "0123456789", "cpu": "a processor", "threads": 1},
    }  # fmt: skip
    return {"questions": [one]}


def test_what_is_reached_is_told_from_what_is_missed():
    (one,) = made_up()["questions"]
    lines = verdicts(one)
    assert next(line for line in lines if "Hard" in line).endswith("4 of 4 tasks. **reached**")
    tenth = [line for line in lines if "10 % tasks" in line]
    assert len(tenth) == 6
    assert all("100% of sets" in line and line.endswith("**reached**") for line in tenth)
    (rare,) = [line for line in lines if line.startswith("- kind, 1%")]
    assert "sibling's best of 16 14% in 16.0 s a set" in rare
    assert rare.endswith("**reached**")
    assert [line.rsplit("**")[-2] for line in lines[-2:]] == ["reached", "missed"]


def test_far_or_seldom_is_missed():
    (far,) = made_up(distance=0.31)["questions"]
    (seldom,) = made_up(share=0.6)["questions"]
    for one in (far, seldom):
        assert all("missed" in line for line in verdicts(one) if "10 % tasks" in line)
    assert "**missed**" in next(line for line in verdicts(seldom) if line.startswith("- kind, 1%"))


def test_what_is_not_rare_for_the_sibling_does_not_count():
    (one,) = made_up()["questions"]
    for row in one["tasks"]:
        row["sibling"]["curve"] = dict.fromkeys(CURVE, 0.3)
    (line,) = [line for line in verdicts(one) if line.startswith("- kind, 1%")]
    assert "obeys in 30%" in line
    assert line.endswith("**does not apply**")


def test_the_report_has_every_table_and_its_picture(tmp_path):
    result = made_up()
    text = report_of(result, about="Title.\n\n    call\n\nWhat was asked.")
    assert "What was asked." in text
    for title in (
        "cost", "share of sets that obey", "energy distance to the conditional truth",
        "best of N without steering",
        "half of the genes observed",
    ):  # fmt: skip
        assert f"## world: {title}" in text
    assert " refused " in text
    assert " cannot " in text
    picture(result, tmp_path / "constraints.png")
    assert (tmp_path / "constraints.png").stat().st_size > 1000
