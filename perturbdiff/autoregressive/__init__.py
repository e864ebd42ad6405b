"""One gene after another: tokens, orders, losses, decoding."""

from perturbdiff.autoregressive._decode import Cells, Decoding, DrawnOrder, KnownOrder, decode
from perturbdiff.autoregressive._engine import Engine, Finished
from perturbdiff.autoregressive._likelihood import bin_loss, count_loss, smoothed_targets
from perturbdiff.autoregressive._order import GeneOrder, Said, possible_bins, possible_genes
from perturbdiff.autoregressive._sampling import Sampling
from perturbdiff.autoregressive._speculative import Guessing, Speculative
from perturbdiff.autoregressive._tokens import ExpressionBins

__all__ = [
    "Cells",
    "Decoding",
    "DrawnOrder",
    "Engine",
    "ExpressionBins",
    "Finished",
    "GeneOrder",
    "Guessing",
    "KnownOrder",
    "Said",
    "Sampling",
    "Speculative",
    "bin_loss",
    "count_loss",
    "decode",
    "possible_bins",
    "possible_genes",
    "smoothed_targets",
]
