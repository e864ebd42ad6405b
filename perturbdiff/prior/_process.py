"""A Gaussian process over conditions: what is known of some responses says what others will be.

The log-ratio of gene g in condition i is ``y_ig ~ N(0, a_g (K + nugget I) + v_g diag(u))``. The
kernel is a product over the context (likeness of control means), the perturbation (shared members,
likeness of features) and dose and time; the noise is known from the number of cells,
``u_i = 1/n_treated + 1/n_control``, times the gene's variance; the amplitude ``a_g`` is averaged
over a grid whose weights are learned from all genes together (empirical Bayes). Kriging with known
noise (Matheron 1963; Rasmussen and Williams 2006, chapter 2): few or noisy conditions lead to the
plain average.

C conditions, G genes, A amplitudes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from perturbdiff.prior._donors import Features, member_features
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion

PSEUDO = 0.05
"""Counts per 10,000 added in log-ratios; small, since the process knows which of them are noise."""
AMPLITUDES = np.geomspace(0.001, 10.0, 13)
NUGGET = 0.03
_SMOOTHING = 20.0  # cells' worth of the gene's usual variance, for conditions with few cells
_TINY = 1e-3


def level(mean_log1p: Float[np.ndarray, "... genes"]) -> Float[np.ndarray, "... genes"]:
    """Log level with the small pseudo-count."""
    return np.asarray(np.log(np.expm1(mean_log1p) + PSEUDO))


def mean_at(log_level: Float[np.ndarray, "... genes"]) -> Float[np.ndarray, "... genes"]:
    """Inverse of :func:`level`, never below zero."""
    return np.asarray(np.log1p(np.maximum(np.exp(log_level) - PSEUDO, 0.0)))


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """How fast likeness falls, and how much perturbations have in common.

    Parameters
    ----------
    context_range, number_range
        The larger, the more alike different contexts, doses and times are.
    common, by_features
        Share of the response that all perturbations have in common, and that features explain; the
        rest belongs to the members themselves.
    """

    context_range: float = 2.0
    number_range: float = 2.0
    common: float = 0.3
    by_features: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Likeness of questions, centred and scaled on the training conditions."""

    settings: KernelSettings
    centre: Float[np.ndarray, " genes"]
    number_centre: Float[np.ndarray, " numbers"]
    number_scale: Float[np.ndarray, " numbers"]
    features: Features
    feature_centre: Float[np.ndarray, " features"] | None
    feature_scale: float

    def __call__(
        self, left: Sequence[PriorQuestion], right: Sequence[PriorQuestion]
    ) -> Float[np.ndarray, "left right"]:
        """Product of the likeness in context, perturbation, dose and time."""
        members, numbers = self._members(left, right), self._numbers(left, right)
        return np.asarray(self._contexts(left, right) * members * numbers)

    def _contexts(
        self, left: Sequence[PriorQuestion], right: Sequence[PriorQuestion]
    ) -> Float[np.ndarray, "left right"]:
        a, b = (self._directions(side) for side in (left, right))
        return np.asarray(1.0 + np.exp((a @ b.T - 1.0) / self.settings.context_range))

    def _directions(self, side: Sequence[PriorQuestion]) -> Float[np.ndarray, "side genes"]:
        rows = np.stack([question.context.mean for question in side]) - self.centre
        rows = rows - rows.mean(1, keepdims=True)
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.where(norm > 0, norm, 1.0))

    def _members(
        self, left: Sequence[PriorQuestion], right: Sequence[PriorQuestion]
    ) -> Float[np.ndarray, "left right"]:
        shared = [[len(set(a.members) & set(b.members)) for b in right] for a in left]
        common, by_features = self.settings.common, self.settings.by_features
        same = np.array(shared, dtype=np.float64)
        alike = self._described(left) @ self._described(right).T if by_features else 0.0
        return np.asarray(common + by_features * alike + (1 - common - by_features) * same)

    def _described(self, side: Sequence[PriorQuestion]) -> Float[np.ndarray, "side features"]:
        """Features of all members added up, so that a combination is the sum of its parts."""
        rows = []
        for question in side:
            value = member_features(question.members, self.features)
            if value is None or self.feature_centre is None:
                rows.append(np.zeros_like(self.feature_centre))
            else:
                rows.append(value - len(question.members) * self.feature_centre)
        return np.asarray(np.stack(rows) / self.feature_scale)

    def _numbers(
        self, left: Sequence[PriorQuestion], right: Sequence[PriorQuestion]
    ) -> Float[np.ndarray, "left right"]:
        if not self.number_centre.size:
            return np.ones((len(left), len(right)))
        a, b = (
            (as_numbers(side, self.number_centre) - self.number_centre) / self.number_scale
            for side in (left, right)
        )
        square = ((a[:, None] - b[None]) ** 2).sum(2)
        return np.asarray(np.exp(-square / (2 * self.settings.number_range**2)))


