"""Counts what operators do while they run: operations, bytes, and the memory that lives at once.

torch's own counter reports nothing for the fused attention of CPUs, so every attention has its
formula here. An operator without a formula has no operations, only bytes.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perturbdiff.profiling._work import Work, product

Formula = Callable[[tuple[Any, ...], Any], float]
Kind = str  # "weight_bytes" or "cache_bytes"

_VIEWS = frozenset(
    {
        "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "reshape",
        "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
        "unfold", "unsqueeze", "view", "_reshape_alias", "lift_fresh", "empty", "empty_like",
        "new_empty", "empty_strided", "new_empty_strided", "chunk", "is_same_size", "sym_size",
    }
)  # fmt: skip
_IN_PLACE_READS = frozenset({"zero_", "fill_", "copy_", "index_put_", "_index_put_impl_"})


def _mm(arguments: tuple[Any, ...], _: Any) -> float:
    left, right = arguments[:2]
    return product(left.shape[0], left.shape[1], right.shape[1])


def _addmm(arguments: tuple[Any, ...], out: Any) -> float:
    return _mm(arguments[1:], out)


def _bmm(arguments: tuple[Any, ...], _: Any) -> float:
    left, right = arguments[:2]
    return product(left.shape[0] * left.shape[1], left.shape[2], right.shape[2])


def _baddbmm(arguments: tuple[Any, ...], out: Any) -> float:
    return _bmm(arguments[1:], out)


def _mv(arguments: tuple[Any, ...], _: Any) -> float:
    return product(arguments[0].shape[0], arguments[0].shape[1], 1)


def _dot(arguments: tuple[Any, ...], _: Any) -> float:
    return product(1, arguments[0].numel(), 1)


def _linear(arguments: tuple[Any, ...], out: Any) -> float:
    return product(out.numel(), arguments[0].shape[-1], 1)


def _attention(arguments: tuple[Any, ...], _: Any) -> float:
    query, key, value = arguments[:3]  # [batch, heads, queries or keys, width of a head]
    batch, heads, queries, each = query.shape
    seen = key.shape[2]
    scores = product(batch * heads * queries, each, seen)
    return scores + product(batch * heads * queries, seen, value.shape[-1])


_FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::mv": _mv,
    "aten::dot": _dot,
    "aten::linear": _linear,
    "aten::_int_mm": _mm,
    "mkldnn::_linear_pointwise": _linear,
    "quantized::linear_dynamic": _linear,
    "onednn::qlinear_pointwise": _linear,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
}


class Tally:
    """What was counted under one name."""

    def __init__(self) -> None:
        self.work = Work()
        self.n_operators = 0
        self.peak_bytes = 0


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; what it counts belongs to the phase that is named meanwhile.

    Parameters
    ----------
    kinds
        Tensors whose bytes are those of weights (``"weight_bytes"``) or of a cache
        (``"cache_bytes"``); all others are activations.
    phase
        Names the phase at any moment.
    """

    def __init__(
        self,
        kinds: Mapping[Kind, Iterable[Tensor]] | None = None,
        *,
        phase: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = phase
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._kind: dict[int, Kind] = {}
        self._live: dict[int, int] = {}
        self._now = 0
        for kind, tensors in (kinds or {}).items():
            for tensor in tensors:
                self.declare(tensor, kind)

    def declare(self, tensor: Tensor, kind: Kind) -> None:
        """Count the bytes of this tensor's storage under another name for as long as it lives."""
        address = _address(tensor)
        if address and address not in self._kind:
            self._kind[address] = kind
            weakref.finalize(tensor.untyped_storage(), self._kind.pop, address, None)

    @property
    def total(self) -> Work:
        """Everything, whatever the phase."""
        return sum((tally.work for tally in self.tallies.values()), Work())

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors, beside the weights, that operators met and that lived at once."""
        return max((tally.peak_bytes for tally in self.tallies.values()), default=0)

    def __torch_dispatch__(  # noqa: PLR0917 - torch's own signature
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in _FORMULAS:
            parts = self._in_parts(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        tally = self.tallies[self.phase()]
        short = name.rpartition("::")[2]
        if short not in _VIEWS:
            reads = list(_reads(short, [*args, *kwargs.values()], out))
            operations = _FORMULAS[name](args, out) if name in _FORMULAS else 0.0
            self._add(tally, operations, [*reads, *_tensors(out)])
        tally.peak_bytes = max(tally.peak_bytes, self._now)
        return out

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator is made of, where it is made of others."""
        if not func._can_decompose():
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def _add(self, tally: Tally, operations: float, moved: Iterable[Tensor]) -> None:
        found = dict.fromkeys(("weight_bytes", "activation_bytes", "cache_bytes"), 0.0)
        for tensor in moved:
            self._follow(tensor)
            found[self._kind.get(_address(tensor), "activation_bytes")] += _bytes(tensor)
        tally.work += Work(operations=operations, **found)
        tally.n_operators += 1

    def _follow(self, tensor: Tensor) -> None:
        """Add the storage to what lives, until it dies."""
        storage, address = tensor.untyped_storage(), _address(tensor)
        if not address or address in self._live or address in self._kind:
            return
        size = storage.nbytes()
        self._live[address] = size
        self._now += size
        weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self._now -= self._live.pop(address, 0)


def _reads(name: str, given: list[Any], out: Any) -> Iterator[Tensor]:
    """Tensors that an operator reads; of those that it looks rows up in, as much as it takes."""
    if name in _IN_PLACE_READS:  # what is written to is not read
        given = given[1:]
    if name in ("embedding", "index", "gather", "index_select"):
        yield from _tensors(out)  # rows that are read are as many as those that are written
        given = given[1:]
    seen: set[int] = set()
    for tensor in _tensors(given):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the different numbers of a tensor: an axis that is only repeated has one."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def counted(work: Callable[[], Any], *, weights: Iterable[Tensor] = ()) -> Counting:
    """Run something and count it.

    Parameters
    ----------
    work
        What to run.
    weights
        Parameters and buffers of the networks that take part.

    Returns
    -------
    The counter, with all of it under the name ``""``.
    """
    counting = Counting({"weight_bytes": weights})
    with torch.inference_mode(), counting:
        work()
    return counting
