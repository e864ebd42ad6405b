"""Two ways to say what changed: a shift of the mean log1p value, or a log-ratio re-applied anew."""

import numpy as np
from jaxtyping import Float

from perturbdiff._constants import DEPTH, PSEUDO_COUNT

Genes = Float[np.ndarray, "... genes"]


def log_level(mean_log1p: Genes) -> Genes:
    """Log of the level behind a mean log1p value, in counts per 10,000, with a pseudo-count."""
    return np.asarray(np.log(np.expm1(mean_log1p) + PSEUDO_COUNT))


def from_log_level(level: Genes) -> Genes:
    """Inverse of :func:`log_level`, never below zero."""
    return np.asarray(np.log1p(np.maximum(np.exp(level) - PSEUDO_COUNT, 0.0)))


def log_ratio(treated: Genes, control: Genes) -> Genes:
    """``log((expm1 treated + e) / (expm1 control + e))`` with pseudo-count e."""
    return np.asarray(log_level(treated) - log_level(control))


def apply_log_ratio(control: Genes, ratio: Genes) -> Genes:
    """Mean log1p value where ``control`` is changed by ``ratio``."""
    return from_log_level(log_level(control) + ratio)


def shifted_cells(
    log1p_NG: Float[np.ndarray, "cells genes"], shift_G: Float[np.ndarray, " genes"]
) -> Float[np.ndarray, "cells genes"]:
    """Control cells moved by a shift and clipped to the scale: a distributional baseline.

    No cell has less than no counts of a gene, or more than all of its counts.
    """
    return np.asarray(np.clip(np.asarray(log1p_NG) + shift_G, 0.0, np.log1p(DEPTH)))
