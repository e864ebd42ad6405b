"""Sampling latent responses of sets: which sets, in which batches, with which noise.

B sets, S cells, R control cells, K latent axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._batch import Context, Denoiser
from perturbdiff._random import cell_keys
from perturbdiff.config import SampleConfig
from perturbdiff.data import Condition
from perturbdiff.diffusion import State, karras_schedule, sample
from perturbdiff.model._latent import Vocabulary

SETS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class LatentTask:
    """One condition to sample: what is the same for all its sets."""

    condition: Condition
    control: Float[Tensor, "cells latent"]  # all control cells, centred
    shown: Int[Tensor, " shown"]  # rows that the network is shown
    partners: Int[Tensor, " cells"]  # row of the partner of each generated cell
    shift: Float[Tensor, " latent"]

    def context(self, sets: Sequence[int], vocabulary: Vocabulary, config: SampleConfig) -> Context:
        """Context of some of the sets, on the CPU."""
        n_sets, size = len(sets), config.set_size
        cells = torch.tensor(sets)[:, None] * size + torch.arange(size)
        shown = self.control[self.shown]

        def same(value: Tensor) -> Tensor:
            return value.expand(n_sets, *value.shape)

        return Context(
            partner=self.control[self.partners[cells]],
            has_partner=torch.ones(n_sets, dtype=torch.bool),
            control=same(shown),
            control_mask=torch.ones(n_sets, len(shown), dtype=torch.bool),
            mask=torch.ones(n_sets, size, dtype=torch.bool),
            shift=same(self.shift),
            members=same(vocabulary.members(self.condition)),
            features=same(vocabulary.numbers(self.condition)),
            covariates=same(vocabulary.covariates(self.condition)),
            conditional=torch.ones(n_sets, dtype=torch.bool),
        )


@torch.inference_mode()
def sample_sets(
    denoise: Denoiser,
    contexts: Context,
    keys: Int[Tensor, "sets cells"],
    config: SampleConfig,
) -> Float[Tensor, "sets cells latent"]:
    """Sample sets along the schedule, some at a time.

    Parameters
    ----------
    denoise
        Denoiser with guidance around it.
    contexts
        Control cells already encoded.
    keys
        Noise stream of each cell.
    config
        Sampler and schedule.

    Returns
    -------
    Latent responses, on the device of the contexts.
    """
    schedule = karras_schedule(config.n_steps, config.sigma_min, config.sigma_max, rho=config.rho)
    width = contexts.partner.shape[-1]
    parts = []
    for start in range(0, len(keys), SETS_AT_ONCE):
        part = slice(start, start + SETS_AT_ONCE)
        state = State.initial(keys[part], width, config.sigma_max)
        done = sample(denoise, state, schedule, contexts[part], sampler=config.sampler)
        parts.append(done.x)
    return torch.cat(parts)


def set_keys(
    seed: int, condition: Condition, sets: Sequence[int], *, size: int, device: torch.device
) -> Int[Tensor, "sets cells"]:
    """Noise stream of every cell of some sets of a condition."""
    return cell_keys(seed, condition.name, list(sets), n_cells=size, device=device)
