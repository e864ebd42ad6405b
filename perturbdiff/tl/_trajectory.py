"""Cells on their way through the denoising steps, as a table.

G genes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._constants import DEPTH, UNS_KEY
from perturbdiff._errors import ConfigError, ConstraintError, LabelError, UnknownKeyError, listed
from perturbdiff.config import SampleConfig
from perturbdiff.config._checks import settings_of, whole_number
from perturbdiff.data import Cells, Condition, Registry
from perturbdiff.data._comparison import beside_controls, provenance_of
from perturbdiff.data._genes import principal_axes
from perturbdiff.data._predicted import made_name, made_number
from perturbdiff.data._target import table_key, target_of
from perturbdiff.model import SetDiffusion
from perturbdiff.model._trajectory import Walk, walks
from perturbdiff.tl._labels import condition_labels
from perturbdiff.tl._model import require_model

if TYPE_CHECKING:
    from perturbdiff.model._predictor import Predictor

VALUES: Final = ("cell", "stage", "step", "sigma", "axis_1", "axis_2")
_MOST_ROWS = 2000  # that axes are taken from
_SAME = 1e-4  # share of counts that rounding may tip


def trajectory(
    pred: AnnData,
    model: "Predictor",
    *,
    reference: AnnData,
    n_cells: int = 32,
    genes: Sequence[str] = (),
    sample: SampleConfig | None = None,
    key_added: str = "trajectory",
    copy: bool = False,
) -> AnnData | None:
    """Follow predicted cells from their control partners through the denoising steps.

    The first cells of every condition are generated again, with the same noise, and looked at after
    each step: what the denoiser then makes of a cell is decoded to the expected log1p values that
    the cell would have if it stopped there. That takes the network calls of one batch of sets a
    condition, and those of its pilot where the model does not know it any more; ``predict`` itself
    keeps and costs nothing. The cells that come out are compared with those of ``pred``.

    Parameters
    ----------
    pred
        Prediction of :func:`~perturbdiff.tl.predict`, as it was returned, without constraints.
    model
        The model that made it.
    reference
        The file that it was made from, or one with the same control cells. Treated cells are not
        looked at.
    n_cells
        Cells of each condition to follow: the first ones.
    genes
        Genes whose expected values are written too, a column each.
    sample
        How ``pred`` was sampled, where more than sampler, steps and guidance scale was set.
    key_added
        Where in ``uns`` the table, and in ``varm`` the axes are written.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets ``uns[key_added]``: one row per cell and
    step. Columns: the labels by their names in ``obs``; ``cell``, its name; ``stage``, which is
    ``"control"`` (the control partner, step 0), ``"denoising"`` or ``"counts"`` (the predicted
    cell, after the last step); ``step``; ``sigma``, the noise level before the step, NaN outside
    denoising; ``axis_1`` and ``axis_2``, differences from the mean control cell of the context
    along two principal axes; and a column for each of ``genes``, both in log1p of counts per
    10,000. Sets ``varm[key_added]``, the axes: those along which the followed cells and control
    cells of all conditions, less the mean control cell of their context, differ most.

    Raises
    ------
    ConfigError
        When the model has no denoising steps or did not make ``pred``, or a setting (``key_added``
        among them) makes no sense.
    ConstraintError
        When the cells were made under constraints, which change the steps.
    LabelError
        When the cells that come out are not those of ``pred``: other control cells or settings.
    UnknownKeyError
        When ``pred`` is no prediction, or there is no such gene.
    GeneError, ExpressionError, ScaleError
        As in :func:`~perturbdiff.tl.response`.
    """
    key_added = _key(key_added, pred)
    n_cells = whole_number("n_cells", n_cells, least=1)
    maker = _maker(pred, model)
    registry, cells, controls = beside_controls(pred, reference)
    if registry.genes != maker.registry.genes:
        rule = "are fewer than those of the model; give the prediction as it was returned"
        raise ConfigError("genes of pred", len(registry.genes), rule=rule)
    wanted = _columns(genes, registry)
    notes = pred.uns[UNS_KEY]
    config = settings_of(SampleConfig, "sample", sample, default=_sampling(notes))
    rows, unperturbed = cells.conditions(), controls.controls()
    base = {c: _mean(controls.log1p[unperturbed[c.context]]) for c in rows}
    axes = _axes(cells, controls, base, most=n_cells)
    found = walks(
        maker, reference, list(rows), n_cells=[min(n_cells, len(own)) for own in rows.values()],
        config=config, seed=int(notes["seed"]),
    )  # fmt: skip
    parts = []
    for walk in found:
        own = rows[walk.condition][: walk.drawn[0].shape[0]]
        _check_same(cells.log1p[own], walk, among=cells.names)
        names = [cells.names[row] for row in own]
        labels = condition_labels(registry, walk.condition)
        taken = {f"obs_{k}" if k in VALUES or k in wanted else k: v for k, v in labels.items()}
        for stage, step, sigma, values in _stages(walk, cells.log1p[own].toarray()):
            xy = (values - base[walk.condition]) @ axes
            parts.append(
                pd.DataFrame({
                    **taken, "cell": names, "stage": stage, "step": step, "sigma": sigma,
                    "axis_1": xy[:, 0], "axis_2": xy[:, 1],
                    **{gene: values[:, column] for gene, column in wanted.items()},
                })
            )  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    table.index = table.index.astype(str)
    for name in table.columns[: table.columns.get_loc("step")]:
        if table[name].dtype == object:
            table[name] = pd.Categorical(table[name])
    target = target_of(pred, copy=copy)
    target.uns[key_added] = table
    order = {name: number for number, name in enumerate(registry.genes)}
    target.varm[key_added] = axes[[order[name] for name in target.var_names]]
    return target if copy else None


def _key(key: object, pred: AnnData) -> str:
    """Where the table and its axes are written, unless either would replace something else."""
    key = table_key(key, pred, usual="trajectory")
    if key in pred.varm and key not in pred.uns:
        rule = "varm of pred holds something else there than tl.trajectory writes; choose another"
        raise ConfigError("key_added", key, rule=rule)
    return key


def _maker(pred: AnnData, model: "Predictor") -> SetDiffusion:
    """The model, unless it has no steps, made other cells, or made them under constraints."""
    require_model(model)
    if not isinstance(model, SetDiffusion):
        rule = "has no denoising steps to follow; a SetDiffusion has"
        raise ConfigError("model", type(model).__name__, rule=rule)
    notes = provenance_of(pred)
    if notes.get("bundle_checksum") != model.checksum:
        rule = "is not the one that made this prediction: its checksum is another"
        raise ConfigError("model", model.kind, rule=rule)
    if "constraints" in notes:
        msg = (
            "The cells were made under constraints, which change what a step does. pl.constraints "
            "shows their course; predict without constraints to follow cells."
        )
        raise ConstraintError(msg)
    return model


def _columns(genes: object, registry: Registry) -> dict[str, int]:
    """Place of each gene that is asked for."""
    place = {name: number for number, name in enumerate(registry.genes)}
    if not isinstance(genes, Iterable):
        raise ConfigError("genes", genes, rule="must be names of genes, one or a list of them")
    asked = [genes] if isinstance(genes, str) else [str(name) for name in genes]
    for name in asked:
        if name not in place:
            where = "The prediction"
            raise UnknownKeyError(where, name, known=registry.genes)
        if name in VALUES:
            raise ConfigError("genes", name, rule="has the name of a column of the table")
    return {name: place[name] for name in asked}


def _sampling(notes: dict[str, Any]) -> SampleConfig:
    known: dict[str, Any] = {
        "sampler": str(notes["sampler"]),
        "n_steps": int(notes["n_steps"]),
        "guidance_scale": float(notes["guidance_scale"]),
    }
    return SampleConfig(**known)


def _axes(
    cells: Cells,
    controls: Cells,
    base: dict[Condition, Float[np.ndarray, " genes"]],
    *,
    most: int,
) -> Float[np.ndarray, "genes 2"]:
    """Two axes along which cells differ from the mean control cell of their context."""
    rows, unperturbed = cells.conditions(), controls.controls()
    each = max(_MOST_ROWS // (2 * len(rows)), 1)
    parts = []
    for condition, mean in base.items():
        own = rows[condition][: min(each, most)]
        beside = unperturbed[condition.context]
        beside = beside[np.linspace(0, len(beside) - 1, min(len(own), len(beside))).astype(int)]
        parts += [cells.log1p[own].toarray() - mean, controls.log1p[beside].toarray() - mean]
    _, axes = principal_axes(sp.csr_array(np.concatenate(parts)), 2)
    return np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))


def _stages(
    walk: Walk, final: Float[np.ndarray, "cells genes"]
) -> Iterator[tuple[str, int, float, Float[np.ndarray, "cells genes"]]]:
    """Stage, step, noise level and log1p values, from control to counts."""
    yield "control", 0, np.nan, np.asarray(walk.partners.toarray(), dtype=np.float64)
    for step, sigma in enumerate(walk.sigma):
        yield "denoising", step + 1, sigma, walk.expected(step)
    yield "counts", len(walk.sigma) + 1, np.nan, np.asarray(final, dtype=np.float64)


def _check_same(log1p: sp.csr_array, walk: Walk, *, among: Sequence[str]) -> None:
    """Refuse cells that come out otherwise than they stand in the prediction."""
    counts, size = walk.drawn
    sums = np.asarray(counts.sum(1)).ravel()
    again = np.log1p(counts.toarray() / np.maximum(size, sums)[:, None] * DEPTH)
    there = log1p.toarray()
    differ = np.abs(again - there) > 1e-3
    if differ.sum() > max(_SAME * there.size, 1):
        msg = f"The cells of {walk.condition} come out otherwise than they stand in the prediction"
        if gone := _gone(among):
            msg += (
                f", from which cells were dropped: {listed(gone)} and perhaps later ones are not "
                "there. Cells are followed from the first of each condition on. Give the "
                "prediction as predict returned it, and say with n_cells= how many to follow."
            )
        else:
            msg += (
                ". Give it as predict returned it, the file that it was made from, and sample= as "
                "it was then."
            )
        raise LabelError(msg)


def _gone(names: Sequence[str]) -> list[str]:
    """Cells that predict wrote before the last that is there, and that are there no more."""
    there = set(names)
    last = made_number(max(names))
    return [] if last is None else [n for n in map(made_name, range(last)) if n not in there]


def _mean(matrix: sp.csr_array) -> Float[np.ndarray, " genes"]:
    return np.asarray(matrix.mean(0, dtype=np.float64)).ravel()
