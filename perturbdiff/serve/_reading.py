"""Questions read once: conditions, control cells, and what the priors say of them.

Requests about the same conditions share what is read, solved and encoded for them.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff.data import Condition
from perturbdiff.guidance import check_together
from perturbdiff.model._constrained_answer import reference_of
from perturbdiff.model._fitted import Target
from perturbdiff.model._network_predictor import NetworkPredictor
from perturbdiff.model._predictor import Predictor, baseline_means, support, written_baselines
from perturbdiff.model._questions import Controls
from perturbdiff.serve._formats import dumps, from_h5ad
from perturbdiff.serve._memo import Memo
from perturbdiff.serve._schemas import PredictRequest, Question, constraint_of

AnyModel: TypeAlias = NetworkPredictor[Any, Any, Any]
_UNPACKED = 20  # times the largest body that an uploaded file may unpack to


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """Everything about a question that does not depend on seed, number of cells or sampling."""

    model: AnyModel
    conditions: tuple[Condition, ...]
    controls: tuple[Controls, ...]  # of each condition
    targets: tuple[Target, ...]

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What provenance says about the conditions."""
        fitted, answers = self.model.fitted, {}
        for condition, controls in zip(self.conditions, self.controls, strict=True):
            answers[condition] = baseline_means(fitted.baselines, condition, controls)
        return {
            "support": support(self.conditions, fitted.prior.conditions, self.model.registry),
            "baselines": written_baselines(answers),
        }


def uploaded(request: Question, model: Predictor, *, most_mb: float) -> AnnData | None:
    """The control cells that came with a request.

    Raises
    ------
    ConfigError
        When none came and the model has none of its own, or they cannot be read.
    """
    if request.control_cells is not None:
        return from_h5ad(request.control_cells, most_mb=most_mb * _UNPACKED)
    if model._reservoir is None:
        rule = (
            "is missing: this model was saved without control cells of its own. Upload the control "
            "cells of the contexts, or serve a model that was saved with include_controls"
        )
        raise ConfigError("control_cells", None, rule=rule)
    return None


def check_constraints(request: PredictRequest, reading: Reading) -> None:
    """Refuse constraints of genes that the model does not have, or that contradict each other.

    Raises
    ------
    GeneError, ConstraintError
        As the model's ``predict`` says it, before anything is quoted or queued.
    """
    wishes = [constraint_of(entry) for entry in request.constraints]
    for controls in {one.context: one for one in reading.controls if wishes}.values():
        reference = reference_of(reading.model.fitted, controls)
        bounds = [wish.bind(reference) for wish in wishes]
        check_together(bounds, reference, n_cells=request.n_cells)


class Reader:
    """Reads the questions of a model, and remembers them within bounds.

    Parameters
    ----------
    model
        Fitted model.
    most_contexts
        Contexts whose control cells are kept read.
    most_mb
        Largest request.
    """

    def __init__(self, model: AnyModel, *, most_contexts: int, most_mb: float) -> None:
        self.model, self._most_mb = model, most_mb
        self.memo: Memo[Reading] = Memo(most_contexts)
        self._own: Memo[Controls] = Memo(most_contexts)

    def read(self, request: PredictRequest) -> Reading:
        """What is asked.

        Raises
        ------
        PerturbDiffError
            When the question makes no sense to the model, as its ``predict`` says it.
        """
        key = self._key(request)
        if (known := self.memo.get(key)) is not None:
            return known
        model = self.model
        question = model._ask(
            uploaded(request, model, most_mb=self._most_mb),
            request.perturbations,
            contexts=request.contexts,
            n_cells=request.n_cells,
            doses=request.doses,
            times=request.times,
            missing_genes=request.missing_genes,
        )
        pairs = model._with_controls_of(question)
        if request.control_cells is None:
            pairs = [(condition, self._shared(controls)) for condition, controls in pairs]
        reading = Reading(
            model=model,
            conditions=tuple(condition for condition, _ in pairs),
            controls=tuple(controls for _, controls in pairs),
            targets=tuple(model.fitted.target(*pair) for pair in pairs),
        )
        weight = len({condition.context for condition, _ in pairs})
        return self.memo.put(key, reading, weight=weight)

    def _shared(self, controls: Controls) -> Controls:
        """The same control cells of the model itself, with what was worked out about them."""
        known = self._own.get(controls.context)
        return self._own.put(controls.context, controls) if known is None else known

    @staticmethod
    def _key(request: PredictRequest) -> bytes:
        said: dict[str, Any] = {
            "perturbations": request.perturbations,
            "contexts": request.contexts,
            "doses": request.doses,
            "times": request.times,
            "missing_genes": request.missing_genes,
        }
        content = blake2b(dumps(said), digest_size=16)
        content.update(request.control_cells or b"")
        return content.digest()
