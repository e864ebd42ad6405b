"""Distances between the cloud of predicted cells and the cloud of true cells, in principal axes.

N, M cells, K axes fitted by the caller on training cells. Large clouds are subsampled with stated
seeds.
"""

from collections.abc import Callable, Iterator

import numpy as np
from scipy.spatial.distance import cdist

from perturbdiff._errors import MetricError
from perturbdiff.metrics._intake import Cells, Matrix, pair

MAX_CELLS = 400
N_DRAWS = 3


def energy_distance(
    pred_axes: Cells,
    true_axes: Cells,
    *,
    max_cells: int | None = MAX_CELLS,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    unbiased: bool = True,
) -> float:
    """Energy distance with Euclidean norms; 0 for equal distributions, lower is better.

    ``2 E|X - Y| - E|X - X'| - E|Y - Y'|`` (Székely and Rizzo 2013, equation 2.1). The unbiased
    form leaves a cell's distance to itself out of the last two means and can therefore fall a
    little below 0. ``cell-eval`` (inside ``pearson_edistance``) and many others keep those zeros,
    which adds about ``E|X - X'|/n + E|Y - Y'|/m`` and favours large samples: that is
    ``unbiased=False``.

    Parameters
    ----------
    pred_axes, true_axes
        Cells by principal axes.
    max_cells
        Cells drawn from each side, without replacement; ``None`` takes all.
    n_draws
        Draws to average; one is enough, and made, where nothing is left out.
    seed
        Draw ``i`` uses ``numpy.random.default_rng(seed + i)``, first for the predicted cells.
    unbiased
        Whether self-distances are left out.

    Returns
    -------
    Distance in units of the axes (log1p expression).

    Raises
    ------
    MetricError
        With fewer than two cells on a side.
    """
    pred, true = pair(pred_axes, true_axes)
    mean = _mean_distance if unbiased else _mean_with_self
    return energy(pred, true, max_cells=max_cells, n_draws=n_draws, seed=seed, mean=mean)


def centred_energy_distance(
    pred_axes: Cells,
    true_axes: Cells,
    *,
    max_cells: int | None = MAX_CELLS,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> float:
    """Unbiased energy distance with each side's mean removed: shape only; lower is better.

    Parameters
    ----------
    pred_axes, true_axes
        Cells by principal axes.
    max_cells, n_draws, seed
        As in :func:`energy_distance`. Means are those of all cells given.

    Returns
    -------
    Distance in units of the axes (log1p expression).

    Raises
    ------
    MetricError
        With fewer than two cells on a side.
    """
    pred, true = pair(pred_axes, true_axes)
    return energy(
        pred - pred.mean(0), true - true.mean(0), max_cells=max_cells, n_draws=n_draws, seed=seed
    )


def mmd(
    pred_axes: Cells,
    true_axes: Cells,
    *,
    bandwidth: float | None = None,
    max_cells: int | None = MAX_CELLS,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> float:
    """Squared maximum mean discrepancy with a Gaussian kernel, unbiased; lower is better.

    Gretton et al. 2012, equation 3, with ``k(x, y) = exp(-|x - y|^2 / (2 h^2))``. The bandwidth
    ``h`` is the median distance between *true* cells, so that two predictions of one condition
    meet the same kernel. It is bounded (0 to 2): once clouds are far apart by that width, a wide
    cloud can score better than a narrow one that is nearer, so read it beside the energy distance.

    Parameters
    ----------
    pred_axes, true_axes
        Cells by principal axes.
    bandwidth
        ``h``; by default the median heuristic.
    max_cells, n_draws, seed
        As in :func:`energy_distance`.

    Returns
    -------
    Squared discrepancy, without unit; it can fall a little below 0.

    Raises
    ------
    MetricError
        With fewer than two cells on a side, or when the median distance is 0.
    """
    pred, true = pair(pred_axes, true_axes)
    return discrepancy(
        pred, true, bandwidth=bandwidth, max_cells=max_cells, n_draws=n_draws, seed=seed
    )


def energy(
    pred: Matrix,
    true: Matrix,
    *,
    max_cells: int | None = MAX_CELLS,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    mean: Callable[[Matrix], float] | None = None,
) -> float:
    """Body of :func:`energy_distance`, for matrices already checked."""
    within = mean or _mean_distance
    return float(
        np.mean(
            [
                2 * cdist(u, v).mean() - within(u) - within(v)
                for u, v in _draws(pred, true, max_cells=max_cells, n_draws=n_draws, seed=seed)
            ]
        )
    )


def discrepancy(
    pred: Matrix,
    true: Matrix,
    *,
    bandwidth: float | None = None,
    max_cells: int | None = MAX_CELLS,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> float:
    """Body of :func:`mmd`, for matrices already checked."""
    values = []
    for u, v in _draws(pred, true, max_cells=max_cells, n_draws=n_draws, seed=seed):
        square_uu, square_uv, square_vv = (
            cdist(a, b, "sqeuclidean") for a, b in ((u, u), (u, v), (v, v))
        )
        upper = square_vv[np.triu_indices(len(v), 1)]
        width = float(np.sqrt(np.median(upper))) if bandwidth is None else bandwidth
        if width <= 0:
            msg = (
                f"The kernel's bandwidth is {width:g}: at least half of the true cells coincide, "
                "or a wrong one was given. Pass a positive bandwidth."
            )
            raise MetricError(msg)
        k_uu, k_uv, k_vv = (np.exp(-s / (2 * width**2)) for s in (square_uu, square_uv, square_vv))
        n, m = len(u), len(v)
        values.append(
            (k_uu.sum() - n) / (n * (n - 1)) + (k_vv.sum() - m) / (m * (m - 1)) - 2 * k_uv.mean()
        )
    return float(np.mean(values))


def _draws(
    pred: Matrix, true: Matrix, *, max_cells: int | None, n_draws: int, seed: int
) -> Iterator[tuple[Matrix, Matrix]]:
    if min(len(pred), len(true)) < 2 or (max_cells is not None and max_cells < 2) or n_draws < 1:
        msg = (
            "A distance between distributions needs at least 2 cells a side and 1 draw; here are "
            f"{len(pred)} predicted and {len(true)} true cells, max_cells={max_cells}, "
            f"n_draws={n_draws}. Predict more cells or leave this condition out."
        )
        raise MetricError(msg)
    if max_cells is None or max(len(pred), len(true)) <= max_cells:
        yield pred, true
        return
    for draw in range(n_draws):
        rng = np.random.default_rng(seed + draw)
        rows = rng.permutation(len(pred))[:max_cells]
        yield pred[rows], true[rng.permutation(len(true))[:max_cells]]


def _mean_distance(cells: Matrix) -> float:
    return float(cdist(cells, cells).sum()) / (len(cells) * (len(cells) - 1))


def _mean_with_self(cells: Matrix) -> float:
    return float(cdist(cells, cells).mean())
