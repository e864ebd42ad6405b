"""Intervals for mean shifts, from errors of the effect prior and the spread between sets.

C training conditions, G genes.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float, Int
from scipy.special import ndtri

from perturbdiff._errors import ConfigError, MetricError
from perturbdiff.data import Cells
from perturbdiff.data._comparison import beside_controls
from perturbdiff.prior import EffectPrior
from perturbdiff.tl._labels import condition_labels

if TYPE_CHECKING:
    from perturbdiff.model._predictor import Predictor

LEAST_CONDITIONS: Final = 5
_LEVELS: Final = (1 / 3, 2 / 3)
"""Quantiles of the control level between strata."""
_SIZES: Final = (0.5, 0.8, 0.9, 0.97)
"""Quantiles of the size of the predicted shift: few genes change, and errors grow with it."""
_VALUES: Final = ("gene", "shift", "lower", "upper", "prior_error", "set_error", "stratum")


def uncertainty(
    pred: AnnData,
    model: "Predictor",
    *,
    reference: AnnData,
    level: float = 0.9,
    key_added: str = "uncertainty",
    copy: bool = False,
) -> AnnData | None:
    """Give an interval to the mean shift of every gene in every predicted condition.

    Most of the error of a prediction is that of its mean, which a spread between predicted sets
    does not contain. So each training condition is predicted by a prior that never saw it, and the
    width is the quantile of these errors over conditions and over genes of the same stratum: alike
    in control level and in size of the predicted shift (the jackknife interval of Barber, Candes,
    Ramdas and Tibshirani 2021, with one quantile for all genes of a stratum). The error of the mean
    over predicted sets is added in quadrature. The intervals speak of conditions like those learnt
    from: they hold on average over genes and conditions, not for a context unlike all others.

    Parameters
    ----------
    pred
        Prediction of :func:`~perturbdiff.tl.predict`.
    model
        The model that made it: one with an effect prior.
    reference
        File with control cells of every predicted context.
    level
        Share of measured shifts that intervals are to contain.
    key_added
        Where in ``uns`` the table is written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: one row per condition
    and gene. Columns: the labels by their names in ``obs``, ``gene``, ``shift``, ``lower``,
    ``upper``, ``prior_error`` and ``set_error`` (half-widths that each alone would give), all in
    log1p of counts per 10,000, and ``stratum``.

    Raises
    ------
    MetricError
        With fewer than 5 training conditions, whose errors say too little.
    ConfigError
        When ``level`` is not between 0.5 and 1, or the model has no effect prior or other genes.
    UnknownKeyError, LabelError, GeneError, ExpressionError, ScaleError
        As in :func:`~perturbdiff.tl.response`.
    """
    if not 0.5 <= level < 1:
        raise ConfigError("level", level, rule="must be at least 0.5 and below 1")
    prior = _prior_of(model)
    registry, cells, controls = beside_controls(pred, reference)
    genes = model.registry.genes
    if not set(registry.genes) <= set(genes):
        raise ConfigError("model", len(genes), rule="works on other genes than the prediction")
    widths = _Widths(prior, level=level)
    rows, unperturbed = cells.conditions(), controls.controls()
    sets = _sets(pred, cells)
    parts = []
    for condition, own in rows.items():
        control = _mean(controls, unperturbed[condition.context])
        shift = _mean(cells, own) - control
        stratum = widths.stratum(control, shift)
        prior_error = widths.half(stratum)
        set_error = float(ndtri(0.5 + level / 2)) * _error_of_sets(cells, own, sets)
        half = np.hypot(prior_error, set_error)
        labels = condition_labels(registry, condition)
        taken = {f"obs_{key}" if key in _VALUES else key: text for key, text in labels.items()}
        parts.append(
            pd.DataFrame({
                **taken, "gene": list(registry.genes), "shift": shift, "lower": shift - half,
                "upper": shift + half, "prior_error": prior_error, "set_error": set_error,
                "stratum": stratum,
            })
        )  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    table.index = table.index.astype(str)
    target = pred.copy() if copy else pred
    target.uns[key_added] = table
    return target if copy else None


def _prior_of(model: "Predictor") -> EffectPrior:
    fitted: Any = getattr(model, "fitted", None)
    prior = getattr(fitted, "prior", fitted)
    if not isinstance(prior, EffectPrior):
        rule = "has no effect prior, whose errors intervals are made of"
        raise ConfigError("model", type(model).__name__, rule=rule)
    if len(prior.conditions) < LEAST_CONDITIONS:
        msg = (
            f"Intervals need {LEAST_CONDITIONS} training conditions or more, each to be left out "
            f"in turn; this model has {len(prior.conditions)}. Fit on more contexts or "
            "perturbations."
        )
        raise MetricError(msg)
    return prior


class _Widths:
    """Half-widths by stratum, from the conditions that the prior was fitted on."""

    def __init__(self, prior: EffectPrior, *, level: float) -> None:
        control_CG = np.stack([condition.context.mean for condition in prior.conditions])
        shift_CG = prior.leave_one_out() - control_CG
        error_CG = np.abs(prior.left_out_errors())
        self._levels = np.quantile(control_CG, _LEVELS)
        part = np.searchsorted(self._levels, control_CG)
        self._sizes = np.stack(
            [
                np.quantile(np.abs(shift_CG[part == number]), _SIZES)
                if (part == number).any()
                else np.zeros(len(_SIZES))
                for number in range(len(_LEVELS) + 1)
            ]
        )
        stratum_CG = np.stack(
            [self.stratum(c, s) for c, s in zip(control_CG, shift_CG, strict=True)]
        )
        whole = float(np.quantile(error_CG, level))
        self._half = np.array(
            [
                np.quantile(error_CG[stratum_CG == number], level)
                if (stratum_CG == number).any()
                else whole
                for number in range((len(_LEVELS) + 1) * (len(_SIZES) + 1))
            ]
        )

    def stratum(
        self, control: Float[np.ndarray, " genes"], shift: Float[np.ndarray, " genes"]
    ) -> Int[np.ndarray, " genes"]:
        """Which genes are alike: by control level, then by size of the predicted shift."""
        part = np.searchsorted(self._levels, control)
        size = (np.abs(shift)[:, None] > self._sizes[part]).sum(1)
        return np.asarray(part * (len(_SIZES) + 1) + size, dtype=np.int64)

    def half(self, stratum: Int[np.ndarray, " genes"]) -> Float[np.ndarray, " genes"]:
        """Half-width of each gene by its stratum."""
        return np.asarray(self._half[stratum])


def _mean(cells: Cells, rows: Int[np.ndarray, " rows"]) -> Float[np.ndarray, " genes"]:
    return np.asarray(cells.log1p[rows].mean(0, dtype=np.float64)).ravel()


def _sets(pred: AnnData, cells: Cells) -> Int[np.ndarray, " cells"]:
    """Set of each predicted cell, in the order of ``cells``; one set where nothing is said."""
    if "set" not in pred.obs:
        return np.zeros(len(cells), np.int64)
    return np.asarray(pred.obs["set"].to_numpy()[cells.rows], dtype=np.int64)


def _error_of_sets(
    cells: Cells, rows: Int[np.ndarray, " rows"], sets: Int[np.ndarray, " cells"]
) -> Float[np.ndarray, " genes"]:
    """Standard error of the mean over sets; zero where there is one set."""
    own = sets[rows]
    means = np.stack([_mean(cells, rows[own == number]) for number in np.unique(own)])
    if len(means) < 2:
        return np.zeros(means.shape[1])
    return np.asarray(means.std(0, ddof=1) / np.sqrt(len(means)))
