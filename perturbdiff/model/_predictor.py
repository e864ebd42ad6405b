"""What all predictors share: a registry, the door in, and the door out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._constants import VERSION
from perturbdiff._errors import (
    BundleError,
    ConfigError,
    NotFittedError,
    ScaleError,
    UndefinedBaselineError,
    counted,
    listed,
)
from perturbdiff._logging import logger
from perturbdiff.config._checks import known_keywords, whole_number
from perturbdiff.data import Cells, Condition, Question, Registry, ask, decode, encode
from perturbdiff.data._comparison import reading_notes
from perturbdiff.data._library import sizes_of_made_cells
from perturbdiff.model._bundle import Parts, write_bundle
from perturbdiff.model._panel import Panel, on_all_genes
from perturbdiff.model._questions import Controls
from perturbdiff.model._reservoir import (
    draw_reservoir,
    reservoir_file,
    reservoir_listing,
    reservoir_tensors,
)
from perturbdiff.model._room import require_room
from perturbdiff.prior import Baseline, ConditionSummary


class Predictor(ABC):
    """Answers what a perturbation does in a context, as cells.

    Parameters
    ----------
    registry
        What the columns and genes of the data mean.
    """

    seed = 0
    _controls: Cells | None = None  # of training, to be saved on request
    _reservoir: AnnData | None = None  # control cells that came with a saved model

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def __repr__(self) -> str:
        registry = self.registry
        known = [name for name in registry.perturbations.levels if name not in registry.control]
        by = f" by {', '.join(registry.covariate_keys)}" if registry.covariate_keys else ""
        genes = registry.genes
        state = f"fitted on {counted(len(genes), 'gene')}" if genes else "not fitted"
        of = f"{counted(len(known), 'perturbation')} in obs[{registry.perturbation_key!r}]{by}"
        return f"{type(self).__name__} of {of}, {state}"

    @classmethod
    @known_keywords
    def from_anndata(  # noqa: PLR0913 - one flat keyword for each thing a file may name
        cls,
        adata: AnnData,
        *,
        perturbation_key: str,
        control: str | Sequence[str],
        covariate_keys: Sequence[str] = (),
        scale: str | None = None,
        layer: str | None = None,
        separator: str | None = "+",
        library_size_key: str | None = None,
        dose_key: str | None = None,
        time_key: str | None = None,
        embedding_key: str | None = None,
    ) -> Self:
        """A predictor for data like this; reads names, labels and declared units only.

        Parameters
        ----------
        adata
            Cells × genes. It is not changed.
        perturbation_key, control, covariate_keys, scale, layer, separator, library_size_key
            As in :meth:`Registry.from_anndata`.
        dose_key, time_key, embedding_key
            Likewise.

        Returns
        -------
        A predictor that can be fitted.

        Raises
        ------
        UnknownKeyError
            When a keyword is none of these; names the nearest.
        """
        registry = Registry.from_anndata(
            adata,
            perturbation_key=perturbation_key,
            control=control,
            covariate_keys=covariate_keys,
            scale=scale,
            layer=layer,
            separator=separator,
            library_size_key=library_size_key,
            dose_key=dose_key,
            time_key=time_key,
            embedding_key=embedding_key,
        )
        return cls(registry)

    @abstractmethod
    def _parts(self) -> Parts:
        """Everything that was learnt."""

    def save(self, path: str | Path, *, include_controls: int | None = None) -> None:
        """Save as one folder of JSON and safetensors that :func:`~perturbdiff.load` reads.

        It holds means and variances of the training conditions, and no cells unless asked for.

        Parameters
        ----------
        path
            Folder to make.
        include_controls
            Most control cells of each context to save with it, so that the loaded model answers
            ``predict(None, ...)``; how many there are is in the manifest.

        Raises
        ------
        BundleError
            When there is something at that path already, or there are no control cells to include.
        NotFittedError
            Before ``fit``.
        """
        parts = self._parts()
        if include_controls is not None:
            n_each = whole_number("include_controls", include_controls, least=1)
            parts = self._with_controls(parts, n_each)
        write_bundle(parts, Path(path))

    def _with_controls(self, parts: Parts, n_each: int) -> Parts:
        controls = self._controls
        if controls is None and self._reservoir is not None:
            controls = encode(self._reservoir, self.registry)
        if controls is None or controls.counts is None:
            msg = (
                "There are no control cells with counts to include: fit the model to cells with "
                "counts, or load one that was saved with some."
            )
            raise BundleError(msg)
        kept = draw_reservoir(controls, n_each, seed=self.seed)
        return replace(
            parts, controls=reservoir_tensors(kept, self.registry), listing=reservoir_listing(kept)
        )

    def _take_reservoir(self, parts: Parts) -> None:
        """Keep the control cells of a bundle, where it has any."""
        if parts.controls:
            self._reservoir = reservoir_file(parts.controls, self.registry)

    @abstractmethod
    def predict(
        self,
        adata: AnnData | None = None,
        *,
        perturbations: Sequence[str],
        contexts: Sequence[Mapping[str, str]] | None = None,
        n_cells: int = 256,
        seed: int = 0,
    ) -> AnnData:
        """Predicted cells of every perturbation in every context."""

    def in_precision(self, precision: str) -> Self:
        """The model with its network in another precision, where it has one.

        Parameters
        ----------
        precision
            Name of a precision.

        Returns
        -------
        A new model.

        Raises
        ------
        ConfigError
            When the model has no network that could be in another precision.
        """
        rule = f"a {type(self).__name__} has no such network; a SetDiffusion or CausalBaseline has"
        raise ConfigError("precision", precision, rule=rule)

    def compiled(self) -> Self:
        """The model with its network compiled, where it has one that can be.

        Returns
        -------
        A new model.

        Raises
        ------
        ConfigError
            When the model has no network that is compiled.
        """
        rule = "is for the network of a SetDiffusion, which is called as a whole"
        raise ConfigError("compiled", type(self).__name__, rule=rule)

    def _ask(
        self,
        adata: AnnData | None,
        perturbations: Sequence[str],
        *,
        contexts: Sequence[Mapping[str, str]] | None,
        n_cells: int,
        **numbers: Any,
    ) -> Question:
        if not self.registry.genes:
            msg = f"This {type(self).__name__} was not fitted. Call fit(adata) or load a bundle."
            raise NotFittedError(msg)
        require_room(n_cells, len(self.registry.genes))
        file = self._reservoir if adata is None else adata
        if file is None:
            rule = (
                "this model has no control cells of its own; give a file with those of the "
                "contexts, or load a model that was saved with include_controls"
            )
            raise ConfigError("adata", adata, rule=rule)
        return ask(
            file, self.registry, perturbations=perturbations, contexts=contexts,
            n_cells=n_cells, new_contexts="infer", **numbers,
        )  # fmt: skip


def require_counts(cells: Cells) -> None:
    """Refuse cells whose counts cannot be told."""
    if cells.counts is None or cells.library_size is None:
        why = "log values without library sizes"
        if cells.library_size is not None:
            why = "predicted cells with values that no count says"
        msg = (
            f"Counts are needed to make cells, but the file holds {why}. "
            "Give raw counts (scale='counts'), or name a column with each cell's counts over all "
            "measured genes (library_size_key=...)."
        )
        raise ScaleError(msg)


def controls_by_context(
    question: Question,
    registry: Registry,
    *,
    loadings: Float[np.ndarray, "genes axes"],
    mean: Float[np.ndarray, " genes"],
    known: Sequence[ConditionSummary],
) -> dict[tuple[str, ...], Controls]:
    """Control cells of every context that is asked about.

    Parameters
    ----------
    question
        What is asked.
    registry
        Of the fitted model.
    loadings, mean
        Principal axes and mean of training cells.
    known
        Training conditions; their contexts stand in for genes that the file lacks.

    Returns
    -------
    Controls by context, on all genes of the model.
    """
    cells, panel = question.controls, None
    if cells.genes != registry.genes:
        cells, present = on_all_genes(cells, registry.genes)
        contexts = {summary.context.covariates: summary.context for summary in known}
        panel = Panel(present, tuple(contexts[name] for name in sorted(contexts)))
    rows = cells.controls()
    asked = dict.fromkeys(condition.context for condition in question.conditions)
    return {
        context: Controls(cells.take(rows[context]), context, loadings, mean, panel)
        for context in asked
    }


def support(
    conditions: Sequence[Condition], known: Sequence[ConditionSummary], registry: Registry
) -> dict[str, list[Any]]:
    """Whether doses and times lie within those that were learnt from; those that do not are logged.

    Parameters
    ----------
    conditions
        What is asked.
    known
        Training conditions.
    registry
        Tells whether there are times.

    Returns
    -------
    For the provenance: names of the conditions, ``supported`` for each, and why not.
    """
    n_times = int(registry.time_key is not None)
    seen: dict[str, list[tuple[float, ...]]] = {}
    for summary in known:
        for member in ("", *summary.members):
            seen.setdefault(member, []).append(summary.numbers)
    reasons = []
    for condition in conditions:
        found = []
        for number, member in enumerate(condition.members if condition.doses else ()):
            doses = [
                x for numbers in seen.get(member, seen[""]) for x in numbers[: -n_times or None]
            ]
            found += _beyond(f"dose of {member}", condition.doses[number], doses)
        if condition.time is not None:
            found += _beyond("time", condition.time, [numbers[-1] for numbers in seen[""]])
        reasons.append("; ".join(found))
    if outside := [f"{c} ({why})" for c, why in zip(conditions, reasons, strict=True) if why]:
        logger.warning("asked beyond what was learnt from, so extrapolated: %s", listed(outside))
    return {
        "conditions": [condition.name for condition in conditions],
        "supported": [not why for why in reasons],
        "reason": reasons,
    }


def _beyond(what: str, value: float, known: Sequence[float]) -> list[str]:
    low, high = min(known, default=value), max(known, default=value)
    return [] if low <= value <= high else [f"{what} {value:g} is outside {low:g} to {high:g}"]


def baseline_means(
    baselines: Sequence[Baseline], condition: Condition, controls: Controls
) -> dict[str, Float[np.ndarray, " genes"] | str]:
    """Mean log1p values that each baseline answers, or the reason why it has none."""
    answers: dict[str, Float[np.ndarray, " genes"] | str] = {}
    for baseline in baselines:
        try:
            answers[baseline.name] = baseline.predict_mean(controls.question(condition))
        except UndefinedBaselineError as error:
            answers[baseline.name] = str(error)
    return answers


def written_baselines(
    answers: Mapping[Condition, Mapping[str, Float[np.ndarray, " genes"] | str]],
) -> dict[str, Any]:
    """Baselines' answers as arrays that can be stored: conditions × genes, NaN where undefined."""
    stored: dict[str, Any] = {"conditions": [condition.name for condition in answers]}
    names = dict.fromkeys(name for answer in answers.values() for name in answer)
    for name in names:
        rows = [answer[name] for answer in answers.values()]
        width = next((len(row) for row in rows if not isinstance(row, str)), 0)
        if width:
            stored[name] = np.stack(
                [np.full(width, np.nan) if isinstance(row, str) else row for row in rows]
            )
        if reasons := [row for row in rows if isinstance(row, str)]:
            stored[f"{name}_undefined"] = reasons[0]
    return stored


def answer(
    parts: Sequence[sp.csr_array],
    library_sizes: Sequence[np.ndarray] | None,
    registry: Registry,
    *,
    conditions: Sequence[Condition],
    set_size: int,
    provenance: Mapping[str, Any],
    promised: bool = False,
) -> AnnData:
    """Cells of several conditions as one AnnData; library sizes stay where values were promised."""
    sizes = [part.shape[0] for part in parts]
    cells = parts[0] if len(parts) == 1 else sp.csr_array(sp.vstack(parts, format="csr"))
    library_size = None if library_sizes is None else np.concatenate(library_sizes)
    if library_size is not None and cells.dtype.kind == "f":
        cells = cells.rint()
        cells.eliminate_zeros()
    if library_size is not None and not promised:
        library_size = sizes_of_made_cells(cells, library_size)
    return decode(
        cells,
        library_size,
        registry,
        conditions=conditions,
        condition=np.repeat(np.arange(len(sizes)), sizes),
        sets=np.concatenate([np.arange(size) // set_size for size in sizes]),
        provenance={"version": VERSION, "reading": reading_notes(registry), **provenance},
    )
