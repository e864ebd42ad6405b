"""Names, directions and definitions of every score, in the order in which tables show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """What a score is called, which way is better, and what it measures."""

    name: str
    title: str
    higher_is_better: bool
    best: float
    unit: str
    needs: Literal["means", "cells", "axes", "expression", "conditions"]
    definition: str
    cell_eval: str | None = None  # its name in cell-eval 0.8.2, where that defines it


_ALL: Final = (
    MetricInfo(
        name="pearson_shift",
        title="Pearson of shifts",
        higher_is_better=True,
        best=1.0,
        unit="correlation",
        needs="means",
        definition=(
            "Correlation over genes of predicted and true mean shift from the same control cells."
        ),
        cell_eval="pearson_delta",
    ),
    MetricInfo(
        name="mae_shift",
        title="MAE of shifts",
        higher_is_better=False,
        best=0.0,
        unit="log1p expression",
        needs="means",
        definition="Mean over genes of the absolute error of the mean shift.",
        cell_eval="mae_delta",
    ),
    MetricInfo(
        name="energy_distance",
        title="Energy distance",
        higher_is_better=False,
        best=0.0,
        unit="log1p expression",
        needs="axes",
        definition=(
            "Unbiased energy distance in principal axes of the training cells, at most 400 cells "
            "a side, mean of 3 draws."
        ),
    ),
    MetricInfo(
        name="centred_energy_distance",
        title="Centred energy distance",
        higher_is_better=False,
        best=0.0,
        unit="log1p expression",
        needs="axes",
        definition=(
            "Energy distance after each side's own mean is removed: the shape of the population "
            "only."
        ),
    ),
    MetricInfo(
        name="mmd",
        title="MMD",
        higher_is_better=False,
        best=0.0,
        unit="squared discrepancy",
        needs="axes",
        definition=(
            "Unbiased squared maximum mean discrepancy in the same axes, Gaussian kernel, "
            "bandwidth the median distance between true cells."
        ),
    ),
    MetricInfo(
        name="variance_explained",
        title="Variance explained (top 100)",
        higher_is_better=True,
        best=1.0,
        unit="share",
        needs="cells",
        definition="R2 of the variance over cells of the 100 genes with the largest true shift.",
    ),
    MetricInfo(
        name="de_overlap",
        title="DE overlap at N",
        higher_is_better=True,
        best=1.0,
        unit="share",
        needs="expression",
        definition=(
            "Share of the N significant true genes (rank sums, FDR 0.05) among the N most "
            "changed significant predicted genes."
        ),
        cell_eval="overlap_at_N",
    ),
    MetricInfo(
        name="direction_match",
        title="Direction match",
        higher_is_better=True,
        best=1.0,
        unit="share",
        needs="expression",
        definition=(
            "Share of the significant true genes whose predicted fold change has the true sign."
        ),
        cell_eval="de_direction_match",
    ),
    MetricInfo(
        name="discrimination",
        title="Discrimination",
        higher_is_better=True,
        best=1.0,
        unit="share",
        needs="conditions",
        definition=(
            "1 - rank / (conditions - 1) of a condition's own true shift among all true shifts, by "
            "Pearson with its predicted shift."
        ),
        cell_eval="discrimination_score",
    ),
    MetricInfo(
        name="ranked_first",
        title="Ranked first",
        higher_is_better=True,
        best=1.0,
        unit="share",
        needs="conditions",
        definition="Share of conditions whose predicted shift is nearest to their own true shift.",
    ),
)

METRICS: Final[Mapping[str, MetricInfo]] = MappingProxyType({info.name: info for info in _ALL})
"""Every score by name."""

CONDITION_METRICS: Final = tuple(info.name for info in _ALL if info.needs != "conditions")
"""Scores of one condition; the others compare conditions."""
