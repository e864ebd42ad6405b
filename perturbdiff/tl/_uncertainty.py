"""Intervals for mean shifts, from errors of the effect prior and the spread between sets.

C training conditions, G genes.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Bool, Float, Int
from scipy.special import ndtri

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ConfigError, MetricError, listed
from perturbdiff._logging import logger
from perturbdiff.config._checks import finite_number
from perturbdiff.data import Cells, Condition
from perturbdiff.data._comparison import beside_controls
from perturbdiff.data._target import table_key, target_of
from perturbdiff.prior import EffectPrior
from perturbdiff.prior._summary import moments
from perturbdiff.tl._flags import TOO_FEW, Flags, Population
from perturbdiff.tl._labels import condition_labels
from perturbdiff.tl._model import require_model

if TYPE_CHECKING:
    from perturbdiff.model._predictor import Predictor

LEAST_CONDITIONS: Final = 5
_LEVELS: Final = (1 / 3, 2 / 3)
"""Quantiles of the control level between strata."""
_SIZES: Final = (0.5, 0.8, 0.9, 0.97)
"""Quantiles of the size of the predicted shift: few genes change, and errors grow with it."""
_TAKEN: Final = frozenset({
    "gene", "shift", "lower", "upper", "prior_error", "set_error", "stratum", "supported",
    "collapsed", "reason", "spread", "spread_limit", "spread_false_alarms",
    *(f"{what}_{value}" for what in ("context", "perturbation")
      for value in ("distance", "limit", "false_alarms")),
})  # fmt: skip


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
    Ramdas and Tibshirani 2021, with one quantile for all genes of a stratum, conditions counting
    alike). The error of the mean over predicted sets is added in quadrature. The intervals speak of
    conditions like those learnt from: they hold on average over genes and conditions, not for a
    context unlike all others.

    So two flags stand beside them, whose limits come from the training conditions, each left out in
    turn: what no training condition is beyond, with a chance of 1 % that the next one of the same
    kind is. *Out of support* are contexts whose control cells are farther from those of every
    context learnt from than these are from each other (differences of means over the spread of
    single cells, root mean square over genes); perturbations whose features are likewise, or of a
    kind that could not be left out; doses and times beyond those learnt from. *Collapsed* are
    predicted cells that differ less than treated cells did in any training condition, against the
    control cells of their context (median over genes of the ratio of variances).

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
    log1p of counts per 10,000, ``stratum``, and the flags ``supported`` and ``collapsed`` of the
    condition. Sets ``uns[key_added + "_flags"]``: one row per condition, with the labels, both
    flags, the ``reason`` why it is not supported, and for each of ``context``, ``perturbation``
    and ``spread`` what was measured, the limit, and the share of training conditions that are
    beyond the limit that the others give (``context_distance``, ``context_limit``,
    ``context_false_alarms`` and so on; NaN where there are too few to tell). Conditions that are
    flagged are logged, once a call.

    Raises
    ------
    MetricError
        With fewer than 5 training conditions, whose errors say too little.
    ConfigError
        When ``level`` is not between 0.5 and 1, ``key_added`` cannot be written to, or the model is
        none, has no effect prior or other genes.
    UnknownKeyError, LabelError, GeneError, ExpressionError, ScaleError
        As in :func:`~perturbdiff.tl.response`.
    """
    key_added = table_key(key_added, pred, usual="uncertainty")
    table_key(f"{key_added}_flags", pred, usual="uncertainty_flags")
    level = finite_number("level", level)
    if not 0.5 <= level < 1:
        raise ConfigError("level", level, rule="must be at least 0.5 and below 1")
    require_model(model)
    prior = _prior_of(model)
    registry, cells, controls = beside_controls(pred, reference)
    place = {name: number for number, name in enumerate(model.registry.genes)}
    if not set(registry.genes) <= set(place):
        raise ConfigError("model", len(place), rule="works on other genes than the prediction")
    widths = _Widths(prior, level=level)
    flags = Flags(prior, np.array([place[name] for name in registry.genes], dtype=np.int64))
    rows, unperturbed = cells.conditions(), controls.controls()
    sets, beyond = _sets(pred, cells), _beyond(pred)
    parts, judged = [], []
    for condition, own in rows.items():
        control = _population(controls, unperturbed[condition.context])
        made = _population(cells, own)
        base = _mean(controls, unperturbed[condition.context])
        shift = _mean(cells, own) - base
        stratum = widths.stratum(base, shift)
        prior_error = widths.half(stratum)
        set_error = float(ndtri(0.5 + level / 2)) * _error_of_sets(cells, own, sets)
        half = np.hypot(prior_error, set_error)
        found = flags.judge(condition, made, control, beyond=beyond.get(condition.name, ""))
        labels = condition_labels(registry, condition)
        taken = {f"obs_{k}" if k in _TAKEN else k: text for k, text in labels.items()}
        judged.append({**taken, **found})
        parts.append(
            pd.DataFrame({
                **taken, "gene": list(registry.genes), "shift": shift, "lower": shift - half,
                "upper": shift + half, "prior_error": prior_error, "set_error": set_error,
                "stratum": stratum, "supported": found["supported"],
                "collapsed": found["collapsed"],
            })
        )  # fmt: skip
    _warn(list(rows), judged)
    target = target_of(pred, copy=copy)
    target.uns[key_added] = _with_text_index(pd.concat(parts, ignore_index=True))
    target.uns[f"{key_added}_flags"] = _with_text_index(pd.DataFrame(judged))
    return target if copy else None


