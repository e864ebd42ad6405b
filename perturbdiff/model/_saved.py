"""What a fitted model is made of, as plain values and tensors, and back.

Of the training cells only means, variances and numbers of cells per condition are kept; what the
priors learned from single control cells is kept as coefficients.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perturbdiff.config import NetworkConfig, TrainConfig
from perturbdiff.data import Condition, Registry
from perturbdiff.model._bundle import Parts
from perturbdiff.model._fitted import Fitted, Responding
from perturbdiff.model._latent import Vocabulary
from perturbdiff.model._learning import new_task
from perturbdiff.model._training_data import prior_features
from perturbdiff.nn import ExpressionCodec
from perturbdiff.prior import Baseline, EffectPrior, MixtureLogRatio
from perturbdiff.prior._carried import ClassifierCache
from perturbdiff.prior._dispersion import ResponseDispersion
from perturbdiff.prior._state import summaries_from_state, summaries_to_state

_ARRAYS = ("mean", "loadings")
_NUMBERS = ("dependence", "n_shown", "steps")


def fitted_parts(
    fitted: Responding, network: nn.Module, *, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors of a fitted model.

    Parameters
    ----------
    fitted
        What was learnt.
    network
        Its network.
    settings
        More plain values, the shape of the network among them.

    Returns
    -------
    Contents of ``settings.json`` and ``prior.json``, and tensors by name.
    """
    prior = without_cells(fitted.prior.state(), fitted.mixture)
    plain, arrays = _apart(prior)
    tensors = {
        **prefixed("denoiser", network.state_dict()),
        **prefixed("codec", fitted.codec.state_dict()),
        **prefixed("prior", _tensors(arrays)),
        **prefixed("dispersion", _tensors(vars(fitted.dispersion))),
        **_tensors({name: getattr(fitted, name) for name in _ARRAYS}),
    }
    numbers = {name: getattr(fitted, name) for name in _NUMBERS}
    return {"settings": {**settings, **numbers}, "prior": plain}, tensors


def diffusion_parts(fitted: Fitted) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors of a fitted set diffusion model."""
    settings = {"network": asdict(fitted.network), "precision": fitted.precision}
    return fitted_parts(fitted, fitted.denoiser, settings=settings)


def restore_diffusion(
    registry: Registry, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Fitted:
    """The model that :func:`diffusion_parts` was taken from; nothing is fitted again.

    Parameters
    ----------
    registry
        Names that it was fitted with.
    plain, tensors
        Its parts.

    Returns
    -------
    A model on the CPU.
    """
    shared = restore_shared(registry, plain, tensors)
    network = NetworkConfig(**plain["settings"]["network"])
    denoiser = new_task(shared["vocabulary"], network, TrainConfig(), seed=0).averaged.eval()
    fitted = Fitted(network=network, denoiser=denoiser, **shared)
    precision = plain["settings"].get("precision", "float32")
    if precision != "float32":
        fitted = fitted.lowered(precision)
    fitted.denoiser.load_state_dict(under("denoiser", tensors))
    return fitted


def restore_shared(
    registry: Registry, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What every fitted model holds beside its network, by name."""
    settings = plain["settings"]
    state = {**plain["prior"], **_numpy(under("prior", tensors))}
    classifiers = _classifiers(state)
    prior = EffectPrior.from_state(state, classifiers=classifiers)
    features = prior_features(registry.features)
    conditions = [Condition(c.members, c.context.covariates) for c in prior.conditions]
    return {
        "codec": ExpressionCodec(**under("codec", tensors)),
        "vocabulary": Vocabulary.of(registry, conditions, features),
        "prior": prior,
        "mixture": MixtureLogRatio(classifiers=classifiers).fit(
            prior.conditions, features=features
        ),
        "dispersion": ResponseDispersion(**_numpy(under("dispersion", tensors))),
        "mean": tensors["mean"].numpy(),
        "loadings": tensors["loadings"].numpy(),
        **{name: settings[name] for name in _NUMBERS},
    }


def baseline_parts(baseline: Baseline) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors of a fitted baseline, without any cell."""
    if isinstance(baseline, EffectPrior):
        mixture = MixtureLogRatio(classifiers=baseline.classifiers).fit(baseline.conditions)
        plain, arrays = _apart(without_cells(baseline.state(), mixture))
    else:
        known = baseline if isinstance(baseline, MixtureLogRatio) else None
        plain, arrays = _apart(without_cells(summaries_to_state(baseline.conditions), known))
    return {"prior": plain}, prefixed("prior", _tensors(arrays))


def restore_baseline(
    kind: type[Baseline], registry: Registry, parts: Parts, *, seed: int
) -> Baseline:
    """The baseline that :func:`baseline_parts` was taken from."""
    state = {**parts.plain["prior"], **_numpy(under("prior", parts.arrays))}
    classifiers = _classifiers(state)
    if issubclass(kind, EffectPrior):
        return kind.from_state(state, classifiers=classifiers)
    made = kind(classifiers=classifiers) if issubclass(kind, MixtureLogRatio) else kind()
    features = prior_features(registry.features)
    return made.fit(summaries_from_state(state), features=features, seed=seed)


def without_cells(state: Mapping[str, Any], mixture: MixtureLogRatio | None) -> dict[str, Any]:
    """State of a prior; what was learnt from single control cells is kept as coefficients."""
    kept = dict(state)
    kept["context.axes"] = kept["context.axes"][:0]
    kept["context.kept"] = [0 for _ in kept["context.kept"]]
    known = [] if mixture is None else mixture.classifiers.state(mixture.conditions)
    kept["classifiers"] = len(known)
    for number, classifier in enumerate(known):
        kept |= {f"classifier.{number}.{key}": value for key, value in classifier.items()}
    return kept


def _classifiers(state: Mapping[str, Any]) -> ClassifierCache:
    return ClassifierCache.from_state(
        [under(f"classifier.{number}", state) for number in range(state["classifiers"])]
    )


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Plain values, and arrays."""
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    return {key: value for key, value in state.items() if key not in arrays}, arrays


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def prefixed(prefix: str, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries with a name before theirs."""
    return {f"{prefix}.{key}": value for key, value in entries.items()}


def under(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with this name before theirs, without it."""
    start = f"{prefix}."
    return {key.removeprefix(start): v for key, v in entries.items() if key.startswith(start)}
