"""Labels as users write them, and the one form in which this package compares them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

from perturbdiff._errors import LabelError, UnknownKeyError, listed

OPENING, CLOSING = "([{", ")]}"
MISSING_LIKE = frozenset(
    {"nan", "na", "n/a", "<na>", "none", "null", "nil", "unassigned", "unknown", "missing", "-"}
)
_LIKE_CONTROL = re.compile(
    r"(negative|neg)?(controls?|ctrls?|untreated|unstimulated|unperturbed|dmso|vehicle|mock|pbs"
    r"|nontargeting|scrambled?|nt|ntc)(controls?|ctrl|only)?"
)
"""What unperturbed cells are often called, in small letters and without what stands between."""


def text_of(value: object) -> str:
    """Label as text: whole numbers lose their decimal point, so that 1 and 1.0 are one label."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of labels as codes into its distinct levels; -1 where the label is missing."""

    key: str
    codes: Int[np.ndarray, " cells"]
    levels: tuple[str, ...]


def column_of(obs: pd.DataFrame, key: str) -> "pd.Series[Any]":
    """One column of ``obs``, refused by name where it is absent or there twice."""
    if not isinstance(key, str) or key not in obs.columns:
        raise UnknownKeyError("adata.obs", key, known=[str(name) for name in obs.columns])
    column = obs[key]
    if isinstance(column, pd.DataFrame):
        msg = f"adata.obs has {column.shape[1]} columns called {key!r}. Rename all but one."
        raise LabelError(msg)
    return column


def read_column(obs: pd.DataFrame, key: str) -> Column:
    """Read one column of labels, whatever its dtype.

    Parameters
    ----------
    obs
        Table of cells.
    key
        Column to read: strings, categories (unused ones are ignored), numbers, nullable types.

    Returns
    -------
    Codes and sorted levels. NaN, None, NA and blank text are missing; text that only *looks*
    missing (``"nan"``, ``"unassigned"``) is a label like any other, see ``looks_missing``.

    Raises
    ------
    UnknownKeyError
        When there is no such column.
    LabelError
        When the column is there twice.
    """
    codes, raw = pd.factorize(column_of(obs, key), use_na_sentinel=True)
    texts = [text_of(value) for value in raw.to_numpy()]
    levels = tuple(sorted({text for text in texts if text.strip()}))
    position = {level: number for number, level in enumerate(levels)}
    recode = np.array([position.get(text, -1) for text in texts] + [-1], dtype=np.int64)
    return Column(key=key, codes=recode[codes], levels=levels)


def split_members(label: str, *, separator: str | None) -> tuple[str, ...]:
    """Members of a combination in the order written.

    The separator splits where it stands between two names, outside brackets, and with a space on
    both sides or on neither, so that ``(+/-)-ibuprofen``, ``Ca2+`` and ``CD14+ Monocytes`` are one
    name each.
    """
    if separator is None or separator not in label:
        return (label.strip(),)
    balanced = _depths(label)
    cuts = []
    for match in re.finditer(f"(?:{re.escape(separator)})+", label):
        start, end = match.end() - len(separator), match.end()
        inside = balanced is not None and balanced[start] > 0
        before, after = label[:start], label[end:]
        lopsided = before[-1:].isspace() != after[:1].isspace()
        if not inside and not lopsided and before.strip() and after.strip():
            cuts.append((start, end))
    starts = [0, *(end for _, end in cuts)]
    ends = [*(start for start, _ in cuts), len(label)]
    return tuple(label[start:end].strip() for start, end in zip(starts, ends, strict=True))


def canonical(
    label: str, *, separator: str | None = "+", control: Sequence[str] | str = ()
) -> tuple[str, ...]:
    """The one form of a perturbation label: its members, sorted, without control.

    Parameters
    ----------
    label
        As written, for example ``"MAP2K6+KLF1"``, ``"KLF1+ctrl"`` or ``"ctrl"``.
    separator
        What stands between members; ``None`` when labels are never combinations.
    control
        Label or labels that mean unperturbed.

    Returns
    -------
    Sorted distinct members; empty for control.

    Raises
    ------
    LabelError
        When the members, put together again, would read as something else.
    """
    unperturbed = {name.strip() for name in ((control,) if isinstance(control, str) else control)}
    if label.strip() in unperturbed:
        return ()
    members = sorted(set(split_members(label, separator=separator)) - unperturbed)
    label_of(members, separator=separator)
    return tuple(members)


def label_of(members: Iterable[str], *, separator: str | None = "+", control: str = "") -> str:
    """The label of a combination: its members in sorted order around the separator.

    Parameters
    ----------
    members
        Names in any order.
    separator
        What stands between members.
    control
        Label to give when there are no members.

    Returns
    -------
    A label that ``canonical`` reads as the same members.

    Raises
    ------
    LabelError
        When no such label exists, because a name holds the separator where it would split.
    """
    names = sorted(set(members))
    if not names:
        return control
    if separator is None and len(names) > 1:
        msg = f"{listed(names)} are a combination, but no separator was declared for combinations."
        raise LabelError(msg)
    label = (separator or "").join(names)
    if sorted(set(split_members(label, separator=separator))) != names:
        msg = (
            f"The perturbation {label!r} does not split at {separator!r} into {listed(names)}. "
            "Rename it, or declare another separator (separator=None for no combinations)."
        )
        raise LabelError(msg)
    return label


def looks_missing(levels: Iterable[str]) -> list[str]:
    """Labels that are text but look like a missing value."""
    return [level for level in levels if level.strip().casefold() in MISSING_LIKE]


def near_duplicates(levels: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of labels that differ only in case, spaces, hyphens or a plural s."""
    groups: dict[str, set[str]] = defaultdict(set)
    for level in levels:
        groups[_folded(level)].add(level)
    return [tuple(sorted(group)) for group in groups.values() if len(group) > 1]


def nearly_control(labels: Iterable[str], control: Sequence[str]) -> list[str]:
    """Labels that differ from a control label only as near duplicates do."""
    folded = {_folded(label) for label in control}
    return sorted({x for x in labels if x not in control and _folded(x) in folded})


def sounds_like_control(labels: Iterable[str], control: Sequence[str]) -> list[str]:
    """Labels, other than those of control, that unperturbed cells are often given."""
    found = []
    for label in set(labels) - set(control):
        unnumbered = re.sub(r"(?<=[\W_])\d+$", "", label.strip().casefold())
        if _LIKE_CONTROL.fullmatch(re.sub(r"[\W_]+", "", unnumbered)):
            found.append(label)
    return sorted(found)


def _folded(level: str) -> str:
    singular = re.sub(r"(?<=[a-z]{3})s\b", "", level.strip())
    apart = re.sub(r"(?<=\d)[\s_/-]+(?=\d)", " ", singular)
    return re.sub(r"(?<=[^\s_/-])[\s_/-]+(?=\w)(?!(?<=\s)\d)", "", apart).casefold()


def _depths(label: str) -> list[int] | None:
    """How many brackets are open before each character; None where they do not pair up."""
    depths: list[int] = []
    stack: list[str] = []
    for character in label:
        depths.append(len(stack))
        if character in OPENING:
            stack.append(character)
        elif character in CLOSING and (
            not stack or OPENING.index(stack.pop()) != CLOSING.index(character)
        ):
            return None
    return None if stack else depths
