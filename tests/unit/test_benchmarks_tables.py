"""Averages and tables of scores."""

import math

import pytest

from benchmarks.tables import average, better, markdown, number, plain, score_table


def test_an_average_is_over_what_is_defined():
    means, numbers = average([{"mmd": 1.0, "de_overlap": None}, {"mmd": 3.0, "de_overlap": 0.5}])
    assert means == {"mmd": 2.0, "de_overlap": 0.5}
    assert numbers == {"mmd": 2, "de_overlap": 1}
    assert average([{"mmd": None}]) == ({"mmd": None}, {"mmd": 0})


@pytest.mark.parametrize(
    ("metric", "value", "than", "expected"),
    [
        ("pearson_shift", 0.9, 0.8, True),
        ("energy_distance", 0.9, 0.8, False),
        ("mae_shift", 0.1, 0.1, False),
        ("de_overlap", None, 0.1, None),
    ],
)
def test_better_knows_the_direction(metric, value, than, expected):
    assert better(metric, value, than) is expected


def test_numbers_as_shown():
    assert number(None) == "n/a"
    assert number(True) == "yes"
    assert number(-0.0001) == "0.000"
    assert number(-0.0123, digits=2) == "-0.01"
    assert number(3) == "3"
    assert plain(math.nan) is None
    assert plain(1.5) == 1.5


def test_a_table_is_aligned_and_says_which_way_is_better():
    table = score_table(
        {"model": {"pearson_shift": 0.5, "mae_shift": None}, "a|b": {"pearson_shift": 1.0}},
        ["pearson_shift", "mae_shift"],
        first="method",
    )
    lines = table.splitlines()
    assert lines[0].split("|")[1:4] == [" method ", " Pearson ↑ ", " MAE ↓ "]
    assert len({len(line) for line in lines}) == 1
    assert "n/a" in lines[2]
    assert "a\\|b" in lines[3]
    assert markdown(["x"], [[1]]).count("\n") == 2
