"""The one way in and out of AnnData: names become arrays, arrays become names."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ConfigError, GeneOverlapError, LabelError, UnknownLevelError
from perturbdiff._logging import logger
from perturbdiff.data._cells import Cells, pick_columns
from perturbdiff.data._checks import check_values, declared_scale
from perturbdiff.data._conditions import Condition, Rows, read_rows
from perturbdiff.data._labels import label_of
from perturbdiff.data._library import LIBRARY_SIZE, counts_by_size, library_sizes
from perturbdiff.data._matrix import (
    INFER,
    LEAST_SHARE,
    align_genes,
    gene_names,
    log1p_per_depth,
    read_matrix,
)
from perturbdiff.data._predicted import made_name
from perturbdiff.data._registry import Registry


def encode(
    adata: AnnData,
    registry: Registry,
    *,
    missing_genes: Literal["refuse", "infer"] = "refuse",
    new_contexts: Literal["refuse", "infer"] = "refuse",
) -> Cells:
    """Read labelled cells by name.

    Parameters
    ----------
    adata
        Cells × genes; in memory, backed or a view. It is not changed.
    registry
        What its columns and genes mean.
    missing_genes
        ``"refuse"`` a file that lacks genes of the registry, or read those that are there and
        leave the rest to be inferred (``"infer"``).
    new_contexts
        ``"refuse"`` covariate levels that the registry does not know, or read them (``"infer"``).

    Returns
    -------
    Cells in the order of their names, on the selected genes (all measured ones before ``fit``).
    Cells without a label are left out with one logged count; extra genes are ignored with one.

    Raises
    ------
    LabelError, UnknownKeyError, UnknownLevelError
        When labels are not there, not readable, or unknown.
    GeneError, GeneOverlapError
        When genes are duplicated or missing.
    ExpressionError, ScaleError
        When the numbers are not what was declared.
    """
    measured = gene_names(adata)
    rows = read_rows(adata.obs, registry.columns)
    if not len(rows.rows):
        msg = f"No cell of the file has all its labels ({', '.join(registry.label_keys)})."
        raise LabelError(msg)
    check_known(rows.conditions, registry, new_contexts=new_contexts)
    return read_cells(adata, registry, rows, measured=measured, missing_genes=missing_genes)


def check_known(
    conditions: Sequence[Condition], registry: Registry, *, new_contexts: str = "refuse"
) -> None:
    """Refuse perturbations and covariate levels that the registry does not know, by name."""
    members = sorted({member for c in conditions for member in c.members})
    if unknown := [member for member in members if not registry.knows(member)]:
        known = sorted({*registry.perturbations.levels, *registry.features})
        raise UnknownLevelError(registry.perturbation_key, unknown, known=known)
    if new_contexts == "refuse":
        for number, vocabulary in enumerate(registry.covariates):
            vocabulary.encode(sorted({c.context[number] for c in conditions}))


def read_cells(
    adata: AnnData,
    registry: Registry,
    rows: Rows,
    *,
    measured: tuple[str, ...],
    missing_genes: str = "refuse",
    remedy: str = INFER,
) -> Cells:
    """Read the expression of some rows and put it on the scales that the package works in."""
    layer, scale = registry.layer, registry.scale
    if layer is None:
        scale = declared_scale(adata) or scale
    columns, genes = align_genes(
        measured,
        registry.genes or registry.measured_genes,
        missing=missing_genes,
        remedy=remedy,
    )
    wanted = registry.genes or registry.measured_genes
    if len(genes) < LEAST_SHARE * len(wanted):
        msg = (
            f"Only {len(genes)} of the {len(wanted)} genes of the model are in the file "
            f"({len(genes) / len(wanted):.0%}); the others cannot be inferred from less than "
            f"{LEAST_SHARE:.0%}. Give a file with more of them."
        )
        raise GeneOverlapError(msg)
    if extra := len(set(measured) - set(registry.measured_genes)):
        logger.info("ignored %d genes that the model was not told of", extra)
    matrix = read_matrix(adata, layer, rows=rows.rows)
    check_values(matrix, scale, adata=adata, layer=layer)
    key, panel = registry.library_size_key, registry.measured_genes
    sizes = library_sizes(adata, matrix, scale, key=key, measured=panel, rows=rows.rows)
    if n_empty := int((np.diff(matrix.indptr) == 0).sum()):
        logger.warning("%d of %d cells have no counts at all", n_empty, len(rows.rows))
    matrix = pick_columns(matrix, columns)
    if scale == "counts" and sizes is not None:
        counts: sp.csr_array | None = _whole(matrix)
        log1p = log1p_per_depth(matrix, sizes)
    else:
        counts = None
        if sizes is not None:
            counts = counts_by_size(matrix, sizes, adata=adata, layer=layer, key=key)
        log1p = matrix.astype(np.float32)
    return Cells(
        log1p=log1p,
        counts=counts,
        library_size=sizes,
        genes=genes,
        names=rows.names,
        rows=rows.rows,
        distinct=rows.conditions,
        condition=rows.condition,
        n_missing_labels=rows.n_missing,
    )


def decode(
    values: sp.csr_array | sp.csr_matrix | np.ndarray,
    library_size: Float[np.ndarray, " cells"] | None,
    registry: Registry,
    *,
    conditions: Sequence[Condition],
    condition: Int[np.ndarray, " cells"],
    sets: Int[np.ndarray, " cells"] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> AnnData:
    """Cells as a new AnnData with names, labels, scale and provenance.

    Parameters
    ----------
    values
        Cells × selected genes: counts, or (with ``library_size=None``) log1p of counts per 10,000.
    library_size
        Counts of each cell over all measured genes: the denominator of ``X``.
    registry
        Gives the names.
    conditions, condition
        Conditions, and which of them each cell belongs to.
    sets
        Set that each cell was generated in, written to ``obs["set"]``.
    provenance
        What to say about the origin: plain scalars, strings, arrays, tables.

    Returns
    -------
    ``X`` is ``log1p(counts / library_size * 10^4)`` in float32 CSR, and zero in a cell without any
    count, whatever its library size. ``layers["counts"]`` are the counts, ``obs`` the labels and
    the library size, ``uns["perturbdiff"]`` the provenance and the scale of ``X``. Labels are
    values, never keys. ``encode`` reads it back with the same registry.

    Raises
    ------
    ConfigError
        When the shape does not fit the genes, a cell has counts but no library, or the provenance
        could not be written to a file.
    """
    genes = registry.genes or registry.measured_genes
    if values.shape != (len(condition), len(genes)):
        rule = f"needs one row for {len(condition)} cells and one column for {len(genes)} genes"
        raise ConfigError("values", values.shape, rule=rule)
    matrix = sp.csr_array(values)
    obs = _obs(registry, conditions, condition)
    if sets is not None:
        obs["set"] = sets
    if library_size is None:
        counts, log1p = None, matrix.astype(np.float32)
    else:
        counts = _whole(matrix)
        if ((library_size <= 0) & (np.diff(counts.indptr) > 0)).any():
            rule = "must be above 0 wherever a cell has counts"
            raise ConfigError("library_size", float(library_size.min()), rule=rule)
        log1p = log1p_per_depth(counts, library_size)
        obs[registry.library_size_key or LIBRARY_SIZE] = library_size
    var = pd.DataFrame(index=pd.Index(list(genes), dtype=object))
    adata = AnnData(X=sp.csr_matrix(log1p), obs=obs, var=var)
    if counts is not None:
        adata.layers["counts"] = sp.csr_matrix(counts)
    if registry.layer is not None and registry.layer not in adata.layers:
        own = counts if registry.scale == "counts" and counts is not None else log1p
        adata.layers[registry.layer] = sp.csr_matrix(own)
    adata.uns[UNS_KEY] = {**writable(provenance or {}), "scale": "log1p_cp10k"}
    return adata


def writable(entries: Mapping[str, Any], *, where: str = "provenance") -> dict[str, Any]:
    """The entries in forms that survive a file; None is left out.

    Raises
    ------
    ConfigError
        When a key is not text or holds a slash, or a value has no form in a file.
    """
    plain: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise ConfigError(
                where, key, rule="keys must be text without '/'; keep labels as values"
            )
        if value is None:
            continue
        if isinstance(value, Mapping):
            plain[key] = writable(value, where=f"{where}.{key}")
        elif isinstance(value, list | tuple):
            plain[key] = np.array([str(x) for x in value] if _any_text(value) else value)
        elif isinstance(value, str | bool | int | float | np.generic | np.ndarray | pd.DataFrame):
            plain[key] = value
        else:
            place = f"{where}.{key}"
            raise ConfigError(place, value, rule="must be a scalar, text, array or table")
    return plain


def _any_text(values: Sequence[Any]) -> bool:
    return not values or any(isinstance(value, str) for value in values)


def _obs(
    registry: Registry, conditions: Sequence[Condition], condition: np.ndarray
) -> pd.DataFrame:
    """Labels of each cell as the registry's columns."""
    columns: dict[str, list[Any]] = {
        registry.perturbation_key: [
            label_of(c.members, separator=registry.separator, control=registry.control[0])
            for c in conditions
        ]
    }
    for number, key in enumerate(registry.covariate_keys):
        columns[key] = [c.context[number] for c in conditions]
    names = [made_name(number) for number in range(len(condition))]
    obs = pd.DataFrame(index=pd.Index(names, dtype=object))
    for key, labels in columns.items():
        obs[key] = pd.Categorical(np.array(labels, dtype=object)[condition])
    for key, numbers in _numbers(registry, conditions).items():
        cells = np.array(numbers, dtype=object)[condition]
        text = any(isinstance(number, str) for number in numbers)
        obs[key] = (
            pd.Categorical([None if x is None else str(x) for x in cells])
            if text
            else cells.astype(float)
        )
    return obs


def _numbers(
    registry: Registry, conditions: Sequence[Condition]
) -> dict[str, list[float | str | None]]:
    """Doses and times of each condition as they would be written in a file."""
    columns: dict[str, list[float | str | None]] = {}
    if registry.dose_key is not None:
        unit, join = registry.dose_unit or "", registry.separator or ""
        written: list[float | str | None] = []
        for doses in (c.doses for c in conditions):
            shown = doses[:1] if len(set(doses)) == 1 else doses
            text = join.join(f"{dose!r}{unit}" for dose in shown)
            written.append(None if not shown else text if unit or len(shown) > 1 else shown[0])
        columns[registry.dose_key] = written
    if registry.time_key is not None:
        unit = registry.time_unit or ""
        times = [c.time for c in conditions]
        columns[registry.time_key] = [
            f"{time!r}{unit}" if unit and time is not None else time for time in times
        ]
    return columns


def _whole(matrix: sp.csr_array) -> sp.csr_array:
    """Counts as integers, as narrow as they fit."""
    wide = len(matrix.data) > 0 and matrix.data.max() > np.iinfo(np.int32).max
    return matrix.astype(np.int64 if wide else np.int32, copy=False)
