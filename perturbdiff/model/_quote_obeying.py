"""What obeying constraints costs beside the network, measured on short predictions that obey.

From the pilot of a condition to its report everything is timed together, as

    a + b · cells + c · calls of the network + d · sets in these calls

(the calls along the course that obeys, not those of the pilot) with coefficients of at least 0. Of
what comes before, the quote of a prediction without constraints knows the time. The short
predictions have the very constraints, control cells and ways of enforcing; what they satisfy at
once, or try again, stands for what longer ones will.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from anndata import AnnData

from perturbdiff._errors import ConfigError
from perturbdiff._logging import logger
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._json import to_json
from perturbdiff.guidance._logic import Bound, conjuncts
from perturbdiff.model._constrained import Wish
from perturbdiff.model._quote_rest import _REPEATS, Request, RestCost, _Runs, _solved
from perturbdiff.profiling import Probe
from perturbdiff.profiling._machine import cache_file, machine_names, read_cache, write_cache

if TYPE_CHECKING:
    from perturbdiff.model._network_predictor import NetworkPredictor

OBEYING = "constraints"
_CELLS = (256, 768)  # of the longer short predictions, for few cells and for many
_CANDIDATES = 64  # of all their sets
_LONG = 1.0  # seconds of a short prediction that is not repeated


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """A prediction of one condition that is timed."""

    n_cells: int
    settings: Mapping[str, Any]
    pilot_calls: int  # of the network, before the course


@dataclass(frozen=True, kw_only=True)
class ObeyingCost:
    """Seconds of a condition, a cell, a call and a set in it; bytes for some numbers of cells.

    ``network`` has the seconds that the network took in each short prediction.
    """

    each: tuple[float, ...]
    peaks: tuple[tuple[float, float], ...]
    network: tuple[float, ...]
    spread: float

    @classmethod
    def measured(cls, runs: _Runs, asked: Sequence[ShortRun], *, before: float) -> "ObeyingCost":
        """From short predictions, of which the first is run once more to warm up."""
        features, took, network, spreads, peaks = [], [], [], [], {}
        _timed(runs, asked[0])
        for one in asked:
            times = [_timed(runs, one)]
            while len(times) < _REPEATS and sum(times[-1]) < _LONG:
                times.append(_timed(runs, one))
            times.sort()
            outside, inside = times[len(times) // 2]
            calls = float(runs.notes["nfe"] - one.pilot_calls)
            sets = float(runs.notes["constraints"]["set_evaluations"].max())
            features.append((1.0, one.n_cells, calls, sets))
            took.append(max(outside - before, 1e-6))
            network.append(inside)
            spreads.append((times[-1][0] - times[0][0]) / (2 * outside))
            if one.n_cells not in peaks:
                peaks[one.n_cells] = runs.peak(_request(one))
        each = _solved(np.array(features), np.array(took))
        error = np.abs(np.array(features) @ np.array(each) / np.array(took) - 1).max()
        return cls(
            each=each,
            peaks=tuple((float(cells), peak) for cells, peak in sorted(peaks.items())),
            network=tuple(network),
            spread=float(error) + float(np.median(spreads)),
        )


def obeying_cost(
    model: "NetworkPredictor[Any, Any, Any]",
    file: AnnData,
    *,
    wish: Wish,
    asked: Sequence[ShortRun],
    rest: RestCost,
    missing_genes: str,
    shorten: Callable[[Any], None] = lambda fitted: None,
) -> ObeyingCost:
    """Measured now, or read where the same was measured before; functions are always run.

    Parameters
    ----------
    model
        Fitted.
    file
        Control cells.
    wish
        Constraints, and how to enforce them.
    asked
        Short predictions.
    rest
        What predictions without constraints take.
    missing_genes
        As in ``predict``.
    shorten
        As for the cost of the rest.

    Returns
    -------
    Coefficients.
    """
    shape = (*machine_names("cpu"), model.checksum, *file.shape, missing_genes)
    said = _written(wish)
    path = None if said is None else cache_file("obeying", *shape, said, list(asked))
    known = None if path is None else read_cache(path)
    if known is not None:
        return ObeyingCost(
            each=tuple(known["each"]),
            peaks=tuple((cells, peak) for cells, peak in known["peaks"]),
            network=tuple(known["network"]),
            spread=known["spread"],
        )
    obeying = {"constraints": wish.constraints, "enforce": wish.ways}
    runs = _Runs(model, file, settings=obeying, missing_genes=missing_genes, shorten=shorten)
    before = sum(each[0] + each[1] for each in rest.seconds.values())
    with _quiet():
        cost = ObeyingCost.measured(runs, asked, before=before)
    if path is not None:
        write_cache(path, asdict(cost))
    return cost


@dataclass(frozen=True, kw_only=True)
class ObeyingRest:
    """Everything in a prediction that obeys but the network."""

    rest: RestCost
    cost: ObeyingCost
    calls: float  # of the network along the course of each condition
    evaluations: float  # sets in them

    @property
    def spread(self) -> float:
        """Relative error to be expected."""
        return max(self.rest.spread, self.cost.spread)

    def phases(self, request: Request) -> dict[str, float]:
        """Seconds of each phase."""
        before = {
            name: each[0] + each[1] * request.contexts for name, each in self.rest.seconds.items()
        }
        own = float(np.dot((1.0, request.cells, self.calls, self.evaluations), self.cost.each))
        return {**before, OBEYING: request.conditions * own}

    def memory_bytes(self, request: Request) -> float:
        """Most bytes at once: conditions are made one after another, and wait."""
        (few, least), (many, most) = self.cost.peaks[0], self.cost.peaks[-1]
        growth = (most - least) / (many - few) if many > few else 0.0
        own = most + max(growth, 0.0) * (request.cells - many)
        return max(own, least) + self.rest.waiting * (request.conditions - 1) * request.cells


def short_sizes(
    bounds: Sequence[Bound], set_size: int, n_cells: int, *, candidates: float = 1
) -> list[int]:
    """Cells of short predictions, many first: two numbers, and none that constraints refuse.

    Nor have they many more candidates than what is asked for.
    """
    measured = [len(b.lower) for b in conjuncts(bounds) if isinstance(b, Bounds)]
    allowed = min((count for count in measured if count > 1), default=max(_CELLS))
    sets = max(-(-n_cells // set_size), int(_CANDIDATES // max(candidates, 1)), 1)
    many = next((count for count in _CELLS if count >= n_cells), _CELLS[-1])
    sizes = min(many, sets * set_size), set_size
    return list(dict.fromkeys(min(size, allowed) for size in sizes))


def _request(one: ShortRun) -> Request:
    return Request(contexts=1, conditions=1, cells=one.n_cells)


def _timed(runs: _Runs, one: ShortRun) -> tuple[float, float]:
    """Seconds outside the network, and within."""
    runs.settings = {**runs.settings, **one.settings}
    phases = runs.run(_request(one), Probe()).phases.values()
    return sum(p.outside_network for p in phases), sum(p.network_seconds for p in phases)


def _written(wish: Wish) -> str | None:
    """A wish by all that it says; None where it holds functions, which say nothing."""
    try:
        return repr(([to_json(one) for one in wish.constraints], wish.ways))
    except ConfigError:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Short predictions need not obey, and nobody needs to be told by this thread."""
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)
