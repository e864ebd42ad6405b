"""Profiles of models side by side, and the files and the figure made of them."""

import json

import pytest
from matplotlib import pyplot as plt

import perturbdiff as ptd
from perturbdiff._errors import ConfigError
from perturbdiff.model import _fitted
from perturbdiff.profiling import PHASES, Span, Work, _compare, _trace, compare, table, write
from perturbdiff.profiling import _machine as machine_module

ASKED = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}]}
FIGURES = {
    "seconds", "network_seconds", "network_calls", "operations", "weight_bytes", "activation_bytes",
    "cache_bytes", "intensity", "operations_per_second", "peak_bytes", "share_of_rate",
    "share_of_bandwidth", "share_of_limit", "bound",
}  # fmt: skip


@pytest.fixture(scope="module")
def report(small_model, simulated_cells):
    known = machine_module.Machine(
        device="cpu", name="made up", threads=1, precision="highest", torch="0",
        rates={"float32": 1e11, "bfloat16": 4e11, "int8": None}, bandwidth=1e10,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 32)
        patch.setattr(_compare, "this_machine", lambda device: known)
        yield compare(
            {"one": small_model, "two": small_model}, simulated_cells, **ASKED, n_cells=(1, 48),
            settings={"two": {"sample": ptd.SampleConfig(n_steps=2)}}, repeats=1,
        )  # fmt: skip


def test_every_run_has_every_figure_and_adds_up(report):
    assert [(run["name"], run["n_cells"]) for run in report["runs"]] == [
        ("one", 1), ("one", 48), ("two", 1), ("two", 48),
    ]  # fmt: skip
    for run in report["runs"]:
        assert set(run) >= FIGURES
        assert [phase["name"] for phase in run["phases"]] == [
            name for name in PHASES if name != "decode steps"
        ]
        for name in ("seconds", "network_calls", "operations", "weight_bytes", "activation_bytes"):
            assert sum(phase[name] for phase in run["phases"]) == pytest.approx(run[name])
        assert all(set(phase) >= FIGURES for phase in run["phases"])
    assert [run["network_calls"] for run in report["runs"]] == [18, 18, 2, 2]
    shown = report["runs"][0]["phases"][2]
    assert shown["share_of_rate"] == pytest.approx(shown["operations_per_second"] / 1e11)


def test_a_report_is_plain_and_written_whole(report, tmp_path):
    files = write(report, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["profile.json", "profile.md", "trace.json"]
    again = json.loads(files[0].read_text(encoding="utf-8"))
    assert again == json.loads(json.dumps({k: v for k, v in report.items() if k != "trace"}))
    assert files[1].read_text(encoding="utf-8") == table(report)
    assert json.loads(files[2].read_text(encoding="utf-8"))["traceEvents"] == report["trace"]


def test_a_report_is_read_where_it_was_written(report, tmp_path):
    file = write(report, tmp_path)[0]
    assert table(tmp_path) == table(file) == table(str(tmp_path)) == table(report)
    here, there = ptd.pl.roofline(report), ptd.pl.roofline(tmp_path)
    assert [len(panel.collections) for panel in (here, there)] == [len(here.collections)] * 2
    plt.close("all")
    file.write_text("no JSON", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no report of a profile"):
        table(tmp_path)


def test_one_number_of_cells_and_one_label_need_no_list(small_model, simulated_cells, monkeypatch):
    known = machine_module.Machine(
        device="cpu", name="made up", threads=1, precision="highest", torch="0",
        rates={"float32": 1e11}, bandwidth=1e10,
    )  # fmt: skip
    monkeypatch.setattr(_fitted, "PILOT_CELLS", 32)
    monkeypatch.setattr(_compare, "this_machine", lambda device: known)
    quick = {"one": {"sample": ptd.SampleConfig(n_steps=1)}}
    asked = ASKED | {"perturbations": "P1"}
    found = compare(
        {"one": small_model}, simulated_cells, **asked, n_cells=4, settings=quick, repeats=1
    )
    assert [run["n_cells"] for run in found["runs"]] == [4]


def test_the_table_has_a_row_for_each_phase(report):
    lines = table(report).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + sum(len(run["phases"]) + 1 for run in report["runs"])
    assert len({len(row) for row in rows}) == 1
    assert "int8 cannot run" in lines[0]
    assert "100 GFLOP/s" in lines[0]


def test_a_trace_has_what_ran_when():
    spans = [
        Span(name="inner", begin=0.5, seconds=0.25, network=True),
        Span(name="outer", begin=0.5, seconds=1.0),
    ]
    events = _trace.trace_events(spans, process="a run", number=3)
    named = [event for event in events if event["ph"] == "M"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["name"] for event in named} == {"a run", "phases", "network calls"}
    assert [event["name"] for event in complete] == ["outer", "inner"]
    assert [(e["ts"], e["dur"], e["tid"]) for e in complete] == [(5e5, 1e6, 1), (5e5, 2.5e5, 2)]
    assert {event["pid"] for event in events} == {3}


def test_traces_cover_their_runs(report):
    for number, run in enumerate(report["runs"], start=1):
        own = [e for e in report["trace"] if e["pid"] == number and e["ph"] == "X"]
        assert max(e["ts"] + e["dur"] for e in own) == pytest.approx(1e6 * run["seconds"], rel=0.01)
        assert sum(e["tid"] == 2 for e in own) == run["network_calls"]


def test_what_cannot_be_compared_is_refused(small_model):
    with pytest.raises(ConfigError, match="at least one"):
        compare({}, **ASKED)
    with pytest.raises(ConfigError, match="must be one of a"):
        compare({"a": small_model}, **ASKED, settings={"b": {}})


# The figure


def test_the_figure_has_a_point_for_each_phase_with_products(report, tmp_path):
    busy = {**report, "runs": [dict(run) for run in report["runs"]]}
    for run in busy["runs"]:
        run["phases"] = [
            {**phase, **Work(operations=1e9, weight_bytes=1e7).to_json(), "intensity": 100.0,
             "operations_per_second": 5e9}
            for phase in run["phases"][:2]
        ]  # fmt: skip
    path = tmp_path / "roofline.png"
    panel = ptd.pl.roofline(busy, save=path, show=False)
    assert path.stat().st_size > 0
    assert len(panel.collections) == 8
    offsets = [tuple(points.get_offsets()[0]) for points in panel.collections]
    assert set(offsets) == {(100.0, 5.0)}
    texts = [text.get_text() for text in panel.texts]
    assert "float32 100 GFLOP/s" in texts
    assert not any("int8" in text for text in texts)
    roof = panel.lines[0].get_xydata()
    assert roof[:, 1].max() == pytest.approx(100.0)
    assert roof[0, 1] == pytest.approx(10 * roof[0, 0])
    legend = [text.get_text() for text in panel.get_legend().get_texts()]
    assert legend[:2] == ["one, 1 cell", "one, 48 cells"]
    plt.close("all")


def test_a_figure_needs_something_to_draw():
    with pytest.raises(ConfigError, match="no phase with products"):
        ptd.pl.roofline({"machines": {}, "runs": []})
    with pytest.raises(ConfigError, match="must end in"):
        ptd.pl.roofline({"machines": {}, "runs": []}, save="x.nonsense")
