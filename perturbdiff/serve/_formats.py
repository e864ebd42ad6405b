"""Predicted cells as JSON, as .h5ad and as Arrow, and back."""

import json
import math
from collections.abc import Callable, Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from anndata.io import read_elem, write_elem
from pydantic_core import to_json as to_bytes

from perturbdiff._errors import ConfigError, ExpressionError
from perturbdiff._optional import needed

H5AD, ARROW, JSON = "application/x-hdf5", "application/vnd.apache.arrow.stream", "application/json"
EVENTS = "text/event-stream"
MEDIA: Mapping[str, str] = MappingProxyType({"json": JSON, "h5ad": H5AD, "arrow": ARROW})


def check_finite(pred: AnnData) -> None:
    """Refuse to hand out cells that are no numbers.

    Raises
    ------
    ExpressionError
        When a value, count or library size is not finite.
    """
    layers = [pred.X, *pred.layers.values()]
    sizes = [pred.obs[name].to_numpy() for name in pred.obs if pred.obs[name].dtype.kind == "f"]
    values = [layer.data for layer in layers]
    if not all(np.isfinite(array).all() for array in (*values, *sizes)):
        msg = "The model made cells that are no finite numbers, so there is no answer."
        raise ExpressionError(msg)


def to_h5ad(pred: AnnData) -> bytes:
    """The bytes of an .h5ad file."""
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        write_elem(file, "/", pred)
    return buffer.getvalue()


def from_h5ad(content: bytes, *, most_mb: float | None = None) -> AnnData:
    """The file that these bytes are.

    Parameters
    ----------
    content
        Bytes of an .h5ad file.
    most_mb
        Refuse one that would take more than this, in millions of bytes, when unpacked.

    Returns
    -------
    The cells.

    Raises
    ------
    ConfigError
        When it is no such file, or unpacks to too much.
    """
    try:
        with h5py.File(BytesIO(content), "r") as file:
            if most_mb is not None:
                _check_size(file, most_mb)
            found = read_elem(file["/"])
    except ConfigError:
        raise
    except Exception as error:  # a damaged file fails in any way it likes
        rule = f"is no .h5ad file that can be read ({type(error).__name__})"
        raise ConfigError("control_cells", _size(content), rule=rule) from error
    if not isinstance(found, AnnData):
        raise ConfigError("control_cells", _size(content), rule="holds no cells")
    return found


def _size(content: bytes) -> str:
    return f"{len(content)} bytes"


def _check_size(file: h5py.File, most_mb: float) -> None:
    total = 0

    def add(_: str, item: object) -> None:
        nonlocal total
        if isinstance(item, h5py.Dataset):
            total += (item.size or 0) * item.dtype.itemsize

    file.visititems(add)
    if total > most_mb * 1e6:
        rule = f"unpacks to more than {most_mb:g} MB; send only the control cells"
        raise ConfigError("control_cells", f"{total / 1e6:.0f} MB", rule=rule)


def to_json(pred: AnnData) -> bytes:
    """Cells as text: labels, counts and log1p values of each cell by gene number.

    ``{"genes", "obs": {column: [...]}, "counts" and "log1p": {"indptr", "indices", "data"},
    "provenance"}``; what has no number is null.
    """
    content: dict[str, Any] = {
        "genes": pred.var_names.tolist(),
        "names": pred.obs_names.tolist(),
        "obs": {name: plain(pred.obs[name].to_numpy()) for name in pred.obs},
        "log1p": _sparse(pred.X),
        "provenance": plain(pred.uns["perturbdiff"]),
    }
    if "counts" in pred.layers:
        content["counts"] = _sparse(pred.layers["counts"])
    return dumps(content)


def _sparse(matrix: Any) -> dict[str, list[Any]]:
    rows = sp.csr_array(matrix)
    values = rows.data if rows.data.dtype.kind in "iu" else rows.data.astype(float).round(6)
    return {
        "indptr": rows.indptr.tolist(),
        "indices": rows.indices.tolist(),
        "data": values.tolist(),
    }


def dumps(content: Any) -> bytes:
    """Plain values as JSON, without a NaN."""
    written: bytes = to_bytes(content, inf_nan_mode="null")
    return written


def plain(value: Any) -> Any:
    """What JSON can hold; numbers that are none are null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, pd.DataFrame):
        return plain(value.to_dict("records"))
    if isinstance(value, np.ndarray | list | tuple):
        return [
            plain(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)
        ]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def to_arrow(pred: AnnData) -> bytes:
    """An Arrow stream: one row a cell, the columns of ``obs``, and lists of genes and values.

    ``gene``, ``log1p`` and ``count`` are lists of the same length; names of genes and the
    provenance are JSON in the metadata of the schema.
    """
    pa = needed("pyarrow", group="serve")
    matrix = sp.csr_array(pred.X)
    offsets = pa.array(matrix.indptr.astype(np.int32))
    columns = {"name": pa.array(pred.obs_names.tolist())}
    for name in pred.obs:
        values = pred.obs[name]
        columns[name] = pa.array(plain(values.to_numpy()))
    columns["gene"] = pa.ListArray.from_arrays(offsets, pa.array(matrix.indices.astype(np.int32)))
    columns["log1p"] = pa.ListArray.from_arrays(offsets, pa.array(matrix.data))
    if "counts" in pred.layers:
        counts = sp.csr_array(pred.layers["counts"])
        own = pa.array(counts.indptr.astype(np.int32))
        columns["count_gene"] = pa.ListArray.from_arrays(own, pa.array(counts.indices))
        columns["count"] = pa.ListArray.from_arrays(own, pa.array(counts.data))
    table = pa.table(columns).replace_schema_metadata(
        {
            "genes": json.dumps(pred.var_names.tolist()),
            "provenance": json.dumps(plain(pred.uns["perturbdiff"]), allow_nan=False),
        }
    )
    sink = BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


WRITERS: Mapping[str, Callable[[AnnData], bytes]] = MappingProxyType(
    {"json": to_json, "h5ad": to_h5ad, "arrow": to_arrow}
)


def wanted_format(accept: str | None) -> str | None:
    """The form that a client likes best; None where it takes none that we have.

    Parameters
    ----------
    accept
        The header, such as ``"application/x-hdf5, application/json;q=0.5"``.

    Returns
    -------
    ``"json"``, ``"h5ad"``, ``"arrow"`` or ``"events"``.
    """
    known = {**{media: name for name, media in MEDIA.items()}, EVENTS: "events"}
    known |= {"*/*": "json", "application/*": "json"}
    found: list[tuple[float, int, str]] = []
    for place, part in enumerate((accept or "*/*").split(",")):
        media, *parameters = [piece.strip().lower() for piece in part.split(";")]
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if media in known and weight > 0:
            found.append((-weight, place, known[media]))
    return min(found)[2] if found else None
