"""Rank perturbations by a wish."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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


def rank_perturbations(  # noqa: PLR0913 - each is something that a question may name
    adata: AnnData,
    model: "SetDiffusion",
    *,
    target: "Sequence[Constraint | Verify]",
    perturbations: Sequence[str] | None = None,
    contexts: Sequence[Mapping[str, str]] | None = None,
    n_cells: int = 128,
    seed: int = 0,
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
        Fitted model.
    target
        What the cells shall obey: constraints, or functions of ``(log1p, genes)``.
    perturbations
        Labels; ``None`` for all that the model knows.
    contexts
        Levels of the covariates; ``None`` for every context with control cells.
    n_cells
        Cells of each condition.
    seed
        Seed of all noise.
    sample
        Sampler, steps, guidance.
    at_once
        Conditions predicted together.
    key_added
        Where in ``uns`` the table is written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: one row a condition, the
    best first, with the labels, ``rank``, ``satisfied`` (by all cells together),
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
    result_key(key_added, taken=[model.registry.embedding_key])
    key_added = table_key(key_added, adata, usual="perturbation_ranking", name="adata")
    from perturbdiff.model._constrained import Wish  # noqa: PLC0415 - slow to import
    from perturbdiff.model._constrained_ranking import rank_by_wish  # noqa: PLC0415

    if not target:
        raise ConfigError("target", target, rule="needs a constraint or more")
    seed, registry = seed_number(seed), model.registry
    known = [level for level in registry.perturbations.levels if level not in registry.control]
    table = rank_by_wish(
        model,
        adata,
        wish=Wish.of(target, None),
        perturbations=known if perturbations is None else perturbations,
        contexts=contexts,
        n_cells=n_cells,
        seed=seed,
        sample=sample,
        at_once=at_once,
    )
    place = target_of(adata, copy=copy)
    place.uns[key_added] = table
    return place if copy else None
