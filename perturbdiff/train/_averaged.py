"""What the Lightning tasks share: averaged weights, optimiser, checkpoints that know their run."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from perturbdiff.config import TrainConfig
from perturbdiff.train._checkpoint import KEY, refuse_other_run


class AveragedTask(LightningModule):
    """A network, its averaged weights and its optimiser.

    Whatever is random belongs to the step, so a resumed run is the same run.

    Parameters
    ----------
    config
        Loss and optimiser.
    seed
        Seed of the first weights and of all noise.
    settings
        Everything that makes a run the run it is, by name; a checkpoint must agree with it.
    """

    averaged: nn.Module

    def __init__(self, config: TrainConfig, *, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.settings = dict(settings)

    @property
    @abstractmethod
    def learner(self) -> nn.Module:
        """The network whose weights are trained."""

    @abstractmethod
    def total_loss(self, network: nn.Module, batch: Any, stream: str) -> Tensor:
        """Loss of a batch, with randomness named by ``stream``."""

    def average(self) -> Any:
        """A copy of the network that is not trained but follows."""
        return copy.deepcopy(self.learner).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step; its noise is a function of seed and step, so a resumed run is the same run."""
        stream = f"train {self.global_step} {self.global_rank}"
        total = self.total_loss(self.learner, batch, stream)
        self.log("loss", total, prog_bar=True, batch_size=len(batch.context.mask))
        return total

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss of the averaged weights on held-out populations, at the same noise every time."""
        total = self.total_loss(self.averaged, batch, f"validation {batch_idx}")
        size = len(batch.context.mask)
        self.log("val_loss", total, prog_bar=True, batch_size=size, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the averaged weights; young averages follow faster."""
        step = self.global_step
        keep = min(self.config.ema_decay, step / (step + 9))
        with torch.no_grad():
            for mean, now in zip(
                self.averaged.parameters(), self.learner.parameters(), strict=True
            ):
                mean.lerp_(now, 1 - keep)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what was trained on what, as plain values."""
        checkpoint[KEY] = {**self.settings, "data": self._data()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with another network, other settings, another seed or other cells.

        Raises
        ------
        TrainingError
            When the checkpoint belongs to another run; names the first difference.
        """
        refuse_other_run(checkpoint, {**self.settings, "data": self._data()})

    def _data(self) -> str | None:
        """Fingerprint of the cells, where there is a data module of ours."""
        module = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        return getattr(module, "digest", None)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with linear warm-up; averaging of the weights stands in for a decay."""
        optimizer = torch.optim.AdamW(
            self.learner.parameters(),
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
