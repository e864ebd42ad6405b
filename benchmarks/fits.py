"""One fit of the model and what it predicts, with times, kept on disk."""

import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from benchmarks.cache import Arrays, Cache, key_digest, source_files, source_hash
from benchmarks.environment import DECISIVE, environment, versions
from perturbdiff._constants import UNS_KEY
from perturbdiff.config import NetworkConfig, SampleConfig, TrainConfig
from perturbdiff.data import Registry
from perturbdiff.data._library import LIBRARY_SIZE
from perturbdiff.model import SetDiffusion
from perturbdiff.train import TrainerOptions

SOURCE = source_hash(source_files())
"""Of the code that this process runs: read once, since files may be edited while it does."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the model is fitted and asked."""

    steps: int | None = None
    n_top_genes: int | None = 2000
    n_cells: int = 512
    accelerator: str = "auto"
    distribution_weight: float | None = None
    network_is_used: bool = True

    @property
    def train(self) -> TrainConfig:
        """Settings of training; ``steps`` replaces only the most steps, and looks if need be."""
        usual = TrainConfig()
        if self.distribution_weight is not None:
            usual = replace(usual, distribution_weight=self.distribution_weight)
        if self.steps is None:
            return usual
        return replace(usual, max_steps=self.steps, check_every=min(usual.check_every, self.steps))

    def key(self) -> dict[str, Any]:
        """All that an answer depends on beside the data and the seed."""
        return {
            "train": asdict(self.train),
            "network": asdict(NetworkConfig()),
            "sample": asdict(SampleConfig()),
            "n_top_genes": self.n_top_genes,
            "n_cells": self.n_cells,
            "accelerator": self.accelerator,
            "network_is_used": self.network_is_used,
            "source": SOURCE,
            "packages": versions(DECISIVE),
        }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is held out and asked."""

    label: str
    holdout: Any
    perturbations: tuple[str, ...]
    contexts: tuple[Mapping[str, str], ...] | None
    split_hash: str
    doses: tuple[float, ...] | None = None


def timed_fit(
    model: SetDiffusion, adata: AnnData, *, holdout: Any, recipe: Recipe, seed: int
) -> float:
    """Fit a model; seconds that it took."""
    began = time.perf_counter()
    model.fit(
        adata,
        holdout=holdout,
        n_top_genes=recipe.n_top_genes,
        seed=seed,
        train=recipe.train,
        options=TrainerOptions(progress=False, accelerator=recipe.accelerator),
    )
    return time.perf_counter() - began


def timed_prediction(model: SetDiffusion, adata: AnnData, **question: Any) -> tuple[AnnData, float]:
    """Predicted cells, and seconds that they took."""
    began = time.perf_counter()
    pred = model.predict(adata, **question)
    return pred, time.perf_counter() - began


def fit_and_predict(
    adata: AnnData, wanted: Wanted, *, registry: Registry, recipe: Recipe, seed: int
) -> tuple[dict[str, Any], Arrays]:
    """Fit without the held-out cells, predict them, and say how long both took."""
    model = SetDiffusion(registry)
    with listening() as lines:
        seconds_fit = timed_fit(model, adata, holdout=wanted.holdout, recipe=recipe, seed=seed)
        if not recipe.network_is_used:
            model.fitted.dependence = 0.0
        pred, seconds_predict = timed_prediction(
            model,
            adata,
            perturbations=wanted.perturbations,
            contexts=wanted.contexts,
            n_cells=recipe.n_cells,
            seed=seed,
            **({} if wanted.doses is None else {"doses": wanted.doses}),
        )
    if model.split_hash != wanted.split_hash:
        msg = "The model was fitted on another split than the one to be scored."
        raise RuntimeError(msg)
    plain = {
        "seconds_fit": seconds_fit,
        "seconds_predict": seconds_predict,
        "n_predicted": pred.n_obs,
        "steps": getattr(model.fitted, "steps", None),
        "dependence": float(model.fitted.dependence),
        "nfe": int(pred.uns[UNS_KEY]["nfe"]),
        "n_genes": pred.n_vars,
        "genes": list(pred.var_names),
        "labels": [str(label) for label in pred.obs[registry.perturbation_key]],
        "peak_memory_mb": peak_memory_mb(),
        "log": lines,
        "made_with": environment(),
    }
    cells = sp.csr_array(pred.X)
    arrays = {
        "data": cells.data,
        "indices": cells.indices.astype(np.int64),
        "indptr": cells.indptr.astype(np.int64),
        "library_size": pred.obs[registry.library_size_key or LIBRARY_SIZE].to_numpy(np.float64),
    }
    return plain, arrays


def kept_fit(
    cache: Cache,
    adata: AnnData,
    wanted: Wanted,
    *,
    registry: Registry,
    data_checksum: str,
    recipe: Recipe,
    seed: int,
) -> tuple[dict[str, Any], Arrays, str]:
    """The fit from the cache, or a new one; also its key, for whatever is derived from it."""
    key = {
        "data": data_checksum,
        "split": wanted.split_hash,
        "asked": [list(wanted.perturbations), [dict(c) for c in wanted.contexts or ()]],
        "registry": key_digest(registry.to_json()),
        "seed": seed,
        **recipe.key(),
    }
    plain, arrays = cache.get(
        f"fit {wanted.label} {seed}",
        key,
        lambda: fit_and_predict(adata, wanted, registry=registry, recipe=recipe, seed=seed),
    )
    return plain, arrays, key_digest(key)


def predicted_cells(plain: Mapping[str, Any], arrays: Arrays) -> np.ndarray:
    """Predicted log1p values, cells by genes."""
    shape = (int(plain["n_predicted"]), int(plain["n_genes"]))
    parts = (arrays["data"], arrays["indices"], arrays["indptr"])
    return np.asarray(sp.csr_array(parts, shape=shape).toarray(), dtype=np.float32)


def rows_of(plain: Mapping[str, Any], label: str) -> np.ndarray:
    """Rows of the predicted cells of one perturbation."""
    return np.flatnonzero(np.array(plain["labels"], dtype=object) == label)


def peak_memory_mb() -> float:
    """Most memory that this process held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else 1024**2)


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the package logs in the meantime."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener = logging.getLogger("perturbdiff"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def summary(fits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Times of fits: the longest and the mean."""
    fit = [float(one["seconds_fit"]) for one in fits]
    predict = [float(one["seconds_predict"]) for one in fits]
    return {
        "n_fits": len(fits),
        "seconds_fit_longest": max(fit),
        "seconds_fit_mean": sum(fit) / len(fit),
        "seconds_predict_longest": max(predict),
        "seconds_predict_mean": sum(predict) / len(predict),
        "peak_memory_mb": max(float(one["peak_memory_mb"]) for one in fits),
    }
