"""Predicted cells beside the measured ones: the same conditions, genes and scale, by name.

N cells, G genes, K principal axes.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Bool, Float

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import LabelError, UnknownKeyError, listed
from perturbdiff._logging import logger
from perturbdiff.data._cells import Cells
from perturbdiff.data._checks import is_prediction
from perturbdiff.data._conditions import Columns, Condition, read_rows
from perturbdiff.data._door import read_cells
from perturbdiff.data._genes import principal_axes
from perturbdiff.data._matrix import gene_names, require_anndata
from perturbdiff.data._predicted import read_prediction
from perturbdiff.data._registry import Registry, Vocabulary

Stated = dict[str, dict[str, np.ndarray | str]]

_UNDEFINED = "_undefined"
_TEXTS = ("control", "covariate_keys", "measured_genes", "genes")
_READING = (*(item.name for item in fields(Columns)), "scale", "layer", "library_size_key")


def reading_notes(registry: Registry) -> dict[str, Any]:
    """How a file like the training file is read, as plain values for the provenance."""
    notes = {name: getattr(registry, name) for name in _READING}
    return {**notes, **{name: list(getattr(registry, name)) for name in _TEXTS}}


def provenance_of(pred: AnnData) -> dict[str, Any]:
    """What a prediction says about its origin.

    Raises
    ------
    UnknownKeyError
        When the AnnData is no prediction, or its provenance was lost.
    """
    entries: dict[str, Any] = pred.uns.get(UNS_KEY, {})
    if "reading" not in entries:
        where = (
            "pred is no prediction of tl.predict, or what it says of its origin was lost when it "
            f"was joined (anndata.concat leaves uns out): its uns[{UNS_KEY!r}]"
        )
        raise UnknownKeyError(where, "reading", known=list(entries))
    return entries


def condition_names(table: pd.DataFrame) -> "pd.Series[str]":
    """Name of the condition of each row of a report about constraints, by which code finds it.

    What people read stands beside it; in earlier predictions the name stood in its place.
    """
    key = "condition_key" if "condition_key" in table else "condition"
    return table[key].astype(str)


def registry_of(pred: AnnData) -> Registry:
    """What a prediction says about reading files like the one that its model was fitted on.

    Parameters
    ----------
    pred
        Prediction, in memory or read from a file.

    Returns
    -------
    A registry on the genes of the model, with the columns but without vocabularies.

    Raises
    ------
    UnknownKeyError
        When the AnnData is no prediction, or its provenance was lost.
    """
    notes: dict[str, Any] = provenance_of(pred)["reading"]
    texts = {name: tuple(str(text) for text in notes[name]) for name in _TEXTS}
    plain = {name: None if name not in notes else str(notes[name]) for name in _READING}
    key = str(notes["perturbation_key"])
    known: dict[str, Any] = {
        **plain,
        **texts,
        "embedding_key": None,
        "perturbations": Vocabulary(key=key, levels=()),
        "covariates": tuple(Vocabulary(key=k, levels=()) for k in texts["covariate_keys"]),
    }
    return Registry(**known)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Predicted and measured cells of the same conditions, on the genes of the model."""

    registry: Registry
    pred: Cells
    there: Bool[np.ndarray, " genes"]  # genes that the prediction holds
    reference: Cells  # every labelled cell
    stated: Stated

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """Predicted conditions, sorted."""
        return tuple(self.pred.conditions())

    def predicted(self, condition: Condition) -> Float[np.ndarray, "cells genes"]:
        """Predicted cells, log1p of counts per 10,000; genes that are not there as in controls."""
        cells = np.asarray(self.pred.log1p[self.pred.conditions()[condition]].toarray())
        if not self.there.all():
            control = self.controls(condition).log1p
            rows = np.arange(len(cells)) * control.shape[0] // len(cells)
            cells[:, ~self.there] = control[rows].toarray()[:, ~self.there]
        return cells

    def predicted_mean(self, condition: Condition) -> Float[np.ndarray, " genes"]:
        """Mean of the predicted cells; exactly that of the controls for genes not there."""
        rows = self.pred.conditions()[condition]
        mean = np.asarray(self.pred.log1p[rows].mean(0, dtype=np.float64)).ravel()
        control = np.asarray(self.controls(condition).log1p.mean(0, dtype=np.float64)).ravel()
        return np.where(self.there, mean, control)

    def measured(self, condition: Condition) -> Float[np.ndarray, "cells genes"]:
        """Measured treated cells."""
        return np.asarray(self.reference.log1p[self.reference.conditions()[condition]].toarray())

    def controls(self, condition: Condition) -> Cells:
        """Measured control cells of the context of a condition."""
        return self.reference.take(self.reference.controls()[condition.context])

    def partners(self, condition: Condition) -> Cells:
        """Control cells that a model starts from: those that are not empty."""
        cells = self.controls(condition)
        if cells.library_size is None or (cells.library_size > 0).all():
            return cells
        return cells.take(np.flatnonzero(cells.library_size > 0))

    def unseen(self) -> sp.csr_array:
        """Reference cells other than the treated cells of the predicted conditions."""
        asked = set(self.conditions)
        kept = np.array([condition not in asked for condition in self.reference.distinct], bool)
        return self.reference.log1p[kept[self.reference.condition]]

    def axes(
        self, n_axes: int
    ) -> tuple[Float[np.ndarray, " genes"], Float[np.ndarray, "genes axes"]]:
        """Mean and principal axes of the reference without the cells that were predicted."""
        return principal_axes(self.unseen(), n_axes)


