"""A user's question in the registry's terms: which conditions, how many cells, which controls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from anndata import AnnData
from jaxtyping import Int

from perturbdiff._errors import ConfigError, LabelError, UnknownKeyError, UnknownLevelError, listed
from perturbdiff.data._cells import Cells
from perturbdiff.data._conditions import Condition, Rows, read_rows
from perturbdiff.data._door import check_known, read_cells
from perturbdiff.data._labels import canonical
from perturbdiff.data._matrix import gene_names
from perturbdiff.data._registry import Registry


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
        Numbers in the registry's units, needed where, and only where, it has such a column.
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
    members = _perturbations(perturbations, registry)
    if n_cells < 1:
        raise ConfigError("n_cells", n_cells, rule="must be at least 1")
    dose_list = _numbers("doses", doses, registry.dose_key)
    time_list = _numbers("times", times, registry.time_key)
    measured = gene_names(adata)
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
    return Question(conditions=tuple(dict.fromkeys(asked)), n_cells=n_cells, controls=controls)


def _perturbations(labels: Sequence[str], registry: Registry) -> list[tuple[str, ...]]:
    labels = [labels] if isinstance(labels, str) else list(labels)
    if not labels:
        raise ConfigError("perturbations", labels, rule="needs at least one label")
    members = [
        canonical(label, separator=registry.separator, control=registry.control) for label in labels
    ]
    for label, names in zip(labels, members, strict=True):
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
    if not values:
        raise ConfigError(name, values, rule=f"the model needs {name} (column {key!r} in training)")
    if not all(0 <= value < float("inf") for value in values):
        raise ConfigError(name, values, rule="must be finite and not negative")
    return [float(value) for value in values]


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
    found: dict[tuple[str, ...], None] = {}
    for levels in asked:
        for key in levels:
            if key not in registry.covariate_keys:
                raise UnknownKeyError("The context", key, known=registry.covariate_keys)
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
            msg = f"No control cells of {dict(levels)} in the file. It has: {listed(there)}."
            raise LabelError(msg)
        found.update(dict.fromkeys(matching))
    return list(found)
