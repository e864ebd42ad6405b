"""Effect prior, simple baselines, optimal-transport partners and count transport, on arrays."""

from importlib import import_module
from typing import TYPE_CHECKING

from perturbdiff.prior._baselines import (
    Additive,
    Baseline,
    CopyControl,
    MeanShift,
    NearestContext,
)
from perturbdiff.prior._carried import CarriedLogRatio, MixtureLogRatio, SimilarityShift
from perturbdiff.prior._effect import EffectPrior
from perturbdiff.prior._pairs import optimal_partners
from perturbdiff.prior._response import apply_log_ratio, log_ratio, shifted_cells
from perturbdiff.prior._ridge import GeneRidge
from perturbdiff.prior._summary import (
    ConditionSummary,
    ContextSummary,
    PriorQuestion,
    summarise_condition,
    summarise_context,
)

if TYPE_CHECKING:
    from perturbdiff.prior._draws import draw_counts
    from perturbdiff.prior._transport import TransportPlan, expected_log1p, solve_transport

_TORCH = {
    "TransportPlan": "_transport",
    "draw_counts": "_draws",
    "expected_log1p": "_transport",
    "solve_transport": "_transport",
}


def __getattr__(name: str) -> object:
    """Count transport needs torch, so it is imported when it is first asked for."""
    if name in _TORCH:
        return getattr(import_module(f"perturbdiff.prior.{_TORCH[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


__all__ = [
    "Additive",
    "Baseline",
    "CarriedLogRatio",
    "ConditionSummary",
    "ContextSummary",
    "CopyControl",
    "EffectPrior",
    "GeneRidge",
    "MeanShift",
    "MixtureLogRatio",
    "NearestContext",
    "PriorQuestion",
    "SimilarityShift",
    "TransportPlan",
    "apply_log_ratio",
    "draw_counts",
    "expected_log1p",
    "log_ratio",
    "optimal_partners",
    "shifted_cells",
    "solve_transport",
    "summarise_condition",
    "summarise_context",
]
