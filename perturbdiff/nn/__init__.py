"""Networks: the set denoiser, its parts, and the expression codec."""

from perturbdiff.nn._codec import ExpressionCodec
from perturbdiff.nn._denoiser import SetDenoiser

__all__ = ["ExpressionCodec", "SetDenoiser"]