def compare(pred: AnnData, reference: AnnData) -> Comparison:
    """Read a prediction and the file that holds the truth, as the model's own data was read.

    Parameters
    ----------
    pred
        Prediction; its provenance says how to read the reference.
    reference
        File with control cells and treated cells of every predicted condition.

    Returns
    -------
    Cells of both on the genes of the model. Those that the prediction lacks count as unchanged, so
    that leaving out what is hard to predict gains nothing; how many they are is logged.

    Raises
    ------
    UnknownKeyError
        When ``pred`` is no prediction, or the reference lacks a column.
    LabelError
        When the reference is a prediction, or lacks cells of a condition.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file, or that of the
        prediction was changed.
    """
    require_anndata(pred, name="pred")
    require_anndata(reference, name="reference")
    _refuse_prediction(reference, pred)
    registry = registry_of(pred)
    found = read_rows(reference.obs, registry.columns)
    guess = read_rows(pred.obs, registry.columns)
    _check_truth(guess.conditions, found.conditions)
    cells, there = read_prediction(pred, registry, guess)
    stated = stated_means(pred, registry.genes)
    _check_answers(cells, stated)
    _say_what_is_left_out(cells, there, stated)
    return Comparison(
        registry=registry,
        pred=cells,
        there=there,
        reference=read_cells(
            reference,
            registry,
            found,
            measured=gene_names(reference),
            remedy="Give a reference that has them: all genes of the model are compared.",
        ),
        stated=stated,
    )


def beside_controls(pred: AnnData, reference: AnnData) -> tuple[Registry, Cells, Cells]:
    """Read a prediction and the measured control cells of its contexts; no truth is needed.

    Parameters
    ----------
    pred
        Prediction; its provenance says how to read the reference.
    reference
        File with control cells of every predicted context. Treated cells are not looked at.

    Returns
    -------
    A registry on those genes of the model that the prediction holds, and predicted and control
    cells on them.

    Raises
    ------
    UnknownKeyError
        When ``pred`` is no prediction, or the reference lacks a column.
    LabelError
        When the reference is a prediction, or lacks control cells of a context.
    GeneError, ExpressionError, ScaleError
        When the expression of the reference is not like that of the training file, or that of the
        prediction was changed.
    """
    require_anndata(pred, name="pred")
    require_anndata(reference, name="reference")
    _refuse_prediction(reference, pred)
    registry = registry_of(pred)
    found = read_rows(reference.obs, registry.columns)
    cells, there = read_prediction(pred, registry, read_rows(pred.obs, registry.columns))
    contexts = {condition.context for condition in cells.conditions()}
    if not contexts:
        msg = "The prediction has no treated cells with labels."
        raise LabelError(msg)
    held = {c.context for c in found.conditions if c.is_control}
    if lacking := [", ".join(context) for context in sorted(contexts - held)]:
        msg = f"The reference has no control cells in the context of: {listed(lacking)}."
        raise LabelError(msg)
    wanted = np.array([c.is_control and c.context in contexts for c in found.conditions], bool)
    registry = registry.with_genes(
        name for name, kept in zip(registry.genes, there, strict=True) if kept
    )
    controls = read_cells(
        reference,
        registry,
        found.take(np.flatnonzero(wanted[found.condition])),
        measured=gene_names(reference),
        remedy="Give a reference that has them.",
    )
    return registry, cells.select(registry.genes), controls


