"""A held-out condition: its true cells, its control cells, and the scores of any answer.

N cells, G genes, C conditions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from benchmarks.tables import plain
from perturbdiff._constants import DEPTH
from perturbdiff._random import cell_keys, gene_lanes, uniform
from perturbdiff.data import Condition
from perturbdiff.metrics import (
    CONDITION_METRICS,
    Projection,
    discrimination,
    score_condition,
    split_half_ceiling,
)
from perturbdiff.model._questions import Controls, partner_rows
from perturbdiff.prior import draw_counts, shifted_cells, solve_transport

Cells = Float[np.ndarray, "cells genes"]
N_CELLS = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """What is needed to score an answer about one condition.

    ``true_shifts`` holds the true mean shifts of all conditions that answers are to be told apart
    from, on the genes of this one; ``own`` is the place of this one among them.
    """

    condition: Condition
    controls: Controls
    truth: Cells
    project: Projection
    true_shifts: Float[np.ndarray, "conditions genes"]
    half_shifts: Float[np.ndarray, "splits halves conditions genes"]
    own: int

    @cached_property
    def control_cells(self) -> Cells:
        """Control cells, dense."""
        return np.asarray(self.controls.cells.log1p.toarray(), dtype=np.float32)

    @property
    def n_once(self) -> int:
        """Cells that can be made without using a control cell twice, at most the usual number."""
        return min(N_CELLS, len(self.controls))

    def score(self, cells_NG: Cells) -> dict[str, Any]:
        """Every score of predicted cells, with reasons where one is undefined."""
        scores = score_condition(
            cells_NG, self.truth, self.control_cells, project=self.project, seed=0
        )
        values = {name: plain(value) for name, value in scores.values.items()}
        shift_G = np.asarray(cells_NG, dtype=np.float64).mean(0) - self.control_cells.mean(
            0, dtype=np.float64
        )
        values |= self.told_apart(shift_G)
        return {
            "values": values,
            "undefined": scores.undefined,
            "n_pred": scores.n_pred,
            "n_significant": scores.n_significant,
        }

    def score_mean(self, mean_G: Float[np.ndarray, " genes"]) -> dict[str, float | None]:
        """Scores of a predicted mean, before it is made into cells."""
        shift = mean_G - self.control_cells.mean(0, dtype=np.float64)
        true = self.true_shifts[self.own]
        flat = np.ptp(shift) < 1e-9
        return {
            "pearson_shift": 0.0 if flat else float(np.corrcoef(shift, true)[0, 1]),
            "mae_shift": float(np.abs(shift - true).mean()),
            **self.told_apart(shift),
        }

    def told_apart(self, shift_G: Float[np.ndarray, " genes"]) -> dict[str, float | None]:
        """How near the predicted shift is to the own true shift, among those of all conditions."""
        if len(self.true_shifts) < 2:
            return {"discrimination": None, "ranked_first": None}
        guesses = self.true_shifts.copy()
        guesses[self.own] = shift_G
        ranked = discrimination(guesses, self.true_shifts)
        return {
            "discrimination": float(ranked.scores[self.own]),
            "ranked_first": float(ranked.ranks[self.own] == 0),
        }

    def ceiling(self) -> dict[str, Any]:
        """Scores between halves of the true cells; discrimination from ``half_shifts``."""
        scores = split_half_ceiling(self.truth, self.control_cells, project=self.project, seed=0)
        values = {name: plain(scores.values[name]) for name in CONDITION_METRICS}
        values |= {"discrimination": None, "ranked_first": None}
        if len(self.true_shifts) > 1:
            ranked = [discrimination(guess, true) for guess, true in self.half_shifts]
            values["discrimination"] = float(np.mean([one.scores[self.own] for one in ranked]))
            values["ranked_first"] = float(np.mean([one.ranks[self.own] == 0 for one in ranked]))
        return {"values": values, "undefined": scores.undefined, "n_half": scores.n_half}

    def shifted(self, mean_G: Float[np.ndarray, " genes"]) -> Cells:
        """Every control cell once, moved by the predicted shift and clipped to the scale."""
        shift_G = mean_G - self.control_cells.mean(0, dtype=np.float64)
        return shifted_cells(self.control_cells, shift_G).astype(np.float32)

    def transported(
        self, mean_G: Float[np.ndarray, " genes"], *, n_cells: int | None = N_CELLS, seed: int = 0
    ) -> Cells:
        """Control cells thinned or added to until their mean is met.

        Parameters
        ----------
        mean_G
            Mean log1p value per gene to reach.
        n_cells
            Cells, from the partners that the model would use; ``None`` for every control cell once.
        seed
            Of partners and counts.
        """
        name = self.condition.name
        if n_cells is None:
            rows = torch.arange(len(self.controls))
        else:
            rows = partner_rows(len(self.controls), n_cells, seed=seed, condition=name)
        counts, size = self.controls.counts(rows), self.controls.library_size(rows)
        plan = solve_transport(counts, size, torch.from_numpy(mean_G))
        keys = cell_keys(seed, name, 0, n_cells=len(rows))
        draws = uniform(keys, gene_lanes(self.controls.cells.genes))
        moved = draw_counts(counts, size, plan, uniform_NG=draws)
        return torch.log1p(moved / size[:, None] * DEPTH).numpy().astype(np.float32)


def true_shift(treated_NG: Any, control_NG: Any) -> Float[np.ndarray, " genes"]:
    """Difference of the mean log1p values of two populations, sparse or dense."""
    return _mean(treated_NG) - _mean(control_NG)


def half_shifts(
    treated: Sequence[Any], control: Sequence[Any], *, n_splits: int = 5
) -> Float[np.ndarray, "splits halves conditions genes"]:
    """Shifts between halves of treated and halves of control cells.

    Nothing is shared by the halves: whole control cells would lend their noise to both, and tell
    small populations apart by it.

    Parameters
    ----------
    treated, control
        Cells by genes of each condition, sparse or dense.
    n_splits
        Random splits.
    """
    splits = []
    for split in range(n_splits):
        pairs = [
            [t - c for t, c in zip(_halves(cells, split), _halves(base, split), strict=True)]
            for cells, base in zip(treated, control, strict=True)
        ]
        splits.append([np.stack(side) for side in zip(*pairs, strict=True)])
    return np.array(splits)


def _halves(cells_NG: Any, split: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng([split, cells_NG.shape[0]]).permutation(cells_NG.shape[0])
    first, second = np.array_split(order, 2)
    return _mean(cells_NG[np.sort(first)]), _mean(cells_NG[np.sort(second)])


def _mean(cells_NG: Any) -> Float[np.ndarray, " genes"]:
    return np.asarray(cells_NG.mean(0, dtype=np.float64)).ravel()
