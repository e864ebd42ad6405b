"""Whether a prediction is nearest to the condition it was made for.

C conditions, G genes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from perturbdiff._errors import MetricError
from perturbdiff.metrics._intake import FLAT, Matrix, pair

_DISTANCES: Final[Mapping[str, str]] = {
    "pearson": "correlation",
    "l1": "cityblock",
    "l2": "euclidean",
    "cosine": "cosine",
}


@dataclass(frozen=True, kw_only=True)
class Discrimination:
    """How well predictions of different conditions can be told apart."""

    score: float  # mean over conditions of 1 - normalised rank
    ranked_first: float  # share of conditions nearest to their own truth
    scores: Matrix  # per condition
    ranks: Matrix  # per condition: true shifts nearer than its own, ties counted half


def discrimination(
    pred_shifts_CG: NDArray[Any],
    true_shifts_CG: NDArray[Any],
    *,
    similarity: str = "pearson",
    normaliser: str = "n-1",
    target_genes: Sequence[int] | None = None,
) -> Discrimination:
    """Rank of a condition's own true shift among all true shifts, seen from its predicted shift.

    The perturbation discrimination score: 1 minus the rank (0 for the nearest) over the number of
    other conditions, averaged; a guess scores 0.5. ``cell-eval`` 0.8.2 (``discrimination_score_l1``
    and so on; its metric ``correlation`` is ``pearson`` here) divides by the number of conditions
    ``n``, so that the worst score is ``1/n`` and a guess ``(n + 1) / 2n``: that is
    ``normaliser="n"``. It also breaks ties by position, so that predictions without any effect
    score by the alphabet; here ties count half, and such a prediction gets the middle rank.

    Parameters
    ----------
    pred_shifts_CG, true_shifts_CG
        One mean shift per condition, conditions and genes in the same order.
    similarity
        ``pearson``, ``cosine``, or by the smaller ``l1`` or ``l2`` distance.
    normaliser
        Divisor of the rank, ``n-1`` or ``n``.
    target_genes
        Position of the gene that each condition targets, left out when its prediction is ranked;
        -1 for none. ``cell-eval`` leaves out the gene of the same name.

    Returns
    -------
    Scores and ranks; higher scores are better.

    Raises
    ------
    MetricError
        With fewer than two conditions, or when a true shift has no similarity to anything (it is
        constant).
    """
    pred, true = pair(pred_shifts_CG, true_shifts_CG)
    _refuse_table(pred, true, similarity=similarity, normaliser=normaliser)
    n = len(true)
    if target_genes is not None and len(target_genes) != n:
        msg = (
            f"target_genes has {len(target_genes)} entries for {n} conditions. Give one each, -1 "
            "for none."
        )
        raise MetricError(msg)
    targets = [-1] * n if target_genes is None else list(target_genes)
    distance_CC = _distances(pred, true, similarity)
    for row, target in enumerate(targets):
        if target >= 0:
            kept = np.delete(np.arange(true.shape[1]), target)
            distance_CC[row] = _distances(pred[row : row + 1, kept], true[:, kept], similarity)[0]
    own_C1 = np.diag(distance_CC)[:, None]
    ranks_C = (distance_CC < own_C1).sum(1) + ((distance_CC == own_C1).sum(1) - 1) / 2
    scores_C = 1 - ranks_C / (n if normaliser == "n" else n - 1)
    return Discrimination(
        score=float(scores_C.mean()),
        ranked_first=float((ranks_C == 0).mean()),
        scores=scores_C,
        ranks=ranks_C,
    )


def _distances(pred: Matrix, true: Matrix, similarity: str) -> Matrix:
    with np.errstate(invalid="ignore", divide="ignore"):
        distance: Matrix = cdist(pred, true, _DISTANCES[similarity])
    distance[_directionless(pred, similarity)] = 1.0  # equally far from everything
    return distance


def _directionless(shifts: Matrix, similarity: str) -> NDArray[np.bool_]:
    """Shifts to which nothing can be similar, but for rounding."""
    if similarity == "pearson":
        return np.asarray(np.ptp(shifts, axis=1) <= FLAT)
    if similarity == "cosine":
        return np.asarray(np.abs(shifts).max(1) <= FLAT)
    return np.zeros(len(shifts), dtype=bool)


def _refuse_table(pred: Matrix, true: Matrix, *, similarity: str, normaliser: str) -> None:
    if similarity not in _DISTANCES or normaliser not in ("n", "n-1"):
        msg = (
            f"similarity {similarity!r} with normaliser {normaliser!r} is not known. "
            f"Use one of {', '.join(_DISTANCES)} and 'n' or 'n-1'."
        )
        raise MetricError(msg)
    if len(pred) != len(true):
        msg = (
            f"There are {len(pred)} predicted and {len(true)} true shifts. Give every condition "
            "both; where nothing was predicted that is a shift of zero."
        )
        raise MetricError(msg)
    if len(true) < 2:
        msg = (
            "Discrimination compares conditions and needs at least 2 of them. Leave it out of "
            "this table."
        )
        raise MetricError(msg)
    if (flat := _directionless(true, similarity)).any():
        msg = (
            f"The true shift of condition {int(np.flatnonzero(flat)[0])} has no direction (it is "
            "constant), so nothing can be near it. Leave that condition out, or use "
            "similarity='l1'."
        )
        raise MetricError(msg)
