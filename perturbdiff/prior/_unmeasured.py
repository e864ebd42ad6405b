"""What perturbations do that were never measured, alone or together, learned by leaving some out.

A new perturbation is expected to do what others do on average, plus as much of what its features
explain as left-out perturbations support. A combination is expected to do what its members do one
by one, each with its noise shrunk, plus what left-out combinations support.

C conditions, G genes, F features.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.stats import t as student

from perturbdiff.prior._process import ResponseProcess, level, mean_at
from perturbdiff.prior._ridge import deal
from perturbdiff.prior._summary import ConditionSummary, PriorQuestion

Split = tuple[list[ConditionSummary], list[ConditionSummary]]
CONFIDENCE = 0.95
"""How sure it must be that features gain something over left-out perturbations. Likelihood cannot
tell: genes that follow one program repeat one chance agreement with the features."""
_SHARES = np.linspace(0, 1, 11)


def without_features(
    conditions: Sequence[ConditionSummary], process: ResponseProcess
) -> ResponseProcess:
    """The process in which perturbations have nothing in common but members and the average."""
    settings = process.kernel.settings
    if not settings.by_features:
        return process
    plain = replace(settings, by_features=0.0)
    return ResponseProcess.fit(conditions, features={}, settings=plain)


def all_alone(conditions: Sequence[ConditionSummary], members: tuple[str, ...]) -> bool:
    """Whether these are several perturbations, each of which was measured alone somewhere."""
    alone = {c.members[0] for c in conditions if len(c.members) == 1}
    return len(members) > 1 and alone.issuperset(members)


def split_unmeasured(
    conditions: Sequence[ConditionSummary], *, combinations: bool, seed: int, limit: int
) -> list[Split]:
    """Training conditions split into (left out, kept), whole perturbations at a time.

    Parameters
    ----------
    conditions
        Training conditions.
    combinations
        Leave out combinations whose members stay, measured alone; otherwise all that is no such
        combination, and everything that has a member in common with it.
    seed
        Seed of the folds.
    limit
        Perturbations up to which each is left out in turn; ten folds beyond.

    Returns
    -------
    Only splits that leave something to learn from.
    """
    wanted = [c for c in conditions if all_alone(conditions, c.members) == combinations]
    fold = deal((c.members for c in wanted), seed=seed, limit=limit)
    splits = []
    for place in sorted(set(fold.values())):
        out = [c for c in wanted if fold[c.members] == place]
        groups = {c.members for c in out}
        hidden = {member for group in groups for member in group}
        kept = [
            c
            for c in conditions
            if (c.members not in groups if combinations else hidden.isdisjoint(c.members))
        ]
        if kept:
            splits.append((out, kept))
    return splits


def one_by_one(process: ResponseProcess, question: PriorQuestion) -> Float[np.ndarray, " genes"]:
    """Sum of the shifts that the members are expected to cause alone."""
    here = question.context.mean
    shift = np.zeros_like(here)
    for member in question.members:
        ratio = process.log_ratio(replace(question, members=(member,)))
        shift += mean_at(level(here) + ratio) - here
    return shift


def describe_new(
    question: PriorQuestion, process: ResponseProcess, plain: ResponseProcess
) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes features"]]:
    """The average response, and how far features say that this one deviates from it."""
    base = one_by_one(plain, question)
    return base, (one_by_one(process, question) - base)[:, None]


def describe_combination(
    question: PriorQuestion,
    process: ResponseProcess,
    plain: ResponseProcess,
    *,
    added: Float[np.ndarray, " genes"],
) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes features"]]:
    """What the members do one by one, and by how much the combination may deviate from it.

    Deviations: towards the sum of the shifts as measured; towards what other combinations with a
    member in common say; the expressed part of the gene. There is no strength of its own: learned
    from pairs that interact, it spoils those that do not.
    """
    here = question.context.mean
    base = one_by_one(plain, question)
    jointly = mean_at(level(here) + process.log_ratio(question)) - here
    return base, np.stack([added - base, jointly - base, 1 - np.exp(-here)], axis=1)


def trusted_share(gains: Sequence[tuple[float, float]], *, confidence: float = CONFIDENCE) -> float:
    """How much of a deviation is to be believed, from what it explains of left-out perturbations.

    Adding a share s of deviation d to an answer that misses by r changes the squared error by
    ``s² d·d - 2 s d·r``. The share is the one with the lowest upper confidence limit of the mean
    change over perturbations (Student's t); none, unless something is gained that surely.

    Parameters
    ----------
    gains
        ``d·r`` and ``d·d`` of each left-out perturbation.
    confidence
        Of the one-sided limit.

    Returns
    -------
    Between 0 and 1; 0 with fewer than two perturbations.
    """
    if len(gains) < 2:
        return 0.0
    agreement, size = np.array(gains).T
    change = _SHARES[:, None] ** 2 * size - 2 * _SHARES[:, None] * agreement
    error = change.std(1, ddof=1) / np.sqrt(len(gains))
    limit = change.mean(1) + student.ppf(confidence, len(gains) - 1) * error
    return float(_SHARES[int(np.argmin(limit))])