def as_numbers(
    side: Sequence[PriorQuestion], missing: Float[np.ndarray, " numbers"]
) -> Float[np.ndarray, "side numbers"]:
    """Dose and time of each question as log1p; ``missing`` where a question has none."""
    rows = [
        np.log1p(np.abs(np.array(question.numbers, dtype=np.float64)))
        if len(question.numbers) == len(missing)
        else missing
        for question in side
    ]
    return np.stack(rows)


def make_kernel(
    conditions: Sequence[ConditionSummary], features: Features, settings: KernelSettings
) -> Kernel:
    """Centre and scale on the training conditions, each context and perturbation counted once."""
    contexts = {c.context.covariates: c.context.mean for c in conditions}
    width = max(len(c.numbers) for c in conditions)
    numbers = np.array(
        [np.log1p(np.abs(np.array(c.numbers))) for c in conditions if len(c.numbers) == width]
    )
    spread = numbers.std(0)
    singles = sorted({name for c in conditions for name in c.members if name in features})
    described = np.array([np.asarray(features[name], dtype=np.float64) for name in singles])
    middle = described.mean(0) if singles else None
    scale = float(np.sqrt(((described - middle) ** 2).sum(1).mean())) if singles else 1.0
    return Kernel(
        settings=settings,
        centre=np.mean([contexts[key] for key in sorted(contexts)], axis=0),
        number_centre=numbers.mean(0),
        number_scale=np.where(spread > 0, spread, 1.0),
        features=features,
        feature_centre=middle,
        feature_scale=scale or 1.0,
    )


def cell_noise(
    conditions: Sequence[ConditionSummary],
) -> tuple[Float[np.ndarray, " conditions"], Float[np.ndarray, " genes"]]:
    """Sampling variance of log-ratios as a product: u by condition, v by gene."""
    contexts = [c.context for c in conditions]
    treated = _smoothed_noise([(c.mean, c.var, c.n_cells) for c in conditions])
    control = _smoothed_noise([(c.mean, c.var, c.n_cells) for c in contexts])
    by_condition = np.array(
        [1 / max(c.n_cells, 1) + 1 / max(c.context.n_cells, 1) for c in conditions]
    )
    by_gene = np.exp(np.log((treated + control) / by_condition[:, None]).mean(0))
    return by_condition, by_gene


def _smoothed_noise(
    sides: Sequence[tuple[np.ndarray, np.ndarray, int]],
) -> Float[np.ndarray, "conditions genes"]:
    """Variance of the log level of a mean; that of few cells leans on the gene's usual one."""
    mean, var = np.stack([side[0] for side in sides]), np.stack([side[1] for side in sides])
    n = np.array([max(side[2], 1) for side in sides], dtype=np.float64)[:, None]
    per_mean = (var.mean(0) + _TINY) / (mean.mean(0) + _TINY)
    usual = per_mean * ((n * mean + 10 * mean.mean(0)) / (n + 10) + _TINY)
    smooth = (n * var + _SMOOTHING * usual) / (n + _SMOOTHING) / n
    slope = np.exp(mean) / (np.expm1(mean) + PSEUDO)
    return np.asarray(smooth * slope**2)


