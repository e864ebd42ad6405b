"""Whether a question is like those learnt from, and whether predicted cells spread as cells do.

What counts as far, or as narrow, is where the training conditions end: each is left out in turn and
measured against the others, and the limit is the one-sided prediction bound of these C values,

    mean ± t(1 - α, C - 1) · sd · √(1 + 1/C),    α = 0.01,

with t the quantile of Student's distribution (Hahn and Meeker 1991, chapter 4): the next value of
the same kind is beyond it with probability α, were the values normal. How often training conditions
are themselves beyond the bound that the others give is stated beside it.

C conditions or contexts, G genes, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist
from scipy.stats import t as student

from perturbdiff.data import Condition
from perturbdiff.prior import ConditionSummary, EffectPrior
from perturbdiff.prior._donors import member_features
from perturbdiff.prior._unmeasured import all_alone

FALSE_ALARM: Final = 0.01
TOO_FEW = "too few contexts were learnt from to tell whether this one is like them"
_LEAST_VALUES = 3  # that a bound is derived from
_LEAST_EXPRESSING = 5  # cells in which a gene is expected to be seen
_LEAST_GENES = 10
_TINY = 1e-9
_UNTRIED: Final = {
    "context": "no perturbation was learnt from in two contexts, so how well a response carries "
    "over is unknown",
    "combination": "no combination was learnt from, so the effects of its members are added up",
    "perturbation": "no perturbation was left out of all contexts, so errors of unseen ones are "
    "unknown",
}

Genes = Float[np.ndarray, " genes"]


@dataclass(frozen=True)
class Population:
    """Mean and variance of log1p values per gene, and the number of cells."""

    mean: Genes
    var: Genes
    n_cells: int

    def of(self, genes: Int[np.ndarray, " kept"]) -> "Population":
        """The same on some of the genes."""
        return Population(self.mean[genes], self.var[genes], self.n_cells)


@dataclass(frozen=True)
class Limit:
    """A bound, and the share of training values beyond the bound that the others give."""

    value: float
    false_alarms: float


def distance_between(one: Population, other: Population, var: Genes) -> float:
    """Distance of two means, in units of the spread of single cells.

    ``d² = mean over genes of ((m₁ - m₂)² - v₁/n₁ - v₂/n₂) / (v + median(v))``: the noise of means
    of few cells is taken off, and hardly expressed genes are kept from ruling. Zero where that
    leaves nothing.

    Parameters
    ----------
    one, other
        Control cells of two contexts.
    var
        Variance of single cells within contexts, ``v``.
    """
    noise = one.var / one.n_cells + other.var / other.n_cells
    unit = var + max(float(np.median(var)), _TINY)
    return float(np.sqrt(max(float((((one.mean - other.mean) ** 2 - noise) / unit).mean()), 0.0)))


def log_spread(cells: Population, control: Population) -> float:
    """How widely cells differ, against control cells: median log-ratio of variances over genes.

    Only genes that are expected in five cells or more of the smaller population count, where the
    share of control cells that express a gene is at least ``m² / (m² + v)``: the variance of others
    says more about the number of cells than about their spread. NaN where fewer than ten are left.
    """
    n_cells = min(cells.n_cells, control.n_cells)
    share = control.mean**2 / np.maximum(control.mean**2 + control.var, _TINY)
    kept = (share * n_cells >= _LEAST_EXPRESSING) & (control.var > 0)
    if kept.sum() < _LEAST_GENES or n_cells < 2:
        return float("nan")
    ratio = (cells.var[kept] + _TINY) / control.var[kept]
    freedom = (1 - 1 / control.n_cells) / (1 - 1 / cells.n_cells)
    return float(np.median(np.log(ratio * freedom)))


def bound(values: Sequence[float] | np.ndarray, *, side: int) -> float:
    """Prediction bound above (``side`` 1) or below (-1) values; NaN where there are too few."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    n = len(known)
    if n < _LEAST_VALUES:
        return float("nan")
    reach = float(student.ppf(1 - FALSE_ALARM, n - 1)) * np.sqrt(1 + 1 / n)
    return float(known.mean() + side * reach * known.std(ddof=1))


def spread_limit(values: Float[np.ndarray, " conditions"]) -> Limit:
    """Below which log-ratios of variances are those of no training condition."""
    known = values[np.isfinite(values)]
    alarms = [known[i] < bound(np.delete(known, i), side=-1) for i in range(len(known))]
    return Limit(bound(known, side=-1), float(np.mean(alarms)) if alarms else float("nan"))


def nearest_limit(apart_CC: Float[np.ndarray, "known known"]) -> Limit:
    """Beyond which nobody among the known is from all others, from distances between them."""
    n = len(apart_CC)
    if n < _LEAST_VALUES:
        return Limit(float("nan"), float("nan"))
    apart = apart_CC + np.diag(np.full(n, np.inf))
    first = apart.min(1)
    who = apart.argmin(1)
    rest = apart.copy()
    rest[np.arange(n), who] = np.inf
    second = rest.min(1)
    alarms = [
        first[i] > bound(np.delete(np.where(who == i, second, first), i), side=1) for i in range(n)
    ]
    return Limit(bound(first, side=1), float(np.mean(alarms)))


