"""The machine's limits, timings learnt from few calls, and what is kept of both."""

import json

import numpy as np
import pytest
import torch

from perturbdiff.profiling import Machine, Quote, Timing, Work, _machine, this_machine
from perturbdiff.profiling._memory import peak_bytes, reset_peak, resident_bytes
from perturbdiff.profiling._quote import expected_largest

MACHINE = Machine(
    device="cpu", name="made up", threads=1, precision="highest", torch="0",
    rates={"float32": 100.0, "bfloat16": 400.0, "int8": None}, bandwidth=10.0,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_machine.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(_machine, "_MEASURED", {})
    monkeypatch.setattr(_machine, "_SIZES", (32,))
    monkeypatch.setattr(_machine, "_SECONDS", 0.0)
    monkeypatch.setattr(_machine, "_COPY_BYTES", 1 << 12)
    return tmp_path


def test_the_limit_that_binds_is_the_slower():
    products = Work(operations=1000, activation_bytes=10)  # 10 s of products, 1 s of bytes
    judged = MACHINE.judged(products, 20.0)
    assert judged["bound"] == "products"
    assert judged["share_of_rate"] == pytest.approx(0.5)
    assert judged["share_of_bandwidth"] == pytest.approx(0.05)
    assert MACHINE.judged(Work(operations=10, weight_bytes=100), 12.5)["bound"] == "memory"
    assert MACHINE.judged(products, 100.0)["bound"] == "overhead"
    assert MACHINE.ridge("float32") == 10.0
    assert MACHINE.judged(products, 20.0, dtype="bfloat16")["share_of_limit"] == 0.125


def test_what_cannot_be_read_is_none():
    unknown = MACHINE.judged(Work(operations=1000, weight_bytes=100), 20.0, dtype="int8")
    assert unknown["share_of_rate"] is None
    assert unknown["bound"] == "memory"
    assert set(MACHINE.judged(Work(), 1.0).values()) == {None}
    assert (MACHINE.rate("float64"), MACHINE.ridge("int8")) == (None, None)


def test_types_that_do_not_run_have_no_rate(folder, monkeypatch):
    def refuse(*_):
        raise RuntimeError

    monkeypatch.setattr(_machine.torch, "_int_mm", refuse)
    found = _machine.measured("cpu", seconds=0.0)
    assert found.rates["int8"] is None
    assert found.rates["float32"] > 0
    assert found.bandwidth > 0


def test_a_machine_is_measured_once_and_kept(folder, monkeypatch):
    first = this_machine()
    monkeypatch.setattr(_machine, "_MEASURED", {})  # as another process
    monkeypatch.setattr(_machine, "_rate", lambda *_: pytest.fail("measured again"))
    assert this_machine() == first
    monkeypatch.setattr(_machine, "_rate", lambda *_: 7.0)
    assert this_machine(refresh=True).rates["float32"] == 7.0
    precision = torch.get_float32_matmul_precision()
    try:  # another setting is another machine
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert this_machine().rates["float32"] == 7.0
        assert len(list(folder.rglob("machine-*.json"))) == 2
    finally:
        torch.set_float32_matmul_precision(precision)


def test_a_damaged_or_locked_cache_is_no_obstacle(folder, monkeypatch):
    path = _machine.cache_file("machine", "a")
    _machine.write_cache(path, {"x": 1})
    monkeypatch.setattr(_machine, "_MEASURED", {})
    assert _machine.read_cache(path) == {"x": 1}
    monkeypatch.setattr(_machine, "_MEASURED", {})
    path.write_text("{", encoding="utf-8")
    assert _machine.read_cache(path) is None
    inside = path / "no folder" / "x.json"  # below a file
    _machine.write_cache(inside, {"y": 2})
    assert _machine.read_cache(inside) == {"y": 2}
    assert _machine.cache_file("machine", "a") != _machine.cache_file("machine", "b")


def test_peak_memory_of_the_process_is_a_number_or_nothing():
    device = torch.device("cpu")
    reset_peak(device)
    now, peak = resident_bytes(), peak_bytes(device)
    assert (now is None) == (peak is None)
    assert now is None or (peak > 1 << 20 and now > 1 << 20)


# Timings


def test_a_sum_of_limits_is_found_again():
    sizes = [(n,) for n in (1, 2, 6, 20, 60)]
    features = [(1.0, n) for (n,) in sizes]
    timing = Timing.fit(features, sizes, [0.5 + 0.25 * n for (n,) in sizes])
    assert timing((1.0, 33), (33,)) == pytest.approx(0.5 + 0.25 * 33)
    assert timing((1.0, 1000), (1000,)) == pytest.approx(0.5 + 250, rel=1e-6)
    assert timing.spread == pytest.approx(0, abs=1e-6)
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing


def test_what_the_sum_misses_is_corrected_near_by_and_nowhere_else():
    sizes = [(n,) for n in (1, 2, 4, 8, 16, 32)]
    seconds = [n * (2.0 if n == 8 else 1.0) for (n,) in sizes]
    timing = Timing.fit([(float(n),) for (n,) in sizes], sizes, seconds)
    plain = timing.coefficients[0]
    assert timing((8.0,), (8,)) > 1.1 * plain * 8
    assert timing((1e9,), (1e9,)) == pytest.approx(plain * 1e9)
    assert timing.spread > 0


def test_no_coefficient_is_below_zero():
    timing = Timing.fit([(1.0, n) for n in (1, 2, 3)], [(n,) for n in (1, 2, 3)], [3.0, 2.0, 1.0])
    assert min(timing.coefficients) >= 0


# Quotes


def test_the_largest_of_some_draws_by_hand():
    assert expected_largest([1.0, 3.0], 1) == 2
    assert expected_largest([3.0, 1.0], 2) == pytest.approx(1 / 4 + 3 * 3 / 4)
    assert expected_largest([5.0], 9) == 5
    rng = np.random.default_rng(0)
    values = rng.random(20)
    drawn = rng.choice(values, (20000, 7)).max(1).mean()
    assert expected_largest(values.tolist(), 7) == pytest.approx(drawn, rel=0.01)


def test_a_quote_reads_like_one():
    quote = Quote(
        seconds=2.0, low=1.5, high=2.5, memory_bytes=3 * 2**20, network_calls=18.0,
        work=Work(operations=1.0), phases={"a": 1.5, "b": 0.5}, bound="memory",
        share_of_limit=0.5, how="by hand",
    )  # fmt: skip
    assert str(quote) == "2.00 s (1.50 to 2.50), 3 MiB, 18 network calls; a 1.50 s, b 0.50 s"
    assert quote.to_json()["work"]["operations"] == 1.0
