"""Whether values were rounded: counts cannot be told from logarithms that were."""

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from jaxtyping import Float

from perturbdiff._constants import DEPTH

_LOOKED_AT = 100_000  # values
_FEWEST = 10  # that a habit is told from
_MOST_DECIMALS = 5  # that float32 holds for logarithms
_CLEAR = 0.25  # of a count: rounding beyond that would explain anything
_SHARE = 0.999


class Rounding(NamedTuple):
    """How values were rounded, and by how much each may be off."""

    how: str
    off: Float[np.ndarray, " values"]


def rounding_of(values: Float[np.ndarray, " values"]) -> Rounding | None:
    """How values were rounded; None where they hold all that float32 can hold.

    Parameters
    ----------
    values
        Logarithms of one plus something, without zeros.
    """
    if len(values) < _FEWEST:
        return None
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half.astype(np.float64), values):
        return Rounding("to half precision (float16)", np.spacing(half).astype(np.float64) / 2)
    exact = values.astype(np.float64)
    own = np.spacing(values.astype(np.float32)).astype(np.float64)
    for decimals in range(1, _MOST_DECIMALS + 1):
        if (np.abs(exact - exact.round(decimals)) <= 0.51 * own).all():
            off = np.full(len(values), 0.5 * 10.0**-decimals)
            return Rounding(f"to {decimals} decimal{'s' * (decimals > 1)}", off)
    return None


def rounding_that_explains(
    log1p: sp.csr_array, library_size: Float[np.ndarray, " cells"]
) -> str | None:
    """How values were rounded, where that is why they do not stand for whole counts.

    Parameters
    ----------
    log1p
        Log1p of counts per 10,000.
    library_size
        Of each cell.

    Returns
    -------
    ``"to 3 decimals"``, say. None where values were not rounded, or are further from whole counts
    than rounding can bring them: off by h, log1p of c counts per 10,000 of a library of n is off by
    about h · (c + n / 10,000) counts.
    """
    n_values = len(log1p.data)
    looked_at = np.unique(np.linspace(0, n_values - 1, min(n_values, _LOOKED_AT)).astype(np.int64))
    values = log1p.data[looked_at]
    rounding = rounding_of(values)
    if rounding is None:
        return None
    rows = np.searchsorted(log1p.indptr, looked_at, side="right") - 1
    depth = library_size[rows] / DEPTH
    counts = np.expm1(values.astype(np.float64)) * depth
    allowed = rounding.off * (counts + depth)
    clear = allowed < _CLEAR
    near = np.abs(counts - np.maximum(counts.round(), 1)) <= 1.1 * allowed + 0.02
    return rounding.how if near[clear].sum() >= _SHARE * clear.sum() else None
