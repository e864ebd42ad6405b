"""Conditions (perturbation, covariates, dose, time) and which cells belong to which."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from perturbdiff._errors import LabelError, counted, listed
from perturbdiff._logging import logger
from perturbdiff.data._labels import Column, canonical, read_column, split_members
from perturbdiff.data._numbers import NumberColumn, numbers_per_member, read_numbers


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of ``obs`` that make up a condition, and how to read them."""

    perturbation_key: str
    control: tuple[str, ...]
    covariate_keys: tuple[str, ...] = ()
    separator: str | None = "+"
    dose_key: str | None = None
    dose_unit: str | None = None  # None: whichever single unit the column has
    time_key: str | None = None
    time_unit: str | None = None


@dataclass(frozen=True)
class Condition:
    """A perturbation in a context. No members means control."""

    members: tuple[str, ...]
    context: tuple[str, ...] = ()
    doses: tuple[float, ...] = ()  # one for each member, or none
    time: float | None = None

    @property
    def is_control(self) -> bool:
        """Whether nothing was done to these cells."""
        return not self.members

    @property
    def name(self) -> str:
        """Text that no other condition has, for keys of noise and for lists in files."""
        parts: list[object] = [list(self.members), list(self.context)]
        if self.doses or self.time is not None:
            parts += [list(self.doses), self.time]
        return json.dumps(parts)

    @classmethod
    def named(cls, name: str) -> Self:
        """The condition that has this name."""
        members, context, *numbers = json.loads(name)
        doses, time = numbers or ((), None)
        return cls(tuple(members), tuple(context), tuple(doses), time)

    def __str__(self) -> str:
        doses = "+".join(f"{dose:g}" for dose in self.doses)
        numbers = {"dose": doses, "time": "" if self.time is None else f"{self.time:g}"}
        known = [f"{key} {text}" for key, text in numbers.items() if text]
        where = f" in {', '.join(self.context)}" if self.context else ""
        return ", ".join([" and ".join(self.members or ("control",)) + where, *known])

    def __lt__(self, other: Self) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[object, ...]:
        return self.members, self.context, self.doses, -1.0 if self.time is None else self.time


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of an AnnData that have all their labels, in the canonical order (sorted names)."""

    rows: Int[np.ndarray, " cells"]  # position in the AnnData
    names: tuple[str, ...]
    conditions: tuple[Condition, ...]  # sorted, controls included
    condition: Int[np.ndarray, " cells"]  # position in ``conditions``
    n_missing: int

    def take(self, index: np.ndarray) -> Self:
        """A part of the rows; conditions that no longer occur are dropped."""
        used, condition = np.unique(self.condition[index], return_inverse=True)
        return replace(
            self,
            rows=self.rows[index],
            names=tuple(np.array(self.names, dtype=object)[index].tolist()),
            conditions=tuple(self.conditions[number] for number in used),
            condition=condition.astype(np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The columns that make up a condition."""

    perturbation: Column
    members: list[tuple[str, ...]]  # one for each level of the perturbation
    covariates: list[Column]
    dose: NumberColumn | None
    time: NumberColumn | None

    @property
    def treated(self) -> Bool[np.ndarray, " cells"]:
        treated = [bool(members) for members in self.members]
        return np.take(np.array([*treated, False], bool), self.perturbation.codes)

    def complete(self) -> Bool[np.ndarray, " cells"]:
        """Cells with every label; control cells need no dose and no time."""
        labels = [column.codes >= 0 for column in (self.perturbation, *self.covariates)]
        numbers = [c.codes >= 0 for c in (self.dose, self.time) if c is not None]
        control = ~self.treated
        table = np.stack([*labels, *(there | control for there in numbers)])
        return np.asarray(table.all(axis=0))

    def codes(self) -> Int[np.ndarray, "cells columns"]:
        treated = self.treated
        none = np.full(len(treated), -1, np.int64)
        numbers = [
            none if column is None else np.where(treated, column.codes, -1)
            for column in (self.dose, self.time)
        ]
        covariates = [column.codes for column in self.covariates]
        return np.stack([self.perturbation.codes, *numbers, *covariates], axis=1)


