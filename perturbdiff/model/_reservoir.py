"""Control cells that are kept with a model, so that it answers by context alone.

N cells, G genes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from anndata import AnnData
from torch import Tensor

from perturbdiff._random import stream_key, uniform
from perturbdiff.data import Cells, Condition, Registry, decode


def draw_reservoir(controls: Cells, n_each: int, *, seed: int) -> Cells:
    """At most so many control cells of each context, in the order of their names.

    Parameters
    ----------
    controls
        Control cells.
    n_each
        Most cells of a context.
    seed
        Seed of the draw, which does not depend on the other contexts.

    Returns
    -------
    A part of the cells.
    """
    chosen = []
    for context, rows in controls.controls().items():
        key = torch.tensor([stream_key(seed, "reservoir", *context)])
        order = uniform(key, torch.arange(len(rows)))[0].argsort(stable=True)
        chosen.append(rows[np.sort(order[:n_each].numpy())])
    return controls.take(np.sort(np.concatenate(chosen)))


def reservoir_tensors(cells: Cells, registry: Registry) -> dict[str, Tensor]:
    """Counts, library sizes and contexts of control cells as tensors; names are left out."""
    assert cells.counts is not None  # a model that makes cells was fitted on counts
    assert cells.library_size is not None
    context = np.array([cells.distinct[number].context for number in cells.condition], dtype=object)
    codes = [
        vocabulary.encode(context[:, number].tolist())
        for number, vocabulary in enumerate(registry.covariates)
    ]
    table = np.stack(codes, axis=1) if codes else np.zeros((len(cells), 0), np.int64)
    return {
        "data": torch.from_numpy(cells.counts.data.astype(np.int64)),
        "indices": torch.from_numpy(cells.counts.indices.astype(np.int64)),
        "indptr": torch.from_numpy(cells.counts.indptr.astype(np.int64)),
        "library_size": torch.from_numpy(cells.library_size.astype(np.float64)),
        "context": torch.from_numpy(table),
    }


def reservoir_listing(cells: Cells) -> list[dict[str, Any]]:
    """Number of cells of each context, for the manifest."""
    return [
        {"context": list(context), "cells": len(rows)} for context, rows in cells.controls().items()
    ]


def reservoir_file(tensors: Mapping[str, Tensor], registry: Registry) -> AnnData:
    """The control cells as a file like the training file, on the genes of the model."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    n_cells = len(arrays["library_size"])
    matrix = sp.csr_array(
        (arrays["data"], arrays["indices"], arrays["indptr"]), shape=(n_cells, len(registry.genes))
    )
    contexts = [_labels(codes, registry) for codes in arrays["context"].tolist()]
    distinct = sorted(set(contexts))
    place = {context: number for number, context in enumerate(distinct)}
    return decode(
        matrix,
        arrays["library_size"],
        registry,
        conditions=[Condition((), context) for context in distinct],
        condition=np.array([place[context] for context in contexts], dtype=np.int64),
    )


def _labels(codes: Sequence[int], registry: Registry) -> tuple[str, ...]:
    return tuple(
        vocabulary.levels[code - 1]
        for code, vocabulary in zip(codes, registry.covariates, strict=True)
    )