class Flags:
    """Judges questions and answers by the conditions that a prior was fitted on.

    Parameters
    ----------
    prior
        Fitted prior.
    genes
        Places of the genes that are looked at, among those of the prior.
    """

    def __init__(self, prior: EffectPrior, genes: Int[np.ndarray, " genes"]) -> None:
        self._known = prior.conditions
        self._features = prior._features
        contexts = {c.context.covariates: c.context for c in self._known}
        self._contexts = {
            name: Population(c.mean, c.var, c.n_cells).of(genes) for name, c in contexts.items()
        }
        self._var = np.mean([one.var for one in self._contexts.values()], axis=0)
        apart = [
            [distance_between(a, b, self._var) for b in self._contexts.values()]
            for a in self._contexts.values()
        ]
        self.context_limit = nearest_limit(np.array(apart))
        members = dict.fromkeys(c.members for c in self._known)
        described = [member_features(names, self._features) for names in members]
        self._described = [one for one in described if one is not None]
        table = np.array(self._described)
        self.perturbation_limit = nearest_limit(
            cdist(table, table) if len(table) else np.zeros((0, 0))
        )
        self.kinds = {_kind(c.members, _without(self._known, c)) for c in self._known}
        own = [
            log_spread(Population(c.mean, c.var, c.n_cells).of(genes), self._contexts[where])
            for c in self._known
            for where in [c.context.covariates]
        ]
        self.spread_limit = spread_limit(np.array(own))

    def judge(
        self, condition: Condition, cells: Population, control: Population, *, beyond: str = ""
    ) -> dict[str, Any]:
        """What is to be said of one predicted condition.

        Parameters
        ----------
        condition
            What was asked.
        cells, control
            Predicted cells, and control cells of the context.
        beyond
            Why its dose or time was not learnt from, if so.

        Returns
        -------
        Columns of the table of flags.
        """
        near = min(distance_between(control, other, self._var) for other in self._contexts.values())
        far = self._far_by_features(condition.members)
        reasons = [
            *self._about_context(condition, near),
            *self._about_perturbation(condition, far),
            *([beyond] if beyond else []),
        ]
        spread = log_spread(cells, control)
        return {
            "supported": not reasons,
            "reason": "; ".join(reasons),
            "context_distance": near,
            "context_limit": self.context_limit.value,
            "context_false_alarms": self.context_limit.false_alarms,
            "perturbation_distance": far,
            "perturbation_limit": self.perturbation_limit.value,
            "perturbation_false_alarms": self.perturbation_limit.false_alarms,
            "collapsed": bool(spread < self.spread_limit.value),
            "spread": float(np.exp(spread)),
            "spread_limit": float(np.exp(self.spread_limit.value)),
            "spread_false_alarms": self.spread_limit.false_alarms,
        }

    def _about_context(self, condition: Condition, near: float) -> list[str]:
        limit = self.context_limit.value
        if near > limit:
            return [
                f"control cells are farther from those of any context learnt from ({near:.2f}) "
                f"than these from each other (at most {limit:.2f})"
            ]
        if np.isnan(limit) and condition.context not in self._contexts:
            return [TOO_FEW]
        return []

    def _about_perturbation(self, condition: Condition, far: float) -> list[str]:
        if any(
            c.members == condition.members and c.context.covariates == condition.context
            for c in self._known
        ):
            return []
        found = []
        kind = _kind(condition.members, self._known)
        if kind not in self.kinds:
            found.append(_UNTRIED[kind])
        limit = self.perturbation_limit.value
        if kind == "perturbation" and far > limit:
            found.append(
                f"features are farther from those of any perturbation learnt from ({far:.2f}) than "
                f"these from each other (at most {limit:.2f})"
            )
        return found

    def _far_by_features(self, members: tuple[str, ...]) -> float:
        """Distance of features to the nearest that were learnt from; NaN where there are none."""
        own = member_features(members, self._features)
        if own is None:
            return float("nan")
        return min((float(np.linalg.norm(own - one)) for one in self._described), default=np.nan)


def _without(known: Sequence[ConditionSummary], out: ConditionSummary) -> list[ConditionSummary]:
    """What is left of training conditions when one is left out, at all doses and times."""
    key = out.members, out.context.covariates
    return [c for c in known if (c.members, c.context.covariates) != key]


def _kind(members: tuple[str, ...], known: Sequence[ConditionSummary]) -> str:
    """Whether a perturbation is known from another context, in parts, or not at all."""
    if any(c.members == members for c in known):
        return "context"
    return "combination" if all_alone(known, members) else "perturbation"
