"""Lightning task of the set diffusion model.

B sets, S cells, K latent axes.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from perturbdiff._batch import SetBatch
from perturbdiff._errors import TrainingError
from perturbdiff._random import cell_keys, normal
from perturbdiff.config import NetworkConfig, TrainConfig
from perturbdiff.diffusion import (
    Preconditioned,
    denoising_loss,
    energy_distance_loss,
    sample_sigmas,
)
from perturbdiff.nn import SetDenoiser
from perturbdiff.train._seeding import seeded

_LOG_MEAN = -0.5
_LOG_STD = 1.2
_KEY = "perturbdiff"
_MAY_CHANGE = ("max_steps", "patience")  # between an interrupted run and its continuation


class SetDiffusionTask(LightningModule):
    """Denoiser, its averaged weights, loss and optimiser; noise belongs to the step, not the state.

    Parameters
    ----------
    network
        Shape of the denoiser.
    config
        Loss and optimiser.
    n_perturbations, n_features, covariate_sizes
        Vocabulary sizes.
    seed
        Of the first weights and of all noise.
    """

    def __init__(
        self,
        network: NetworkConfig,
        config: TrainConfig | None = None,
        *,
        n_perturbations: int,
        n_features: int = 0,
        covariate_sizes: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config or TrainConfig()
        self.seed = seed
        self._settings: dict[str, Any] = {
            **{f"network.{name}": value for name, value in asdict(network).items()},
            **{f"train.{name}": value for name, value in asdict(self.config).items()},
            "n_perturbations": n_perturbations,
            "n_features": n_features,
            "covariate_sizes": list(covariate_sizes),
            "seed": seed,
        }
        for name in _MAY_CHANGE:
            del self._settings[f"train.{name}"]
        with seeded(seed):
            raw = SetDenoiser(
                network,
                n_perturbations=n_perturbations,
                n_features=n_features,
                covariate_sizes=covariate_sizes,
            )
        self.denoiser = Preconditioned(raw, 1.0)
        self.averaged = copy.deepcopy(self.denoiser).requires_grad_(requires_grad=False)

    def loss(self, denoiser: Preconditioned, batch: SetBatch, stream: str) -> dict[str, Tensor]:
        """Denoising error and distribution term of a batch, with noise named by ``stream``."""
        x0, context = batch.x0, batch.context
        n_sets, n_cells, width = x0.shape
        keys = cell_keys(self.seed, stream, range(n_sets), n_cells=n_cells, device=x0.device)
        sigma = sample_sigmas(keys[:, 0], step=1, log_mean=_LOG_MEAN, log_std=_LOG_STD)
        xt = x0 + sigma[:, None, None] * normal(keys, width)
        x0_hat = denoiser(xt, sigma, context)
        denoising = denoising_loss(
            x0_hat, x0, sigma=sigma, sigma_data=denoiser.sigma_data, mask=context.mask
        )
        distribution = energy_distance_loss(x0_hat, x0, context.mask).mean()
        return {"denoising": denoising, "distribution": distribution}

    def training_step(self, batch: SetBatch, batch_idx: int) -> Tensor:
        """One step; its noise is a function of seed and step, so a resumed run is the same run."""
        parts = self.loss(self.denoiser, batch, f"train {self.global_step} {self.global_rank}")
        total = parts["denoising"] + self.config.distribution_weight * parts["distribution"]
        self.log("loss", total, prog_bar=True, batch_size=len(batch.x0))
        return total

    def validation_step(self, batch: SetBatch, batch_idx: int) -> None:
        """Loss of the averaged weights on held-out populations, at the same noise every time."""
        parts = self.loss(self.averaged, batch, f"validation {batch_idx}")
        total = parts["denoising"] + self.config.distribution_weight * parts["distribution"]
        self.log("val_loss", total, prog_bar=True, batch_size=len(batch.x0), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: SetBatch, batch_idx: int) -> None:
        """Move the averaged weights; young averages follow faster."""
        step = self.global_step
        keep = min(self.config.ema_decay, step / (step + 9))
        with torch.no_grad():
            for mean, now in zip(
                self.averaged.parameters(), self.denoiser.parameters(), strict=True
            ):
                mean.lerp_(now, 1 - keep)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what was trained on what, as plain values."""
        checkpoint[_KEY] = {**self._settings, "data": self._data()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with another network, other settings, another seed or other cells.

        Raises
        ------
        TrainingError
            When the checkpoint belongs to another run; names the first difference.
        """
        written = checkpoint.get(_KEY, {})
        for name, value in {**self._settings, "data": self._data()}.items():
            if written.get(name) != value:
                msg = (
                    f"The checkpoint belongs to another run: {name} was {written.get(name)!r} and "
                    f"is now {value!r}. Give the same settings, or another checkpoint_dir."
                )
                raise TrainingError(msg)

    def _data(self) -> str | None:
        """Fingerprint of the cells, where there is a data module of ours."""
        module = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        return getattr(module, "digest", None)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with linear warm-up; averaging of the weights stands in for a decay."""
        optimizer = torch.optim.AdamW(
            self.denoiser.parameters(),
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        warmup = max(1, self.config.warmup_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
