"""Constraints and ways of enforcing as JSON, for command lines, settings and servers."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np

from perturbdiff._errors import ConfigError, UnknownKeyError, listed
from perturbdiff._typing import Json
from perturbdiff.guidance._constraints import (
    AtLeast,
    AtMost,
    Constraint,
    Fix,
    FoldChange,
    KnockDown,
)
from perturbdiff.guidance._enforcement import NAMED, Way
from perturbdiff.guidance._gene_sets import GeneSetShift, Observed, Unchanged
from perturbdiff.guidance._joined import All, Not
from perturbdiff.guidance._joined import Any as AnyMember
from perturbdiff.guidance._whole_cells import LibrarySize, NonNegative

KINDS: Mapping[str, type[Constraint]] = {
    "fix": Fix,
    "at_least": AtLeast,
    "at_most": AtMost,
    "fold_change": FoldChange,
    "knock_down": KnockDown,
    "gene_set_shift": GeneSetShift,
    "unchanged": Unchanged,
    "observed": Observed,
    "library_size": LibrarySize,
    "non_negative": NonNegative,
    "all": All,
    "any": AnyMember,
    "not": Not,
}


def to_json(constraint: Constraint) -> dict[str, Json]:
    """A constraint as plain values.

    Parameters
    ----------
    constraint
        Any but those that hold functions: classifiers and verifiers have no form in JSON.

    Returns
    -------
    ``{"kind": ..., ...}`` with the fields of the constraint.

    Raises
    ------
    ConfigError
        When it has no form in JSON.
    """
    names = {kind: name for name, kind in KINDS.items()}
    if type(constraint) not in names:
        rule = "holds a function, which has no form in JSON; pass it in Python"
        raise ConfigError("constraint", type(constraint).__name__, rule=rule)
    entries: dict[str, Json] = {"kind": names[type(constraint)]}
    for item in fields(constraint):  # type: ignore[arg-type]
        entries[item.name] = _plain(getattr(constraint, item.name))
    return entries


def _plain(value: Any) -> Json:
    if isinstance(value, Constraint):
        return to_json(value)
    if isinstance(value, np.ndarray):
        listed: Json = value.tolist()
        return listed
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    plain: Json = value
    return plain


def from_json(entries: Mapping[str, Any]) -> Constraint:
    """The constraint that these values state.

    Parameters
    ----------
    entries
        ``{"kind": "at_least", "gene": "ISG15", "value": 2.0}`` and the like.

    Returns
    -------
    The constraint.

    Raises
    ------
    ConfigError
        When the entries are no mapping, or a value is missing or wrong.
    UnknownKeyError
        When a kind or a field is unknown.
    """
    if not isinstance(entries, Mapping) or "kind" not in entries:
        raise ConfigError("constraint", entries, rule="must be a mapping with a kind")
    name = entries["kind"]
    if not isinstance(name, str) or name not in KINDS:
        where = "constraints"
        raise UnknownKeyError(where, str(name), known=list(KINDS))
    kind = KINDS[name]
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    given = {key: value for key, value in entries.items() if key != "kind"}
    for key in given:
        if key not in known:
            within = f"constraint {name!r}"
            raise UnknownKeyError(within, key, known=known)
    needed = [
        item.name
        for item in fields(kind)  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING
    ]
    if lacking := [key for key in needed if key not in given]:
        where = f"constraint {name!r}"
        raise ConfigError(where, given, rule=f"lacks {listed(lacking)}")
    if "members" in given:
        if not isinstance(given["members"], list | tuple):
            where = f"constraint {name!r}, members"
            raise ConfigError(where, given["members"], rule="must be a list of constraints")
        given["members"] = tuple(from_json(member) for member in given["members"])
    if "member" in given:
        given["member"] = from_json(given["member"])
    given = {key: tuple(v) if _is_names(v) else v for key, v in given.items()}
    try:
        return kind(**given)
    except TypeError as error:
        where = f"constraint {name!r}"
        raise ConfigError(where, given, rule=str(error)) from None


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def way_to_json(way: Way) -> dict[str, Json]:
    """A way of enforcing as plain values."""
    names = {kind: name for name, kind in NAMED.items()}
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(way).items()}
    return {"kind": names[type(way)], **plain}


def way_from_json(entries: Mapping[str, Any] | str) -> Way:
    """The way of enforcing that these values state, or that has this name.

    Parameters
    ----------
    entries
        A name such as ``"soft"``, or ``{"kind": "branch", "k": 4, "share": 12}``.

    Returns
    -------
    The way.

    Raises
    ------
    UnknownKeyError
        When a kind or a field is unknown.
    ConfigError
        When the entries are neither a name nor a mapping, or a value is wrong.
    """
    if not isinstance(entries, str | Mapping):
        rule = "must be the name of a way, or a mapping with a kind"
        raise ConfigError("enforce", entries, rule=rule)
    given: dict[str, Any] = {"kind": entries} if isinstance(entries, str) else dict(entries)
    name = str(given.pop("kind", None))
    where = "ways of enforcing"
    if name not in NAMED:
        raise UnknownKeyError(where, name, known=list(NAMED))
    known = [item.name for item in fields(NAMED[name])]
    for key in given:
        if key not in known:
            within = f"{where}, {name!r}"
            raise UnknownKeyError(within, key, known=known)
    if isinstance(given.get("window"), list):
        given["window"] = tuple(given["window"])
    return NAMED[name](**given)
