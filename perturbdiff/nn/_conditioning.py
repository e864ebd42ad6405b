"""What a set is told about itself, as one vector: noise level, perturbation, context.

B sets, D width, M members, F features, C covariates, R control cells.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbdiff._batch import Context

_FREQUENCIES = 16


class Conditioning(nn.Module):
    """Sum of what is known, through a small network; every part may be unknown.

    Parameters
    ----------
    width
        Of the result.
    n_latent
        Latent axes, in which the effect prior's shift is given.
    n_perturbations
        Known perturbations; a combination is the sum of its members, in no order.
    n_features
        Numbers that describe a perturbation.
    covariate_sizes
        Known levels of each covariate.
    """

    frequency: Tensor

    def __init__(
        self,
        width: int,
        *,
        n_latent: int,
        n_perturbations: int,
        n_features: int,
        covariate_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.register_buffer(
            "frequency", torch.logspace(0, 1.5, _FREQUENCIES) * math.pi, persistent=False
        )
        self.level = nn.Linear(2 * _FREQUENCIES, width)
        self.perturbation = nn.Embedding(n_perturbations + 1, width, padding_idx=0)
        self.features = nn.Linear(n_features, width, bias=False) if n_features else None
        self.covariates = nn.ModuleList(
            nn.Embedding(size + 1, width, padding_idx=0) for size in covariate_sizes
        )
        self.shift = nn.Linear(n_latent + 1, width)
        self.null = nn.Parameter(torch.zeros(width))
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(
        self,
        c_noise_B: Float[Tensor, " sets"],
        context: Context,
        summary_BD: Float[Tensor, "sets width"],
    ) -> Float[Tensor, "sets width"]:
        """Vector that modulates every block."""
        angle = c_noise_B[:, None] * self.frequency
        level = self.level(torch.cat([angle.sin(), angle.cos()], dim=-1))
        known = self.perturbation(context.members).sum(1) + self.shift(_direction(context.shift))
        if self.features is not None:
            known = known + self.features(context.features)
        for number, table in enumerate(self.covariates):
            known = known + table(context.covariates[:, number])
        known = torch.where(context.conditional[:, None], known, self.null)
        out: Tensor = self.mix(level + known + summary_BD)
        return out


def _direction(shift_BK: Tensor) -> Tensor:
    """Unit-variance direction of the shift and, apart, how long it is."""
    length = shift_BK.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    return torch.cat([shift_BK / length, length.log()], dim=-1)
