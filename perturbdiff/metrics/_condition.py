"""Every score of one condition at once.

N cells, G genes, K axes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perturbdiff._errors import MetricError, UnknownKeyError
from perturbdiff.metrics._distribution import discrepancy, energy
from perturbdiff.metrics._expression import FDR, DEAgreement, compare_tables
from perturbdiff.metrics._intake import (
    Cells,
    Matrix,
    dense,
    refuse_scale,
    triple,
    unpacked,
)
from perturbdiff.metrics._rank_sum import DETable, table_of
from perturbdiff.metrics._registry import CONDITION_METRICS
from perturbdiff.metrics._response import mae, pearson, variance_of_top

Project: TypeAlias = Callable[[Matrix], Any]
"""From cells by genes to cells by axes, fitted on training cells."""


@dataclass(frozen=True, kw_only=True)
class ConditionScores:
    """Scores of one condition, NaN with a reason where one is not defined."""

    values: dict[str, float]
    undefined: dict[str, str]
    n_pred: int
    n_true: int
    n_control: int
    n_genes: int
    n_significant: (
        int  # truly changed genes behind the expression scores; 0 where none was computed
    )
    scale: str
    seed: int


@dataclass(frozen=True)
class Projection:
    """Principal axes of training cells."""

    mean: NDArray[np.floating[Any]]  # genes
    axes: NDArray[np.floating[Any]]  # axes by genes

    def __call__(self, cells: Matrix) -> Matrix:
        """Coordinates of cells, cells by axes."""
        coordinates: Matrix = (cells - self.mean) @ self.axes.T
        return coordinates


def fit_projection(train_cells: Cells, *, n_axes: int = 30, seed: int = 0) -> Projection:
    """Principal axes in which distances between distributions are taken.

    Parameters
    ----------
    train_cells
        Cells by genes, log1p of counts per 10,000; never the held-out cells.
    n_axes
        Axes to keep; fewer where cells or genes are fewer.
    seed
        Seed of the randomised decomposition.

    Returns
    -------
    Callable from cells by genes to cells by axes.

    Raises
    ------
    MetricError
        When there are fewer than two training cells, or they are not finite.
    """
    from sklearn.decomposition import PCA  # noqa: PLC0415 - slow to import, not needed for scores

    checked = dense(train_cells, what="train_cells")
    if len(checked) < 2 or n_axes < 1:
        msg = f"Axes need at least 2 training cells and 1 axis, not {len(checked)} and {n_axes}."
        raise MetricError(msg)
    matrix = unpacked(train_cells)
    pca = PCA(min(n_axes, *checked.shape), random_state=seed)
    pca.fit(matrix if matrix.dtype == np.float32 else checked)
    return Projection(pca.mean_, pca.components_)


def score_condition(
    pred_cells: Cells,
    true_cells: Cells,
    control_cells: Cells,
    *,
    project: Project | None,
    metrics: Sequence[str] | None = None,
    n_top: int = 100,
    scale: str = "log1p_cp10k",
    seed: int = 0,
) -> ConditionScores:
    """Score the predicted cells of one condition.

    A predicted shift without any difference between genes, such as that of copied control cells,
    has a Pearson of 0 here (it explains nothing), so that averages over conditions stay comparable
    between methods. Negative predictions leave the expression scores undefined.

    Parameters
    ----------
    pred_cells, true_cells, control_cells
        Cells by genes on the declared scale, genes in the same order.
    project
        Axes fitted on training cells, as from :func:`fit_projection`; ``None`` leaves distances
        undefined.
    metrics
        Names from ``CONDITION_METRICS``; all by default.
    n_top
        Genes of variance explained.
    scale
        ``log1p_cp10k`` or ``cp10k``: declared, checked and recorded, never guessed. Means and
        distances use the numbers as they are.
    seed
        Seed of the subsampling in distances.

    Returns
    -------
    Scores in the order of ``metrics``, reasons where one is undefined, and the numbers behind them.

    Raises
    ------
    MetricError
        When inputs are empty, not finite, not on the scale, of different width, or one object.
    UnknownKeyError
        When a metric does not exist.
    """
    pred, true, control = triple(pred_cells, true_cells, control_cells)
    for cells, what in ((pred, "pred_cells"), (true, "true_cells"), (control, "control_cells")):
        refuse_scale(cells, what=what, scale=scale, signed=what == "pred_cells")
    truth = Side(true, control=control, project=project, scale=scale, what="true_cells")
    guess = Side(pred, control=control, project=project, scale=scale, what="pred_cells")
    return score_sides(guess, truth, metrics=metrics, n_top=n_top, seed=seed)


@dataclass
class Side:
    """Cells of one side and what is derived from them, each at most once."""

    cells: Matrix
    control: Matrix = field(kw_only=True)
    project: Project | None = field(kw_only=True)
    scale: str = field(kw_only=True)
    what: str = field(kw_only=True)

    @cached_property
    def shift(self) -> Matrix:
        """Mean shift from the control cells."""
        shift_G: Matrix = self.cells.mean(0) - self.control.mean(0)
        return shift_G

    @cached_property
    def axes(self) -> Matrix:
        """Cells in principal axes."""
        if self.project is None:
            msg = "No axes were given. Pass project=fit_projection(training cells)."
            raise MetricError(msg)
        axes = dense(np.asarray(self.project(self.cells)), what=f"projected {self.what}")
        if len(axes) != len(self.cells):
            msg = (
                f"project made {len(axes)} rows of {len(self.cells)} cells. It must keep one row "
                "a cell."
            )
            raise MetricError(msg)
        return axes

    @cached_property
    def table(self) -> DETable:
        """Differential expression against the control cells."""
        refuse_scale(self.cells, what=self.what, scale=self.scale)
        return table_of(self.cells, self.control, scale=self.scale)


def score_sides(
    pred: Side, true: Side, *, metrics: Sequence[str] | None, n_top: int, seed: int
) -> ConditionScores:
    """Body of :func:`score_condition`, for sides already checked."""
    names = CONDITION_METRICS if metrics is None else tuple(metrics)
    agreement: list[DEAgreement] = []

    def expression() -> DEAgreement:
        if not agreement:
            agreement.append(compare_tables(pred.table, true.table, fdr=FDR))
        return agreement[0]

    def centred(side: Side) -> Matrix:
        axes: Matrix = side.axes - side.axes.mean(0)
        return axes

    scorers: Final[Mapping[str, Callable[[], float]]] = {
        "pearson_shift": lambda: pearson(pred.shift, true.shift, no_effect="zero"),
        "mae_shift": lambda: mae(pred.shift, true.shift),
        "energy_distance": lambda: energy(pred.axes, true.axes, seed=seed),
        "centred_energy_distance": lambda: energy(centred(pred), centred(true), seed=seed),
        "mmd": lambda: discrepancy(pred.axes, true.axes, seed=seed),
        "variance_explained": lambda: variance_of_top(
            pred.cells, true.cells, true.shift, n_top=n_top
        ),
        "de_overlap": lambda: expression().overlap,
        "direction_match": lambda: expression().direction_match,
    }
    values, undefined = {}, {}
    for name in names:
        if name not in scorers:
            where = "The scores of one condition"
            raise UnknownKeyError(where, name, known=tuple(scorers))
        try:
            values[name] = scorers[name]()
        except MetricError as error:
            values[name], undefined[name] = float("nan"), str(error)
    return ConditionScores(
        values=values,
        undefined=undefined,
        n_pred=len(pred.cells),
        n_true=len(true.cells),
        n_control=len(true.control),
        n_genes=true.cells.shape[1],
        n_significant=agreement[0].n_true if agreement else 0,
        scale=true.scale,
        seed=seed,
    )
