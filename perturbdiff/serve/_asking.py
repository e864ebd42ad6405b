"""Questions of a client as JSON: what ``tl.predict`` takes, or an error in words."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ConfigError
from perturbdiff.config import DecodeConfig, SampleConfig
from perturbdiff.config._checks import settings_of
from perturbdiff.data._library import LIBRARY_SIZE


def written(question: Mapping[str, Any]) -> bytes:
    """A question as JSON, without what was left out.

    Raises
    ------
    ConfigError
        When something has no form in JSON.
    """
    said = {name: _plain(value) for name, value in question.items() if value is not None}
    try:
        return json.dumps(said).encode()
    except (TypeError, ValueError) as error:
        rule = f"holds something that has no form in JSON ({error})"
        raise ConfigError("question", list(said), rule=rule) from error


def several(given: Any, kind: type) -> list[Any]:
    """One or several as a list."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]


def contexts_of(given: Any) -> list[Any] | None:
    """Contexts, one or several, with their levels as text."""
    if given is None:
        return None
    return [
        {key: str(level) for key, level in one.items()} if isinstance(one, Mapping) else one
        for one in several(given, Mapping)
    ]


def settings(kind: type[Any], name: str, given: object) -> dict[str, Any] | None:
    """Settings of a kind, as plain values."""
    return None if given is None else asdict(settings_of(kind, name, given))


def shared(
    contexts: Any, *, n_cells: Any, seed: Any, doses: Any, times: Any, sample: Any
) -> dict[str, Any]:
    """What every question may name."""
    return {
        "contexts": contexts_of(contexts),
        "n_cells": n_cells,
        "seed": seed,
        "doses": None if doses is None else np.atleast_1d(doses),
        "times": None if times is None else np.atleast_1d(times),
        "sample": settings(SampleConfig, "sample", sample),
    }


def prediction(
    perturbations: Any,
    contexts: Any,
    *,
    decode: Any,
    constraints: Any,
    enforce: Any,
    **others: Any,
) -> dict[str, Any]:
    """What a prediction, or a quote of it, is asked with; the others as they are, or shared."""
    plain = {name: others.pop(name) for name in ("decoding", "missing_genes")}
    return {
        "perturbations": several(perturbations, str),
        **shared(contexts, **others),
        "decode": settings(DecodeConfig, "decode", decode),
        **plain,
        "constraints": constraints_of(constraints),
        "enforce": ways_of(enforce),
    }


def controls_of(adata: AnnData, about: Mapping[str, Any]) -> AnnData:
    """Control cells of a file, without what the model does not read.

    Parameters
    ----------
    adata
        File.
    about
        What the server says of its model: columns, layer, labels of control.
    """
    key, layer = about["perturbation_key"], about["layer"]
    size = about["library_size_key"] or LIBRARY_SIZE
    if key in adata.obs:
        adata = adata[np.isin(adata.obs[key].astype(str), about["control"])]
    columns = [name for name in (key, *about["covariates"], size) if name in adata.obs]
    kept = AnnData(
        X=None if layer is not None and layer in adata.layers else adata.X,
        obs=adata.obs[columns].copy(),
        var=adata.var.copy(),
        layers={layer: adata.layers[layer]} if layer in adata.layers else None,
    )
    if adata.raw is not None:  # how many genes there were may say that some were left out
        none = sp.csr_matrix((kept.n_obs, adata.raw.n_vars), dtype=np.float32)
        kept.raw = AnnData(none, obs=kept.obs, var=adata.raw.var[[]].copy())
    said = adata.uns.get(UNS_KEY)
    if isinstance(said, Mapping):  # what the numbers are
        kept.uns[UNS_KEY] = {name: said[name] for name in ("scale", "reading") if name in said}
    return kept


def constraints_of(given: Any) -> list[dict[str, Any]] | None:
    """Constraints, one or several, in their declared form."""
    from perturbdiff.guidance import as_constraints  # noqa: PLC0415 - slow to import
    from perturbdiff.guidance._json import to_json  # noqa: PLC0415

    if given is None or (isinstance(given, Sequence) and not given):
        return None
    return [to_json(one) for one in as_constraints(given)]


def ways_of(given: Any) -> Any:
    """Ways of enforcing constraints, one or several."""
    from perturbdiff.guidance._enforcement import Way  # noqa: PLC0415 - slow to import
    from perturbdiff.guidance._json import way_to_json  # noqa: PLC0415

    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Sequence):
        return [ways_of(one) for one in given]
    if not isinstance(given, Way):
        rule = "must be the name of a way, or settings such as perturbdiff.Soft()"
        raise ConfigError("enforce", given, rule=rule)
    return way_to_json(given)


def _plain(value: Any) -> Any:
    """Numbers and labels of NumPy and pandas as Python's own."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
