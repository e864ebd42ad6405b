"""A block of the causal decoder: positions look at the prefix and at what was said before them.

B cells, T positions, M places that are looked at, P prefix, D width, H heads, K key.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

_WIDENED = 4 << 20  # bytes of keys and values that a processor keeps at hand


class CausalBlock(nn.Module):
    """Block whose positions see the prefix and what was said before them.

    Normalisation is modulated by the condition of the cell; at first it is plain. Layers may be in
    bfloat16, and keys and values then are; what runs between the layers is in float32 all the same.
    """

    def __init__(self, width: int, n_heads: int, *, hidden: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width)
        )
        self.memory_norm = nn.LayerNorm(width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def projected(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by head, ``[cells, places, heads, key]``."""
        x: Tensor = self.query_key_value(self._narrow(x_BTD))
        return self._by_head(x, 3)

    def remember(self, x_BPD: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the prefix."""
        normed, layer = self.memory_norm(x_BPD), self.query_key_value
        if not isinstance(layer, nn.Linear):  # of 8 bits: its rows are no weights by themselves
            return self._by_head(layer(normed), 3)[1:]
        return self._by_head(functional.linear(normed, layer.weight[x_BPD.shape[-1] :]), 2)

    def modulated_by(self, condition_BD: Tensor) -> Float[Tensor, "cells six_widths"]:
        """What the condition of each cell changes."""
        out: Tensor = self.modulation(self._narrow(condition_BD))
        return out.to(condition_BD.dtype)

    def attend(
        self, query_BTHK: Tensor, keys_BHMK: Tensor, values_BHMK: Tensor, *, visible: Tensor
    ) -> Float[Tensor, "cells positions width"]:
        """Mix what is visible, ``[cells, positions, places]``."""
        mixed = looked_back(
            query_BTHK.transpose(1, 2), keys_BHMK, values_BHMK, visible=visible[:, None]
        )
        out: Tensor = self.out(self._narrow(mixed.transpose(1, 2).flatten(-2)))
        return out

    def fed(
        self, x_BTD: Float[Tensor, "cells positions width"], modulation: Sequence[Tensor]
    ) -> Float[Tensor, "cells positions width"]:
        """With what the hidden layer adds; shift, scale and gate are those of the condition."""
        shift, scale, gate = modulation
        normed = torch.addcmul(shift, self.forward_norm(x_BTD), scale)
        return torch.addcmul(x_BTD, gate, self.feed_forward(self._narrow(normed)))

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self.memory_norm.weight.dtype)

    def _by_head(self, x: Tensor, n_parts: int) -> tuple[Tensor, ...]:
        return x.view(*x.shape[:-1], n_parts, self.n_heads, -1).unbind(2)


def looked_back(
    query: Float[Tensor, "cells heads positions key"],
    keys: Float[Tensor, "cells heads places key"],
    values: Float[Tensor, "cells heads places key"],
    *,
    visible: Bool[Tensor, "cells 1 positions places"],
) -> Float[Tensor, "cells heads positions key"]:
    """Attention of few positions over many places, which is bound by how these are read.

    torch's attention in bfloat16 takes more than twice as long on a processor as in float32. So
    there keys and values come from memory in bfloat16 and are widened for a few cells at a time,
    within the caches; what is mixed is in float32.

    Parameters
    ----------
    query, keys, values
        Of every head.
    visible
        What each position may see.

    Returns
    -------
    The mixture of values.
    """
    if keys.dtype != torch.bfloat16 or keys.device.type != "cpu":
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
    query = query.float()
    each = 2 * keys[0].numel() * query.element_size()
    at_once = max(1, min(len(keys), _WIDENED // each))
    wide_keys, wide_values = query.new_empty(2, at_once, *keys.shape[1:])
    out = torch.empty_like(query)
    for start in range(0, len(keys), at_once):
        own = slice(start, start + at_once)
        count = len(keys[own])
        out[own] = functional.scaled_dot_product_attention(
            query[own],
            wide_keys[:count].copy_(keys[own]),
            wide_values[:count].copy_(values[own]),
            attn_mask=visible[own],
        )
    return out
