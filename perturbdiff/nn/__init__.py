"""Networks: the set denoiser, the causal decoder, their parts, and the expression codec."""

from perturbdiff.nn._causal_decoder import CausalDecoder
from perturbdiff.nn._cell_cache import GeneInputs, KeyValueCache
from perturbdiff.nn._codec import ExpressionCodec
from perturbdiff.nn._denoiser import SetDenoiser
from perturbdiff.nn._draft_decoder import DraftDecoder
from perturbdiff.nn._precision import require_precision

__all__ = [
    "CausalDecoder",
    "DraftDecoder",
    "ExpressionCodec",
    "GeneInputs",
    "KeyValueCache",
    "SetDenoiser",
    "require_precision",
]
