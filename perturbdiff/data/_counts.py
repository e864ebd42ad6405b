"""Drawing treated cells as counts, with their partners and what the prior says of each gene.

S cells, G genes.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._batch import Context, Sets
from perturbdiff._constants import DEPTH
from perturbdiff.data._module import SetDataModule
from perturbdiff.data._sets import Population, SetDataset


@dataclass(frozen=True, kw_only=True, eq=False)
class CountPopulation(Population):
    """A population with its counts, and the prior of each gene that never saw it."""

    counts: sp.csr_array  # treated × genes
    library_size: Float[Tensor, " treated"]
    control_counts: sp.csr_array  # controls × genes
    control_size: Float[Tensor, " controls"]
    level: Float[Tensor, " genes"]  # control mean of log1p values
    rise: Float[Tensor, " genes"]  # of that mean, by the prior
    log_rate: Float[Tensor, " genes"]  # mean count that the prior states, per count of the library
    dispersion: Float[Tensor, " genes"] | None = None  # log, of the controls beside all cells


@dataclass(frozen=True, kw_only=True)
class CountBatch(Sets):
    """Treated cells to learn from, by sets that share a condition."""

    counts: Int[Tensor, "sets cells genes"]
    partner: Float[Tensor, "sets cells genes"]  # log1p values of the partners
    log_size: Float[Tensor, "sets cells"]
    level: Float[Tensor, "sets genes"]
    rise: Float[Tensor, "sets genes"]
    log_rate: Float[Tensor, "sets genes"]
    context: Context
    dispersion: Float[Tensor, "sets genes"] | None = None


class CountDataset(SetDataset):
    """Sets by number, as :class:`SetDataset` draws them, with counts instead of latent values."""

    batch = CountBatch

    def __getitem__(self, number: int) -> CountBatch:
        """Set ``number``, as a batch of one."""
        population, rows, context = self.drawn(number)
        assert isinstance(population, CountPopulation)
        size = self.config.set_size
        partner = population.partner[rows].numpy()
        depth = population.control_size[partner][:, None] / DEPTH
        log_size = population.library_size[rows].log().float()
        return CountBatch(
            counts=_rows(population.counts, rows, size).long(),
            partner=torch.log1p(
                _rows(population.control_counts, partner, size)
                / torch.nn.functional.pad(depth, (0, 0, 0, size - len(depth)), value=1.0)
            ).float(),
            log_size=torch.nn.functional.pad(log_size, (0, size - len(rows)))[None],
            level=population.level[None],
            rise=population.rise[None],
            log_rate=population.log_rate[None],
            context=context,
            dispersion=None if population.dispersion is None else population.dispersion[None],
        )


class CountDataModule(SetDataModule):
    """As :class:`SetDataModule`, with batches of counts."""

    sets = CountDataset
    n_validation = 48

    @property
    def digest(self) -> str:
        """Fingerprint of the training cells, their counts and the seed."""
        content = blake2b(super().digest.encode(), digest_size=16)
        for population in self.train.populations:
            assert isinstance(population, CountPopulation)
            for array in (population.counts.data, population.log_rate.numpy()):
                content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()


def _rows(matrix: sp.csr_array, rows: Int[np.ndarray, " cells"], size: int) -> Tensor:
    dense = torch.from_numpy(matrix[rows].toarray())
    return torch.nn.functional.pad(dense, (0, 0, 0, size - len(rows)))[None]
