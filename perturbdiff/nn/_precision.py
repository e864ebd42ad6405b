"""Lower precision for inference: bfloat16, or weights and inputs of linear layers in 8 bits."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from perturbdiff._errors import ConfigError
from perturbdiff._typing import PrecisionName

_TINY = 1e-12
_FLOAT8_FROM = (8, 9)  # compute capability
_LEAST_ROWS = 32  # of a product of 8-bit numbers on a CUDA device
_ALIGNED = 16  # what its sizes are multiples of there


class EightBitLinear(nn.Module):
    """Linear layer whose weights are in 8 bits, and whose inputs become so.

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

    kind: ClassVar[torch.dtype]
    most: ClassVar[float]  # the largest number that stands for the largest weight or input

    weight: Shaped[Tensor, "outputs inputs"]
    scale: Float[Tensor, " outputs"]
    bias: Float[Tensor, " outputs"] | None

    def __init__(self, n_inputs: int, n_outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(n_outputs, n_inputs).to(self.kind))
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
        A layer of its own, with weights rounded.
        """
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        weight = linear.weight.detach()
        scale = _scale(weight, cls.most)
        made.weight, made.scale = cls.rounded(weight / scale), scale[:, 0]
        made.bias = None if linear.bias is None else linear.bias.detach().clone()
        return made

    @staticmethod
    @abstractmethod
    def rounded(numbers: Tensor) -> Tensor:
        """Numbers of at most ``most``, in 8 bits; they may be overwritten."""

    @staticmethod
    @abstractmethod
    def product(rows: Tensor, weight: Tensor) -> Shaped[Tensor, "rows outputs"]:
        """``rows @ weight.T`` of numbers in 8 bits."""

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Products of numbers in 8 bits, scaled."""
        if torch.is_grad_enabled() and x.requires_grad:
            weight = self.weight.to(x.dtype) * self.scale[:, None]
            return functional.linear(x, weight, self.bias)
        rows = x.flatten(0, -2)
        size = _scale(rows, self.most)
        product = self.product(self.rounded(rows / size), self.weight).to(x.dtype)
        out = product.mul_(size).mul_(self.scale)
        if self.bias is not None:
            out = out.add_(self.bias)
        return out.view(*x.shape[:-1], -1)


class Int8Linear(EightBitLinear):
    """In whole numbers from -127 to 127; sums of their products are exact."""

    kind = torch.int8
    most = 127.0

    @staticmethod
    def rounded(numbers: Tensor) -> Tensor:
        """To the nearest whole number."""
        return numbers.round_().to(torch.int8)

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Shaped[Tensor, "rows outputs"]:
        """On a CUDA device in the sizes that it knows; a processor leaves one input undefined."""
        if not rows.is_cuda:
            if rows.shape[1] == 1:
                rows, weight = _padded(rows, 1, 0), _padded(weight, 1, 0)
            return torch._int_mm(rows, weight.t())
        return filled(torch._int_mm, rows, weight)


class Float8Linear(EightBitLinear):
    """In numbers of 4 bits exponent and 3 bits mantissa, for GPUs that multiply them.

    The format is that of torchao's dynamic float8 with a scale a row (``PerRow``). A processor,
    which multiplies them as float32, gives the same, and no sooner than float32.
    """

    kind = torch.float8_e4m3fn
    most = 448.0

    @staticmethod
    def rounded(numbers: Tensor) -> Tensor:
        """To the nearest number of that format."""
        return numbers.to(torch.float8_e4m3fn)

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Shaped[Tensor, "rows outputs"]:
        """Sums are kept in float32."""
        if not rows.is_cuda:
            return rows.float() @ weight.float().t()
        return filled(scaled_product, rows, weight)


EIGHT_BITS: Mapping[str, type[EightBitLinear]] = MappingProxyType(
    {"int8": Int8Linear, "float8": Float8Linear}
)


def filled(
    multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weight: Tensor
) -> Shaped[Tensor, "rows outputs"]:
    """A product in sizes that a CUDA device knows: filled up with zeros, which change no sum.

    Parameters
    ----------
    multiply
        Takes ``[rows, inputs]`` and ``[inputs, outputs]``.
    rows, weight
        ``[rows, inputs]`` and ``[outputs, inputs]``, in 8 bits.

    Returns
    -------
    Of the sizes that were given.
    """
    (n_rows, n_inputs), n_outputs = rows.shape, len(weight)
    inputs, outputs = -n_inputs % _ALIGNED, -n_outputs % _ALIGNED
    short = max(_LEAST_ROWS - n_rows, -n_rows % _ALIGNED)
    if inputs or short:
        rows = _padded(rows, inputs, short)
    if inputs or outputs:
        weight = _padded(weight, inputs, outputs)
    return multiply(rows, weight.t())[:n_rows, :n_outputs]


def _padded(numbers: Tensor, columns: int, rows: int) -> Tensor:
    """With zeros behind; as bytes, since padding knows no float8."""
    raw = functional.pad(numbers.view(torch.int8), (0, columns, 0, rows))
    return raw.view(numbers.dtype)


def scaled_product(rows: Tensor, weight: Tensor) -> Float[Tensor, "rows outputs"]:
    """Product of float8 matrices, ``[rows, inputs]`` and ``[inputs, outputs]``, in float32."""
    one = torch.ones((), device=rows.device)
    return torch._scaled_mm(rows, weight, scale_a=one, scale_b=one, out_dtype=torch.float32)


def _scale(rows: Tensor, most: float) -> Float[Tensor, "rows 1"]:
    """What one step of 8 bits is worth in each row."""
    return rows.abs().amax(1, keepdim=True).clamp_min(_TINY) / most


def require_precision(precision: PrecisionName, device: torch.device) -> None:
    """Refuse a GPU that does not multiply numbers of a precision, before anything is moved to it.

    Parameters
    ----------
    precision
        Of a network.
    device
        Where it shall be.

    Raises
    ------
    ConfigError
        When the network is in float8 and the GPU has an older design than those that have it.
    """
    if precision != "float8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _FLOAT8_FROM:
        wanted, has = (".".join(map(str, pair)) for pair in (_FLOAT8_FROM, found))
        rule = f"float8 needs a GPU of compute capability {wanted}, this one has {has}"
        raise ConfigError("device", str(device), rule=rule)


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
