"""Answers on disk: found again, never half-written, forgotten when code changes."""

import json

import numpy as np
import pytest

from benchmarks.cache import (
    Cache,
    array_checksum,
    file_checksum,
    key_digest,
    source_files,
    source_hash,
    write_json,
)

CODE = '"""A module."""\n\n\ndef double(x):\n    """Twice."""\n    return 2 * x\n'


def hash_of(folder, text):
    path = folder / "module.py"
    path.write_text(text)
    return source_hash([path])


def test_comments_and_docstrings_do_not_change_the_hash_but_code_does(tmp_path):
    before = hash_of(tmp_path, CODE)
    assert hash_of(tmp_path, CODE.replace("Twice.", "Two times.")) == before
    assert hash_of(tmp_path, CODE.replace("return", "# quickly\n    return")) == before
    assert hash_of(tmp_path, CODE.replace("2 * x", "3 * x")) != before
    assert hash_of(tmp_path, CODE.replace("double", "twice")) != before


def test_only_rooms_with_a_say_are_hashed(tmp_path):
    for name in ("pl/_plots.py", "prior/_a.py", "metrics/_b.py", "_random.py", "cli/_app.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")

    def names(**options):
        return [p.name for p in source_files(package=tmp_path, **options)]

    assert names() == ["_random.py", "_b.py", "_a.py"]
    assert names(rooms=("prior",)) == ["_random.py", "_a.py"]


def test_an_answer_is_made_once_for_each_key(tmp_path):
    cache, made = Cache(tmp_path / "cache"), []

    def make():
        made.append(1)
        return {"n": len(made)}, {"x": np.arange(3)}

    first = cache.get("fit CD16 Mono", {"seed": 0}, make)
    again = cache.get("fit CD16 Mono", {"seed": 0}, make)
    assert first[0] == again[0] == {"n": 1}
    np.testing.assert_array_equal(again[1]["x"], [0, 1, 2])
    assert cache.get("fit CD16 Mono", {"seed": 1}, make)[0] == {"n": 2}
    assert cache.has("fit CD16 Mono", {"seed": 1})
    assert not cache.has("fit CD16 Mono", {"seed": 2})


def test_an_interrupted_answer_is_not_found(tmp_path):
    cache = Cache(tmp_path)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get("fit", {}, interrupted)
    with pytest.raises(ValueError, match="JSON compliant"):
        cache.get("fit", {}, lambda: ({"score": float("nan")}, {}))
    assert not cache.has("fit", {})
    assert cache.get("fit", {}, lambda: ({"score": None}, {})) == ({"score": None}, {})


def test_the_order_of_a_key_does_not_matter():
    assert key_digest({"a": 1, "b": [2]}) == key_digest({"b": [2], "a": 1})
    assert key_digest({"a": 1}) != key_digest({"a": 2})


def test_checksums(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_checksum(path).startswith("ba7816bf8f01cfea")  # published test vector of SHA-256
    same = array_checksum(np.arange(4), np.zeros(2))
    assert same == array_checksum(np.arange(4), np.zeros(2))
    assert same != array_checksum(np.arange(4, dtype=np.int32), np.zeros(2))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results" / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("inf")})
    assert json.loads(path.read_text()) == {"a": 1}
