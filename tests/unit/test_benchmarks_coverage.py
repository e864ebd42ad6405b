"""The benchmark of intervals: shares, averages and conclusions by known answers."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.coverage import averages, covered, fires, flags_of, report


def test_shares_are_those_of_true_shifts_inside():
    table = pd.DataFrame({
        "lower": [-1.0, -1.0, -1.0, -1.0, 0.0, 0.0], "upper": [1.0, 1.0, 1.0, 3.0, 0.0, 0.0],
        "stratum": [0, 0, 1, 1, 1, 2],
    })  # fmt: skip
    found = covered(table, np.array([0.5, 2.0, -0.5, 1.0, 0.0, 0.1]))
    assert found["covered"] == 0.75
    assert found["by_stratum"] == {"0": 0.5, "1": 1.0}
    assert found["half_width"] == pytest.approx(5 / 6)
    assert found["covered_most_changed"] == pytest.approx(4 / 6)
    assert found["silent"] == pytest.approx(2 / 6)
    assert found["silent_right"] == 0.5


def row(name, share, *, supported=True, collapsed=False):
    flags = {
        "supported": supported, "collapsed": collapsed, "reason": "", "context_distance": 0.5,
        "context_limit": 0.7, "context_false_alarms": 0.0, "spread": 0.9, "spread_limit": None,
    }  # fmt: skip
    spoilt = {
        "genes exchanged": flags | {"supported": False}, "one cell repeated": flags,
        "cells drawn together": flags | {"collapsed": True},
    }  # fmt: skip
    return {
        "held_out": name, "covered": share, "by_stratum": {"0": share, "14": 0.9},
        "covered_most_changed": 0.5, "half_width": 0.1, "half_width_most_changed": 0.2,
        "shift_most_changed": 0.4, "silent": 0.1, "silent_right": 0.9, "warnings": 0,
        **flags, "spoilt": spoilt,
    }  # fmt: skip


ROWS = [row("B", 0.7), row("NK", 0.9, supported=False)]


def test_averages_count_alarms_and_name_what_lies_outside():
    found = averages(ROWS)
    assert found["covered"] == pytest.approx(0.8)
    assert found["strata_outside"] == ["0"]
    assert (found["false_support"], found["false_collapse"], found["n"]) == (1, 0, 2)
    wanted = {"genes exchanged": 2, "one cell repeated": 0, "cells drawn together": 2}
    assert found["fired"] == wanted
    assert found["false_in_training"] == {"context": 0.0, "perturbation": None, "spread": None}
    assert fires("genes exchanged", {"supported": False, "collapsed": False})
    assert not fires("one cell repeated", {"supported": False, "collapsed": False})


def test_flags_become_plain_values():
    series = pd.Series({
        "cell_type": "B", "supported": np.bool_(True), "reason": "", "context_limit": np.nan,
        "spread": np.float64(0.5), "spread_limit": 0.3,
    })  # fmt: skip
    found = flags_of(series)
    assert found == {
        "supported": True, "reason": "", "context_limit": None, "spread": 0.5, "spread_limit": 0.3,
    }  # fmt: skip
    assert type(found["supported"]) is bool


def test_the_report_says_what_was_reached_and_what_was_not():
    made = {"commit": "c" * 40, "cpu": "a processor", "threads": 1}
    study = {
        "data": "cells.h5ad", "held_out": "cell types", "n_genes": 9, "seconds": 3.0, "rows": ROWS,
        "averages": averages(ROWS),
    }  # fmt: skip
    line = {"n_genes": 7, **ROWS[0]["spoilt"]["one cell repeated"]}
    result = {"studies": [study], "leukaemia": line, "command": "run", "environment": made}
    text = report(result)
    for part in (
        "cells.h5ad: 0.800 covered on average, wanted 0.85 to 0.95: **not reached**",
        "low control level, shift smallest half (0.800)", "1 of 2 out of support, 0 of 2 collapsed",
        "the others give: context 0.0%.",
        "genes exchanged: flagged 2 of 2", "line was **not flagged**", "0.90 n/a", "cccccccccccc",
    ):  # fmt: skip
        assert part in text
