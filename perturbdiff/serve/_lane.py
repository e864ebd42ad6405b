"""Requests that run as a whole, in a thread of their own: constrained ones, rankings, the sibling.

Constraints change the course at every step, and the autoregressive sibling goes gene by gene, so
these do not share denoising batches. They stop at the next call of the network when cancelled.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from threading import local
from typing import Any

from anndata import AnnData
from torch import nn

from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.model import CausalBaseline, SetDiffusion
from perturbdiff.model._predictor import Predictor
from perturbdiff.serve._jobs import Cancelled, Token
from perturbdiff.serve._reading import uploaded
from perturbdiff.serve._schemas import PredictRequest, RankRequest
from perturbdiff.tl import predict, rank_perturbations


class Lane:
    """Answers whole requests with the model's own functions.

    Parameters
    ----------
    model
        Model; its weights are shared, what it remembers is not.
    most_mb
        Largest request.
    """

    def __init__(self, model: Predictor, *, most_mb: float) -> None:
        self.model, self._most_mb = _own_copy(model), most_mb
        self._current = local()
        for network, names in _networks(self.model):
            for name in names:
                setattr(network, name, self._watched(getattr(network, name)))

    def predict(self, request: PredictRequest, token: Token) -> AnnData:
        """Predicted cells.

        Raises
        ------
        PerturbDiffError
            When the question makes no sense.
        Cancelled
            When it was stopped.
        """
        with self._under(token):
            return predict(
                uploaded(request, self.model, most_mb=self._most_mb),
                self.model,
                perturbations=request.perturbations,
                contexts=request.contexts,
                n_cells=request.n_cells,
                seed=request.seed,
                **request.options,
            )

    def rank(self, request: RankRequest, token: Token) -> list[dict[str, Any]]:
        """One row a condition, the best first.

        Raises
        ------
        PerturbDiffError
            When the question makes no sense, or the model does not rank.
        Cancelled
            When it was stopped.
        """
        if not isinstance(self.model, SetDiffusion):
            kind = type(self.model).__name__
            rule = "cannot rank perturbations; a set diffusion model can"
            raise ConfigError("model", kind, rule=rule)
        file = uploaded(request, self.model, most_mb=self._most_mb)
        with self._under(token):
            ranked = rank_perturbations(
                self.model._reservoir if file is None else file,
                self.model,
                target=request.wishes(),
                perturbations=request.perturbations,
                contexts=request.contexts,
                n_cells=request.n_cells,
                seed=request.seed,
                doses=request.doses,
                times=request.times,
                sample=request.sampling,
                copy=True,
            )
        assert ranked is not None  # a copy was asked for
        rows: list[dict[str, Any]] = ranked.uns["perturbation_ranking"].to_dict("records")
        return rows

    @contextmanager
    def _under(self, token: Token) -> Iterator[None]:
        self._current.token = token
        try:
            yield
        finally:
            self._current.token = None

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which stops a request of this thread that was cancelled."""

        def call(*args: Any, **kwargs: Any) -> Any:
            token: Token | None = getattr(self._current, "token", None)
            if token is not None:
                if token.stop.is_set():
                    raise Cancelled
                token.calls += 1
            return function(*args, **kwargs)

        return call


def check_options(model: Predictor, options: Mapping[str, Any]) -> None:
    """Refuse settings that this kind of model does not have.

    Raises
    ------
    UnknownKeyError
        With the nearest that it has.
    """
    known = list(signature(model.predict).parameters)
    for name in options:
        if name not in known:
            kind = f"{type(model).__name__}.predict"
            raise UnknownKeyError(kind, name, known=known)


def _own_copy(model: Predictor) -> Predictor:
    """The model with memories of its own, so that threads do not share them."""
    own = copy.copy(model)
    if isinstance(own, SetDiffusion):
        fitted = own.fitted
        own._fitted = replace(fitted, denoiser=copy.copy(fitted.denoiser))
    elif isinstance(own, CausalBaseline):
        own._fitted = replace(own.fitted, decoder=copy.copy(own.fitted.decoder))
    return own


def _networks(model: Predictor) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """What is called at every step, or for every gene."""
    if isinstance(model, SetDiffusion):
        return [(model.fitted.denoiser, ("forward",))]
    if isinstance(model, CausalBaseline):
        return [(model.fitted.decoder, ("prefill", "decode"))]
    return []
