"""From logits to a bin or a gene, with one uniform number: no generator, no batch, no slot.

V bins, G genes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a bin, or a gene, is chosen.

    Parameters
    ----------
    temperature
        Logits are divided by it.
    top_p
        Choices outside the smallest set with this much probability are left out (Holtzman et al.,
        2020).
    greedy
        Take the most likely choice; temperature and ``top_p`` then do not matter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            rule = "must be above 0; greedy = True takes the most likely choice"
            raise ConfigError("sampling.temperature", self.temperature, rule=rule)
        if not 0 < self.top_p <= 1:
            raise ConfigError("sampling.top_p", self.top_p, rule="must be above 0 and at most 1")

    def probabilities(
        self, logits: Float[Tensor, "*places choices"]
    ) -> Float[Tensor, "*places choices"]:
        """Distribution that is drawn from, in float64."""
        if self.temperature != 1:  # the largest stays 0 however cold it is
            logits = (logits - logits.amax(-1, keepdim=True)).double() / self.temperature
        share = logits.softmax(-1, dtype=torch.float64)
        if self.top_p == 1:
            return share
        falling, place = share.sort(dim=-1, descending=True, stable=True)
        kept = falling.cumsum(-1) - falling < self.top_p
        share = share.masked_fill(~torch.zeros_like(kept).scatter_(-1, place, kept), 0)
        return share / share.sum(-1, keepdim=True)

    def choose(
        self, logits: Float[Tensor, "*places choices"], uniform: Float[Tensor, "*places"]
    ) -> Int[Tensor, "*places"]:
        """A choice by inversion: one uniform number gives one choice, whoever asks."""
        return logits.argmax(-1) if self.greedy else inverted(self.probabilities(logits), uniform)

    def choose_named(
        self,
        logits: Float[Tensor, "*places choices"],
        uniform: Float[Tensor, "*places choices"],
    ) -> Int[Tensor, "*places"]:
        """A choice by the largest of ``log p`` plus Gumbel noise, with a number for each choice.

        Numbers that belong to names make the choice one of a name, wherever it stands.
        """
        if self.greedy:
            return logits.argmax(-1)
        return (self.probabilities(logits).log() - (-uniform.log()).log()).argmax(-1)


def inverted(
    share: Float[Tensor, "*places choices"], uniform: Float[Tensor, "*places"]
) -> Int[Tensor, "*places"]:
    """First choice at which the cumulative share, which need not end at 1, passes the number."""
    below = share.cumsum(-1)
    passed = below <= uniform[..., None] * below[..., -1:]
    return passed.sum(-1).clamp_max(share.shape[-1] - 1)
