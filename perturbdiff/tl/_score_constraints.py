"""What constraints cost against the measured cells."""

import numpy as np
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import UnknownKeyError
from perturbdiff.data._comparison import compare, condition_names
from perturbdiff.data._matrix import require_anndata
from perturbdiff.data._target import target_of
from perturbdiff.metrics import Projection, energy_distance

_N_AXES = 30


def score_constraints(pred: AnnData, *, reference: AnnData, copy: bool = False) -> AnnData | None:
    """Fill in the energy distance from constrained cells to the measured ones.

    Parameters
    ----------
    pred
        Prediction with constraints.
    reference
        File with the measured cells.
    copy
        Return a new AnnData and leave this one as it is.

    Returns
    -------
    The new AnnData with ``copy=True``, else None. Sets the column ``energy_distance_to_truth`` of
    ``uns["perturbdiff"]["constraints"]``: distance over the cells of each condition in 30 principal
    axes of the reference without the cells that were predicted; NaN for conditions whose cells are
    no longer in the prediction.

    Raises
    ------
    UnknownKeyError
        When ``pred`` is no prediction with constraints.
    LabelError
        When the reference lacks cells of a predicted condition.
    """
    require_anndata(pred, name="pred")
    entries = pred.uns.get(UNS_KEY, {})
    if "constraints" not in entries:
        where = f"uns[{UNS_KEY!r}] of the prediction"
        raise UnknownKeyError(where, "constraints", known=list(entries))
    comparison = compare(pred, reference)
    mean, loadings = comparison.axes(_N_AXES)
    project = Projection(mean, loadings.T)
    distances = {
        condition.name: energy_distance(
            project(comparison.predicted(condition).astype(np.float64)),
            project(comparison.measured(condition).astype(np.float64)),
        )
        for condition in comparison.conditions
    }
    target = target_of(pred, copy=copy)
    table = target.uns[UNS_KEY]["constraints"].copy()
    names = condition_names(table)
    table["energy_distance_to_truth"] = [distances.get(name, np.nan) for name in names]
    target.uns[UNS_KEY]["constraints"] = table
    return target if copy else None
