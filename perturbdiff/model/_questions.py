"""A question about one condition, with its control cells as arrays.

N control cells, G genes, K principal axes.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._random import stream_key, uniform
from perturbdiff.data import Cells, Condition
from perturbdiff.model._panel import Panel
from perturbdiff.model._training_data import question_of
from perturbdiff.prior import ContextSummary, PriorQuestion, summarise_context

EVERY = slice(None)
_PARTNER = 1 << 22  # step of uniform numbers


@dataclass(frozen=True, eq=False)
class Controls:
    """Control cells of one context, in the order of their names."""

    cells: Cells
    context: tuple[str, ...]
    loadings: Float[np.ndarray, "genes axes"]
    mean: Float[np.ndarray, " genes"]  # of training cells
    panel: Panel | None = None  # where genes are missing

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def summary(self) -> ContextSummary:
        """What the priors look at."""
        loadings = self.loadings if self.panel is None else self.panel.axes(self.loadings)
        axes = self.cells.log1p @ loadings - self.mean @ loadings
        summary = summarise_context(self.cells.log1p, axes, covariates=self.context)
        return summary if self.panel is None else self.panel.filled(summary)

    def along(self, axes: Float[Tensor, "genes axes"]) -> Float[Tensor, "cells axes"]:
        """All cells along the axes, less their mean."""
        weights = axes.double().numpy()
        weights = weights if self.panel is None else self.panel.axes(weights)
        values = torch.from_numpy(np.asarray(self.cells.log1p @ weights))
        return (values - values.mean(0)).float()

    def counts(
        self, rows: Int[Tensor, " cells"], genes: slice = EVERY
    ) -> Int[Tensor, "cells genes"]:
        """Counts of some of the cells, dense."""
        assert self.cells.counts is not None  # asked for only where counts can be drawn
        some = self.cells.counts[rows.numpy()][:, genes]
        return torch.from_numpy(some.toarray().astype(np.int64))

    def library_size(self, rows: Int[Tensor, " cells"]) -> Float[Tensor, " cells"]:
        """Counts of each cell over all measured genes."""
        assert self.cells.library_size is not None
        return torch.from_numpy(self.cells.library_size[rows.numpy()].astype(np.float64))

    def question(self, condition: Condition) -> PriorQuestion:
        """What the priors are asked."""
        return question_of(condition, self.summary)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the cells: names, counts and library sizes."""
        content = blake2b(digest_size=16)
        content.update("\0".join(self.cells.names).encode())
        if self.cells.library_size is not None:
            content.update(np.ascontiguousarray(self.cells.library_size).tobytes())
        if self.panel is not None:
            content.update(self.panel.present.tobytes())
        for matrix in (self.cells.log1p, self.cells.counts):
            if matrix is not None:
                for part in (matrix.data, matrix.indices, matrix.indptr):
                    content.update(np.ascontiguousarray(part).tobytes())
        return content.hexdigest()


def partner_rows(
    n_controls: int, n_cells: int, *, seed: int, condition: str
) -> Int[Tensor, " cells"]:
    """Control partner of each generated cell.

    All controls are used once, in an order of this seed and condition, before any is used again;
    the first cells have the same partners however many are asked for.
    """
    orders = [
        uniform(
            torch.tensor([stream_key(seed, "partners", condition, turn)]), torch.arange(n_controls)
        )[0].argsort(stable=True)
        for turn in range(-(-n_cells // n_controls))
    ]
    return torch.cat(orders)[:n_cells]


def forked_partners(
    keys: Int[Tensor, "*sets cells"], n_controls: int
) -> Int[Tensor, "*sets cells"]:
    """Control partner of each cell of a set that is drawn anew, by the key of the cell."""
    chance = uniform(keys.flatten(), torch.zeros(1, dtype=torch.int64), step=_PARTNER)
    return (chance[:, 0] * n_controls).long().view(keys.shape)


def shown_controls(
    n_controls: int, n_shown: int, *, seed: int, context: tuple[str, ...]
) -> Int[Tensor, " shown"]:
    """Control cells that the network is shown: the same for all sets and perturbations."""
    key = torch.tensor([stream_key(seed, "shown controls", *context)])
    order = uniform(key, torch.arange(n_controls))[0].argsort(stable=True)
    return order[:n_shown]
