"""From options to settings, and from settings to a fitted model."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perturbdiff._errors import ConfigError
from perturbdiff.config import load_run

if TYPE_CHECKING:
    from anndata import AnnData

    from perturbdiff.config import RunConfig, SampleConfig
    from perturbdiff.model import SetDiffusion


def settings_of(
    config: str | None, overrides: Sequence[str] | None, chosen: Mapping[str, Any]
) -> "RunConfig":
    """The settings, with flags over overrides over the file."""
    flags = [f"{name}={json.dumps(value)}" for name, value in chosen.items() if value is not None]
    return load_run(config, overrides=[*(overrides or ()), *flags])


def sampling(overrides: Sequence[str] | None) -> "SampleConfig":
    """The settings of sampling; any other would be without effect where nothing is learnt."""
    for text in overrides or ():
        if text.partition("=")[0].split(".")[0].strip() != "sample":
            rule = "only settings of sample have a say here, such as sample.n_steps=10"
            raise ConfigError("--set", text, rule=rule)
    return load_run(None, overrides=[*(overrides or ())]).sample


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
