"""Networks: the set denoiser, its parts, and the expression codec."""

from perturbdiff.nn._codec import ExpressionCodec, ResponseFactors, copula_scores
from perturbdiff.nn._denoiser import SetDenoiser

__all__ = ["ExpressionCodec", "ResponseFactors", "SetDenoiser", "copula_scores"]
