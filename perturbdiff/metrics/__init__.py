"""Scores of predicted cells: functions on arrays, tables of them, and torchmetrics classes.

Everything takes cells by genes (log1p of counts per 10,000) or cells by principal axes, never
names or files. The torchmetrics classes are loaded when they are first asked for, so that scoring
arrays does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perturbdiff.metrics._ceiling import (
    CeilingScores,
    discrimination_ceiling,
    spearman_brown,
    split_half_ceiling,
)
from perturbdiff.metrics._condition import (
    ConditionScores,
    Projection,
    fit_projection,
    score_condition,
)
from perturbdiff.metrics._discrimination import Discrimination, discrimination
from perturbdiff.metrics._distribution import centred_energy_distance, energy_distance, mmd
from perturbdiff.metrics._expression import (
    DEAgreement,
    compare_tables,
    de_overlap,
    direction_match,
)
from perturbdiff.metrics._rank_sum import DETable, rank_genes
from perturbdiff.metrics._registry import CONDITION_METRICS, METRICS, MetricInfo
from perturbdiff.metrics._response import (
    mae_shift,
    mean_shift,
    pearson_shift,
    variance_explained,
)
from perturbdiff.metrics._table import TableScores, average_scores, score_conditions

if TYPE_CHECKING:
    from perturbdiff.metrics._modules import (
        MMD,
        CentredEnergyDistance,
        DEOverlap,
        DirectionMatch,
        DiscriminationScore,
        EnergyDistance,
        MAEShift,
        PearsonShift,
        VarianceExplained,
    )

_MODULES = frozenset(
    {
        "MMD",
        "CentredEnergyDistance",
        "DEOverlap",
        "DirectionMatch",
        "DiscriminationScore",
        "EnergyDistance",
        "MAEShift",
        "PearsonShift",
        "VarianceExplained",
    }
)

__all__ = [
    "CONDITION_METRICS",
    "METRICS",
    "MMD",
    "CeilingScores",
    "CentredEnergyDistance",
    "ConditionScores",
    "DEAgreement",
    "DEOverlap",
    "DETable",
    "DirectionMatch",
    "Discrimination",
    "DiscriminationScore",
    "EnergyDistance",
    "MAEShift",
    "MetricInfo",
    "PearsonShift",
    "Projection",
    "TableScores",
    "VarianceExplained",
    "average_scores",
    "centred_energy_distance",
    "compare_tables",
    "de_overlap",
    "direction_match",
    "discrimination",
    "discrimination_ceiling",
    "energy_distance",
    "fit_projection",
    "mae_shift",
    "mean_shift",
    "mmd",
    "pearson_shift",
    "rank_genes",
    "score_condition",
    "score_conditions",
    "spearman_brown",
    "split_half_ceiling",
    "variance_explained",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module("perturbdiff.metrics._modules"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