def _refuse_prediction(reference: AnnData, pred: AnnData) -> None:
    if not is_prediction(reference):
        return
    if is_prediction(pred):
        msg = (
            "reference is itself a prediction, so nothing would be measured. Give the file with "
            "the real cells."
        )
    else:
        msg = (
            "reference is a prediction and pred is none: the two were exchanged. Give the "
            "prediction first and the file with the real cells as reference."
        )
    raise LabelError(msg)


def _check_answers(pred: Cells, stated: Stated) -> None:
    """Refuse cells of conditions that the prediction was not asked about."""
    treated = [condition for condition in pred.distinct if condition.members]
    if not treated:
        msg = "The prediction has no treated cells any more. Give it as predict returned it."
        raise LabelError(msg)
    asked = {name for answers in stated.values() for name in answers}
    if asked and (others := [str(c) for c in treated if c.name not in asked]):
        msg = (
            f"The prediction has cells of {listed(others)}, which it was not asked about: what the "
            "baselines answer is not there. If several predictions were joined, score each alone, "
            "or predict all contexts in one call; labels must stay as predict wrote them."
        )
        raise LabelError(msg)


def _say_what_is_left_out(pred: Cells, there: Bool[np.ndarray, " genes"], stated: Stated) -> None:
    """Log which genes and conditions of the answer are no longer in the prediction."""
    if n_absent := int((~there).sum()):
        logger.warning(
            "the prediction lacks %d of the %d genes of its model; they count as unchanged",
            *(n_absent, len(there)),
        )
    kept = {condition.name for condition in pred.distinct}
    asked = dict.fromkeys(name for answers in stated.values() for name in answers)
    if gone := [str(Condition.named(name)) for name in asked if name not in kept]:
        logger.warning(
            "the prediction has no cells any more of %d of its %d conditions, which are not "
            "compared: %s",
            *(len(gone), len(asked), listed(gone)),
        )


def stated_means(pred: AnnData, genes: tuple[str, ...]) -> Stated:
    """Mean log1p values that the baselines stated when the prediction was made.

    Parameters
    ----------
    pred
        Prediction.
    genes
        Genes wanted, in order.

    Returns
    -------
    By name of the baseline and name of the condition: a value per gene, or the reason why there is
    none.
    """
    entries = pred.uns[UNS_KEY]
    stored: dict[str, Any] = entries.get("baselines", {})
    conditions = [str(name) for name in stored.get("conditions", ())]
    place = {str(name): number for number, name in enumerate(entries["reading"]["genes"])}
    columns = np.array([place[name] for name in genes], dtype=np.int64)
    names = dict.fromkeys(key.removesuffix(_UNDEFINED) for key in stored if key != "conditions")
    found: Stated = {}
    for name in names:
        reason = str(stored.get(name + _UNDEFINED, ""))
        table = np.asarray(stored.get(name, np.full((len(conditions), len(place)), np.nan)))
        found[name] = {
            condition: reason if np.isnan(row).any() else row[columns].astype(np.float64)
            for condition, row in zip(conditions, table, strict=True)
        }
    return found


def _check_truth(asked: tuple[Condition, ...], there: tuple[Condition, ...]) -> None:
    """Refuse predicted conditions that the reference did not measure."""
    if not asked:
        msg = "The prediction has no cells with labels."
        raise LabelError(msg)
    known = set(there)
    if lacking := [str(condition) for condition in asked if condition not in known]:
        msg = f"The reference has no treated cells to compare with: {listed(lacking)}."
        raise LabelError(msg)
    contexts = {condition.context for condition in there if condition.is_control}
    if lacking := [str(condition) for condition in asked if condition.context not in contexts]:
        msg = f"The reference has no control cells in the context of: {listed(lacking)}."
        raise LabelError(msg)
