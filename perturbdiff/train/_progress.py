"""One bar for each run, in steps."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from perturbdiff._optional import progress_bars


class StepBar(Callback):
    """A bar of optimiser steps with the latest losses beside it.

    Lightning's own bar counts epochs, which a run of a fixed number of steps has no number of.

    Parameters
    ----------
    title
        What is being trained.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._bar: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._bar = progress_bars()(
                total=trainer.max_steps, initial=trainer.global_step, desc=self.title, unit="step"
            )

    def on_train_batch_end(  # noqa: PLR0917 - the signature is Lightning's
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._bar is not None:
            self._bar.set_postfix(self._losses(trainer), refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.set_postfix(self._losses(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def _losses(trainer: Trainer) -> dict[str, str]:
        shown = {"loss": "loss", "val_loss": "held out"}
        metrics = trainer.callback_metrics
        return {words: f"{float(metrics[k]):.3f}" for k, words in shown.items() if k in metrics}
