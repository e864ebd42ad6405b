"""What a command reads and writes: files, and data sets by name."""

import json
import os
import shutil
import warnings
from collections.abc import Sequence
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
    if path.is_dir():
        return _read_zarr(path)
    if not path.is_file():
        if path.suffix or os.sep in source:
            raise ConfigError("file", source, rule="is not there")
        known_dataset(source)
    try:
        return anndata.read_h5ad(path)
    except OSError as error:
        raise ConfigError("file", source, rule="cannot be read as .h5ad") from error


def _read_zarr(path: Path) -> "AnnData":
    import anndata

    if not _is_zarr(path):
        raise ConfigError("file", str(path), rule="is a folder, and no .zarr of cells")
    try:
        return anndata.read_zarr(path)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError("file", str(path), rule="cannot be read as .zarr") from error


def _is_zarr(path: Path) -> bool:
    return any((path / name).is_file() for name in (".zgroup", "zarr.json"))


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
    """The whole file or none: a folder where the name ends in .zarr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        if path.suffix == ".zarr":
            with warnings.catch_warnings():  # which version of zarr is anndata's own choice
                warnings.simplefilter("ignore", UserWarning)
                adata.write_zarr(part)
        else:
            adata.write_h5ad(part, compression="gzip")
        if path.is_dir():
            shutil.rmtree(path)
        part.replace(path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse to put a model where something is."""
    _check_free(out, overwrite=overwrite)
    if out.is_dir() and not (out / "manifest.json").is_file():
        raise ConfigError("out", str(out), rule="is a folder but no saved model; name another")


def check_table_out(out: Path, *, overwrite: bool) -> None:
    """Refuse a name that says no table, or to put one where something is."""
    if out.suffix != ".csv":
        raise ConfigError("out", str(out), rule="must end in .csv, which says what it is")
    if out.is_dir():
        raise ConfigError("out", str(out), rule="is a folder; name a file")
    _check_free(out, overwrite=overwrite)


def check_cells_out(out: Path, *, overwrite: bool) -> None:
    """Refuse a name that says no kind of file of cells, or to put cells where something is."""
    if out.suffix not in (".h5ad", ".zarr"):
        raise ConfigError("out", str(out), rule="must end in .h5ad or .zarr, which say what it is")
    _check_free(out, overwrite=overwrite)
    if out.is_dir() and not (out.suffix == ".zarr" and _is_zarr(out)):
        raise ConfigError("out", str(out), rule="is a folder but no .zarr of cells; name another")


def check_pictures(folder: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Refuse to draw over pictures that are there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("pictures", str(folder), rule="is a file; name a folder")
    there = [name for name in names if (folder / name).exists()]
    if there and not overwrite:
        rule = f"holds {there[0]} already; name another, or --overwrite"
        raise ConfigError("pictures", str(folder), rule=rule)


def _check_free(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigError("out", str(out), rule="is there already; name another, or --overwrite")
