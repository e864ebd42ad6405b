"""Doses and times: numbers with at most one unit, read once at intake or refused with examples."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from jaxtyping import Int

from perturbdiff._errors import LabelError
from perturbdiff.data._labels import column_of

NUMBER = re.compile(
    r"\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>[^\W\d_][\w/]*|%)?\s*"
)


@dataclass(frozen=True, kw_only=True)
class NumberColumn:
    """A column of numbers as codes into its distinct entries; -1 where the entry is missing.

    An entry holds one number, or one per member of a combination (``"1+1"``).
    """

    key: str
    codes: Int[np.ndarray, " cells"]
    entries: tuple[tuple[float, ...], ...]
    unit: str


def read_numbers(
    obs: pd.DataFrame, key: str, *, separator: str | None = None, unit: str | None = None
) -> NumberColumn:
    """Read a column of doses or times.

    Parameters
    ----------
    obs
        Table of cells.
    key
        Column to read: numbers, or text such as ``"10"``, ``"1e-1"``, ``"6h"``, ``"1+1"``.
    separator
        What stands between the numbers of a combination's members.
    unit
        Unit that the column must be in; ``None`` to accept whichever single unit it has.

    Returns
    -------
    Codes, distinct entries, and the unit (empty for bare numbers).

    Raises
    ------
    LabelError
        When an entry is no number, is negative or infinite, or when units are mixed; the message
        names the first rows where that is so.
    """
    column = column_of(obs, key)
    codes, uniques = pd.factorize(column, use_na_sentinel=True)
    raw = list(uniques.to_numpy())  # keeps float32, whose text is shorter than as float64
    parsed = [_parse(value, separator) for value in raw]
    bad = [number for number, entry in enumerate(parsed) if entry is None]
    if bad:
        _refuse(column, codes, raw, bad=bad, rule="is not a number (>= 0, with at most one unit)")
    units = {unit_ for entry in parsed if entry for unit_ in entry[1]}
    wanted = unit if unit is not None else min(units, default="")
    if units - {wanted}:
        odd = [n for n, entry in enumerate(parsed) if entry and set(entry[1]) - {wanted}]
        rule = f"is not in the unit of the other values ({wanted or 'none'})"
        _refuse(column, codes, raw, bad=odd, rule=rule)
    entries = [entry[0] if entry else () for entry in parsed]
    distinct = tuple(sorted({entry for entry in entries if entry}))
    position = {entry: number for number, entry in enumerate(distinct)}
    recode = np.array([position.get(entry, -1) for entry in entries] + [-1], dtype=np.int64)
    return NumberColumn(key=key, codes=recode[codes], entries=distinct, unit=wanted)


def numbers_per_member(entry: tuple[float, ...], n_members: int) -> tuple[float, ...] | None:
    """One number for each member: a single number holds for all; None where the counts differ."""
    if len(entry) == 1:
        return entry * n_members
    return entry if len(entry) == n_members else None


def _parse(
    value: object, separator: str | None
) -> tuple[tuple[float, ...], tuple[str, ...]] | None:
    """Numbers and units of one entry; no numbers for blank text, None for what is no number."""
    text = str(value).strip()
    if not text:
        return (), ()
    parts: Sequence[str] = (text,)
    if NUMBER.fullmatch(text) is None and separator:
        parts = text.split(separator)
    matches = [NUMBER.fullmatch(part) for part in parts]
    found = [match for match in matches if match is not None]
    numbers = tuple(float(match["number"]) for match in found)
    if len(found) < len(matches) or not all(0 <= number < float("inf") for number in numbers):
        return None
    return numbers, tuple(match["unit"] or "" for match in found)


def _refuse(
    column: "pd.Series[Any]",
    codes: Int[np.ndarray, " cells"],
    raw: Sequence[object],
    *,
    bad: Sequence[int],
    rule: str,
) -> NoReturn:
    rows = [str(column.index[int(np.argmax(codes == number))]) for number in bad[:5]]
    shown = [f"{raw[number]!r} (cell {row!r})" for number, row in zip(bad[:5], rows, strict=True)]
    more = f", ... ({len(bad)} distinct values in all)" if len(bad) > len(shown) else ""
    msg = (
        f"obs[{column.name!r}] {rule}: {', '.join(shown)}{more}. "
        "Write plain numbers in one unit; leave the entry missing where none applies."
    )
    raise LabelError(msg)
