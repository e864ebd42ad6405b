"""How far predictions move when nothing but the order of genes changes.

N cells, G genes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from anndata import AnnData
from jaxtyping import Float

from perturbdiff._errors import ConfigError
from perturbdiff._random import gene_lanes, stream_key, uniform
from perturbdiff._typing import OrderName
from perturbdiff.config import DecoderConfig
from perturbdiff.data import Registry
from perturbdiff.metrics import energy_distance, fit_projection
from perturbdiff.model._causal_baseline import CausalBaseline
from perturbdiff.model._set_diffusion import SetDiffusion

_AXES = 30

Answers = dict[str, Float[np.ndarray, "cells genes"]]


def order_sensitivity(
    model: SetDiffusion | CausalBaseline,
    adata: AnnData,
    *,
    ask: Mapping[str, Any],
    fit: Mapping[str, Any] | None = None,
    orders: Sequence[OrderName] = ("vocabulary", "random", "coexpression"),
    seeds: Sequence[int] = (0, 1),
) -> dict[str, Any]:
    """How far predictions move when the order of genes changes, beside the spread of seeds.

    One model is fitted an order, from the same first weights, seed and data, and asked the same
    question with randomness that belongs to genes by name. A set diffusion model is given the file
    with its genes in another order, which is all the order that it could know.

    Parameters
    ----------
    model
        Says which kind of model, and what the columns of the file mean; it is not changed.
    adata
        Cells to fit on and to ask about.
    ask
        Settings of ``predict``: ``perturbations``, ``contexts``, ``n_cells``.
    fit
        Settings of ``fit``: ``holdout``, ``n_top_genes``, ``network``, ``train``, ``options``.
    orders
        Orders to compare.
    seeds
        Seeds to compare under the first order; the first seed is that of all orders.

    Returns
    -------
    ``"orders"`` and ``"seeds"``: the mean over pairs of the ``mean_shift_difference`` (absolute
    difference of mean log1p values, over genes and conditions) and of the ``energy_distance``
    between predicted populations, in principal axes of all of them.

    Raises
    ------
    ConfigError
        With fewer than two orders or two seeds.
    """
    for name, values in (("orders", orders), ("seeds", seeds)):
        if len(set(values)) < 2:
            raise ConfigError(name, list(values), rule="must be at least two to compare")
    registry = replace(model.registry, genes=(), gene_mean=(), gene_scale=())

    def predicted(order: OrderName, seed: int) -> Answers:
        file, settings = adata, dict(fit or {})
        if isinstance(model, CausalBaseline):
            network = settings.pop("network", None) or DecoderConfig()
            settings["network"] = replace(network, order=order)
        else:
            file = _in_order(adata, registry, order)
        fresh = type(model)(registry).fit(file, seed=seed, **settings)
        return _by_condition(fresh.predict(file, seed=seeds[0], **ask), registry)

    first = predicted(orders[0], seeds[0])
    by_order = [first, *(predicted(order, seeds[0]) for order in orders[1:])]
    by_seed = [first, *(predicted(orders[0], seed) for seed in seeds[1:])]
    return {
        "model": model.kind,
        "compared": {"orders": list(orders), "seeds": list(seeds)},
        "orders": _spread(by_order),
        "seeds": _spread(by_seed),
    }


def _in_order(adata: AnnData, registry: Registry, order: OrderName) -> AnnData:
    """The file with its genes in another order."""
    if order == "vocabulary":
        return adata
    key = torch.tensor([stream_key(0, "order of the file", order)])
    place = uniform(key, gene_lanes([str(name) for name in adata.var_names]))[0]
    return adata[:, place.argsort().numpy()].copy()


def _by_condition(pred: AnnData, registry: Registry) -> Answers:
    """Log1p values of each condition, genes sorted by name."""
    keys = [registry.perturbation_key, *registry.covariate_keys]
    genes = np.argsort(pred.var_names.to_numpy(dtype=str), kind="stable")
    groups = pred.obs.groupby(keys, observed=True, sort=True).indices
    return {
        str(name): pred.X[rows].toarray()[:, genes].astype(np.float64)
        for name, rows in groups.items()
    }


def _spread(answers: Sequence[Answers]) -> dict[str, float]:
    """Mean difference over pairs of answers and conditions."""
    everything = np.concatenate([cells for answer in answers for cells in answer.values()])
    project = fit_projection(everything, n_axes=_AXES)
    shifts, energies = [], []
    for left, right in combinations(answers, 2):
        for name, cells in left.items():
            shifts.append(np.abs(cells.mean(0) - right[name].mean(0)).mean())
            energies.append(energy_distance(project(cells), project(right[name]), unbiased=False))
    return {
        "mean_shift_difference": float(np.mean(shifts)),
        "energy_distance": float(np.mean(energies)),
    }
