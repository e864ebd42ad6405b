"""Optimal-transport partners: which control cell does each treated cell most resemble.

M treated cells, N control cells, K latent axes.
"""

import numpy as np
import ot
from jaxtyping import Float, Int

BLOCK = 1000


def _ranks(axes_NK: Float[np.ndarray, "cells axes"]) -> Int[np.ndarray, " cells"]:
    """Rows in an order that depends on the cells alone."""
    return np.lexsort(axes_NK.T[::-1])


def optimal_partners(
    treated_MK: Float[np.ndarray, "treated axes"],
    control_NK: Float[np.ndarray, "controls axes"],
    *,
    block: int = BLOCK,
) -> Int[np.ndarray, " treated"]:
    """Control partner of each treated cell, by exact optimal transport between the populations.

    Both populations should be centred. Larger ones are dealt into blocks of alike composition, each
    solved alone, so that time grows linearly with the number of cells.

    Parameters
    ----------
    treated_MK, control_NK
        Cells in latent axes; the cost is the squared Euclidean distance.
    block
        Most cells of a side that one problem holds.

    Returns
    -------
    Row of ``control_NK`` for each row of ``treated_MK``: the one that receives most of its mass.
    """
    treated = np.asarray(treated_MK, dtype=np.float64)
    control = np.asarray(control_NK, dtype=np.float64)
    partners = np.zeros(len(treated), dtype=np.intp)
    n_blocks = max(1, -(-max(len(treated), len(control)) // block))
    n_blocks = min(n_blocks, len(control), max(len(treated), 1))
    rows, columns = _ranks(treated), _ranks(control)
    for start in range(n_blocks):
        here, there = rows[start::n_blocks], columns[start::n_blocks]
        if not len(here):
            continue
        cost = ot.dist(treated[here], control[there])
        plan = ot.emd(ot.unif(len(here)), ot.unif(len(there)), cost, numItermax=1_000_000)
        partners[here] = there[np.asarray(plan).argmax(1)]
    return partners
