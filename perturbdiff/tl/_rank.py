"""Rank perturbations by a wish."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pandas as pd
from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff.config import SampleConfig
from perturbdiff.config._checks import seed_number
from perturbdiff.data._target import result_key, table_key, target_of
from perturbdiff.tl._model import require_model

if TYPE_CHECKING:
    from perturbdiff.guidance import Constraint
    from perturbdiff.model import SetDiffusion
    from perturbdiff.model._constrained import Verify
    from perturbdiff.serve import Client


@runtime_checkable
class _Ranking(Protocol):
    """A model elsewhere that ranks by itself, as that of a server does."""

    @property
    def rank(self) -> Callable[..., pd.DataFrame]:
        """Gives the table of a ranking."""
        ...


def rank_perturbations(  # noqa: PLR0913 - each is something that a question may name
    adata: AnnData,
    model: "SetDiffusion | Client",
    *,
    target: "Constraint | Verify | Sequence[Constraint | Verify]",
    perturbations: Sequence[str] | None = None,
    contexts: Sequence[Mapping[str, str]] | None = None,
    n_cells: int = 128,
    seed: int = 0,
    doses: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sample: SampleConfig | None = None,
    at_once: int = 8,
    key_added: str = "perturbation_ranking",
    copy: bool = False,
) -> AnnData | None:
    """Rank perturbations by how well their predicted cells meet a wish.

    Cells are predicted without constraints. Control cells are read and encoded once for all
    perturbations of a context, and only ``at_once`` conditions are held in memory at a time.

    Parameters
    ----------
    adata
        File with the control cells of the contexts.
    model
        Fitted model, or :class:`~perturbdiff.serve.Client` of a server that has one.
    target
        What the cells shall obey, one or several: constraints, or functions of ``(log1p, genes)``,
        which a server does not take.
    perturbations
        Labels; ``None`` for all that the model knows.
    contexts
        Levels of the covariates; ``None`` for every context with control cells.
    n_cells
        Cells of each condition.
    seed
        Seed of all noise.
    doses, times
        Where the model was told of such columns, in their units: every perturbation is ranked at
        every dose and time.
    sample
        Sampler, steps, guidance.
    at_once
        Conditions predicted together; a server knows its own number.
    key_added
        Where in ``uns`` the table is written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: one row a condition, the
    best first, with the labels, dose and time, ``rank``, ``satisfied`` (by all cells together),
    ``satisfied_sets`` (share of sets that obey by themselves; sorted by it), ``energy`` (sum of
    mean violations in units of each constraint's spread over sets; breaks ties), ``worst``
    (constraint with most energy) and ``worst_violation`` (in its own unit).

    Raises
    ------
    ConstraintError, GeneError
        When the wish cannot hold or names unknown genes.
    ConfigError
        When the model is no ``SetDiffusion``, there is no wish, ``at_once`` is below 1, or ``seed``
        or ``key_added`` is none.
    UnknownLevelError, LabelError
        When a perturbation or context is unknown, or has no control cells.
    """
    require_model(model)
    if not isinstance(model, _Ranking):
        result_key(key_added, taken=[model.registry.embedding_key])
    key_added = table_key(key_added, adata, usual="perturbation_ranking", name="adata")
    question: dict[str, Any] = {
        "target": target, "perturbations": perturbations, "contexts": contexts,
        "n_cells": n_cells, "seed": seed_number(seed), "doses": doses, "times": times,
        "sample": sample,
    }  # fmt: skip
    if isinstance(model, _Ranking):
        table = model.rank(adata, **question)
    else:
        table = _ranked(adata, model, **question, at_once=at_once)
    place = target_of(adata, copy=copy)
    place.uns[key_added] = table
    return place if copy else None


def _ranked(
    adata: AnnData,
    model: "SetDiffusion",
    *,
    target: "Constraint | Verify | Sequence[Constraint | Verify]",
    perturbations: Sequence[str] | None,
    **how: Any,
) -> pd.DataFrame:
    """The table of a model that is here."""
    from perturbdiff.model._constrained import Wish  # noqa: PLC0415 - slow to import
    from perturbdiff.model._constrained_ranking import rank_by_wish  # noqa: PLC0415

    wish, registry = Wish.of(target, None), model.registry
    if not wish.constraints:
        raise ConfigError("target", target, rule="needs a constraint or more")
    known = [level for level in registry.perturbations.levels if level not in registry.control]
    asked = known if perturbations is None else perturbations
    return rank_by_wish(model, adata, wish=wish, perturbations=asked, **how)
