"""What is worth keeping between requests, within bounds."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """The values used last, as many as weigh no more than ``most``; threads may share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    @property
    def weight(self) -> int:
        """What all values weigh."""
        with self._lock:
            return sum(weight for _, weight in self._values.values())

    def get(self, key: Hashable) -> T | None:
        """The value, if it is still there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T, *, weight: int = 1) -> T:
        """Keep a value, not one that is too heavy, and forget those not used for longest."""
        with self._lock:
            self._values.pop(key, None)
            if weight <= self.most:
                self._values[key] = value, weight
            total = sum(weight for _, weight in self._values.values())
            while total > self.most:
                _, (_, gone) = self._values.popitem(last=False)
                total -= gone
        return value
