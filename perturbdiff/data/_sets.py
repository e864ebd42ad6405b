"""Drawing sets of cells to learn from: which condition, which cells, which controls beside them.

A set belongs to a number, not to a moment: set number n of a seed is the same whichever process
draws it and whatever was drawn before, so training can stop, go on and be spread over devices.

S cells, R control cells, A cell axes, K latent axes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from perturbdiff._batch import Context, SetBatch, Sets
from perturbdiff._errors import SplitError
from perturbdiff.config import TrainConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Population:
    """Treated cells of one condition in latent space, and the control cells they started from."""

    name: str
    x0: Float[Tensor, "treated latent"]
    partner: Int[Tensor, " treated"]  # row of ``control``
    control: Float[Tensor, "controls axes"]  # centred
    shift: Float[Tensor, " latent"]  # effect prior that never saw this condition
    members: Int[Tensor, " members"]
    features: Float[Tensor, " features"]
    covariates: Int[Tensor, " covariates"]


class SetDataset(Dataset[Any]):
    """Sets by number, drawn from populations with probability proportional to √(cells).

    Cells of a set are drawn without replacement; a population with fewer cells than ``set_size``
    gives all of them, and the rest of the set is masked. So each epoch deals small populations'
    cells anew and there is no tail to drop.

    Parameters
    ----------
    populations
        Training conditions, in an order that does not depend on the file.
    config
        Sizes.
    seed
        Seed of the draws.

    Raises
    ------
    SplitError
        When there is nothing to learn from.
    """

    batch: type[Sets] = SetBatch

    def __init__(
        self, populations: Sequence[Population], config: TrainConfig, *, seed: int
    ) -> None:
        if not populations:
            msg = "There is no treated population to learn from: every condition is held out."
            raise SplitError(msg)
        self.populations = tuple(populations)
        self.config = config
        self.seed = seed
        weight = np.sqrt([len(population.x0) for population in self.populations])
        self._chance = weight / weight.sum()
        self._most_members = max(len(population.members) for population in self.populations)

    def __getitem__(self, number: int) -> Any:
        """Set ``number``, as a batch of one."""
        population, rows, context = self.drawn(number)
        return SetBatch(x0=_padded(population.x0[rows], self.config.set_size), context=context)

    def drawn(self, number: int) -> tuple[Population, Int[np.ndarray, " cells"], Context]:
        """Population, treated cells and context of set ``number``."""
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, number])))
        population = self.populations[int(draw.choice(len(self._chance), p=self._chance))]
        size, n_controls = self.config.set_size, self.config.n_controls
        rows = draw.permutation(len(population.x0))[:size]
        control = draw.permutation(len(population.control))[:n_controls]
        identified = bool(draw.random() >= self.config.drop_identity)
        has_partner = bool(draw.random() >= self.config.drop_partner)
        conditional = bool(draw.random() >= self.config.drop_condition)
        noise = torch.from_numpy(draw.standard_normal(len(population.shift)).astype(np.float32))
        strength = self.config.shift_noise * population.shift.square().mean().sqrt()
        members = torch.zeros(self._most_members, dtype=torch.int64)
        members[: len(population.members)] = population.members * identified
        context = Context(
            partner=_padded(population.control[population.partner[rows]], size),
            has_partner=torch.tensor([has_partner]),
            control=_padded(population.control[control], n_controls),
            control_mask=(torch.arange(n_controls) < len(control))[None],
            mask=(torch.arange(size) < len(rows))[None],
            shift=(population.shift + strength * noise)[None],
            members=members[None],
            features=population.features[None],
            covariates=(population.covariates * identified)[None],
            conditional=torch.tensor([conditional]),
        )
        return population, rows, context


class EpochSampler(Sampler[int]):
    """Numbers of the sets of an epoch, this process's share of them.

    Parameters
    ----------
    length
        Sets an epoch, over all processes.
    rank, world_size
        This process among all.
    first
        Tells, when an epoch starts, how many sets were drawn before; without it epochs are counted.
    """

    def __init__(
        self,
        length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        first: Callable[[], int] | None = None,
    ) -> None:
        self.length = length - length % world_size
        self.rank, self.world_size = rank, world_size
        self.first = first
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the sets of another epoch, where epochs are counted."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self.length if self.first is None else self.first()
        yield from range(first + self.rank, first + self.length, self.world_size)

    def __len__(self) -> int:
        return self.length // self.world_size


def _padded(cells: Tensor, size: int) -> Tensor:
    """The cells as one set of a fixed size."""
    return torch.nn.functional.pad(cells, (0, 0, 0, size - len(cells)))[None]
