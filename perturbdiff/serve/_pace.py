"""What a request will take, from what requests took: the measured fallback of quotes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

from perturbdiff.config import SampleConfig
from perturbdiff.diffusion import network_calls
from perturbdiff.guidance import BestOf, Branch, DepthFirst, Hard, Particles
from perturbdiff.guidance._enforcement import Way

PILOT_CELLS = 512
_NEWEST = 0.1  # weight of what was measured last
_AT_FIRST = {
    "read": 0.01,
    "set_step": 6e-4,
    "solve": 1.0,
    "draw": 3e-4,
    "write": 3e-5,
    "whole": 2e-3,
}
FIXED = {"draw": 32, "write": 512, "whole": 512}
"""Cells that the fixed part of a kind of work counts for."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a request asks for."""

    n_conditions: int
    n_cells: int  # of each condition
    n_solves: int  # populations that nobody solved yet
    n_genes: int
    n_drawn: int = 0  # cells, over all conditions, that are there already
    config: SampleConfig | None = None  # None where nothing is denoised
    whole: bool = False  # whether it runs by itself, and shares no steps
    ways: tuple[Way, ...] = ()  # of enforcing constraints

    @property
    def all_cells(self) -> int:
        """Cells over all conditions."""
        return self.n_conditions * self.n_cells

    @property
    def n_candidates(self) -> int:
        """Candidates of each set that the search makes, at most."""
        return max((self._candidates(way) for way in self.ways), default=1)

    @property
    def set_steps(self) -> int:
        """Steps of sets of 32 cells; a set with guidance takes two.

        Every candidate of a search counts, and each further draw of its counts as a step does.
        """
        if self.config is None:
            return 0
        twice = 2 if self.config.guidance_scale not in (0.0, 1.0) else 1
        if self.whole:
            passes = 1 + max((w.resamples for w in self.ways if isinstance(w, Hard)), default=0)
            draws = max((getattr(way, "redraws", 1) for way in self.ways), default=1) - 1
            sets = -(-self.all_cells // 32) * self.n_candidates
            return sets * (twice * passes * self._calls + draws)
        pilot = self.n_solves * max(PILOT_CELLS - self.n_cells, 0)
        known = (self.n_conditions - self.n_solves) * min(self.n_cells, PILOT_CELLS)
        sets = -(-(self.all_cells + pilot - known) // 32)
        return sets * twice * self._calls

    @property
    def _calls(self) -> int:
        """Network calls of a trajectory."""
        config = self.config
        return 1 if config is None else network_calls(config.sampler, config.n_steps)

    def _candidates(self, way: Way) -> int:
        if isinstance(way, BestOf | Particles):
            return way.n
        if isinstance(way, Branch):
            return way.k
        return max(1, -(-way.budget // self._calls)) if isinstance(way, DepthFirst) else 1


@dataclass(kw_only=True)
class Pace:
    """Seconds of each kind of work, averaged over what was done lately."""

    seconds: dict[str, float] = field(default_factory=lambda: dict(_AT_FIRST))
    _lock: Lock = field(default_factory=Lock)

    def note(self, kind: str, seconds: float, amount: float = 1.0) -> None:
        """Some work was done: an amount of a kind (a read, set steps, a solve, cells)."""
        if amount <= 0:
            return
        amount += FIXED.get(kind, 0)
        with self._lock:
            old = self.seconds[kind]
            self.seconds[kind] = old + _NEWEST * (seconds / amount - old)

    def _of(self, n_cells: int, kind: str) -> float:
        return (n_cells + FIXED[kind]) * self.seconds[kind]

    def quote(self, size: Size) -> Mapping[str, float]:
        """Seconds and bytes of a request on a server that does nothing else.

        Parameters
        ----------
        size
            What is asked for.

        Returns
        -------
        ``seconds``, of which ``denoise`` and others, and ``memory_bytes``.
        """
        rate = self.seconds
        parts = {
            "read": rate["read"],
            "denoise": 0.0 if size.whole else size.set_steps * rate["set_step"],
            "solve": size.n_solves * rate["solve"],
            "draw": self._of(
                max(size.all_cells * size.n_candidates - size.n_drawn, 0),
                "whole" if size.whole else "draw",
            ),
            "write": self._of(size.all_cells, "write"),
        }
        dense = min(size.all_cells, 2 * PILOT_CELLS) * size.n_genes * 8
        sparse = size.all_cells * size.n_genes * 8  # an answer may be as dense as that
        return {"seconds": sum(parts.values()), **parts, "memory_bytes": 8 * dense + sparse}