def _with_text_index(table: pd.DataFrame) -> pd.DataFrame:
    table.index = table.index.astype(str)
    return table


def _beyond(pred: AnnData) -> dict[str, str]:
    """Why doses and times were not learnt from, by condition."""
    notes = pred.uns[UNS_KEY].get("support", {})
    names, reasons = (list(notes.get(key, ())) for key in ("conditions", "reason"))
    return {str(name): str(reason) for name, reason in zip(names, reasons, strict=True)}


def _warn(conditions: list[Condition], judged: list[dict[str, Any]]) -> None:
    """One line for each kind of flag that is up."""
    pairs = list(zip(conditions, judged, strict=True))
    out = [(c, str(found["reason"])) for c, found in pairs if not found["supported"]]
    if far := [f"{c} ({reason})" for c, reason in out if reason != TOO_FEW]:
        logger.warning("unlike what was learnt from, so do not rely on: %s", listed(far))
    if untold := [str(c) for c, reason in out if reason == TOO_FEW]:
        logger.warning("%s, so nothing speaks for: %s", TOO_FEW, listed(untold))
    if narrow := [
        f"{c} ({found['spread']:.2f} times as widely as control cells, not below "
        f"{found['spread_limit']:.2f} in training)"
        for c, found in pairs
        if found["collapsed"]
    ]:
        logger.warning("predicted cells are too much alike (mode collapse): %s", listed(narrow))


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
        self._half = np.array(
            [
                _alike_quantile(error_CG, stratum_CG == number, level)
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


def _alike_quantile(
    error_CG: Float[np.ndarray, "conditions genes"],
    chosen_CG: Bool[np.ndarray, "conditions genes"],
    level: float,
) -> float:
    """Quantile of the chosen errors, conditions counting alike however many genes they have there.

    A held-out condition is one more of the conditions, not one more gene: pooled errors would speak
    for conditions that have many genes in a stratum. Of all errors where none is chosen.
    """
    chosen = chosen_CG if chosen_CG.any() else np.ones_like(chosen_CG)
    weight = (chosen / np.maximum(chosen.sum(1, keepdims=True), 1))[chosen]
    errors = error_CG[chosen]
    order = np.argsort(errors, kind="stable")
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(errors[order][min(np.searchsorted(reached, level), len(errors) - 1)])


def _population(cells: Cells, rows: Int[np.ndarray, " rows"]) -> Population:
    mean, var = moments(cells.log1p[rows])
    return Population(mean, var, len(rows))


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
