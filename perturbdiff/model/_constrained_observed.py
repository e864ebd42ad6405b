"""What a measured panel says about the genes that were not measured.

N cells, G genes, P measured genes, C conditions, F features of a gene.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff.guidance._bounds import Bounds
from perturbdiff.model._questions import Controls

_PENALTIES = np.logspace(-2, 4, 25)
_MOST_CONDITIONS = 40
_BLOCK = 256
_FOLDS = 10
_NEAREST = 10


def completed_target(
    target: Float[np.ndarray, " genes"],
    observed: Float[np.ndarray, " measured"],
    genes: Int[np.ndarray, " measured"],
    *,
    control: Float[np.ndarray, " genes"],
    shifts: Sequence[Float[np.ndarray, " genes"]],
) -> Float[np.ndarray, " genes"]:
    """Mean log1p values after seeing those of the measured genes.

    What the prior missed on the measured genes is regressed on how the known conditions shift
    those genes, and on the prior's own shift (a context may respond more strongly than others);
    the same weights then apply to the genes that were not measured. The ridge penalty is the one
    under which measured genes that are left out in turn are predicted with the least mean absolute
    error, infinite included: where nothing carries over, the prior stays.

    Parameters
    ----------
    target
        Mean that the effect prior predicts.
    observed, genes
        Means of the measured genes, and which they are.
    control
        Means of the control cells of the context.
    shifts
        Mean shifts of the training conditions.

    Returns
    -------
    Means of all genes; those of the measured ones as observed.
    """
    features = np.stack([target - control, *shifts[:_MOST_CONDITIONS]], axis=1)
    scale = features[genes].std(0)
    features = features / np.where(scale > 0, scale, 1.0)
    missed = observed - target[genes]
    here = features[genes]
    fold = np.arange(len(genes)) % min(_FOLDS, len(genes))
    best, weight = float(np.abs(missed).mean()), np.zeros(features.shape[1])
    for penalty in _PENALTIES:
        rest = np.concatenate(
            [
                missed[fold == f]
                - here[fold == f] @ _ridge(here[fold != f], missed[fold != f], penalty)
                for f in np.unique(fold)
            ]
        )
        if (error := float(np.abs(rest).mean())) < best:
            best, weight = error, _ridge(here, missed, penalty)
    moved = np.maximum(target + features @ weight, 0.0)
    moved[genes] = observed
    return moved


def _ridge(features: np.ndarray, values: np.ndarray, penalty: float) -> np.ndarray:
    gram = features.T @ features + penalty * np.eye(features.shape[1])
    weight: np.ndarray = np.linalg.solve(gram, features.T @ values)
    return weight


def matched_partners(
    bound: Bounds,
    controls: Controls,
    target: Float[np.ndarray, " genes"],
    *,
    chance: Float[Tensor, " streams"],
) -> Int[Tensor, " cells"]:
    """For each measured cell one of the control cells most like it, each around its own mean.

    Distances are over the measured genes, along the principal axes that these genes carry. Which
    of the nearest ten it is, is drawn: one of them says as much about the cell as another.
    """
    genes = bound.genes.numpy()
    axes = controls.loadings[genes]
    values = bound.lower.numpy()
    measured = (values - target[genes]) @ axes
    own = np.asarray(controls.cells.log1p[:, genes] @ axes)
    own = own - own.mean(0)
    near, n_near = [], min(_NEAREST, len(own))
    for start in range(0, len(measured), _BLOCK):
        part = measured[start : start + _BLOCK]
        square = (part**2).sum(1)[:, None] - 2 * part @ own.T + (own**2).sum(1)
        near.append(square.argpartition(n_near - 1, axis=1)[:, :n_near])
    ranked = np.sort(np.concatenate(near), axis=1)
    pick = (chance[: len(ranked)].numpy() * n_near).astype(np.int64)
    return torch.from_numpy(ranked[np.arange(len(ranked)), pick].astype(np.int64))
