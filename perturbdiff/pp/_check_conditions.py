"""Cells of every condition and context, and what of it can be learnt from and held out."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pandas as pd

from perturbdiff._errors import PerturbDiffError, counted, listed
from perturbdiff.data._conditions import Columns, Condition, read_rows
from perturbdiff.data._labels import label_of
from perturbdiff.pp._finding import FACT, FAULT, WARNING, Finding, refused

_LEAST_TO_CHOOSE = 4  # conditions that the number of training steps is chosen on
Sizes = dict[Condition, int]


def condition_findings(
    obs: pd.DataFrame, columns: Columns, *, min_cells: int, features: bool
) -> list[Finding]:
    """What conditions there are, how many cells they have, and what can be held out.

    Parameters
    ----------
    obs
        Table of cells with unique names.
    columns
        Columns that can be read.
    min_cells
        Conditions with fewer cells are warned about.
    features
        Whether perturbations have features, so that unseen ones can be predicted.

    Returns
    -------
    Findings.
    """
    try:
        rows = read_rows(obs, columns)
    except PerturbDiffError as error:
        return [refused(error, about="conditions", where="adata.obs", n=0)]
    counts = np.bincount(rows.condition, minlength=len(rows.conditions)).tolist()
    sizes = dict(zip(rows.conditions, counts, strict=True))
    where = ", ".join(
        f"obs[{key!r}]" for key in (columns.perturbation_key, *columns.covariate_keys)
    )
    treated = {c: n for c, n in sizes.items() if not c.is_control}
    controls = {c.context: n for c, n in sizes.items() if c.is_control}
    found = [*_without(treated, controls, where=where), *_small(sizes, min_cells, where=where)]
    learnt = {c: n for c, n in treated.items() if c.context in controls and n > 1}
    if controls and len(learnt) < _LEAST_TO_CHOOSE:
        found.append(
            Finding(
                level=WARNING if learnt else FAULT, about="conditions", where=where, n=len(learnt),
                found=f"{counted(len(learnt), 'condition')} to learn from: treated, of more than "
                "one cell, with control cells in the same context",
                what_to_do="With fewer than 4 the number of training steps cannot be chosen."
                if learnt else "Add treated cells, or check the covariates.",
            )
        )  # fmt: skip
    found += [
        Finding(level=FACT, about="conditions", where=where, n=n, found=f"cells of {condition}")
        for condition, n in sorted(sizes.items())
    ]
    return [*found, *_holdouts(learnt, columns, features=features)]


def _without(
    treated: Sizes, controls: dict[tuple[str, ...], int], *, where: str
) -> Iterator[Finding]:
    if not controls:
        yield Finding(
            level=FAULT, about="controls", where=where, n=0,
            found="no control cell has all its labels",
            what_to_do="Name the control label; without control cells nothing can be learnt.",
        )  # fmt: skip
        return
    lacking: dict[tuple[str, ...], int] = defaultdict(int)
    for condition, n in treated.items():
        if condition.context not in controls:
            lacking[condition.context] += n
    for context, n in sorted(lacking.items()):
        yield Finding(
            level=WARNING, about="controls", where=where, n=n,
            found=f"no control cells in {', '.join(context)}, so its treated cells teach nothing",
            what_to_do="Add control cells, or define contexts by fewer covariates.",
        )  # fmt: skip


def _small(sizes: Sizes, min_cells: int, *, where: str) -> Iterator[Finding]:
    for condition, n in sorted(sizes.items()):
        if n < min_cells:
            alone = n == 1 and not condition.is_control
            yield Finding(
                level=WARNING, about="conditions", where=where, n=n,
                found=f"only {counted(n, 'cell')} of {condition}"
                + (", which is left out" if alone else f", fewer than {min_cells}"),
                what_to_do="Its mean is uncertain: do not hold it out, and do not trust its score.",
            )  # fmt: skip


def _holdouts(learnt: Sizes, columns: Columns, *, features: bool) -> Iterator[Finding]:
    """One line for each column: what of it may be held out with something left to learn from."""
    for number, key in enumerate(columns.covariate_keys):
        levels = sorted({c.context[number] for c in learnt})
        free = [
            level for level in levels
            if _answerable([c for c in learnt if c.context[number] == level], learnt)
        ]  # fmt: skip
        yield _holdout(key, free, "contexts")
    by_members: dict[tuple[str, ...], list[Condition]] = defaultdict(list)
    for condition in learnt:
        by_members[condition.members].append(condition)
    single = {members[0] for members in by_members if len(members) == 1}
    pairs, alone = [], []
    for members, own in sorted(by_members.items()):
        label = label_of(members, separator=columns.separator)
        if len(members) > 1 and set(members) <= single:
            pairs.append(label)
        elif len(members) == 1 and features and len(own) < len(learnt):
            alone.append(label)
    if any(len(members) > 1 for members in by_members):
        yield _holdout(columns.perturbation_key, pairs, "combinations of what is measured alone")
    if features or len(single) > 1:
        yield _holdout(columns.perturbation_key, alone, "perturbations with features")


def _answerable(held: list[Condition], learnt: Sizes) -> bool:
    """Whether every held-out perturbation is seen in what is left."""
    left = {member for c in set(learnt) - set(held) for member in c.members}
    return all(set(condition.members) <= left for condition in held)


def _holdout(key: str, labels: list[str], what: str) -> Finding:
    example = f"holdout={{{key!r}: [{labels[0]!r}]}}" if labels else ""
    none = {
        "contexts": "Each needs perturbations that are measured in another context too.",
        "perturbations with features": "Unseen ones need features: name them with embedding_key.",
    }
    return Finding(
        level=FACT, about="holdout", where=f"obs[{key!r}]", n=len(labels),
        found=f"{what} that can be held out: {listed(labels) or 'none'}",
        what_to_do=example or none.get(what, ""),
    )  # fmt: skip
