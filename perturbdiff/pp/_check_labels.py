"""Whether the labels of cells can be read as they were declared."""

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from perturbdiff._errors import LabelError, PerturbDiffError, listed, nearest
from perturbdiff.data._conditions import Columns, check_names
from perturbdiff.data._labels import (
    Column,
    canonical,
    looks_missing,
    near_duplicates,
    nearly_control,
    read_column,
    sounds_like_control,
)
from perturbdiff.data._numbers import read_numbers
from perturbdiff.pp._finding import FAULT, WARNING, Finding, refused


def label_findings(obs: pd.DataFrame, columns: Columns) -> tuple[list[Finding], Columns | None]:
    """What is wrong with labels, and the columns that can be read in spite of it.

    Parameters
    ----------
    obs
        Table of cells.
    columns
        As declared.

    Returns
    -------
    Findings, and the columns without those that cannot be read; None where the perturbation
    cannot.
    """
    found: list[Finding] = []
    try:
        check_names(obs)
    except LabelError as error:
        n = int(obs.index.duplicated(keep=False).sum())
        found.append(refused(error, about="labels", where="adata.obs_names", n=n))
    levels: dict[str, Column] = {}
    for key in (columns.perturbation_key, *columns.covariate_keys):
        try:
            levels[key] = read_column(obs, key)
        except PerturbDiffError as error:
            found.append(refused(error, about="labels", where=f"obs[{key!r}]", n=len(obs)))
    for column in levels.values():
        found += _of_column(column)
    columns = replace(
        columns, covariate_keys=tuple(key for key in columns.covariate_keys if key in levels)
    )
    dose, time = columns.dose_key, columns.time_key
    if dose is not None and (wrong := _of_numbers(obs, dose, separator=columns.separator)):
        found.append(wrong)
        columns = replace(columns, dose_key=None)
    if time is not None and (wrong := _of_numbers(obs, time, separator=None)):
        found.append(wrong)
        columns = replace(columns, time_key=None)
    if columns.perturbation_key not in levels:
        return found, None
    try:
        found += _of_control(levels[columns.perturbation_key], columns)
    except LabelError as error:
        found.append(
            refused(error, about="labels", where=f"obs[{columns.perturbation_key!r}]", n=len(obs))
        )
        return found, None
    return found, columns


def _of_numbers(obs: pd.DataFrame, key: str, *, separator: str | None) -> Finding | None:
    try:
        read_numbers(obs, key, separator=separator)
    except PerturbDiffError as error:
        return refused(error, about="labels", where=f"obs[{key!r}]", n=len(obs))
    return None


def _of_column(column: Column) -> Iterator[Finding]:
    where = f"obs[{column.key!r}]"
    if n_missing := int((column.codes < 0).sum()):
        yield Finding(
            level=WARNING, about="labels", where=where, n=n_missing,
            found=f"{n_missing} of {len(column.codes)} cells without a label, which are left out",
            what_to_do="Label them, or leave it so.",
        )  # fmt: skip
    if odd := looks_missing(column.levels):
        n = int(sum((column.codes == column.levels.index(level)).sum() for level in odd))
        yield Finding(
            level=WARNING, about="labels", where=where, n=n,
            found=f"labels that look like missing values, taken as they stand: {listed(odd)}",
            what_to_do="Set them to missing (None) if they are.",
        )  # fmt: skip
    for group in near_duplicates(column.levels):
        n = int(sum((column.codes == column.levels.index(level)).sum() for level in group))
        yield Finding(
            level=WARNING, about="labels", where=where, n=n,
            found=f"labels that are nearly the same: {listed(group)}",
            what_to_do="Give them one name if they are one.",
        )  # fmt: skip


def _of_control(column: Column, columns: Columns) -> Iterator[Finding]:
    where = f"obs[{column.key!r}]"
    labels = {
        *column.levels,
        *(
            member
            for level in column.levels
            for member in canonical(level, separator=columns.separator, control=columns.control)
        ),
    }
    for label in columns.control:
        if label not in column.levels:
            yield Finding(
                level=FAULT, about="controls", where=where, n=0,
                found=f"no cell is labelled {label!r}, named as control",
                what_to_do=nearest(label, column.levels),
            )  # fmt: skip
    near = nearly_control(labels, columns.control)
    others = sounds_like_control(labels - set(near), columns.control)
    for level, names in ((FAULT, near), (WARNING, others)):
        if names:
            members = [number for number, text in enumerate(column.levels) if text in names]
            yield Finding(
                level=level, about="controls", where=where,
                n=int(pd.Series(column.codes).isin(members).sum()),
                found=f"{listed(names)} beside the control label {listed(columns.control)}",
                what_to_do=f"If these are control too: control={[*columns.control, *names]!r}.",
            )  # fmt: skip
