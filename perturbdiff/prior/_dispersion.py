"""Response dispersion: how unevenly the cells of a population respond, gene by gene.

Count transport multiplies every cell's rate by one number per gene. Real cells differ: some make
CXCL10 and some do not. The dispersion D of a gene is the variance of the factor by which a cell's
response differs from the average (see :class:`ResponseFactors`). It is measured in each training
condition as the D at which transported control cells have the variance of the treated cells, and
carried over to a new condition by a weighted mean of log D, shrunk towards a small value where
little was seen. Where fewer cells respond, the mean is lower and the dispersion higher; how much is
one slope shared by all genes, measured across conditions.

N cells, G genes, C training conditions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff.prior._carried import MixtureLogRatio
from perturbdiff.prior._donors import find_donors
from perturbdiff.prior._draws import draw_counts
from perturbdiff.prior._factors import ResponseFactors
from perturbdiff.prior._summary import PriorQuestion
from perturbdiff.prior._transport import solve_transport

GRID = (0.02, 0.1, 0.3, 1.0, 3.0, 10.0)
_CELLS = 120
LEAST_SHIFT = 0.1
"""Shift of the mean log1p value at which a gene counts as responding."""
_TYPICAL = 0.1
_SHRINKAGE = 10.0
_MOST_INFORMATION = 400.0
_FLAT_SHARE = 0.02
_TINY = 1e-9


def measure_dispersion(
    counts_NG: Int[Tensor, "cells genes"],
    library_size_N: Float[Tensor, " cells"],
    *,
    mean: Float[np.ndarray, " genes"],
    var: Float[np.ndarray, " genes"],
    score: Float[Tensor, "cells genes"],
    uniform: Float[Tensor, "cells genes"],
) -> Float[np.ndarray, " genes"]:
    """Log of the dispersion at which transported cells vary as the treated ones do.

    Parameters
    ----------
    counts_NG, library_size_N
        Some control cells of the condition.
    mean, var
        Of log1p values of the treated cells.
    score, uniform
        Standard normal and uniform numbers of each cell and gene.

    Returns
    -------
    One value per gene, NaN where the gene does not respond.
    """
    size = library_size_N.double() / DEPTH
    base = torch.log1p(counts_NG / size[:, None]).mean(0).numpy()
    moved = np.abs(mean - base) > LEAST_SHIFT
    out = np.full(len(mean), np.nan)
    genes = torch.from_numpy(np.flatnonzero(moved))
    if not len(genes):
        return out
    counts, target = counts_NG[:, genes], torch.from_numpy(mean[moved])
    spread = []
    for value in GRID:
        lift = ResponseFactors(torch.full((len(genes),), value, dtype=torch.float64)).log(
            score[:, genes]
        )
        plan = solve_transport(counts, library_size_N.double(), target, deviation_NG=lift)
        drawn = draw_counts(
            counts, library_size_N, plan, uniform_NG=uniform[:, genes], deviation_NG=lift
        )
        spread.append(torch.log1p(drawn / size[:, None]).var(0, correction=0).numpy())
    rising = np.maximum.accumulate(np.stack(spread), axis=0)
    out[moved] = [
        np.interp(wanted, curve, np.log(GRID), left=np.log(GRID[0] / 4))
        for wanted, curve in zip(var[moved], rising.T, strict=True)
    ]
    return out


@dataclass(frozen=True, kw_only=True)
class ResponseDispersion:
    """Dispersions measured in the training conditions.

    ``log`` holds log D, NaN where a gene did not respond; ``information`` says how much each
    measurement tells: number of cells (at most 400) times size of the shift; ``mean`` is the mean
    log1p value of the treated cells.
    """

    log: Float[np.ndarray, "conditions genes"]
    information: Float[np.ndarray, "conditions genes"]
    mean: Float[np.ndarray, "conditions genes"]

    @property
    def slope(self) -> float:
        """Change of log D with the mean log1p value, within genes and over conditions; not above 0.

        Zero where no gene responded in two conditions.
        """
        weight = np.where(np.isnan(self.log), 0.0, self.information)
        total = np.maximum(weight.sum(0), _TINY)
        log = np.nan_to_num(self.log)
        log = log - (weight * log).sum(0) / total
        mean = self.mean - (weight * self.mean).sum(0) / total
        square = float((weight * mean**2).sum())
        return min(0.0, float((weight * log * mean).sum()) / square) if square > _TINY else 0.0

    def predict(
        self, shares: Float[np.ndarray, " conditions"], mean: Float[np.ndarray, " genes"]
    ) -> Float[np.ndarray, " genes"]:
        """Dispersion of each gene of a condition.

        Parameters
        ----------
        shares
            How much each training condition counts.
        mean
            Mean log1p value that the condition will have.

        Returns
        -------
        D, above 0 and at most twice the largest that is measured.
        """
        weight = np.where(np.isnan(self.log), 0.0, self.information)
        weight = weight * (shares[:, None] + _FLAT_SHARE)
        there = np.nan_to_num(self.log) + self.slope * (mean - self.mean)
        total = (weight * there).sum(0) + _SHRINKAGE * np.log(_TYPICAL)
        log = total / (weight.sum(0) + _SHRINKAGE)
        return np.asarray(np.exp(np.clip(log, np.log(GRID[0] / 4), np.log(2 * GRID[-1]))))


def information(shift: Float[np.ndarray, " genes"], n_cells: int) -> Float[np.ndarray, " genes"]:
    """How much a condition tells about the dispersion of each gene."""
    return np.asarray(min(float(n_cells), _MOST_INFORMATION) * np.abs(shift))


def condition_shares(
    mixture: MixtureLogRatio, question: PriorQuestion
) -> Float[np.ndarray, " conditions"]:
    """How much each training condition counts for a question.

    The same perturbation elsewhere counts as the mixture of contexts says; where there is none,
    conditions with a member in common, or else all that :func:`find_donors` gives, count alike.
    """
    donors = find_donors(mixture.conditions, question)
    if donors.axis == "context":
        weight = dict(
            zip(
                (donor.key for donor in donors.conditions),
                mixture.shares(question, donors.conditions),
                strict=True,
            )
        )
    else:
        related = [d for d in donors.conditions if set(d.members) & set(question.members)]
        used = related or donors.conditions
        weight = {donor.key: 1 / len(used) for donor in used}
    return np.array([weight.get(condition.key, 0.0) for condition in mixture.conditions])


def some_rows(n_cells: int) -> Int[np.ndarray, " rows"]:
    """Rows of the control cells that dispersion is measured on, evenly spaced."""
    return np.unique(np.linspace(0, n_cells - 1, min(n_cells, _CELLS)).round().astype(np.int64))
