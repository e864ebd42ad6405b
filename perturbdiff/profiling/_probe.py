"""Splits a prediction into phases: what ran when, for how long, doing what.

A probe is put around a model from outside for as long as a ``with`` block lasts: callables of the
model's own objects are replaced by watched ones and put back afterwards. Nothing in the model knows
of it, so a probe that is off costs nothing. Time belongs to the innermost phase alone, so phases
add up to the whole.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perturbdiff.profiling._counting import Counting
from perturbdiff.profiling._work import Work

CONDITION = "condition encoding"
CONTROL = "control encoding"
DENOISE = "denoising steps"
STEPS = "decode steps"
GENES = "decode to genes"
POST = "post-processing"
PHASES = (CONDITION, CONTROL, DENOISE, STEPS, GENES, POST)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A callable of an object, and what its running means.

    Parameters
    ----------
    owner, name
        Object and attribute.
    phase
        Phase while it runs; ``None`` for that of the caller.
    then
        Phase that the caller is in afterwards.
    network
        Whether it is a call of the network.
    cache
        Tensors of its arguments and result that are a cache.
    """

    owner: object
    name: str
    phase: str | None = None
    then: str | None = None
    network: bool = False
    cache: Callable[[tuple[Any, ...], Any], Iterable[Tensor]] | None = None


@dataclass(kw_only=True)
class Phase:
    """What was spent in one phase."""

    seconds: float = 0.0
    network_seconds: float = 0.0
    network_calls: int = 0
    work: Work = field(default_factory=Work)
    peak_bytes: int = 0

    @property
    def outside_network(self) -> float:
        """Seconds beside the calls of the network."""
        return self.seconds - self.network_seconds


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time, in seconds from the start."""

    name: str
    begin: float
    seconds: float
    network: bool = False


class Probe:
    """Clock and counter of one prediction; phases are those that it went through.

    Parameters
    ----------
    device
        Waited for before each look at the clock, where it works on its own.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.phases: dict[str, Phase] = {}
        self.spans: list[Span] = []
        self.seconds = 0.0
        self.counting: Counting | None = None
        self._stack = [CONDITION]
        self._began = self._last = self._opened = 0.0

    @property
    def phase(self) -> str:
        """The phase under way."""
        return self._stack[-1]

    @property
    def network_calls(self) -> int:
        """Calls of the network in all phases."""
        return sum(phase.network_calls for phase in self.phases.values())

    def _of(self, name: str) -> Phase:
        return self.phases.setdefault(name, Phase())

    def _look(self) -> float:
        """Give the time since the last look to the phase under way."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._of(self.phase).seconds += now - self._last
        self._last = now
        return now

    def run(self, work: Callable[[], Any]) -> Any:
        """Run the whole of it, from the first phase to the last.

        Parameters
        ----------
        work
            The prediction.

        Returns
        -------
        What it returns.
        """
        self._stack = [CONDITION]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._began = self._last = time.perf_counter()
        self._opened = 0.0
        out = work()
        end = self._look() - self._began
        self._close(end)
        self.seconds += end
        return out

    def _close(self, end: float) -> None:
        """Write down the outermost phase, which no stage stands for."""
        if end > self._opened:
            name = self.phase
            self.spans.append(Span(name=name, begin=self._opened, seconds=end - self._opened))

    def watched(self, stage: Stage, call: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, with its time and its work on record."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            begin, outermost = self._look(), len(self._stack) == 1
            if outermost:
                self._close(begin - self._began)
            self._stack.append(stage.phase or self.phase)
            try:
                if stage.cache is not None:
                    self._declare(stage.cache((*args, *kwargs.values()), None))
                out = call(*args, **kwargs)
                if stage.cache is not None:
                    self._declare(stage.cache((), out))
            finally:
                end = self._look()
                name = self._stack.pop()
                if stage.then is not None:
                    self._stack[-1] = stage.then
                if outermost:
                    self._opened = end - self._began
            if stage.network:
                self._of(name).network_seconds += end - begin
                self._of(name).network_calls += 1
            span = Span(
                name=stage.name if stage.network else name,
                begin=begin - self._began, seconds=end - begin, network=stage.network,
            )  # fmt: skip
            self.spans.append(span)
            return out

        return inner

    def _declare(self, tensors: Iterable[Tensor]) -> None:
        if self.counting is not None:
            for tensor in tensors:
                self.counting.declare(tensor, "cache_bytes")

    @contextmanager
    def counts(self, weights: Iterable[Tensor]) -> Iterator[Counting]:
        """Count operations and bytes meanwhile, which takes time of its own: not while timing.

        Parameters
        ----------
        weights
            Parameters and buffers of the networks.

        Returns
        -------
        A context manager that hands out the counter; phases have its figures afterwards.
        """
        counting = Counting({"weight_bytes": weights}, phase=lambda: self.phase)
        self.counting = counting
        try:
            with counting:
                yield counting
        finally:
            self.counting = None
            for name, tally in counting.tallies.items():
                self._of(name).work += tally.work
                self._of(name).peak_bytes = max(self._of(name).peak_bytes, tally.peak_bytes)


@contextmanager
def watching(probe: Probe, stages: Sequence[Stage]) -> Iterator[Probe]:
    """Put a probe around some callables for the time of a block.

    Parameters
    ----------
    probe
        Clock and counter.
    stages
        What is watched.

    Returns
    -------
    A context manager that hands out the probe.
    """
    put_back: list[tuple[object, str, Any]] = []
    missing = object()
    try:
        for stage in stages:
            call = getattr(stage.owner, stage.name)
            own = vars(stage.owner).get(stage.name, missing)
            put_back.append((stage.owner, stage.name, own))
            object.__setattr__(stage.owner, stage.name, probe.watched(stage, call))
        yield probe
    finally:
        for owner, name, own in reversed(put_back):
            if own is missing:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, own)
