"""Which perturbations bring cells nearest to a wish: many are asked, few are held at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff.config import SampleConfig
from perturbdiff.config._checks import settings_of, whole_number
from perturbdiff.data import Condition, Registry, label_of
from perturbdiff.guidance import check_together
from perturbdiff.guidance._logic import Bound
from perturbdiff.model._constrained import Asked, Wish
from perturbdiff.model._constrained_answer import reference_of
from perturbdiff.model._constrained_finish import as_values
from perturbdiff.model._constrained_report import in_sets, naming
from perturbdiff.model._predictor import controls_by_context, require_counts
from perturbdiff.model._set_diffusion import SetDiffusion

WISHED = ("rank", "satisfied", "satisfied_sets", "energy", "worst", "worst_violation")


def rank_by_wish(  # noqa: PLR0913 - a question, and how to ask it
    model: SetDiffusion,
    adata: AnnData,
    *,
    wish: Wish,
    perturbations: Sequence[str],
    contexts: Sequence[Mapping[str, str]] | None,
    n_cells: int,
    seed: int,
    doses: Sequence[float] | None,
    times: Sequence[float] | None,
    sample: SampleConfig | None,
    at_once: int,
) -> pd.DataFrame:
    """One row a condition, the best first.

    Control cells are read and encoded once for all perturbations of a context. At most ``at_once``
    conditions are held in memory.
    """
    if not isinstance(model, SetDiffusion):
        rule = (
            "does not rank perturbations; a SetDiffusion does. Predict each with tl.predict "
            "and compare"
        )
        raise ConfigError("model", type(model).__name__, rule=rule)
    at_once = whole_number("at_once", at_once, least=1)
    config, fitted = settings_of(SampleConfig, "sample", sample), model.fitted
    question = model._ask(
        adata, perturbations, contexts=contexts, n_cells=n_cells, doses=doses, times=times
    )
    require_counts(question.controls)
    controls = controls_by_context(
        question,
        model.registry,
        loadings=fitted.loadings,
        mean=fitted.mean,
        known=fitted.prior.conditions,
    )
    bounds: dict[tuple[str, ...], list[Bound]] = {}
    for context, own in controls.items():
        reference = reference_of(fitted, own)
        bounds[context] = [constraint.bind(reference) for constraint in wish.constraints]
        check_together(bounds[context], reference, n_cells=n_cells)
    rows = []
    for start in range(0, len(question.conditions), at_once):
        asked = [
            Asked(
                condition=condition,
                controls=controls[condition.context],
                target=fitted.target(condition, controls[condition.context]),
            )
            for condition in question.conditions[start : start + at_once]
        ]
        drawn, _ = fitted.respond(
            [one.condition for one in asked],
            [one.controls for one in asked],
            [one.target for one in asked],
            n_cells=n_cells,
            config=config,
            seed=seed,
        )
        for one, (counts, size) in zip(asked, drawn, strict=True):
            condition = one.condition
            dense = torch.from_numpy(counts.toarray()), torch.from_numpy(size)
            with naming(condition):
                found = _judged(bounds[condition.context], *dense, set_size=config.set_size)
            rows.append(_named(model.registry, condition) | found)
    table = pd.DataFrame(rows).sort_values(
        ["satisfied_sets", "energy"], ascending=[False, True], kind="stable", ignore_index=True
    )
    table["rank"] = range(1, len(table) + 1)
    labels_first = [name for name in table.columns if name not in WISHED]
    return table[[*labels_first, *WISHED]]


def _named(registry: Registry, condition: Condition) -> dict[str, Any]:
    """What a condition is called: labels, and the dose of all its members and the time."""
    label = label_of(condition.members, separator=registry.separator)
    named: dict[str, Any] = {registry.perturbation_key: label}
    named |= zip(registry.covariate_keys, condition.context, strict=True)
    if registry.dose_key is not None:
        named[registry.dose_key] = condition.doses[0]
    if registry.time_key is not None:
        named[registry.time_key] = condition.time
    return named


def _judged(
    bounds: Sequence[Bound], counts: torch.Tensor, size: torch.Tensor, *, set_size: int
) -> dict[str, Any]:
    """How well the cells of one condition meet the wish."""
    cells = as_values(counts.double(), size)
    sets = in_sets(cells, min(set_size, len(counts)))
    scaled = [bound.scaled(sets) for bound in bounds]
    energies = [float(bound.energy(sets).mean()) for bound in scaled]
    worst = max(range(len(bounds)), key=energies.__getitem__)
    return {
        "satisfied": all(bool(bound.holds(cells).all()) for bound in bounds),
        "satisfied_sets": float(
            torch.stack([bound.holds(sets).all(-1) for bound in bounds]).all(0).double().mean()
        ),
        "energy": sum(energies),
        "worst": bounds[worst].text,
        "worst_violation": bounds[worst].violation(cells),
    }
