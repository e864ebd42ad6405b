"""A model as one folder: JSON, safetensors and a manifest; reading it runs nothing.

No paths are in it, and no cells unless control cells were asked for. Files are told apart by
content: the same model gives the same bytes.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import safetensors
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from perturbdiff._constants import VERSION
from perturbdiff._errors import BundleError, listed

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.safetensors"
CONTROLS = "controls.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Everything that a model is made of.

    ``plain`` holds what JSON can hold, a file for each entry; ``arrays`` holds tensors by name.
    ``controls`` are control cells that go with it and are listed in the manifest; they are nothing
    that was learnt, and have no part in the checksum.
    """

    kind: str
    plain: Mapping[str, Any]  # what JSON can hold
    arrays: Mapping[str, Tensor]
    controls: Mapping[str, Tensor] = field(default_factory=dict)
    listing: Sequence[Mapping[str, Any]] = ()  # of the controls by context

    @cached_property
    def checksum(self) -> str:
        """Fingerprint of the content, the same before saving and after loading."""
        content = blake2b(_text([self.kind, dict(self.plain)]), digest_size=16)
        for name in sorted(self.arrays):
            array = self.arrays[name].detach().cpu().contiguous()
            content.update(_text([name, str(array.dtype), list(array.shape)]))
            content.update(array.reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


def write_bundle(parts: Parts, path: Path) -> None:
    """Write a folder that is there as a whole or not at all.

    Parameters
    ----------
    parts
        The model.
    path
        Folder to make, with its parents.

    Raises
    ------
    BundleError
        When there is something at that path already.
    """
    if path.exists() or path.is_symlink():
        msg = f"There is something at {path} already, and save never overwrites. Name a new folder."
        raise BundleError(msg)
    files = {f"{name}.json": _pretty(content) for name, content in parts.plain.items()}
    files[ARRAYS] = _packed(parts.arrays)
    if parts.controls:
        files[CONTROLS] = _packed(parts.controls)
    manifest = {
        "format": FORMAT,
        "kind": parts.kind,
        "version": VERSION,
        "checksum": parts.checksum,
        "files": {name: _sha256(content) for name, content in files.items()},
        **({"controls": list(parts.listing)} if parts.controls else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    unfinished.mkdir()
    try:
        for name, content in {**files, MANIFEST: _pretty(manifest)}.items():
            (unfinished / name).write_bytes(content)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_bundle(path: Path) -> Parts:
    """Read a folder that :func:`write_bundle` wrote, on the CPU.

    Parameters
    ----------
    path
        The folder.

    Returns
    -------
    The model's parts, each file checked against the manifest.

    Raises
    ------
    BundleError
        When something is missing, damaged, or newer than this version of the package.
    """
    manifest = _read_manifest(path)
    files = {name: _read_file(path, name, checksum) for name, checksum in manifest["files"].items()}
    try:
        arrays = tensors_of(files.pop(ARRAYS))
        controls = tensors_of(files.pop(CONTROLS)) if CONTROLS in files else {}
        plain = {name.removesuffix(".json"): json.loads(text) for name, text in files.items()}
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        msg = f"The bundle {path} cannot be read: {error}. Save the model anew."
        raise BundleError(msg) from error
    return Parts(
        kind=manifest["kind"], plain=plain, arrays=arrays, controls=controls,
        listing=manifest.get("controls", ()),
    )  # fmt: skip


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        msg = f"There is no folder {path}. Give the folder that save() wrote."
        raise BundleError(msg)
    if not (path / MANIFEST).is_file():
        found = listed(sorted(entry.name for entry in path.iterdir())) or "nothing"
        msg = f"{path} is not a bundle: it has no {MANIFEST} (it holds {found})."
        raise BundleError(msg)
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        number, written_by = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(_damaged(path, MANIFEST)) from error
    if not isinstance(number, int) or number < 1:
        raise BundleError(_damaged(path, MANIFEST))
    if number > FORMAT:
        msg = (
            f"The bundle {path} has format {number}, written by perturbdiff {written_by}; this "
            f"version ({VERSION}) reads formats up to {FORMAT}. "
            "Run: pip install --upgrade perturbdiff"
        )
        raise BundleError(msg)
    kind, files = manifest.get("kind"), manifest.get("files")
    if not isinstance(kind, str) or not isinstance(files, dict) or ARRAYS not in files:
        raise BundleError(_damaged(path, MANIFEST))
    return cast("dict[str, Any]", manifest)


def _read_file(path: Path, name: str, checksum: str) -> bytes:
    if Path(name).name != name:
        raise BundleError(_damaged(path, MANIFEST))
    if not (path / name).is_file():
        msg = (
            f"The bundle {path} lacks {name}. Copy the whole folder again, or save the model anew."
        )
        raise BundleError(msg)
    content = (path / name).read_bytes()
    if _sha256(content) != checksum:
        raise BundleError(_damaged(path, name))
    return content


def _damaged(path: Path, name: str) -> str:
    return (
        f"The bundle {path} is damaged: {name} is not what was saved. "
        "Copy the whole folder again, or save the model anew."
    )


def _packed(arrays: Mapping[str, Tensor]) -> bytes:
    dense = torch.contiguous_format  # copies, since safetensors refuses tensors that share memory
    copies = {
        name: array.detach().cpu().clone(memory_format=dense) for name, array in arrays.items()
    }
    return bytes(bytes_of(copies))


def _sha256(content: bytes) -> str:
    return sha256(content).hexdigest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, allow_nan=False, indent=1) + "\n").encode()
