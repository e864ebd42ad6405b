"""Answers kept on disk, so that a long run can be interrupted and go on.

An entry is found by everything that it depends on, the source of the package included: comments and
docstrings may change without an answer being lost, code may not.
"""

import ast
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = Path(__file__).resolve().parents[1] / "perturbdiff"
WITHOUT_INFLUENCE = (  # on what a model answers
    "cli", "pl", "pp", "profiling", "serve", "tl", "data/datasets", "model/_bundle.py",
    "model/_baselines.py", "model/_load.py", "model/_saved.py", "model/_trajectory.py",
)  # fmt: skip
Arrays = dict[str, np.ndarray]


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def array_checksum(*arrays: np.ndarray) -> str:
    """Checksum of the values, types and shapes of arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def source_files(*, rooms: Iterable[str] | None = None, package: Path = PACKAGE) -> list[Path]:
    """Modules of the package whose code has a say in an answer.

    Parameters
    ----------
    rooms
        Only these rooms, and modules beside them; all but those without influence by default.
    package
        Folder of the package.
    """
    files = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        inside = "/" in place
        if any(place == name or place.startswith(f"{name}/") for name in WITHOUT_INFLUENCE):
            continue
        if rooms is None or not inside or place.split("/")[0] in set(rooms):
            files.append(path)
    return files


def source_hash(files: Iterable[Path]) -> str:
    """Hash of what the files do: their syntax trees without docstrings."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    first.value = ast.Constant("")
        digest.update(f"{path.name}\0{ast.dump(tree)}\0".encode())
    return digest.hexdigest()


def key_digest(key: Mapping[str, Any]) -> str:
    """Short name of a key."""
    text = json.dumps(key, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Cache:
    """Folder of answers: a JSON file each, with an NPZ file of arrays beside it."""

    folder: Path

    def get(
        self,
        label: str,
        key: Mapping[str, Any],
        make: Callable[[], tuple[dict[str, Any], Arrays]],
    ) -> tuple[dict[str, Any], Arrays]:
        """The answer that is kept under a key, made and kept first where there is none.

        Parameters
        ----------
        label
            Beginning of the file's name, for people.
        key
            All that the answer depends on; must have a JSON form.
        make
            Gives a plain dictionary and arrays.
        """
        stem = self._path(label, key)
        if not stem.with_suffix(".json").exists():
            plain, arrays = make()
            self._keep(stem, {"key": dict(key), "answer": plain}, arrays)
        stored = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        with np.load(stem.with_suffix(".npz"), allow_pickle=False) as file:
            return stored["answer"], dict(file)

    def has(self, label: str, key: Mapping[str, Any]) -> bool:
        """Whether the answer is there."""
        return self._path(label, key).with_suffix(".json").exists()

    def _path(self, label: str, key: Mapping[str, Any]) -> Path:
        plain = "".join(letter if letter.isalnum() else "_" for letter in label)
        return self.folder / f"{plain}-{key_digest(key)}"

    def _keep(self, stem: Path, entry: Mapping[str, Any], arrays: Arrays) -> None:
        """The JSON file comes last and whole, so that a half-written answer is never found."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
            np.savez_compressed(part, **arrays)
        os.replace(part.name, stem.with_suffix(".npz"))  # noqa: PTH105
        write_json(stem.with_suffix(".json"), entry)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, sort_keys=False, allow_nan=False)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
