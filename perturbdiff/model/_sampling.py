"""Sampling latent responses of sets: which sets, in which batches, with which noise.

B sets, S cells, R shown control cells, K latent axes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from perturbdiff._batch import Context, Denoiser
from perturbdiff._random import cell_keys
from perturbdiff.config import DecodeConfig, SampleConfig
from perturbdiff.data import Condition
from perturbdiff.diffusion import Hook, Preconditioned, State, karras_schedule, sample
from perturbdiff.guidance import ClassifierFreeGuidance, CountCalls, wrap
from perturbdiff.model._latent import Vocabulary

if TYPE_CHECKING:
    from perturbdiff.nn import SetDenoiser

SETS_AT_ONCE = 64  # that keep the cores of a processor busy
SETS_AT_ONCE_ON_GPU = 1024  # a guess: not yet measured
BATCH_BYTES = 256 * 2**20  # that hidden values of a batch may take at a time
_MEMORIES = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentTask:
    """One condition to sample: what is the same for all its sets."""

    condition: Condition
    control: Float[Tensor, "controls axes"]  # all control cells, centred
    shown: Int[Tensor, " shown"]  # rows that the network is shown
    partners: Int[Tensor, " cells"]  # row of the partner of each generated cell
    shift: Float[Tensor, " latent"]
    digest: str  # of the control cells

    def keys(self, sets: Sequence[int], config: SampleConfig | DecodeConfig, seed: int) -> Tensor:
        """Noise stream of every cell of some sets."""
        return cell_keys(seed, self.condition.name, list(sets), n_cells=config.set_size)


@runtime_checkable
class Sampler(Protocol):
    """Makes latent responses of sets."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def sample(
        self,
        tasks: Sequence[Any],
        sets: Sequence[Sequence[int]],
        config: Any,
        *,
        seed: int,
    ) -> tuple[list[Float[Tensor, "sets cells latent"]], int]:
        """Latent responses of some sets of each task, and the network calls made."""
        ...


def set_contexts(
    task: LatentTask,
    sets: Sequence[int],
    *,
    vocabulary: Vocabulary,
    n_shown: int,
    set_size: int,
    most_members: int,
) -> Context:
    """What a network is told about some sets of a task.

    Parameters
    ----------
    task
        Condition.
    sets
        Numbers of the sets.
    vocabulary
        Codes of conditions.
    n_shown
        Control cells that the network is shown.
    set_size
        Cells a set.
    most_members
        Members of the largest combination in the batch.

    Returns
    -------
    One row a set, control cells not encoded.
    """
    cells = torch.tensor(sets)[:, None] * set_size + torch.arange(set_size)
    members = vocabulary.members(task.condition)
    one = Context(
        partner=torch.zeros(1, set_size, task.control.shape[1]),
        has_partner=torch.ones(1, dtype=torch.bool),
        control=pad(task.control[task.shown], (0, 0, 0, n_shown - len(task.shown)))[None],
        control_mask=(torch.arange(n_shown) < len(task.shown))[None],
        mask=torch.ones(1, set_size, dtype=torch.bool),
        shift=task.shift[None],
        members=pad(members, (0, most_members - len(members)))[None],
        features=vocabulary.numbers(task.condition)[None],
        covariates=vocabulary.covariates(task.condition)[None],
        conditional=torch.ones(1, dtype=torch.bool),
    )
    many = one[torch.zeros(len(sets), dtype=torch.int64)]
    return replace(many, partner=task.control[task.partners[cells]])


