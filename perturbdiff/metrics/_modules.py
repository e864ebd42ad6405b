"""The scores as torchmetrics: one update a condition, the mean over conditions at the end.

N cells, G genes, K axes. States are plain sums, so a distributed run reduces them by itself.
"""

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from perturbdiff._errors import MetricError, UnknownKeyError
from perturbdiff.metrics._discrimination import discrimination
from perturbdiff.metrics._distribution import centred_energy_distance, energy_distance, mmd
from perturbdiff.metrics._expression import de_overlap, direction_match
from perturbdiff.metrics._registry import METRICS
from perturbdiff.metrics._response import (
    mae_shift,
    mean_shift,
    pearson_shift,
    variance_explained,
)


class _Scored(Metric):
    """A score as a metric; settings are those of the function of the same name."""

    full_state_update = False
    is_differentiable = False
    score: ClassVar[Callable[..., Any]]
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "score"):
            known = signature(cls.score).parameters.values()
            cls.__signature__ = Signature([one for one in known if one.kind is one.KEYWORD_ONLY])

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        known = list(signature(type(self)).parameters)
        for name in settings:
            if name not in known:
                raise UnknownKeyError(type(self).__name__, name, known=known)
        self.settings = settings


class _MeanOverConditions(_Scored):
    """A score averaged over conditions."""

    total: Tensor
    count: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, *cells: Tensor) -> None:
        """Add one condition: the populations that the function of the same name takes."""
        self.total += type(self).score(*(_array(part) for part in cells), **self.settings)
        self.count += 1

    def compute(self) -> Tensor:
        """Mean over the conditions seen."""
        if self.count == 0:
            msg = f"{type(self).__name__} has seen no condition. Call update first."
            raise MetricError(msg)
        return self.total / self.count


class PearsonShift(_MeanOverConditions):
    """:func:`pearson_shift`; update with predicted, true and control cells."""

    score = staticmethod(pearson_shift)
    higher_is_better = METRICS["pearson_shift"].higher_is_better


class MAEShift(_MeanOverConditions):
    """:func:`mae_shift`; update with predicted, true and control cells."""

    score = staticmethod(mae_shift)
    higher_is_better = METRICS["mae_shift"].higher_is_better


class EnergyDistance(_MeanOverConditions):
    """:func:`energy_distance`; update with predicted and true cells in principal axes."""

    score = staticmethod(energy_distance)
    higher_is_better = METRICS["energy_distance"].higher_is_better


class CentredEnergyDistance(_MeanOverConditions):
    """:func:`centred_energy_distance`; update with predicted and true cells in principal axes."""

    score = staticmethod(centred_energy_distance)
    higher_is_better = METRICS["centred_energy_distance"].higher_is_better


class MMD(_MeanOverConditions):
    """:func:`mmd`; update with predicted and true cells in principal axes."""

    score = staticmethod(mmd)
    higher_is_better = METRICS["mmd"].higher_is_better


class VarianceExplained(_MeanOverConditions):
    """:func:`variance_explained`; update with predicted, true and control cells."""

    score = staticmethod(variance_explained)
    higher_is_better = METRICS["variance_explained"].higher_is_better


class DEOverlap(_MeanOverConditions):
    """:func:`de_overlap`; update with predicted, true and control cells."""

    score = staticmethod(de_overlap)
    higher_is_better = METRICS["de_overlap"].higher_is_better


class DirectionMatch(_MeanOverConditions):
    """:func:`direction_match`; update with predicted, true and control cells."""

    score = staticmethod(direction_match)
    higher_is_better = METRICS["direction_match"].higher_is_better


class DiscriminationScore(_Scored):
    """:func:`discrimination`; update with predicted, true and control cells of a condition."""

    score = staticmethod(discrimination)
    higher_is_better = METRICS["discrimination"].higher_is_better
    pred: list[Tensor]
    true: list[Tensor]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("pred", [], dist_reduce_fx="cat")
        self.add_state("true", [], dist_reduce_fx="cat")

    def update(self, pred_cells: Tensor, true_cells: Tensor, control_cells: Tensor) -> None:
        """Keep the mean shifts of one condition."""
        control = _array(control_cells)
        for state, cells in ((self.pred, pred_cells), (self.true, true_cells)):
            shift = torch.from_numpy(mean_shift(_array(cells), control)[None])
            state.append(shift.to(self.device, torch.float32))

    def compute(self) -> Tensor:
        """Score over all conditions seen."""
        if not len(self.pred):
            msg = "DiscriminationScore has seen no condition. Call update first."
            raise MetricError(msg)
        pred, true = (_array(dim_zero_cat(state)) for state in (self.pred, self.true))
        score = discrimination(pred, true, **self.settings).score
        return torch.tensor(score, device=self.device, dtype=torch.float32)


def _array(cells: Tensor) -> NDArray[np.generic]:
    """A tensor as an array; bfloat16, which numpy lacks, is widened."""
    plain = cells.detach().cpu()
    array: NDArray[np.generic] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array
