"""Tools on AnnData: ask a model, and score what it answers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perturbdiff.tl._predict import predict
    from perturbdiff.tl._rank import rank_perturbations
    from perturbdiff.tl._response import response, response_genes
    from perturbdiff.tl._score import score
    from perturbdiff.tl._score_constraints import score_constraints
    from perturbdiff.tl._summary import summarise_scores
    from perturbdiff.tl._trajectory import trajectory
    from perturbdiff.tl._uncertainty import uncertainty

_FROM = {
    "predict": "_predict",
    "rank_perturbations": "_rank",
    "response": "_response",
    "response_genes": "_response",
    "score": "_score",
    "score_constraints": "_score_constraints",
    "summarise_scores": "_summary",
    "trajectory": "_trajectory",
    "uncertainty": "_uncertainty",
}

__all__ = [
    "predict",
    "rank_perturbations",
    "response",
    "response_genes",
    "score",
    "score_constraints",
    "summarise_scores",
    "trajectory",
    "uncertainty",
]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"perturbdiff.tl.{_FROM[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
