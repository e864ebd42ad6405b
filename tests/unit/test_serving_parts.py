"""Parts of a server by themselves: memos, desks, settings, forms, quotes, shared numbers."""

import sys
import threading
import time
from dataclasses import fields
from io import BytesIO

import h5py
import numpy as np
import pytest
import yaml

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ExpressionError, UnknownKeyError
from perturbdiff._optional import needed
from perturbdiff.config import SampleConfig
from perturbdiff.config._runs import shipped_configs
from perturbdiff.serve import ServeConfig, load_serve_config
from perturbdiff.serve._board import Board
from perturbdiff.serve._desk import Desk
from perturbdiff.serve._formats import check_finite, from_h5ad, plain, to_h5ad, wanted_format
from perturbdiff.serve._memo import Memo
from perturbdiff.serve._pace import Pace, Size
from perturbdiff.serve._schemas import constraint_of

# Settings


def test_settings_are_those_that_ship():
    shipped = shipped_configs() / "serve" / "standard.yaml"
    assert load_serve_config("standard") == ServeConfig() == load_serve_config()
    assert set(yaml.safe_load(shipped.read_text())) == {one.name for one in fields(ServeConfig)}
    assert load_serve_config(overrides=("port=9000", "deadline_s=5")).port == 9000
    assert load_serve_config(shipped).n_sets == 64


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("port=80", "1024 to 65535"),
        ("host=example.org", "must be one of"),
        ("accelerator=tpu", "cpu, cuda, auto"),
        ("n_sets=0", "at least 1"),
        ("deadline_s=0", "above 0"),
        ("max_cells=many", "whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        load_serve_config(overrides=(override,))


def test_unknown_settings_are_named():
    with pytest.raises(UnknownKeyError, match="'deadline_s'"):
        load_serve_config(overrides=("deadline=5",))
    with pytest.raises(ConfigError, match="is not a file"):
        load_serve_config("nowhere.yaml")


def test_what_is_not_installed_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "litserve", None)
    with pytest.raises(ImportError, match=r"litserve is not installed.*perturbdiff\[serve\]"):
        needed("litserve", group="serve")
    with pytest.raises(ImportError, match=r"litserve is not installed"):
        _ = ptd.serve.run
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = ptd.serve.Server
    assert "Client" in dir(ptd.serve)


# Memories


def test_a_memo_forgets_what_was_not_used_for_longest():
    memo = Memo(3)
    for name in "abc":
        memo.put(name, name.upper())
    assert memo.get("a") == "A"
    memo.put("d", "D", weight=2)
    assert [memo.get(name) for name in "abcd"] == ["A", None, None, "D"]
    assert memo.weight == 3
    memo.put("e", "E", weight=4)  # too heavy to be kept at all
    assert memo.get("e") is None
    assert len(memo) == 2


# Desks


def test_owners_take_turns_and_errors_are_theirs():
    reports, gate, order = [], threading.Event(), []
    desk = Desk(1, reports.append)
    desk.put("gate", gate.wait, then=print, kind="wait")
    for number in range(3):
        desk.put("many", lambda n=number: order.append(("many", n)), then=print, kind="work")
    desk.put("one", lambda: order.append(("one", 0)), then=print, kind="work")
    desk.put("bad", lambda: 1 / 0, then=print, kind="work", amount=7.0)
    desk.put("gone", lambda: order.append("gone"), then=print, kind="work")
    desk.drop("gone")
    gate.set()
    until = time.monotonic() + 10
    while len(reports) < 6 and time.monotonic() < until:
        time.sleep(0.005)
    desk.close()
    assert order == [("many", 0), ("one", 0), ("many", 1), ("many", 2)]
    (bad,) = [done for done in reports if done.error is not None]
    assert (bad.owner, bad.amount, type(bad.error)) == ("bad", 7.0, ZeroDivisionError)


# Forms


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "json"),
        ("*/*", "json"),
        ("application/x-hdf5", "h5ad"),
        ("application/json;q=0.5, application/vnd.apache.arrow.stream", "arrow"),
        ("text/event-stream", "events"),
        ("text/html", None),
        ("application/json;q=0", None),
        ("application/json;q=no, application/x-hdf5;q=0.1", "h5ad"),
    ],
)
def test_the_form_that_a_client_likes_best(accept, form):
    assert wanted_format(accept) == form


