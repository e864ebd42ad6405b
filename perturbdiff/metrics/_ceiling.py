"""What a replicate of the experiment would score: the ceiling that stands beside every table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perturbdiff._errors import MetricError
from perturbdiff.metrics._condition import Project, Side, score_sides
from perturbdiff.metrics._discrimination import (
    Discrimination,
    discrimination,
)
from perturbdiff.metrics._intake import (
    Cells,
    Matrix,
    dense,
    refuse_same,
    refuse_scale,
    same_genes,
)

N_SPLITS = 5


@dataclass(frozen=True, kw_only=True)
class CeilingScores:
    """Scores between halves of the true cells, averaged over splits."""

    values: dict[str, float]
    spread: dict[str, float]  # standard deviation over splits
    undefined: dict[str, str]
    n_splits: int
    n_half: int  # cells in each half
    seed: int


def split_half_ceiling(
    true_cells: Cells,
    control_cells: Cells,
    *,
    project: Project | None,
    metrics: Sequence[str] | None = None,
    n_splits: int = N_SPLITS,
    n_top: int = 100,
    scale: str = "log1p_cp10k",
    seed: int = 0,
) -> CeilingScores:
    """Score one half of the treated cells as if it were the prediction of the other half.

    Split ``i`` shuffles the N treated cells with ``numpy.random.default_rng([seed, i])``; the
    first N // 2 play the prediction, the next N // 2 the truth, an odd cell is left out, and both
    are compared with the *same, whole* set of control cells, as a prediction is. Scores are
    averaged over splits, without correction: halves hold half the cells, so this ceiling is a
    little low for full data. ``cell-eval`` (``compute_ceiling``) splits the control cells as well,
    makes one split, and maps a mean correlation ``r`` to full depth by :func:`spearman_brown`.

    Parameters
    ----------
    true_cells, control_cells
        Cells by genes on the declared scale.
    project, metrics, n_top, scale
        As in :func:`score_condition`.
    n_splits
        Splits to average.
    seed
        Seed of the splits and of the subsampling in distances.

    Returns
    -------
    Mean and spread of each score; NaN with a reason where one is undefined in some split.

    Raises
    ------
    MetricError
        With fewer than four treated cells, or for the reasons of :func:`score_condition`.
    """
    refuse_same(true_cells, control_cells, names=("true_cells", "control_cells"))
    true, control = dense(true_cells, what="true_cells"), dense(control_cells, what="control_cells")
    same_genes(control, true, names=("control_cells", "true_cells"))
    for cells, what in ((true, "true_cells"), (control, "control_cells")):
        refuse_scale(cells, what=what, scale=scale)
    if n_splits < 1:
        msg = f"n_splits is {n_splits}; use at least 1."
        raise MetricError(msg)
    scores = []
    for split in range(n_splits):
        guess, truth = (
            Side(half, control=control, project=project, scale=scale, what="half of true_cells")
            for half in _halves(true, entropy=[seed, split])
        )
        scores.append(score_sides(guess, truth, metrics=metrics, n_top=n_top, seed=seed))
    undefined: dict[str, str] = {}
    for score in scores:
        undefined = score.undefined | undefined
    columns = {
        name: np.array([score.values[name] for score in scores]) for name in scores[0].values
    }
    return CeilingScores(
        values={name: float(column.mean()) for name, column in columns.items()},
        spread={name: float(column.std()) for name, column in columns.items()},
        undefined=undefined,
        n_splits=n_splits,
        n_half=len(true) // 2,
        seed=seed,
    )


def discrimination_ceiling(
    true_cells: Mapping[str, Cells],
    control_cells: Mapping[str, Cells],
    *,
    n_splits: int = N_SPLITS,
    seed: int = 0,
    similarity: str = "pearson",
    normaliser: str = "n-1",
    split_control: bool = False,
) -> Discrimination:
    """Discrimination between shifts of one half of the cells and shifts of the other half.

    Halves are those of :func:`split_half_ceiling`, by default with the same whole set of control
    cells for both.

    Parameters
    ----------
    true_cells, control_cells
        Cells by genes of every condition, by the same names.
    n_splits, seed
        Splits to average and their seed.
    similarity, normaliser
        As in :func:`discrimination`.
    split_control
        Whether the control cells are halved too (with ``default_rng([seed, i, 1])``), one half for
        each shift. Whole control cells lend their sampling noise to both shifts of a condition,
        which by itself tells small conditions apart; halves lend none but leave each shift noisier.

    Returns
    -------
    Averages over splits; conditions in the order of ``true_cells``.

    Raises
    ------
    MetricError
        When a condition has no control cells, or too few cells to halve.
    """
    if lacking := sorted(set(true_cells) - set(control_cells)):
        msg = f"Conditions without control cells: {lacking}. Give control_cells for each."
        raise MetricError(msg)
    parts = []
    for split in range(n_splits):
        shifts: list[list[Matrix]] = [[], []]
        for name, cells in true_cells.items():
            control = dense(control_cells[name], what=f"control_cells[{name!r}]")
            halves = _halves(dense(cells, what=f"true_cells[{name!r}]"), entropy=[seed, split])
            bases = (
                _halves(control, entropy=[seed, split, 1]) if split_control else (control, control)
            )
            for side, half, base in zip(shifts, halves, bases, strict=True):
                same_genes(half, base, names=(f"true_cells[{name!r}]", f"control_cells[{name!r}]"))
                side.append(half.mean(0) - base.mean(0))
        guess, truth = (np.stack(side) for side in shifts)
        parts.append(discrimination(guess, truth, similarity=similarity, normaliser=normaliser))
    return Discrimination(
        score=float(np.mean([part.score for part in parts])),
        ranked_first=float(np.mean([part.ranked_first for part in parts])),
        scores=np.mean([part.scores for part in parts], axis=0),
        ranks=np.mean([part.ranks for part in parts], axis=0),
    )


def spearman_brown(correlation: float) -> float:
    """Reliability at full depth from that of halves, ``2r / (1 + r)`` (Spearman 1910; Brown 1910).

    Parameters
    ----------
    correlation
        Agreement between halves, above 0.

    Returns
    -------
    Agreement expected between two full sets of cells.

    Raises
    ------
    MetricError
        When the halves do not agree at all, which leaves nothing to correct.
    """
    if not 0 < correlation <= 1:
        msg = (
            f"A split-half correlation of {correlation:g} cannot be corrected; it must lie in (0, "
            "1]."
        )
        raise MetricError(msg)
    return 2 * correlation / (1 + correlation)


def _halves(cells: Matrix, *, entropy: list[int]) -> tuple[Matrix, Matrix]:
    half = len(cells) // 2
    if half < 2:
        msg = f"{len(cells)} cells cannot be halved; 4 are needed. Leave this condition out."
        raise MetricError(msg)
    rows = np.random.default_rng(entropy).permutation(len(cells))
    return cells[rows[:half]], cells[rows[half : 2 * half]]
