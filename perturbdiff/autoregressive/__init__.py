"""One gene after another: tokens, orders, losses."""

from perturbdiff.autoregressive._likelihood import bin_loss, count_loss, smoothed_targets
from perturbdiff.autoregressive._order import GeneOrder, Said
from perturbdiff.autoregressive._tokens import ExpressionBins

__all__ = [
    "ExpressionBins",
    "GeneOrder",
    "Said",
    "bin_loss",
    "count_loss",
    "smoothed_targets",
]
