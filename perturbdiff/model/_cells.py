"""Cells made from control cells and a stated mean, without a network.

Partners and uniform numbers are those that a set diffusion model uses for the same seed, condition
and set size, so that what differs between its cells and these is the model.

N cells, R control cells, G genes.
"""

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._random import cell_keys, gene_lanes, uniform
from perturbdiff.config import SampleConfig
from perturbdiff.data._library import sizes_of_made_cells
from perturbdiff.model._fitted import PILOT_CELLS
from perturbdiff.model._questions import partner_rows
from perturbdiff.prior import draw_counts, shifted_cells, solve_transport

SET_SIZE = SampleConfig().set_size
_BLOCK = 1024  # cells that are dense at a time


def transported_cells(
    counts_RG: sp.csr_array,
    library_size_R: Float[np.ndarray, " controls"],
    mean_G: Float[np.ndarray, " genes"] | None,
    *,
    genes: Sequence[str],
    condition: str,
    n_cells: int,
    seed: int,
) -> tuple[sp.csr_array, Float[np.ndarray, " cells"]]:
    """Control cells whose counts are thinned or added to until their mean is as stated.

    Parameters
    ----------
    counts_RG, library_size_R
        Control cells in the order of their names.
    mean_G
        Mean log1p value per gene to reach, over a fixed number of pilot cells; ``None`` leaves the
        counts as they are.
    genes
        Names, which the random numbers belong to.
    condition
        Name of the condition, which partners and random numbers belong to.
    n_cells
        Cells wanted; the first cells are the same however many they are.
    seed
        Seed of all draws.

    Returns
    -------
    Counts, and library sizes: those of the partners, or the sum of the counts where it is more.
    """
    rows = partner_rows(
        len(library_size_R), max(n_cells, PILOT_CELLS), seed=seed, condition=condition
    ).numpy()
    size_N = library_size_R[rows].astype(np.float64)
    if mean_G is None:
        return sp.csr_array(counts_RG[rows[:n_cells]]), size_N[:n_cells]
    pilot = slice(PILOT_CELLS)
    plan = solve_transport(
        _dense(counts_RG, rows[pilot]), torch.from_numpy(size_N[pilot]), torch.from_numpy(mean_G)
    )
    lanes, n_sets = gene_lanes(genes), -(-n_cells // SET_SIZE)
    keys = cell_keys(seed, condition, range(n_sets), n_cells=SET_SIZE).flatten()[:n_cells]
    parts = []
    for start in range(0, n_cells, _BLOCK):
        block = slice(start, min(start + _BLOCK, n_cells))
        drawn = draw_counts(
            _dense(counts_RG, rows[block]),
            torch.from_numpy(size_N[block]),
            plan,
            uniform_NG=uniform(keys[block], lanes),
        )
        parts.append(sp.csr_array(drawn.numpy()))
    made = sp.csr_array(sp.vstack(parts, format="csr"))
    return made, sizes_of_made_cells(made, size_N[:n_cells])


def moved_cells(
    log1p_RG: sp.csr_array,
    shift_G: Float[np.ndarray, " genes"],
    *,
    condition: str,
    n_cells: int,
    seed: int,
) -> sp.csr_array:
    """Log1p values of control cells plus a shift, never below zero.

    Parameters
    ----------
    log1p_RG
        Control cells in the order of their names.
    shift_G
        What is added to each gene.
    condition, n_cells, seed
        As in :func:`transported_cells`; the cells have the same partners.

    Returns
    -------
    Log1p values; they have no counts.
    """
    rows = partner_rows(log1p_RG.shape[0], n_cells, seed=seed, condition=condition).numpy()
    parts = [
        sp.csr_array(shifted_cells(log1p_RG[rows[i : i + _BLOCK]].toarray(), shift_G))
        for i in range(0, n_cells, _BLOCK)
    ]
    return sp.csr_array(sp.vstack(parts, format="csr"))


def _dense(counts_RG: sp.csr_array, rows: Int[np.ndarray, " cells"]) -> Int[Tensor, "cells genes"]:
    return torch.from_numpy(counts_RG[rows].toarray().astype(np.int64))