@dataclass(eq=False)
class LatentSampler:
    """Samples latent responses; encodes the control cells of a context once.

    Parameters
    ----------
    denoiser
        Trained weights.
    vocabulary
        Codes of conditions.
    n_shown
        Control cells that the network is shown.
    """

    denoiser: Preconditioned
    vocabulary: Vocabulary
    n_shown: int
    _memory: OrderedDict[tuple[object, ...], Tensor] = field(default_factory=OrderedDict)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.denoiser.sigma_data.device

    def sets_at_once(self, set_size: int) -> int:
        """Sets in a batch: as many as keep the device busy and fit into the memory budget.

        In a block, each cell has six vectors of the width (itself, normalised, query, key, value,
        what was attended to) and two of the hidden layer, in float32.
        """
        network: SetDenoiser = self.denoiser.network  # type: ignore[assignment]
        shape = network.config
        each = 4 * set_size * shape.width * (6 + 2 * shape.expansion)
        most = SETS_AT_ONCE if self.device.type == "cpu" else SETS_AT_ONCE_ON_GPU
        return max(1, min(most, BATCH_BYTES // each))

    @torch.inference_mode()
    def sample(
        self,
        tasks: Sequence[LatentTask],
        sets: Sequence[Sequence[int]],
        config: SampleConfig,
        *,
        seed: int,
        hook: Hook | None = None,
    ) -> tuple[list[Float[Tensor, "sets cells latent"]], int]:
        """Latent responses of some sets of each task, and the network calls made.

        Parameters
        ----------
        tasks
            Conditions.
        sets
            Numbers of the sets wanted of each.
        config
            Sampler, schedule, guidance.
        seed
            Seed of all noise.
        hook
            Called after each step of each batch of sets, with their state.

        Returns
        -------
        One tensor a task, and the number of calls of the network.
        """
        calls = CountCalls()
        denoise = wrap(self.denoiser, calls, ClassifierFreeGuidance(config.guidance_scale))
        schedule = karras_schedule(
            config.n_steps, config.sigma_min, config.sigma_max, rho=config.rho
        )
        wanted = [(task, number) for task, numbers in enumerate(sets) for number in numbers]
        done: list[list[Tensor]] = [[] for _ in tasks]
        at_once = self.sets_at_once(config.set_size)
        for start in range(0, len(wanted), at_once):
            chunk = [
                (task, [number for _, number in group])
                for task, group in groupby(wanted[start : start + at_once], lambda x: x[0])
            ]
            named = [(tasks[t], numbers) for t, numbers in chunk]
            x = self._run(denoise, named, schedule=schedule, config=config, seed=seed, hook=hook)
            for (task, _), part in zip(chunk, x, strict=True):
                done[task].append(part)
        none = [
            torch.zeros(0, config.set_size, len(task.shift), device=self.device) for task in tasks
        ]
        return [
            torch.cat([empty, *parts]) for empty, parts in zip(none, done, strict=True)
        ], calls.nfe

    def _run(
        self,
        denoise: Denoiser,
        chunk: Sequence[tuple[LatentTask, list[int]]],
        *,
        schedule: Tensor,
        config: SampleConfig,
        seed: int,
        hook: Hook | None,
    ) -> list[Tensor]:
        """Sample one batch of sets."""
        most = max(len(task.condition.members) for task, _ in chunk)
        context = Context.join(
            [self._context(task, sets, config, most_members=most) for task, sets in chunk]
        )
        keys = torch.cat([task.keys(sets, config, seed) for task, sets in chunk]).to(self.device)
        state = State.initial(keys, context.shift.shape[-1], config.sigma_max)
        x = sample(denoise, state, schedule, context, sampler=config.sampler, hook=hook).x
        return list(torch.split(x, [len(sets) for _, sets in chunk]))

    def _context(
        self, task: LatentTask, sets: list[int], config: SampleConfig, *, most_members: int
    ) -> Context:
        """Context of some sets of a task, on the device, control cells encoded."""
        many = set_contexts(
            task, sets, vocabulary=self.vocabulary, n_shown=self.n_shown,
            set_size=config.set_size, most_members=most_members,
        ).to(self.device)  # fmt: skip
        first = torch.zeros(len(sets), dtype=torch.int64, device=self.device)
        return replace(many, memory=self._remembered(task, many[:1])[first])

    def _remembered(self, task: LatentTask, context: Context) -> Tensor:
        """Encoded control cells of a context, kept for its other perturbations and sets."""
        key = (task.digest, tuple(task.shown.tolist()), self.device)
        if key not in self._memory:
            network: SetDenoiser = self.denoiser.network  # type: ignore[assignment]
            memory = network.remember(context).memory
            assert memory is not None  # `remember` fills it
            self._memory[key] = memory
            while len(self._memory) > _MEMORIES:
                self._memory.popitem(last=False)
        self._memory.move_to_end(key)
        return self._memory[key]
