"""What a piece of a network does to a machine: operations, and bytes by what they belong to.

An *operation* is one addition or multiplication within a matrix product or an attention: a product
of ``[m, k]`` and ``[k, n]`` has ``2 · m · k · n``. Element-wise work has no operations here, only
bytes. A *byte* is counted when an operator reads a tensor that it was given, once, or writes
a tensor that it makes; views cost nothing, and what a processor keeps in its own caches is not
known, so bytes are an upper bound of what crosses the memory bus.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes; sums and multiples are those of the parts."""

    operations: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    cache_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Weights, activations and cache together."""
        return self.weight_bytes + self.activation_bytes + self.cache_bytes

    @property
    def intensity(self) -> float | None:
        """Operations a byte; None where nothing is moved."""
        return self.operations / self.bytes if self.bytes else None

    def __add__(self, other: "Work") -> "Work":
        return Work(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __mul__(self, times: float) -> "Work":
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    __rmul__ = __mul__

    def to_json(self) -> dict[str, float]:
        """Plain numbers by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, float]) -> Self:
        """The work that these are the numbers of."""
        return cls(**values)


def product(rows: float, inner: float, columns: float) -> float:
    """Operations of a matrix product."""
    return 2.0 * rows * inner * columns


def attention(queries: float, keys: float, width: float) -> float:
    """Operations of attention over all heads: scores, then the mix of the values.

    Parameters
    ----------
    queries, keys
        How many there are; of a batch, the sum over its members of their product belongs here as
        ``queries`` with the ``keys`` that each sees.
    width
        Of all heads together.

    Returns
    -------
    ``2 · (2 · queries · keys · width)``.
    """
    return 2.0 * product(queries, keys, width)
