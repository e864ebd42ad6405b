"""Splits: which conditions are held out, so that no cell of theirs reaches training."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from jaxtyping import Bool

from perturbdiff._errors import ConfigError, SplitError, UnknownKeyError, UnknownLevelError, listed
from perturbdiff.config._checks import seed_number
from perturbdiff.data._cells import Cells
from perturbdiff.data._conditions import Condition
from perturbdiff.data._labels import canonical, label_of
from perturbdiff.data._registry import Registry

Holdout = Mapping[str, Sequence[str]] | Sequence[Mapping[str, Sequence[str]]]
Kind = Literal["context", "perturbation", "combination"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Held-out conditions, and training and test cells as masks over the cells that were split."""

    conditions: tuple[Condition, ...]  # held out, sorted
    train: Bool[np.ndarray, " cells"]
    test: Bool[np.ndarray, " cells"]
    test_names: frozenset[str]
    hash: str  # of held-out conditions and the names of both parts


def split(cells: Cells, registry: Registry, *, holdout: Holdout) -> Split:
    """Hold conditions out.

    Parameters
    ----------
    cells
        Cells to split.
    registry
        Gives the meaning of the keys of ``holdout``.
    holdout
        Labels to hold out by column, for example ``{"cell_type": ["NK"]}``,
        ``{"condition": ["KLF1"]}``, or both (treated with KLF1 *and* NK). Several such mappings
        hold out what any of them names. Control cells always stay in training.

    Returns
    -------
    Masks and a hash that depends on conditions and names of cells, not on the order of rows.

    Raises
    ------
    ConfigError
        When ``holdout`` has another form.
    UnknownKeyError, UnknownLevelError
        When a column or label is not there; names the nearest.
    SplitError
        When nothing is held out, or no treated cell is left to learn from.
    """
    mappings = [mapping for mapping in _mappings(holdout, registry) if mapping]
    treated = list(cells.conditions())
    held: set[Condition] = set()
    for mapping in mappings:
        tests = [
            _labels(key, labels, treated, registry=registry) for key, labels in mapping.items()
        ]
        found = {c for c in treated if all(c in conditions for conditions in tests)}
        if not found:
            msg = f"Nothing to hold out: no treated cell matches {dict(mapping)}."
            raise SplitError(msg)
        held |= found
    if not held:
        msg = "Nothing to hold out: holdout is empty; None holds nothing out."
        raise SplitError(msg)
    if held == set(treated):
        msg = f"All {len(treated)} treated conditions are held out; none is left to learn from."
        raise SplitError(msg)
    test = np.array([condition in held for condition in cells.distinct], bool)[cells.condition]
    names = np.array(cells.names, dtype=object)
    return Split(
        conditions=tuple(sorted(held)),
        train=~test,
        test=test,
        test_names=frozenset(names[test].tolist()),
        hash=_hash(held, names[~test].tolist(), names[test].tolist()),
    )


def random_holdout(
    cells: Cells, registry: Registry, *, kind: Kind, fraction: float, seed: int
) -> list[dict[str, list[str]]]:
    """Draw what to hold out.

    Parameters
    ----------
    cells
        Cells to choose from.
    registry
        Names the columns.
    kind
        ``"context"``: whole contexts; ``"perturbation"``: perturbations in all contexts;
        ``"combination"``: only perturbations with several members.
    fraction
        Share to hold out, at least one and never all.
    seed
        Seed of the draw.

    Returns
    -------
    A ``holdout`` for ``split``; the same for the same labels and seed, whatever the order of rows.

    Raises
    ------
    ConfigError
        When the fraction is not between 0 and 1, or the seed is none.
    SplitError
        When there are fewer than two to choose from (or no combination).
    """
    if not 0 < fraction < 1:
        raise ConfigError("fraction", fraction, rule="must be between 0 and 1")
    treated = list(cells.conditions())
    if kind == "context":
        choices = [
            dict(zip(registry.covariate_keys, ([level] for level in context), strict=True))
            for context in sorted({c.context for c in treated})
        ]
    elif kind in ("perturbation", "combination"):
        n_members = 1 if kind == "perturbation" else 2
        labels = sorted({c.members for c in treated if len(c.members) >= n_members})
        choices = [
            {registry.perturbation_key: [label_of(members, separator=registry.separator)]}
            for members in labels
        ]
    else:
        raise ConfigError("kind", kind, rule="must be context, perturbation or combination")
    least = 1 if kind == "combination" else 2
    if len(choices) < least:
        msg = f"There are {len(choices)} of kind {kind!r} to choose from; {least} are needed."
        raise SplitError(msg)
    number = min(max(1, round(fraction * len(choices))), max(1, len(choices) - 1))
    order = np.random.default_rng(seed_number(seed)).permutation(len(choices))
    return [choices[place] for place in sorted(order[:number])]


def check_leakage(train: Cells, held_out: Split) -> None:
    """Prove that no cell of a held-out condition is among the training cells.

    Parameters
    ----------
    train
        Cells about to be learnt from.
    held_out
        What must not be among them.

    Raises
    ------
    SplitError
        When a held-out condition or a test cell, by name, is among them.
    """
    leaked = sorted(set(train.conditions()) & set(held_out.conditions))
    if leaked:
        shown = listed(str(condition) for condition in leaked)
        msg = f"{len(leaked)} held-out conditions are among the training cells: {shown}."
        raise SplitError(msg)
    if same := sorted(held_out.test_names.intersection(train.names)):
        msg = f"{len(same)} test cells are among the training cells: {listed(same)}."
        raise SplitError(msg)


def _mappings(holdout: object, registry: Registry) -> list[Mapping[str, Sequence[str]]]:
    """What to hold out as a list of mappings from a column to labels."""
    some = [holdout] if isinstance(holdout, Mapping) else holdout
    sound = isinstance(some, Sequence) and all(
        isinstance(one, Mapping) and all(isinstance(labels, Iterable) for labels in one.values())
        for one in some
    )
    if not sound:
        key = (*registry.covariate_keys, registry.perturbation_key)[0]
        rule = f"must map columns to lists of labels, such as {{{key!r}: [...]}}, or list such maps"
        raise ConfigError("holdout", holdout, rule=rule)
    return list(cast("Sequence[Mapping[str, Sequence[str]]]", some))


def _labels(
    key: str, labels: Sequence[str], treated: Sequence[Condition], *, registry: Registry
) -> set[Condition]:
    """Treated conditions that one entry of a holdout names."""
    labels = [labels] if isinstance(labels, str) else [str(label) for label in labels]
    if key == registry.perturbation_key:
        known = {condition.members for condition in treated}
        wanted = set()
        for label in labels:
            members = canonical(label, separator=registry.separator, control=registry.control)
            if not members:
                msg = f"{label!r} is control; control cells cannot be held out."
                raise SplitError(msg)
            if members not in known:
                names = sorted(label_of(m, separator=registry.separator) for m in known)
                raise UnknownLevelError(key, [label], known=names)
            wanted.add(members)
        return {condition for condition in treated if condition.members in wanted}
    if key not in registry.covariate_keys:
        raise UnknownKeyError("holdout", key, known=registry.label_keys)
    number = registry.covariate_keys.index(key)
    registry.covariates[number].encode(labels)
    return {condition for condition in treated if condition.context[number] in labels}


def _hash(held: set[Condition], train: Sequence[str], test: Sequence[str]) -> str:
    content = [sorted(condition.name for condition in held), sorted(train), sorted(test)]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