def test_cells_survive_the_way(simulated_cells):
    back = from_h5ad(to_h5ad(simulated_cells))
    np.testing.assert_array_equal(back.X.toarray(), simulated_cells.X.toarray())
    assert back.obs.equals(simulated_cells.obs)


def test_a_file_that_unpacks_to_too_much_is_refused():
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("X", shape=(10**6, 100), dtype="f4", compression="gzip")
        file.create_dataset("none", data=h5py.Empty("f4"))
    assert len(buffer.getvalue()) < 10**5
    with pytest.raises(ConfigError, match="unpacks to more than 100 MB"):
        from_h5ad(buffer.getvalue(), most_mb=100)


def test_a_file_without_cells_is_refused():
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("X", data=np.zeros(3))
    with pytest.raises(ConfigError, match="control_cells"):
        from_h5ad(buffer.getvalue())


def test_no_nan_leaves(simulated_cells):
    made = simulated_cells[:3].copy()
    check_finite(made)
    made.X = made.X.astype(np.float32)
    made.X.data[0] = np.nan
    with pytest.raises(ExpressionError, match="no finite numbers"):
        check_finite(made)
    assert plain({"a": np.array([1.0, np.nan]), "b": np.int64(3), "c": (None, True)}) == {
        "a": [1.0, None], "b": 3, "c": [None, True],
    }  # fmt: skip


# Constraints


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "at_least", "gene": "A", "value": "much"}, "at_least|value|constraint"),
        ({"kind": "all", "members": 3}, "must be a list of constraints"),
        ({"kind": "all", "members": ["x"]}, "mapping with a kind|no constraint takes"),
        ({"kind": "eval"}, "eval"),
    ],
)
def test_only_declared_constraints_are_read(entry, words):
    with pytest.raises((ConfigError, UnknownKeyError), match=words):
        constraint_of(entry)


# Quotes


def test_quotes_follow_what_work_took():
    pace = Pace()
    size = Size(n_conditions=2, n_cells=64, n_solves=2, n_genes=30, config=SampleConfig())
    assert size.set_steps == 18 * 2 * 16  # the pilot is more than what is asked
    known = Size(n_conditions=2, n_cells=64, n_solves=0, n_genes=30, config=SampleConfig())
    assert known.set_steps == 0
    more = Size(n_conditions=1, n_cells=1024, n_solves=0, n_genes=30, config=SampleConfig())
    assert more.set_steps == 18 * 16
    guided = SampleConfig(guidance_scale=2.0)
    twice = Size(n_conditions=1, n_cells=1024, n_solves=0, n_genes=30, config=guided)
    assert twice.set_steps == 2 * more.set_steps
    before = pace.quote(size)["seconds"]
    for _ in range(50):
        pace.note("solve", 3.0)
    pace.note("solve", 3.0, 0)
    assert pace.quote(size)["solve"] == pytest.approx(6.0, rel=0.02)
    assert pace.quote(size)["seconds"] > before


# Shared numbers


def test_the_board_tells_who_lives_and_what_was_cancelled(tmp_path):
    board = Board(tmp_path, n_workers=2, n_servers=2)
    assert not board.alive(0)
    first, second = board.born(0), board.born(1)
    assert board.ready
    assert board.life(0) == 1
    second.close()
    assert not board.alive(1)
    assert not board.ready
    board._file(1).unlink()
    assert not board.alive(1)
    first.close()
    board.work(0, running=3, backlog_s=2.0)
    board.work(1, running=1, backlog_s=4.0)
    assert (board.running, board.backlog_s) == (4, 2.0)
    board.wait(0, 2)
    board.wait(1, 1)
    assert board.waiting == 3
    seen = [0, 0]
    for number in (5, 7):
        board.cancel(0, number)
    board.cancel(1, 9)
    assert list(board.cancelled(seen)) == [5, 7, 9]
    assert list(board.cancelled(seen)) == []
    for number in range(2000):  # more than are remembered
        board.cancel(1, number)
    assert list(board.cancelled(seen))[-1] == 1999