def read_rows(obs: pd.DataFrame, columns: Columns) -> Rows:
    """Read the condition of every cell.

    Parameters
    ----------
    obs
        Table of cells with unique names.
    columns
        Which columns to read and how.

    Returns
    -------
    The rows whose labels are all there. Cells without a perturbation label, a covariate, or (unless
    they are control) a dose or time that was asked for are left out and counted in one
    log line.

    Raises
    ------
    LabelError
        When names are not unique, or a combination has another number of doses than members.
    """
    check_names(obs)
    fields = _read_fields(obs, columns)
    keep = fields.complete()
    if n_missing := int((~keep).sum()):
        logger.warning("left out %d of %d cells without a label", n_missing, len(keep))
    rows = np.flatnonzero(keep)
    names = obs.index.astype(str).to_numpy(dtype=object)[rows]
    order = np.argsort(names, kind="stable")
    rows, names = rows[order], names[order]
    table, index = _distinct(fields.codes()[rows])
    found = []
    for number, codes in enumerate(table.tolist()):
        condition = _condition(codes, fields, columns.separator)
        if condition is None:
            example = names[int(np.argmax(index == number))]
            label = fields.perturbation.levels[codes[0]]
            msg = (
                f"obs[{columns.dose_key!r}] has another number of doses than {label!r} has members "
                f"(cell {example!r}). Write one dose for all members, or one for each."
            )
            raise LabelError(msg)
        found.append(condition)
    conditions = tuple(sorted(set(found)))
    position = {condition: number for number, condition in enumerate(conditions)}
    recode = np.array([position[condition] for condition in found], dtype=np.int64)
    return Rows(
        rows=rows.astype(np.int64),
        names=tuple(names.tolist()),
        conditions=conditions,
        condition=recode[index] if found else np.zeros(0, np.int64),
        n_missing=n_missing,
    )


def _read_fields(obs: pd.DataFrame, columns: Columns) -> _Fields:
    perturbation = read_column(obs, columns.perturbation_key)
    separator, control = columns.separator, columns.control
    return _Fields(
        perturbation=perturbation,
        members=[canonical(x, separator=separator, control=control) for x in perturbation.levels],
        covariates=[read_column(obs, key) for key in columns.covariate_keys],
        dose=None
        if columns.dose_key is None
        else read_numbers(obs, columns.dose_key, separator=separator, unit=columns.dose_unit),
        time=None
        if columns.time_key is None
        else read_numbers(obs, columns.time_key, unit=columns.time_unit),
    )


def _condition(codes: Sequence[int], fields: _Fields, separator: str | None) -> Condition | None:
    """The condition that these codes stand for; None where doses and members do not match."""
    level, dose, time, *context = codes
    members = fields.members[level]
    doses: tuple[float, ...] = ()
    if dose >= 0 and fields.dose is not None:
        written = split_members(fields.perturbation.levels[level], separator=separator)
        numbers = numbers_per_member(fields.dose.entries[dose], len(written))
        if numbers is None:
            return None
        by_member = dict(zip(written, numbers, strict=True))
        doses = tuple(by_member[member] for member in members)
    return Condition(
        members=members,
        context=tuple(c.levels[n] for c, n in zip(fields.covariates, context, strict=True)),
        doses=doses,
        time=None if time < 0 or fields.time is None else fields.time.entries[time][0],
    )


def _distinct(
    codes: Int[np.ndarray, "cells columns"],
) -> tuple[Int[np.ndarray, "distinct columns"], Int[np.ndarray, " cells"]]:
    """Distinct rows of a table of codes and which of them each row is."""
    index = np.zeros(len(codes), np.int64)
    for column in codes.T:
        index = np.unique(index * (column.max(initial=0) + 2) + column + 1, return_inverse=True)[1]
    first = np.unique(index, return_index=True)[1]
    return codes[first], index.astype(np.int64)


def check_names(obs: pd.DataFrame) -> None:
    """Refuse cells of which two have one name."""
    if not obs.index.is_unique:
        twice = obs.index[obs.index.duplicated()].unique()
        msg = (
            f"Cells must have unique names; {counted(len(twice), 'name')} more than once: "
            f"{listed(twice)}. Call adata.obs_names_make_unique()."
        )
        raise LabelError(msg)
