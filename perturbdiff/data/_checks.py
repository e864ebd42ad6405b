"""Checks at intake: units are declared and the numbers must agree with them."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._constants import DEPTH, SCALES, UNS_KEY
from perturbdiff._errors import ExpressionError, ScaleError, counted, listed, nearest
from perturbdiff._logging import logger
from perturbdiff._typing import Scale
from perturbdiff.data._conditions import Condition
from perturbdiff.data._labels import looks_missing, near_duplicates
from perturbdiff.data._matrix import place, row_sums

_TWICE = float(np.log1p(np.log1p(DEPTH)))
SAMPLE = 256
"""Rows looked at to tell what else in the file may be usable."""


def declared_scale(adata: AnnData) -> Scale | None:
    """The scale that the file declares for ``X``, if any."""
    entry = adata.uns.get(UNS_KEY)
    scale = entry.get("scale") if hasattr(entry, "get") else None
    return None if scale is None else known_scale(str(scale))


def is_prediction(adata: AnnData) -> bool:
    """Whether the cells were made by a model, under promises that leave library sizes as they are.

    Their counts may then be more than the library size, which no measured cell's are.
    """
    entry = adata.uns.get(UNS_KEY)
    return hasattr(entry, "get") and "reading" in entry


def known_scale(scale: str) -> Scale:
    """The scale itself, refused by name when this package does not know it."""
    if not isinstance(scale, str) or scale not in SCALES:
        msg = f"scale = {scale!r} is not known. {nearest(scale, SCALES)}"
        raise ScaleError(msg)
    return cast("Scale", scale)


def resolve_scale(adata: AnnData, scale: str | None, layer: str | None) -> Scale:
    """The scale of the expression to be read: as named in the call, or as the file declares.

    Raises
    ------
    ScaleError
        When it is unknown, not stated at all, or stated twice and differently.
    """
    declared = declared_scale(adata) if layer is None else None
    if scale is None and declared is None:
        msg = (
            f"The scale of {place(layer)} is not declared. Pass scale='counts' (integer counts) or "
            f"scale='log1p_cp10k' (log1p of counts per 10,000), or call perturbdiff.pp.normalize. "
            f"{usable(adata, skip=())}"
        )
        raise ScaleError(msg.rstrip())
    if scale is None:
        return cast("Scale", declared)
    if declared is not None and known_scale(scale) != declared:
        msg = (
            f"scale={scale!r} was asked for, but adata.uns[{UNS_KEY!r}]['scale'] declares "
            f"{declared!r} for adata.X. Name the layer that holds {scale!r}, or leave scale out."
        )
        raise ScaleError(msg)
    return known_scale(scale)


def check_values(matrix: sp.csr_array, scale: Scale, *, adata: AnnData, layer: str | None) -> None:
    """Refuse numbers that are not on the declared scale.

    Parameters
    ----------
    matrix
        Cells × genes.
    scale
        Declared scale.
    adata, layer
        Where the numbers come from, for the message and its hint.

    Raises
    ------
    ExpressionError
        For NaN, infinity, negative values, or fractions in counts.
    ScaleError
        For values that are on another scale than log1p of counts per 10,000.
    """
    values, where = matrix.data, place(layer)
    if not len(values):
        return
    if not np.isfinite(values).all():
        n_bad = int((~np.isfinite(values)).sum())
        bad = counted(n_bad, "NaN or infinite value")
        msg = f"{where} holds {bad}. {usable(adata, skip=(layer,))}"
        raise ExpressionError(msg.rstrip())
    if (lowest := values.min()) < 0:
        msg = (
            f"{where} holds negative values (lowest {float(lowest):.4g}), so it is neither "
            f"counts nor log1p of counts; it looks scaled. {usable(adata, skip=(layer,))}"
        )
        raise ExpressionError(msg.rstrip())
    whole = values.dtype.kind in "biu" or bool((values == np.rint(values)).all())
    if scale == "counts" and not whole:
        example = float(values[np.argmax(values != np.rint(values))])
        msg = (
            f"{where} is declared as counts but holds fractions such as {example:.4g}. "
            f"{usable(adata, skip=(layer,))}"
        )
        raise ExpressionError(msg.rstrip())
    if scale == "log1p_cp10k":
        _check_log(matrix, whole=whole, adata=adata, layer=layer)


def _check_log(matrix: sp.csr_array, *, whole: bool, adata: AnnData, layer: str | None) -> None:
    where, hint = place(layer), usable(adata, skip=(layer,))
    if whole:
        msg = f"{where} is declared as log1p_cp10k but holds only whole numbers. {hint}"
        raise ScaleError(msg.rstrip())
    base = adata.uns["log1p"].get("base") if isinstance(adata.uns.get("log1p"), dict) else None
    if layer is None and base is not None:
        msg = f"{where} holds logarithms of base {base}; log1p_cp10k has natural ones. {hint}"
        raise ScaleError(msg.rstrip())
    highest = float(matrix.data.max())
    if highest > 1.001 * np.log1p(DEPTH) and not is_prediction(adata):
        msg = f"{where} holds {highest:.4g}, more than log1p of counts per 10,000 can be. {hint}"
        raise ScaleError(msg.rstrip())
    linear = sp.csr_array(
        (np.expm1(matrix.data.astype(np.float64)), matrix.indices, matrix.indptr),
        shape=matrix.shape,
    )
    depth = row_sums(linear)
    depth = depth[depth > 0]
    constant = len(depth) > 1 and bool(np.ptp(depth) < 1e-3 * depth.mean())
    if not is_prediction(adata):
        warn_logged_twice(depth, highest=highest, where=where)
    off = bool((depth > 1.02 * DEPTH).any()) or (constant and depth.mean() < 0.98 * DEPTH)
    if off and not is_prediction(adata):
        msg = (
            f"{where} is declared as log1p of counts per 10,000, but undoing the logarithm gives "
            f"{float(np.median(depth)):,.0f} per cell (median). {hint}"
        )
        raise ScaleError(msg.rstrip())


def warn_logged_twice(depth: Float[np.ndarray, " cells"], *, highest: float, where: str) -> None:
    """Say in the log that values look like logarithms of logarithms.

    Nothing that was logged twice is above ``log1p(log1p(10,000))``, and what is undone once sums to
    little; a selection of rarely seen genes looks alike, so this is no error.

    Parameters
    ----------
    depth
        Sum over genes of each cell, one logarithm undone.
    highest
        Highest value.
    where
        What they are, for the message.
    """
    if len(depth) and highest <= _TWICE and np.median(depth) < DEPTH / 2:
        logger.warning(
            "%s holds nothing above %.3g and undoing the logarithm gives %.0f per cell (median): "
            "it looks logged twice, unless only few or rarely seen genes were kept",
            *(where, highest, np.median(depth)),
        )


def usable(adata: AnnData, *, skip: Sequence[str | None]) -> str:
    """A sentence on what in the file holds counts or log values, or nothing."""
    found = []
    for name, values in _candidates(adata):
        if name in skip:
            continue
        kind = _looks_like(values)
        if kind is None:
            continue
        if name is None:
            found.append(f"adata.X holds {kind}")
        else:
            found.append(f"layer={name!r} holds {kind}")
    raw = None if adata.raw is None else _looks_like(adata.raw.X[:SAMPLE])
    if raw is not None:
        found.append(f"adata.raw holds {raw} (adata.raw.to_adata())")
    return f"Usable here: {'; '.join(found)}." if found else ""


def _candidates(adata: AnnData) -> Iterator[tuple[str | None, Any]]:
    rows = slice(0, SAMPLE)
    if adata.X is not None:
        yield None, adata.X[rows]
    for name in adata.layers:
        yield name, adata.layers[name][rows]


def _looks_like(values: Any) -> str | None:
    stored = values.data if sp.issparse(values) else np.asarray(values).ravel()
    if stored.dtype.kind not in "iuf" or not len(stored):
        return None
    if not np.isfinite(stored).all() or stored.min() < 0:
        return None
    if (stored == np.rint(stored)).all():
        return "whole numbers (counts?)"
    return "non-negative fractions (log values?)" if stored.max() < 20 else None


def warn_labels(levels: dict[str, tuple[str, ...]], conditions: dict[Condition, int]) -> None:
    """Say in the log what looks wrong about labels but may be meant.

    Parameters
    ----------
    levels
        Distinct labels as written, for each column.
    conditions
        Number of cells of each condition.
    """
    for key, names in levels.items():
        if odd := looks_missing(names):
            logger.warning(
                "obs[%r] has labels that look like missing values and are taken as they stand: %s",
                *(key, listed(odd)),
            )
        for group in near_duplicates(names):
            logger.warning("obs[%r] has labels that are nearly the same: %s", key, listed(group))
    if single := sorted(condition for condition, size in conditions.items() if size == 1):
        shown = listed(str(condition) for condition in single)
        logger.warning("%d condition(s) have a single cell: %s", len(single), shown)
    with_control = {condition.context for condition in conditions if condition.is_control}
    without = sorted({c.context for c in conditions} - with_control)
    if without:
        logger.warning("%d context(s) have no control cells: %s", len(without), listed(without))
