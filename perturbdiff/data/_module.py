"""Lightning data module over populations of cells."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from perturbdiff._batch import SetBatch
from perturbdiff.config import TrainConfig
from perturbdiff.data._sets import EpochSampler, Population, SetDataset

_VALIDATION_SETS = 128


class SetDataModule(LightningDataModule):
    """Batches of sets for training, and the same few for every look at held-out populations.

    Parameters
    ----------
    train
        Populations to learn from.
    validation
        Populations of an inner fold; empty for none.
    config
        Sizes.
    seed
        Of all draws.
    """

    def __init__(
        self,
        train: Sequence[Population],
        validation: Sequence[Population] = (),
        *,
        config: TrainConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config or TrainConfig()
        self.train = SetDataset(train, self.config, seed=seed)
        self.validation = SetDataset(validation, self.config, seed=seed + 1) if validation else None

    def train_dataloader(self) -> DataLoader[SetBatch]:
        """``check_every`` batches an epoch; each process takes its own sets."""
        trainer = self.trainer
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        length = self.config.check_every * self.config.n_sets * world_size
        return self._loader(
            self.train, sampler=EpochSampler(length, rank=rank, world_size=world_size)
        )

    def val_dataloader(self) -> DataLoader[SetBatch] | list[Any]:
        """The same sets at every look."""
        if self.validation is None:
            return []
        return self._loader(self.validation, sampler=range(_VALIDATION_SETS))

    def _loader(self, sets: SetDataset, *, sampler: Any) -> DataLoader[SetBatch]:
        # A generator of its own: without one, loaders draw from the global random state.
        return DataLoader(
            sets,
            batch_size=self.config.n_sets,
            sampler=sampler,
            collate_fn=SetBatch.join,
            generator=torch.Generator(),
        )
