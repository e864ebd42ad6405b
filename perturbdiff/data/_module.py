"""Lightning data module over populations of cells."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from perturbdiff._batch import SetBatch
from perturbdiff.config import TrainConfig
from perturbdiff.data._sets import EpochSampler, Population, SetDataset


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
        Seed of all draws.
    """

    sets: type[SetDataset] = SetDataset
    n_validation = 128

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
        sets = self.sets
        self.train = sets(train, self.config, seed=seed)
        self.validation = sets(validation, self.config, seed=seed + 1) if validation else None

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the training cells and the seed."""
        content = blake2b(str(self.train.seed).encode(), digest_size=16)
        for population in self.train.populations:
            content.update(population.name.encode())
            for cells in (population.x0, population.control, population.shift):
                content.update(cells.numpy().tobytes())
        return content.hexdigest()

    def train_dataloader(self) -> DataLoader[SetBatch]:
        """``check_every`` batches an epoch, or all if fewer; each process takes its own sets.

        With a trainer the sets of a step follow from its number, so that a resumed run, whose first
        epoch Lightning may cut short, goes on with the sets that an uninterrupted one would see.
        """
        length = min(self.config.check_every, self.config.max_steps) * self.config.n_sets
        trainer = self.trainer
        if trainer is None:
            return self._loader(self.train, sampler=EpochSampler(length))
        a_step = self.config.n_sets * trainer.world_size * trainer.accumulate_grad_batches
        sampler = EpochSampler(
            length * trainer.world_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            first=lambda: trainer.global_step * a_step,
        )
        return self._loader(self.train, sampler=sampler)

    def val_dataloader(self) -> DataLoader[SetBatch] | list[Any]:
        """The same sets at every look."""
        if self.validation is None:
            return []
        return self._loader(self.validation, sampler=range(self.n_validation))

    def _loader(self, sets: SetDataset, *, sampler: Any) -> DataLoader[SetBatch]:
        # A generator of its own: without one, loaders draw from the global random state.
        return DataLoader(
            sets,
            batch_size=self.config.n_sets,
            sampler=sampler,
            collate_fn=sets.batch.join,
            generator=torch.Generator(),
        )
