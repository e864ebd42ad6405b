"""What the priors and baselines know of each population of cells: means, spreads, sizes, axes.

N cells, G genes, K principal axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from jaxtyping import Float

CELLS_KEPT = 250
"""Control cells of a context that are kept to tell what other contexts it resembles."""


@dataclass(frozen=True, kw_only=True)
class ContextSummary:
    """Control cells of one context.

    ``mean`` and ``var`` are of log1p values per gene; ``axes`` holds a few hundred of the cells in
    principal axes shared by all contexts.
    """

    covariates: tuple[str, ...]
    mean: Float[np.ndarray, " genes"]
    var: Float[np.ndarray, " genes"]
    n_cells: int
    axes: Float[np.ndarray, "cells axes"]


@dataclass(frozen=True, kw_only=True)
class PriorQuestion:
    """What a baseline is asked: perturbations together, in a context, at a dose or time."""

    members: tuple[str, ...]
    context: ContextSummary
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConditionSummary:
    """Treated cells of one condition beside the control cells of its context."""

    members: tuple[str, ...]
    context: ContextSummary
    mean: Float[np.ndarray, " genes"]
    var: Float[np.ndarray, " genes"]
    n_cells: int
    numbers: tuple[float, ...] = ()

    @property
    def question(self) -> PriorQuestion:
        """The question that these cells answer."""
        return PriorQuestion(members=self.members, context=self.context, numbers=self.numbers)

    @property
    def key(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]:
        """What conditions are sorted and recognised by."""
        return self.members, self.context.covariates, self.numbers

    @property
    def size(self) -> int:
        """Cells of the smaller side, which sets how noisy the shift is."""
        return min(self.n_cells, self.context.n_cells)

    @property
    def noise(self) -> Float[np.ndarray, " genes"]:
        """Variance of the measured mean shift that sampling of cells explains."""
        return self.var / max(self.n_cells, 1) + self.context.var / max(self.context.n_cells, 1)


def moments(
    log1p_NG: Float[np.ndarray, "cells genes"] | sp.csr_matrix | sp.csr_array,
) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, " genes"]]:
    """Mean and variance per gene in float64, whatever the storage."""
    n_cells = max(log1p_NG.shape[0], 1)
    if sp.issparse(log1p_NG):
        values = sp.csr_array(log1p_NG, dtype=np.float64)
        mean = np.asarray(values.sum(0)).ravel() / n_cells
        square = np.asarray(values.multiply(values).sum(0)).ravel() / n_cells
        return mean, np.maximum(square - mean**2, 0.0)
    dense = np.asarray(log1p_NG, dtype=np.float64)
    return dense.mean(0), dense.var(0)


def representatives(
    axes_NK: Float[np.ndarray, "cells axes"], *, limit: int = CELLS_KEPT
) -> Float[np.ndarray, "kept axes"]:
    """At most ``limit`` cells, evenly spaced along the leading axis; row order plays no part."""
    axes = np.asarray(axes_NK, dtype=np.float64)
    axes = axes[np.lexsort(axes.T[::-1])] if axes.size else axes
    if len(axes) <= limit:
        return axes
    return axes[np.linspace(0, len(axes) - 1, limit).round().astype(np.intp)]


def summarise_context(
    log1p_NG: Float[np.ndarray, "cells genes"] | sp.csr_matrix | sp.csr_array,
    axes_NK: Float[np.ndarray, "cells axes"],
    *,
    covariates: Sequence[str],
    limit: int = CELLS_KEPT,
) -> ContextSummary:
    """Summary of the control cells of one context."""
    mean, var = moments(log1p_NG)
    return ContextSummary(
        covariates=tuple(covariates),
        mean=mean,
        var=var,
        n_cells=int(log1p_NG.shape[0]),
        axes=representatives(axes_NK, limit=limit),
    )


def summarise_condition(
    log1p_NG: Float[np.ndarray, "cells genes"] | sp.csr_matrix | sp.csr_array,
    context: ContextSummary,
    *,
    members: Sequence[str],
    numbers: Sequence[float] = (),
) -> ConditionSummary:
    """Summary of the treated cells of one condition; ``numbers`` are its dose and time, if any."""
    mean, var = moments(log1p_NG)
    return ConditionSummary(
        members=tuple(members),
        context=context,
        mean=mean,
        var=var,
        n_cells=int(log1p_NG.shape[0]),
        numbers=tuple(float(number) for number in numbers),
    )
