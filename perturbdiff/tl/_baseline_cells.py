"""Cells of the baselines: control cells moved until their mean is what a baseline stated.

N cells, G genes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from perturbdiff._constants import DEPTH
from perturbdiff._errors import UndefinedBaselineError
from perturbdiff._random import cell_keys, gene_lanes, stream_key, uniform
from perturbdiff.data import Cells, Condition
from perturbdiff.prior import draw_counts, shifted_cells, solve_transport

MOST_CELLS = 512
"""Control cells that are moved; distances look at no more than 400 a side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlSample:
    """Some control cells of a condition's context, drawn by name of the condition."""

    cells: Cells
    condition: Condition
    seed: int

    @classmethod
    def of(cls, controls: Cells, condition: Condition, *, seed: int) -> "ControlSample":
        """At most ``MOST_CELLS`` of the control cells, without replacement."""
        rows = np.arange(len(controls))
        if len(rows) > MOST_CELLS:
            key = torch.tensor([stream_key(seed, "controls of baselines", condition.name)])
            order = uniform(key, torch.from_numpy(rows))[0].argsort(stable=True)
            rows = np.sort(order[:MOST_CELLS].numpy())
        return cls(cells=controls.take(rows), condition=condition, seed=seed)

    def shifted(self, mean: Float[np.ndarray, " genes"]) -> Float[np.ndarray, "cells genes"]:
        """Control cells plus the difference of means, never below zero."""
        control = self.cells.log1p.toarray().astype(np.float64)
        return shifted_cells(control, mean - control.mean(0))

    def transported(self, mean: Float[np.ndarray, " genes"]) -> Float[np.ndarray, "cells genes"]:
        """Control cells whose counts are thinned or added to until the mean is right.

        Raises
        ------
        UndefinedBaselineError
            When the counts cannot be told.
        """
        if self.cells.counts is None or self.cells.library_size is None:
            msg = "the reference has neither counts nor library sizes"
            raise UndefinedBaselineError(msg)
        counts = torch.from_numpy(self.cells.counts.toarray().astype(np.int64))
        size = torch.from_numpy(self.cells.library_size.astype(np.float64))
        keys = cell_keys(
            self.seed, f"count transport {self.condition.name}", 0, n_cells=len(counts)
        )
        plan = solve_transport(counts, size, torch.from_numpy(mean))
        drawn: Int[torch.Tensor, "cells genes"] = draw_counts(
            counts, size, plan, uniform_NG=uniform(keys, gene_lanes(self.cells.genes))
        )
        return np.asarray(torch.log1p(drawn / size[:, None] * DEPTH).numpy())
