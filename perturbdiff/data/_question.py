"""A user's question in the registry's terms: which conditions, how many cells, which controls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from anndata import AnnData
from jaxtyping import Int

from perturbdiff._errors import (
    ConfigError,
    LabelError,
    UnknownKeyError,
    UnknownLevelError,
    counted,
    listed,
    nearest,
)
from perturbdiff._logging import logger
from perturbdiff.config._checks import finite_number, whole_number
from perturbdiff.data._cells import Cells
from perturbdiff.data._conditions import Condition, Rows, read_rows
from perturbdiff.data._door import check_known, read_cells
from perturbdiff.data._labels import canonical, nearly_control
from perturbdiff.data._matrix import gene_names
from perturbdiff.data._registry import Registry

FEW_CONTROLS = 10
"""Number of control cells below which a context is warned about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """Conditions to predict, with the control cells of their contexts."""

    conditions: tuple[Condition, ...]  # distinct, in the order asked
    n_cells: int
    controls: Cells

    def control_rows(self, condition: Condition) -> Int[np.ndarray, " controls"]:
        """Rows of ``controls`` that are the control cells of a condition."""
        return self.controls.controls()[condition.context]


def ask(  # noqa: PLR0913 - each is something that a question may name
    adata: AnnData,
    registry: Registry,
    *,
    perturbations: Sequence[str],
    n_cells: int,
    contexts: Sequence[Mapping[str, str]] | None = None,
    doses: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    missing_genes: str = "refuse",
    new_contexts: str = "refuse",
) -> Question:
    """Put a question: every perturbation in every context, at every dose and time.

    Parameters
    ----------
    adata
        File with control cells. Other cells are not looked at.
    registry
        What its columns and genes mean.
    perturbations
        Labels; combinations in any order of members.
    n_cells
        Cells wanted of each condition.
    contexts
        Covariate levels; a context that leaves out a covariate stands for all its levels.
        ``None`` for every context with control cells.
    doses, times
        Numbers in the registry's units, needed where, and only where, it has such a column; every
        perturbation is asked at every dose, which all members of a combination have, and time.
    missing_genes, new_contexts
        As in ``encode``.

    Returns
    -------
    Conditions in the order asked, without repeats, and their control cells on the registry's genes.

    Raises
    ------
    ConfigError
        When a number is missing, superfluous or out of range.
    UnknownLevelError, UnknownKeyError
        When a perturbation, covariate or level is unknown; names the nearest.
    LabelError
        When a perturbation is control, or a context has no control cells in the file.
    """
    measured = gene_names(adata)
    members = _perturbations(perturbations, registry)
    n_cells = whole_number("n_cells", n_cells, least=1)
    dose_list = _numbers("doses", doses, registry.dose_key)
    time_list = _numbers("times", times, registry.time_key)
    found = read_rows(adata.obs, replace(registry.columns, dose_key=None, time_key=None))
    control = np.array([c.is_control for c in found.conditions], bool)
    rows = found.take(np.flatnonzero(control[found.condition]))
    wanted = _contexts(contexts, rows, registry)
    asked = [
        Condition(m, c, () if dose is None else (float(dose),) * len(m), time)
        for m, c, dose, time in product(members, wanted, dose_list, time_list)
    ]
    check_known(asked, registry, new_contexts=new_contexts)
    of_context = np.array([c.context in set(wanted) for c in rows.conditions], bool)
    rows = rows.take(np.flatnonzero(of_context[rows.condition]))
    controls = read_cells(adata, registry, rows, measured=measured, missing_genes=missing_genes)
    controls = _usable(controls)
    return Question(conditions=tuple(dict.fromkeys(asked)), n_cells=n_cells, controls=controls)


def _usable(controls: Cells) -> Cells:
    """Control cells that something can start from: a cell without counts has no library size."""
    if controls.library_size is not None and (controls.library_size <= 0).any():
        there = {context: len(rows) for context, rows in controls.controls().items()}
        controls = controls.take(np.flatnonzero(controls.library_size > 0))
        if gone := sorted(set(there) - set(controls.controls())):
            msg = (
                f"All control cells of {listed(gone)} are empty, so there is nothing to start from."
            )
            raise LabelError(msg)
        n_empty = sum(there.values()) - len(controls)
        logger.warning("left out %s without counts", counted(n_empty, "control cell"))
    few = {
        ", ".join(context): len(rows)
        for context, rows in controls.controls().items()
        if len(rows) < FEW_CONTROLS
    }
    if few:
        shown = listed(f"{context or 'the only context'} ({n})" for context, n in few.items())
        logger.warning(
            "fewer than %d control cells to start from, so that predicted cells repeat them: %s",
            *(FEW_CONTROLS, shown),
        )
    return controls


