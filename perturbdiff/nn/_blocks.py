"""Transformer blocks over cells, without any order among them.

B sets, Q querying cells, M cells that are attended to, D width, H heads, K head width.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention; keys and values are made apart from queries so that they can be kept.

    Parameters
    ----------
    width
        Of the cells.
    n_heads
        Heads; they divide ``width``.
    """

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def keys_values(self, x_BMD: Tensor) -> Float[Tensor, "sets 2 keys width"]:
        """Keys and values of the cells, stacked."""
        return torch.stack(self.key_value(x_BMD).chunk(2, dim=-1), dim=1)

    def forward(
        self,
        x_BQD: Float[Tensor, "sets cells width"],
        keys_values: Float[Tensor, "sets 2 keys width"],
        visible: Bool[Tensor, "sets keys"],
    ) -> Float[Tensor, "sets cells width"]:
        """Attend from each cell to the visible keys; at least one must be visible."""
        query, key, value = (
            cells.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for cells in (self.query(x_BQD), keys_values[:, 0], keys_values[:, 1])
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible[:, None, None, :]
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Sequential):
    """Two linear layers around a GELU."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__(
            nn.Linear(width, expansion * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(expansion * width, width),
        )


class ControlBlock(nn.Module):
    """Block of the control stream: looks at control cells only, so it can be run once."""

    def __init__(self, width: int, n_heads: int, *, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, expansion)

    def forward(
        self, control_BMD: Tensor, visible: Bool[Tensor, "sets keys"]
    ) -> Float[Tensor, "sets keys width"]:
        """Encode the control cells one block further."""
        x = self.norm(control_BMD)
        control = control_BMD + self.attention(x, self.attention.keys_values(x), visible)
        out: Tensor = control + self.feed_forward(self.forward_norm(control))
        return out


class CellBlock(nn.Module):
    """Block of the noised stream: attends to the set and to the encoded control cells.

    Normalisation is modulated by the condition and starts as the identity (adaLN-Zero: Peebles and
    Xie, 2023).
    """

    def __init__(self, width: int, n_heads: int, *, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, n_heads)
        self.forward_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.feed_forward = FeedForward(width, expansion)
        self.memory_norm = nn.LayerNorm(width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def remember(self, control_BMD: Tensor) -> Float[Tensor, "sets 2 keys width"]:
        """Keys and values of control cells for this block."""
        return self.attention.keys_values(self.memory_norm(control_BMD))

    def forward(  # noqa: PLR0917 - a module's inputs
        self,
        cells_BQD: Float[Tensor, "sets cells width"],
        condition_BD: Float[Tensor, "sets width"],
        memory: Float[Tensor, "sets 2 keys width"],
        visible: Bool[Tensor, "sets seen"],
    ) -> Float[Tensor, "sets cells width"]:
        """``visible`` marks first the cells of the set, then those of the memory."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition_BD)[:, None].chunk(
            6, dim=-1
        )
        x = self.norm(cells_BQD) * (1 + scale) + shift
        keys_values = torch.cat([self.attention.keys_values(x), memory], dim=2)
        cells = cells_BQD + gate * self.attention(x, keys_values, visible)
        x = self.forward_norm(cells) * (1 + scale2) + shift2
        out: Tensor = cells + gate2 * self.feed_forward(x)
        return out