@dataclass(frozen=True, kw_only=True)
class ResponseProcess:
    """The process given its training conditions."""

    kernel: Kernel
    questions: tuple[PriorQuestion, ...]
    weights: Float[np.ndarray, "conditions genes"]
    evidence: float

    @classmethod
    def fit(
        cls,
        conditions: Sequence[ConditionSummary],
        *,
        features: Features,
        settings: KernelSettings,
    ) -> "ResponseProcess":
        """Condition on what was measured; the cost is one eigendecomposition for all genes."""
        questions = tuple(c.question for c in conditions)
        kernel = make_kernel(conditions, features, settings)
        ratio = np.stack([level(c.mean) - level(c.context.mean) for c in conditions])
        by_condition, by_gene = cell_noise(conditions)
        scale = 1 / np.sqrt(by_condition)[:, None]
        gram = kernel(questions, questions) + NUGGET * np.eye(len(questions))
        value, vector = np.linalg.eigh(gram * scale * scale.T)
        turned = vector.T @ (scale * ratio)
        likelihood, shrink_CG = [], np.zeros_like(turned)
        for amplitude in AMPLITUDES:
            total_CG = amplitude * value.clip(0)[:, None] + by_gene
            likelihood.append(-0.5 * (turned**2 / total_CG + np.log(total_CG)).sum(0))
        chance_AG, evidence = _empirical_bayes(np.stack(likelihood))
        for amplitude, chance_G in zip(AMPLITUDES, chance_AG, strict=True):
            shrink_CG += chance_G * amplitude / (amplitude * value.clip(0)[:, None] + by_gene)
        weights = scale * (vector @ (shrink_CG * turned))
        return cls(kernel=kernel, questions=questions, weights=weights, evidence=evidence)

    def log_ratio(self, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
        """Expected log-ratio of a condition that was not measured."""
        return np.asarray(self.kernel([question], self.questions)[0] @ self.weights)


def _empirical_bayes(
    likelihood_AG: Float[np.ndarray, "amplitudes genes"],
) -> tuple[Float[np.ndarray, "amplitudes genes"], float]:
    """Posterior of each gene's amplitude under a prior learned from all, and the log evidence."""
    top = likelihood_AG.max(0)
    odds = np.exp(likelihood_AG - top)
    prior = np.full(len(odds), 1 / len(odds))
    for _ in range(20):
        joint = prior[:, None] * odds
        prior = (joint / joint.sum(0)).mean(1) + 1e-6
        prior /= prior.sum()
    joint = prior[:, None] * odds
    return joint / joint.sum(0), float((np.log(joint.sum(0)) + top).sum())


def choose_settings(conditions: Sequence[ConditionSummary], features: Features) -> KernelSettings:
    """Settings of the highest marginal likelihood, one after another, where data can tell."""
    many_members = len({c.members for c in conditions}) > 1
    described = any(name in features for c in conditions for name in c.members)
    settings, best = KernelSettings(), -np.inf
    searches: list[list[dict[str, float]]] = []
    if many_members:
        shares = (0.0, 0.2, 0.35) if described else (0.0,)
        searches.append([{"common": c, "by_features": d} for c in (0.1, 0.3, 0.6) for d in shares])
    if len({c.context.covariates for c in conditions}) > 1:
        searches.append([{"context_range": value} for value in (1.0, 2.0, 4.0)])
    if len({c.numbers for c in conditions}) > 1:
        searches.append([{"number_range": value} for value in (1.0, 2.0, 4.0)])
    for search in searches:
        for change in search:
            candidate = replace(settings, **change)
            process = ResponseProcess.fit(conditions, features=features, settings=candidate)
            if process.evidence > best:
                settings, best = candidate, process.evidence
    return settings
