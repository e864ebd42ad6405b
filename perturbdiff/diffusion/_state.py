"""Where a sampler stands with each set: sets may join, leave, be resampled or fork at any step."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._batch import Sets
from perturbdiff._random import forked_keys, normal


@dataclass(frozen=True, kw_only=True)
class State(Sets):
    """Sets on their way from noise to cells. Every field has the sets as its first axis."""

    x: Float[Tensor, "sets cells latent"]  # noised cells
    history: Float[Tensor, "sets cells latent"]  # x0_hat of the step before
    history_sigma: Float[Tensor, " sets"]  # noise level of that step; 0 = no step yet
    key: Int[Tensor, "sets cells"]  # noise stream of each cell
    step: Int[Tensor, " sets"]  # steps done

    @classmethod
    def initial(
        cls,
        keys: Int[Tensor, "sets cells"],
        width: int,
        sigma_max: float,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Pure noise at the largest level.

        Parameters
        ----------
        keys
            Key of each cell, from ``cell_keys``.
        width
            Latent axes.
        sigma_max
            First level of the schedule.
        dtype
            Float32 or better.

        Returns
        -------
        A state before its first step; draws number 0 of each key are used.
        """
        x = sigma_max * normal(keys, width, dtype=dtype)
        return cls(
            x=x,
            history=torch.zeros_like(x),
            history_sigma=x.new_zeros(len(keys)),
            key=keys,
            step=keys.new_zeros(len(keys)),
        )

    def fork(self, count: int) -> Self:
        """Each set ``count`` times, with noise of their own from here on.

        The first copy goes on with the noise of the original, so that it ends where the original
        would have. Copies lie next to each other.
        """
        copies = self.repeat(count)
        branch = torch.arange(count, device=self.key.device).repeat(len(self.key))
        return replace(copies, key=forked_keys(copies.key, branch[:, None]))

    def noise(self) -> Float[Tensor, "sets cells latent"]:
        """Fresh standard normal draws for the step under way."""
        return normal(self.key, self.x.shape[-1], step=self.step[:, None] + 1, dtype=self.x.dtype)
