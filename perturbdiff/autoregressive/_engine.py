"""Continuous batching: cells of many requests share a fixed number of slots.

After every gene a slot whose cell is done, or cancelled, takes the next waiting cell. Requests
take turns, one cell each, so that a small one does not wait for the last cell of a large one. What
a cell becomes depends on its own key and cache alone, so it is what it would have become alone.

B slots, G genes.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from perturbdiff._errors import ConfigError
from perturbdiff.autoregressive._decode import Cells, Decoding
from perturbdiff.autoregressive._protocol import Cache


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A cell that is done."""

    request: int
    cell: int  # its place in the request
    bins: Int[Tensor, " genes"]


@dataclass
class _Request:
    number: int
    cache: Any
    keys: Tensor
    waiting: int = 0  # first cell that has no slot yet


@dataclass
class _Slot:
    request: _Request
    cell: int
    n_calls: int = field(default=0)


class Engine:
    """Slots for cells in the making.

    Parameters
    ----------
    decoding
        How cells advance.
    n_slots
        Cells that are made at a time.
    n_prefix
        Most places before the first gene that any request needs: its control cells and one.
    """

    def __init__(self, decoding: Decoding, *, n_slots: int, n_prefix: int) -> None:
        if n_slots < 1:
            raise ConfigError("engine.n_slots", n_slots, rule="must be at least 1")
        self.decoding = decoding
        self.n_calls = 0
        self._n_prefix = n_prefix
        self._cells: Cells | None = None  # of the kind that the first request brings
        self._slots: list[_Slot | None] = [None] * n_slots
        self._waiting: deque[_Request] = deque()
        self._n_requests = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in the making."""
        return not self._waiting and not any(self._slots)

    def submit(self, cache: Cache, keys: Int[Tensor, " cells"]) -> int:
        """Let cells wait for a slot.

        Parameters
        ----------
        cache
            From ``prefill``, with or without room for genes.
        keys
            Key of each cell.

        Returns
        -------
        Number of the request.
        """
        if (n_prefix := cache.prefix.shape[1]) > self._n_prefix:
            rule = f"a request needs {n_prefix} places before the first gene; make slots that large"
            raise ConfigError("engine.n_prefix", self._n_prefix, rule=rule)
        self._n_requests += 1
        if len(keys):
            self._waiting.append(_Request(self._n_requests, cache, keys))
        return self._n_requests

    def cancel(self, request: int) -> None:
        """Drop what is left of a request; its slots are free at the next gene."""
        self._waiting = deque(one for one in self._waiting if one.number != request)
        self._slots = [
            None if slot is not None and slot.request.number == request else slot
            for slot in self._slots
        ]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Fill free slots, advance every cell by one call, and hand over those that are done."""
        self._fill()
        if not any(self._slots):
            return []
        cells, decoding = self._cells, self.decoding
        assert cells is not None  # a slot was filled
        most = max(slot.n_calls + 1 for slot in self._slots if slot is not None)
        decoding.advance(cells, reach=min(most * decoding.stride, decoding.n_genes))
        self.n_calls += 1
        for slot in self._slots:
            if slot is not None:
                slot.n_calls += 1
        return self._collect(cells)

    def _fill(self) -> None:
        free = [number for number, slot in enumerate(self._slots) if slot is None]
        for number in free:
            if not self._waiting:
                return
            request = self._waiting.popleft()
            own = slice(request.waiting, request.waiting + 1)
            fresh = self.decoding.begin(request.cache[own], request.keys[own])
            self._slots[number] = _Slot(request, request.waiting)
            self._room(fresh).put(torch.tensor([number], device=request.keys.device), fresh)
            request.waiting += 1
            if request.waiting < len(request.keys):
                self._waiting.append(request)

    def _room(self, like: Cells) -> Cells:
        """The slots, which are made, all alike, when the first cell arrives."""
        if self._cells is None:
            copies = torch.zeros(len(self._slots), dtype=torch.int64, device=like.keys.device)
            cache = like.cache[copies].with_room(self._n_prefix, self.decoding.n_genes)
            self._cells = self.decoding.begin(cache, like.keys[copies])
        return self._cells

    def _collect(self, cells: Cells) -> list[Finished]:
        n_genes, on_time = self.decoding.n_genes, self.decoding.ends_on_time
        done = None if on_time else cells.done.tolist()
        finished = []
        for number, slot in enumerate(self._slots):
            if slot is not None and (slot.n_calls == n_genes if done is None else done[number]):
                self._slots[number] = None
                bins = cells.bins[number].clone()
                finished.append(Finished(request=slot.request.number, cell=slot.cell, bins=bins))
        return finished