def _perturbations(labels: Sequence[str], registry: Registry) -> list[tuple[str, ...]]:
    asked = [labels] if isinstance(labels, str) else labels
    labels = list(asked) if isinstance(asked, Iterable) else [asked]
    if not all(isinstance(label, str) for label in labels):
        rule = "must be labels as text, such as ['A', 'B']"
        raise ConfigError("perturbations", asked, rule=rule)
    if not labels:
        raise ConfigError("perturbations", labels, rule="needs at least one label")
    members = [
        canonical(label, separator=registry.separator, control=registry.control) for label in labels
    ]
    for label, names in zip(labels, members, strict=True):
        unknown = [name for name in names if not registry.knows(name)]
        if near := nearly_control(unknown, registry.control):
            msg = f"{near[0]!r} is no perturbation, but nearly control ({registry.control[0]!r})."
            raise LabelError(msg)
        if not names:
            msg = f"{label!r} is control; ask for a perturbation."
            raise LabelError(msg)
    return members


def _numbers(name: str, values: Sequence[float] | None, key: str | None) -> list[float | None]:
    if key is None:
        if values is not None:
            rule = f"the model was not told of a column of {name}"
            raise ConfigError(name, values, rule=rule)
        return [None]
    if values is None or not np.size(values):
        raise ConfigError(name, values, rule=f"the model needs {name} (column {key!r} in training)")
    numbers: list[float | None] = [finite_number(name, x) for x in np.atleast_1d(values)]
    if any(number is not None and number < 0 for number in numbers):
        raise ConfigError(name, values, rule="must be finite and not negative")
    return numbers


def _contexts(
    asked: Sequence[Mapping[str, str]] | None, controls: Rows, registry: Registry
) -> list[tuple[str, ...]]:
    """Contexts that were asked for, each with control cells in the file."""
    there = [condition.context for condition in controls.conditions]
    if not there:
        msg = f"The file has no control cells ({listed(registry.control)}) to start from."
        raise LabelError(msg)
    if asked is None:
        return there
    several: list[Any] = [asked]
    if isinstance(asked, Iterable) and not isinstance(asked, Mapping):
        several = list(asked)
    key = registry.covariate_keys[0] if registry.covariate_keys else "cell_type"
    form = f"contexts must be mappings such as {{{key!r}: ...}}, or None for all"
    if not several:
        raise ConfigError("contexts", asked, rule=form)
    found: dict[tuple[str, ...], None] = {}
    for levels in several:
        if not isinstance(levels, Mapping) or (registry.covariate_keys and not levels):
            raise ConfigError("contexts", asked, rule=form)
        for key in levels:
            if key not in registry.covariate_keys:
                raise UnknownKeyError("The context", key, known=registry.covariate_keys)
            if isinstance(levels[key], Iterable) and not isinstance(levels[key], str):
                each = ", ".join(f"{{{key!r}: {level!r}}}" for level in levels[key])
                rule = f"is several; a context has one level, so list a context each: [{each}]"
                raise ConfigError(key, levels[key], rule=rule)
        for number, (key, vocabulary) in enumerate(
            zip(registry.covariate_keys, registry.covariates, strict=True)
        ):
            known = sorted({*vocabulary.levels, *(context[number] for context in there)})
            if key in levels and str(levels[key]) not in known:
                raise UnknownLevelError(key, [str(levels[key])], known=known)
        matching = [
            context
            for context in there
            if all(
                key not in levels or str(levels[key]) == level
                for key, level in zip(registry.covariate_keys, context, strict=True)
            )
        ]
        if not matching:
            near = nearest(", ".join(map(str, levels.values())), [", ".join(c) for c in there])
            msg = f"No control cells of {dict(levels)} in the file. {near}"
            raise LabelError(msg)
        found.update(dict.fromkeys(matching))
    return list(found)
