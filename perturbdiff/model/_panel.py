"""Files that lack some of the model's genes: what is summed over, and what stands in for the rest.

N cells, G genes of the model, A axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from perturbdiff._logging import logger
from perturbdiff.data import Cells
from perturbdiff.data._matrix import spread_columns
from perturbdiff.prior import ContextSummary

_SHARPNESS = 5.0


@dataclass(frozen=True, eq=False)
class Panel:
    """Genes of the model that a file has, and contexts that say how high the others may be."""

    present: Bool[np.ndarray, " genes"]
    contexts: tuple[ContextSummary, ...]

    def axes(self, axes_GA: Float[np.ndarray, "genes axes"]) -> Float[np.ndarray, "genes axes"]:
        """Axes summed over the genes present, each as long as before."""
        kept = axes_GA * self.present[:, None]
        length = (kept**2).sum(0)
        return np.asarray(kept * ((axes_GA**2).sum(0) / np.maximum(length, 1e-12)))

    def filled(self, summary: ContextSummary) -> ContextSummary:
        """The summary with absent genes at the level of known contexts, the more alike the more.

        Likeness is the correlation of control means over the genes present.
        """
        means = np.stack([context.mean for context in self.contexts])
        here, there = summary.mean[self.present], means[:, self.present]
        centre = there.mean(0)
        score = np.array([_correlation(here - centre, other - centre) for other in there])
        weight = np.exp(_SHARPNESS * (score - score.max()))
        weight /= weight.sum()
        var = np.stack([context.var for context in self.contexts])
        return replace(
            summary,
            mean=np.where(self.present, summary.mean, weight @ means),
            var=np.where(self.present, summary.var, weight @ var),
        )


def on_all_genes(cells: Cells, genes: Sequence[str]) -> tuple[Cells, Bool[np.ndarray, " genes"]]:
    """Cells with a column for every gene of the model, empty where the file has none."""
    place = {name: number for number, name in enumerate(genes)}
    columns = np.array([place[name] for name in cells.genes], dtype=np.int64)
    present = np.zeros(len(genes), dtype=bool)
    present[columns] = True
    absent = int((~present).sum())
    logger.warning(
        "the file lacks %d of the %d genes of the model (%.0f %%); they are inferred",
        *(absent, len(genes), 100 * absent / len(genes)),
    )
    return replace(
        cells,
        log1p=spread_columns(cells.log1p, columns, len(genes)),
        counts=None if cells.counts is None else spread_columns(cells.counts, columns, len(genes)),
        genes=tuple(genes),
    ), present


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left - left.mean(), right - right.mean()
    norm = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / norm if norm > 0 else 0.0
