"""Networks: the set denoiser, the causal decoder, their parts, and the expression codec."""

from perturbdiff.nn._causal_decoder import CausalDecoder, GeneInputs, KeyValueCache
from perturbdiff.nn._codec import ExpressionCodec
from perturbdiff.nn._denoiser import SetDenoiser

__all__ = ["CausalDecoder", "ExpressionCodec", "GeneInputs", "KeyValueCache", "SetDenoiser"]
