"""From options to settings, and from settings to a fitted model."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perturbdiff.config import load_run

if TYPE_CHECKING:
    from anndata import AnnData

    from perturbdiff.config import RunConfig
    from perturbdiff.model import SetDiffusion


def settings_of(
    config: str | None, overrides: Sequence[str] | None, chosen: Mapping[str, Any]
) -> "RunConfig":
    """The settings, with flags over overrides over the file."""
    flags = [f"{name}={json.dumps(value)}" for name, value in chosen.items() if value is not None]
    return load_run(config, overrides=[*(overrides or ()), *flags])


def fitted(adata: "AnnData", run: "RunConfig", options: Mapping[str, Any]) -> "SetDiffusion":
    from perturbdiff.model import SetDiffusion
    from perturbdiff.train import TrainerOptions

    tune()
    return SetDiffusion.from_anndata(adata, **run.data.columns).fit(
        adata,
        holdout=run.data.holdout or None,
        n_top_genes=run.data.n_top_genes,
        seed=run.seed,
        network=run.model,
        train=run.train,
        options=TrainerOptions(progress=sys.stderr.isatty() or sys.stdout.isatty(), **options),
    )


def tune() -> None:
    """Faster float32 products, for our own process only."""
    import torch

    torch.set_float32_matmul_precision("medium")
