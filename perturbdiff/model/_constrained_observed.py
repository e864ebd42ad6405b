"""What a measured panel says about the genes that were not measured.

N cells, G genes, P measured genes, C conditions, F features of a gene.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff.guidance._bounds import Bounds
from perturbdiff.model._questions import Controls
from perturbdiff.prior import ConditionSummary

_PENALTIES = np.logspace(-2, 4, 25)
_MOST_CONDITIONS = 40
_BLOCK = 256


def completed_target(
    target: Float[np.ndarray, " genes"],
    observed: Float[np.ndarray, " measured"],
    genes: Int[np.ndarray, " measured"],
    *,
    controls: Controls,
    known: list[ConditionSummary],
) -> Float[np.ndarray, " genes"]:
    """Mean log1p values after seeing those of the measured genes.

    What the prior missed on the measured genes is regressed on how the known conditions shift
    those genes, and on the prior's own shift (a context may respond more strongly than others);
    the same weights then apply to the genes that were not measured. The ridge penalty is the one
    with the least generalised cross-validation score (Golub, Heath and Wahba, 1979), infinite
    included.

    Parameters
    ----------
    target
        Mean that the effect prior predicts.
    observed, genes
        Means of the measured genes, and which they are.
    controls
        Control cells of the context.
    known
        Training conditions.

    Returns
    -------
    Means of all genes; those of the measured ones as observed.
    """
    own = target - controls.summary.mean
    shifts = [own, *(summary.mean - summary.context.mean for summary in known[:_MOST_CONDITIONS])]
    features = np.stack(shifts, axis=1)
    scale = features[genes].std(0)
    features = features / np.where(scale > 0, scale, 1.0)
    missed = observed - target[genes]
    here = features[genes]
    left, value, right = np.linalg.svd(here, full_matrices=False)
    along = left.T @ missed
    best, weight = float(missed @ missed) / len(missed), np.zeros(features.shape[1])
    for penalty in _PENALTIES:
        shrink = value**2 / (value**2 + penalty)
        rest = missed - left @ (shrink * along)
        score = float(rest @ rest) / len(missed) / (1 - shrink.sum() / len(missed)) ** 2
        if score < best:
            best = score
            weight = right.T @ (shrink * along / np.maximum(value, 1e-12))
    moved = np.maximum(target + features @ weight, 0.0)
    moved[genes] = observed
    return moved


def matched_partners(
    bound: Bounds, controls: Controls, target: Float[np.ndarray, " genes"], *, n_cells: int
) -> Int[Tensor, " cells"] | None:
    """The control cell that is most like each measured cell, each taken around its own mean.

    Distances are over the measured genes, along the principal axes that these genes carry. None
    where all cells were given the same values.
    """
    if len(bound.lower) == 1 or bound.unit != "log1p":
        return None
    genes = bound.genes.numpy()
    axes = controls.loadings[genes]
    values = bound.lower[:n_cells].numpy()
    measured = (values - target[genes]) @ axes
    own = np.asarray(controls.cells.log1p[:, genes] @ axes)
    own = own - own.mean(0)
    nearest = []
    for start in range(0, len(measured), _BLOCK):
        part = measured[start : start + _BLOCK]
        square = (part**2).sum(1)[:, None] - 2 * part @ own.T + (own**2).sum(1)
        nearest.append(square.argmin(1))
    return torch.from_numpy(np.concatenate(nearest).astype(np.int64))
