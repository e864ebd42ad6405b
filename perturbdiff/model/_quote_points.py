"""Where a probe goes around the two models, and their shapes."""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from perturbdiff._batch import Context
from perturbdiff.model._response import PlanCache
from perturbdiff.nn import KeyValueCache
from perturbdiff.profiling import (
    CONDITION,
    CONTROL,
    DENOISE,
    GENES,
    POST,
    STEPS,
    DecoderShape,
    DenoiserShape,
    Stage,
    Subject,
)

if TYPE_CHECKING:
    from perturbdiff.model._causal_fitted import CausalFitted
    from perturbdiff.model._fitted import Fitted, Responding
    from perturbdiff.model._network_predictor import NetworkPredictor


def diffusion_points(fitted: "Fitted", kind: str) -> Subject:
    """Phases of a set diffusion model.

    Everything up to the latent responses is condition encoding, but for the control stream and the
    run of the sampler; behind it genes and counts are made, and then the answer.
    """
    network = fitted.denoiser.network
    stages = [
        Stage(owner=fitted, name="respond", phase=GENES, then=POST),
        Stage(owner=fitted, name="task", phase=CONDITION),
        Stage(owner=fitted.sampler, name="sample", phase=DENOISE),
        Stage(owner=network, name="remember", phase=CONTROL, cache=_encoded),
        Stage(owner=fitted.denoiser, name="forward", network=True, cache=_encoded),
    ]
    return _subject(fitted, [fitted.denoiser, fitted.codec], kind=kind, stages=stages)


def causal_points(fitted: "CausalFitted", kind: str) -> Subject:
    """Phases of the autoregressive model: prefill is the encoding of control cells."""
    sampler, decoder = fitted.sampler, fitted.decoder
    stages = [
        Stage(owner=fitted, name="written", phase=GENES, then=POST),
        Stage(owner=fitted, name="respond", phase=GENES, then=POST),
        Stage(owner=fitted, name="task", phase=CONDITION),
        Stage(owner=sampler, name="counts", phase=STEPS),
        Stage(owner=sampler, name="prefilled", phase=CONTROL, cache=_kept),
        Stage(owner=decoder, name="decode", network=True, cache=_kept),
        Stage(owner=decoder, name="bin_logits", network=False),
    ]
    networks: list[nn.Module] = [decoder, fitted.codec]
    networks += [] if fitted.draft is None else [fitted.draft]
    return _subject(fitted, networks, kind=kind, stages=stages)


def _subject(
    fitted: "Responding", networks: list[nn.Module], *, kind: str, stages: list[Stage]
) -> Subject:
    weights = [x for one in networks for x in (*one.parameters(), *one.buffers())]
    trained = next(iter(networks[0].parameters()))

    def forget() -> None:
        fitted.plans = PlanCache()
        vars(fitted).pop("sampler", None)

    return Subject(
        kind=kind,
        device=trained.device,
        dtype=precision_of(fitted),
        stages=stages,
        weights=weights,
        n_parameters=sum(p.numel() for p in networks[0].parameters()),
        forget=forget,
    )


def precision_of(fitted: "Responding") -> str:
    """Numbers that most products of the network are of, as rates of the machine are named."""
    return str(getattr(fitted, "precision", "float32"))


def _encoded(arguments: tuple[Any, ...], result: Any) -> Iterable[Tensor]:
    """Encoded control cells among what a denoiser is given or makes."""
    contexts = [x for x in (*arguments, result) if isinstance(x, Context)]
    return [x.memory for x in contexts if x.memory is not None]


def _kept(arguments: tuple[Any, ...], result: Any) -> Iterable[Tensor]:
    """Keys and values among what a decoder is given or makes."""
    caches = [x for x in (*arguments, result) if isinstance(x, KeyValueCache)]
    return [x for cache in caches for x in (cache.keys, cache.values)]


def denoiser_shape(fitted: "Fitted") -> DenoiserShape:
    """Shape of the network, as its operations are counted by hand."""
    return DenoiserShape(
        width=fitted.network.width,
        n_blocks=fitted.network.n_blocks,
        expansion=fitted.network.expansion,
        n_axes=fitted.codec.cell_axes.shape[1],
        n_latent=fitted.codec.encoder.shape[1],
        n_controls=fitted.n_shown,
        n_features=fitted.vocabulary.n_features,
    )


def decoder_shape(fitted: "CausalFitted") -> DecoderShape:
    """Shape of the network, as its operations are counted by hand."""
    network = fitted.network
    return DecoderShape(
        width=network.width,
        n_blocks=network.n_blocks,
        hidden=network.hidden,
        control_expansion=network.control_expansion,
        n_axes=fitted.codec.cell_axes.shape[1],
        n_latent=fitted.codec.encoder.shape[1],
        n_controls=fitted.n_shown,
        n_genes=len(fitted.lanes),
        gene_width=network.gene_width,
        n_bins=fitted.decoder.n_bins,
        n_nodes=len(fitted.decoder.node),
        n_features=fitted.vocabulary.n_features,
        draws_genes=fitted.order.drawn,
    )


def twin_of(model: "NetworkPredictor[Any, Any, Any]") -> "NetworkPredictor[Any, Any, Any]":
    """A model with the same weights that keeps nothing in common with what the first has kept.

    Its network is another object around the same parameters, so that what is put around it is not
    around the first.
    """
    twin, fitted = copy(model), model.fitted
    name = "denoiser" if hasattr(fitted, "denoiser") else "decoder"
    twin._fitted = replace(fitted, **{name: copy(getattr(fitted, name))})
    return twin
