"""The comparison of the siblings: averages, verdict and report by known answers."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData

from benchmarks.siblings import METRICS, Deadline, averaged, network_calls, report, verdict


def row(energy, pearson, seconds=60.0):
    own = {"energy_distance": energy, "pearson_shift": pearson}
    return {
        "scores": dict.fromkeys(METRICS, 0.5) | own,
        "seconds": seconds, "steps": 100, "parameters": 1000, "calls_a_cell": 18.0,
    }  # fmt: skip


CONTEXTS = [
    {
        "context": name,
        "rows": {
            "SetDiffusion, raw": row(2.0, 0.7),
            "SetDiffusion, transport": row(1.0 + number, 0.8),
            "random, raw": row(0.5, 0.6 + 0.1 * number),
        },
        "ceiling": dict.fromkeys(METRICS, 0.0),
    }
    for number, name in enumerate(("B", "NK"))
]


def test_rows_are_averaged_over_contexts():
    rows = averaged(CONTEXTS)
    assert rows["SetDiffusion, transport"]["scores"]["energy_distance"] == 1.5
    assert rows["random, raw"]["scores"]["pearson_shift"] == pytest.approx(0.65)
    assert rows["random, raw"]["seconds"] == 60.0


def test_the_verdict_names_what_the_sibling_wins_and_nothing_else():
    (line,) = verdict(averaged(CONTEXTS))
    assert line.startswith("- random, raw against SetDiffusion, raw: ")
    assert line.endswith(": better in energy_distance; worse in pearson_shift.")


def test_the_report_shows_every_row():
    spread = {"mean_shift_difference": 0.25, "energy_distance": 0.125}
    contexts = [CONTEXTS[0] | {"sensitivity": {"SetDiffusion": {"orders": spread}}}, CONTEXTS[1]]
    data = {"contexts": contexts, "averages": averaged(contexts), "ceiling": CONTEXTS[0]["ceiling"]}
    made = {"commit": "c" * 40, "cpu": "a processor", "threads": 1}
    text = report({"data": {"kang": data}, "command": "run", "environment": made})
    for part in ("kang: B, NK", "SetDiffusion, raw", "random, raw", "0.25000", "cccccccccccc"):
        assert part in text


def test_a_cell_that_draws_its_genes_takes_part_in_few_calls():
    pred = AnnData(X=sp.csr_matrix(np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])))
    assert network_calls(pred, order="random") == 3
    assert network_calls(pred, order="descending") == 2.5


@pytest.mark.parametrize(("ahead", "stops"), [(-1.0, True), (1000.0, False)])
def test_training_ends_with_the_clock(ahead, stops):
    trainer = SimpleNamespace(should_stop=False)
    callback = Deadline(time.perf_counter() + ahead)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert trainer.should_stop is stops
