"""What a command reads and writes: files, and data sets by name."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbdiff._errors import ConfigError, UnknownKeyError

if TYPE_CHECKING:
    from anndata import AnnData

DATASETS = {
    "kang2018_small": "2,999 blood cells, 1,500 genes, with and without interferon-beta; shipped",
    "kang2018": "13,999 blood cells, 14,053 genes, the whole of it; obtained once, through pip",
}
NO_DATA = (
    "name an .h5ad file with its columns and scale, as in: perturbdiff fit cells.h5ad "
    "--perturbation-key condition --control ctrl --covariate-keys cell_type --scale counts; "
    f"or a data set ({', '.join(DATASETS)}), or a run that ships with the package, as in: "
    "perturbdiff fit --config demo"
)


def read(source: str) -> "AnnData":
    """A file, or a data set by its name."""
    import anndata

    if not source:
        raise ConfigError("data", source, rule=NO_DATA)
    if source in DATASETS:
        from perturbdiff.data import datasets as shipped

        adata: AnnData = getattr(shipped, source)()
        return adata
    path = Path(source)
    if not path.is_file():
        if path.suffix or os.sep in source:
            raise ConfigError("file", source, rule="is not there")
        known_dataset(source)
    try:
        return anndata.read_h5ad(path)
    except OSError as error:
        raise ConfigError("file", source, rule="cannot be read as .h5ad") from error


def known_dataset(name: str) -> None:
    if name not in DATASETS:
        where = "The list of data sets"
        raise UnknownKeyError(where, name, known=list(DATASETS))


def read_wish(path: Path) -> dict[str, Any]:
    """Constraints and how to enforce them, from a JSON file."""
    from perturbdiff.guidance import from_json, way_from_json

    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("constraints", str(path), rule="cannot be read") from error
    except ValueError as error:
        rule = f"is no JSON: {error}"
        raise ConfigError("constraints", str(path), rule=rule) from None
    if isinstance(entries, list):
        entries = {"constraints": entries}
    if not isinstance(entries, dict) or not isinstance(entries.get("constraints"), list):
        rule = 'must hold a list of constraints, or {"constraints": [...], "enforce": ...}'
        raise ConfigError("constraints", str(path), rule=rule)
    for name in entries:
        if name not in ("constraints", "enforce"):
            raise UnknownKeyError(str(path), name, known=["constraints", "enforce"])
    wish: dict[str, Any] = {"constraints": [from_json(one) for one in entries["constraints"]]}
    ways = entries.get("enforce")
    if ways is not None:
        listed = ways if isinstance(ways, list) else [ways]
        wish["enforce"] = [way_from_json(way) for way in listed]
    return wish


def write(adata: "AnnData", path: Path) -> None:
    """The whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        adata.write_h5ad(part, compression="gzip")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigError("out", str(out), rule="is there already; name another, or --overwrite")
    if out.is_dir() and not (out / "manifest.json").is_file():
        raise ConfigError("out", str(out), rule="is a folder but no saved model; name another")
