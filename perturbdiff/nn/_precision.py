"""Lower precision for inference: bfloat16, or weights and inputs of linear layers in 8 bits."""

from collections.abc import Callable
from typing import Self

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional

_MOST = 127
_TINY = 1e-12


class Int8Linear(nn.Module):
    """Linear layer whose weights are whole numbers in 8 bits, and whose inputs become so.

    Each output has a scale of its own, and so has each row of inputs, found as it comes: such
    vector-wise dynamic quantisation is that of Dettmers et al. (2022), equation 6. Rows know
    nothing of each other, so that batching stays invisible. Where a gradient is asked for, it is
    that of the layer with these weights and inputs as they are.

    Parameters
    ----------
    n_inputs, n_outputs
        Features.
    bias
        Whether there is one.
    """

    weight: Int8[Tensor, "outputs inputs"]
    scale: Float[Tensor, " outputs"]
    bias: Float[Tensor, " outputs"] | None

    def __init__(self, n_inputs: int, n_outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_outputs, n_inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(n_outputs))
        self.register_buffer("bias", torch.zeros(n_outputs) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """The layer in 8 bits.

        Parameters
        ----------
        linear
            Trained layer.

        Returns
        -------
        A layer of its own; weights are off by at most half a step of their output's scale.
        """
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        weight = linear.weight.detach()
        scale = weight.abs().amax(1).clamp_min(_TINY) / _MOST
        made.weight = (weight / scale[:, None]).round().to(torch.int8)
        made.scale = scale
        made.bias = None if linear.bias is None else linear.bias.detach().clone()
        return made

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Whole numbers are multiplied; sums of products are exact."""
        if torch.is_grad_enabled() and x.requires_grad:
            return functional.linear(x, self.weight * self.scale[:, None], self.bias)
        rows = x.flatten(0, -2)
        size = rows.abs().amax(1, keepdim=True).clamp_min(_TINY) / _MOST
        whole = (rows / size).round_().to(torch.int8)
        product = torch._int_mm(whole, self.weight.t()).to(x.dtype)
        out = product.mul_(size).mul_(self.scale)
        if self.bias is not None:
            out = out.add_(self.bias)
        return out.view(*x.shape[:-1], -1)


def with_linear_layers(module: nn.Module, change: Callable[[nn.Linear], nn.Module]) -> None:
    """Put other layers in the place of all linear ones below a module.

    Parameters
    ----------
    module
        Is changed.
    change
        Makes the new layer.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, change(child))
        else:
            with_linear_layers(child, change)
