"""The raw network of the diffusion model: sets of cells in, sets of cells out.

Permuting cells permutes the output, permuting control cells changes nothing, masked cells are
invisible: no part of it knows a position.

B sets, S cells, R control cells, A cell axes, K latent axes, D width.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbdiff._batch import Context
from perturbdiff._typing import PrecisionName
from perturbdiff.config import NetworkConfig
from perturbdiff.nn._blocks import CellBlock, ControlBlock
from perturbdiff.nn._conditioning import Conditioning
from perturbdiff.nn._precision import EIGHT_BITS, with_linear_layers


class SetDenoiser(nn.Module):
    """Transformer over the cells of a set, with an encoded control stream beside it.

    Parameters
    ----------
    config
        Shape.
    n_perturbations, n_features, covariate_sizes
        As in ``Conditioning``.
    """

    def __init__(
        self,
        config: NetworkConfig,
        *,
        n_perturbations: int,
        n_features: int = 0,
        covariate_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.config = config
        width, n_axes, n_latent = config.width, config.n_axes, config.n_response_axes
        self.cell = nn.Linear(n_latent + n_axes + 1, width)
        self.control = nn.Linear(n_axes, width)
        self.no_control = nn.Parameter(torch.zeros(width))
        self.summary = nn.Linear(n_axes, width)
        self.conditioning = Conditioning(
            width,
            n_latent=n_latent,
            n_perturbations=n_perturbations,
            n_features=n_features,
            covariate_sizes=covariate_sizes,
        )
        self.control_blocks = nn.ModuleList(
            ControlBlock(width, config.n_heads, expansion=config.expansion)
            for _ in range(config.n_blocks)
        )
        self.cell_blocks = nn.ModuleList(
            CellBlock(width, config.n_heads, expansion=config.expansion)
            for _ in range(config.n_blocks)
        )
        self.final_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, n_latent)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def lowered(self, precision: PrecisionName) -> Self:
        """The network with its blocks in another precision, for inference.

        What is said once a set (noise level, condition) stays in float32: it costs next to nothing
        and is most sensitive.

        Parameters
        ----------
        precision
            ``"bfloat16"``, or ``"int8"`` or ``"float8"``, which take bfloat16 between their layers.

        Returns
        -------
        A copy. ``"float32"`` gives one without a change.
        """
        other = deepcopy(self)
        if precision == "float32":
            return other
        for part in (
            other.cell, other.control, other.control_blocks, other.cell_blocks, other.final_norm,
            other.out,
        ):  # fmt: skip
            part.to(torch.bfloat16)
        if (kind := EIGHT_BITS.get(precision)) is not None:
            for blocks in (other.control_blocks, other.cell_blocks):
                with_linear_layers(blocks, kind.of)
        return other

    def remember(self, context: Context) -> Context:
        """The context with its control cells encoded: once for all steps, samples and conditions.

        Parameters
        ----------
        context
            Control cells may be masked, all of them too: a learned vector stands beside them.

        Returns
        -------
        The same context with ``memory`` filled in. It depends on control cells only.
        """
        if context.memory is not None:
            return context
        token_BRD = self.control(context.control.to(self.control.weight.dtype))
        none_B1D = self.no_control.to(token_BRD.dtype).expand(len(token_BRD), 1, -1)
        stream, visible = torch.cat([none_B1D, token_BRD], dim=1), _with_none(context)
        memory = []
        for control_block, cell_block in zip(self.control_blocks, self.cell_blocks, strict=True):
            assert isinstance(cell_block, CellBlock)
            memory.append(cell_block.remember(stream))
            stream = control_block(stream, visible)
        return replace(context, memory=torch.stack(memory, dim=1))

    def forward(
        self,
        x_in: Float[Tensor, "sets cells latent"],
        c_noise: Float[Tensor, " sets"],
        context: Context,
    ) -> Float[Tensor, "sets cells latent"]:
        """Raw output for :class:`~perturbdiff.diffusion.Preconditioned`."""
        memory = self.remember(context).memory if context.memory is None else context.memory
        assert memory is not None  # `remember` fills it
        seen_B11 = context.has_partner[:, None, None].to(x_in.dtype)
        known = seen_B11.expand(-1, x_in.shape[1], 1)
        said = torch.cat([x_in, context.partner * seen_B11, known], dim=-1)
        cells = self.cell(said.to(self.cell.weight.dtype))
        condition = self.conditioning(c_noise, context, self._summary(context)).to(cells.dtype)
        visible = torch.cat([context.mask, _with_none(context)], dim=1)
        for number, block in enumerate(self.cell_blocks):
            cells = block(cells, condition, memory[:, number], visible)
        out: Tensor = self.out(self.final_norm(cells))
        return out

    def _summary(self, context: Context) -> Tensor:
        """Mean spread of the control cells: their latent values are centred, so square them."""
        real = context.control_mask[:, :, None]
        count = context.control_mask.sum(1, keepdim=True).clamp(min=1)
        spread = torch.where(real, context.control.square(), 0).sum(1) / count
        out: Tensor = self.summary(spread.log1p())
        return out


def _with_none(context: Context) -> Tensor:
    """Mask of control cells behind the vector that is always there."""
    always = torch.ones_like(context.control_mask[:, :1])
    return torch.cat([always, context.control_mask], dim=1)
