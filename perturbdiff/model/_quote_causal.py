"""Calls of the autoregressive model: how many there are, and what one takes.

How many calls a batch of cells takes is known beforehand only where every gene is said in a call of
its own. With guesses it depends on how many of them the network shares, cell by cell; where genes
are drawn, on how many genes of the fullest cell are not zero. So both are estimated.
"""

from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from anndata import AnnData

from perturbdiff.autoregressive import Sampling, Speculative
from perturbdiff.config import DecodeConfig
from perturbdiff.model._causal_fitted import CausalFitted, CountTask
from perturbdiff.model._quote_points import decoder_shape, precision_of
from perturbdiff.model._quote_rest import questions
from perturbdiff.profiling import Timing, Work, counted
from perturbdiff.profiling._machine import (
    cache_file,
    machine_names,
    read_cache,
    typical_seconds,
    write_cache,
)
from perturbdiff.profiling._quote import expected_largest

if TYPE_CHECKING:
    from perturbdiff.model._causal_baseline import CausalBaseline

_CELLS = (1, 5, 24, 75, 220)
_REACHES = (100, 150)  # genes that were said; beside the first ones, half and all of them
_SECONDS_EACH = 0.04
_MOST_CACHE = 2.5e8  # bytes of a cache that is timed
_CYCLE = 4  # lengths that timed calls go through
_WATCHED = 24  # cells whose calls are counted
_FIRST_GENES = 256  # of them


class DecoderCost:
    """Seconds, bytes and number of the calls of a decoder.

    Parameters
    ----------
    fitted
        Model.
    task
        A condition to time it on.
    config
        How cells are said.
    """

    def __init__(self, fitted: CausalFitted, task: CountTask, config: DecodeConfig) -> None:
        self.fitted, self.task, self.config = fitted, task, config
        self.shape = decoder_shape(fitted)
        self.decoding = fitted.sampler._decoding(config, None)
        self.n_genes = len(fitted.lanes)
        found = self._known()
        self.steps = {int(k): Timing.from_json(each) for k, each in found["steps"].items()}
        self.prefill = Timing.from_json(found["prefill"])
        self.moved = [Work.from_json(each) for each in found["moved"]]
        self.calls_each: list[float] = found["calls_each"]

    def calls(self, n_cells: int) -> float:
        """Calls until the last of the cells is done."""
        if self.decoding.ends_on_time:
            return float(self.n_genes)
        return expected_largest(self.calls_each, n_cells)

    @property
    def drawn_as_expected(self) -> bool:
        """Whether genes are drawn as the model is trained: as often as the prior expects them."""
        known = self.decoding.ends_on_time or isinstance(self.decoding, Speculative)
        return not known and self.decoding.sampling == Sampling()

    @property
    def spread(self) -> float:
        """Relative error to be expected of a call."""
        return float(np.median([timing.spread for timing in self.steps.values()]))

    def cache_bytes(self, n_cells: int) -> int:
        """Keys and values of some cells."""
        return self.shape.cache_numbers(n_cells) * self.fitted.decoder.kept.itemsize

    def seconds(self, n_cells: int) -> float:
        """Prefill and all calls for cells that are made together."""
        return self.prefill((1.0, n_cells), (n_cells,)) + sum(
            weight * self.step(n_cells, reach) for weight, reach in self._course(n_cells)
        )

    def step(self, n_cells: int, reach: int) -> float:
        """One call, between those of the reaches that were timed: kernels may change on the way."""
        took = [timing((1.0, n_cells), (n_cells,)) for timing in self.steps.values()]
        return float(np.interp(reach, list(self.steps), took))

    def work(self, n_cells: int) -> Work:
        """Of prefill and all calls."""
        total = Work(operations=self.shape.prefill(1, n_cells))
        fixed, each, further = self.moved
        for weight, reach in self._course(n_cells):
            moved = fixed + n_cells * each + (n_cells * reach) * further
            operations = self.shape.step(n_cells, n_positions=self.decoding.stride, reach=reach)
            total += weight * Work(**{**asdict(moved), "operations": operations})
        return total

    def _course(self, n_cells: int) -> list[tuple[float, int]]:
        """Number of calls up to some reaches of the longest cell."""
        calls = self.calls(n_cells)
        last = self.n_genes if self.decoding.stride > 1 else min(self.n_genes, round(calls))
        rising = min(calls, last / self.decoding.stride)  # then it stays at the last gene
        parts, count = 8, self.decoding.stride
        course = [
            (rising / parts, max(count, round((number + 0.5) / parts * last)))
            for number in range(parts)
        ]
        return [*course, (calls - rising, last)]

    def _known(self) -> dict[str, Any]:
        fitted = self.fitted
        numbers = precision_of(fitted)
        weights = float(sum(p.double().abs().sum() for p in fitted.decoder.parameters()))
        names = machine_names(fitted.sampler.device)
        path = cache_file("decoder", *names, self.shape, numbers, self.config, weights)
        if (known := read_cache(path)) is None:
            known = self._measured()
            write_cache(path, known)
        return known

    @torch.inference_mode()
    def _measured(self) -> dict[str, Any]:
        device = self.fitted.sampler.device
        sizes = [n for n in _CELLS if n <= 4 or self.cache_bytes(n) <= _MOST_CACHE]
        stride, n_genes = self.decoding.stride, self.n_genes
        wanted = (stride + _CYCLE, *_REACHES, n_genes // 2, n_genes)
        reaches = sorted({min(max(reach, stride), n_genes) for reach in wanted})
        took: dict[int, list[float]] = {reach: [] for reach in reaches}
        prefills = []
        for n_cells in sizes:
            prefills.append(typical_seconds(device, partial(self.cells, n_cells), _SECONDS_EACH))
            cells = self.cells(n_cells)
            for reach in reaches:
                call = self.advancing(cells, reach)
                took[reach].append(typical_seconds(device, call, _SECONDS_EACH))
        places = [(n,) for n in sizes]
        features = [(1.0, n) for n in sizes]
        steps = {reach: Timing.fit(features, places, each) for reach, each in took.items()}
        prefill = Timing.fit(features, places, prefills)
        return {
            "steps": {str(reach): timing.to_json() for reach, timing in steps.items()},
            "prefill": prefill.to_json(),
            "moved": [work.to_json() for work in self.counted(reaches)],
            "calls_each": self.watched(),
        }

    def cells(self, n_cells: int) -> Any:
        """Cells of which nothing was said, prefilled."""
        cache = self.fitted.sampler.prefilled([(self.task, [0])], n_cells)
        keys = self.task.keys([0], DecodeConfig(set_size=n_cells), 0).flatten()
        return self.decoding.begin(cache, keys.to(cache.keys.device))

    def advancing(self, cells: Any, reach: int) -> Any:
        """A call that says the last genes up to some reach, or up to one a little less.

        No two calls of a cell have the same shape, so no memory that was freed fits the next.
        """
        least, turns = self.decoding.stride, cycle(range(_CYCLE))

        def call() -> None:
            now = max(reach - next(turns), least)
            cells.position.fill_(now - least)
            cells.done.zero_()
            self.decoding.advance(cells, reach=now)

        return call

    def counted(self, reaches: list[int]) -> list[Work]:
        """Bytes of a call: fixed, a cell, and a cell and gene that was said."""
        decoder = self.fitted.decoder
        weights = [*decoder.parameters(), *decoder.buffers()]
        near, far = reaches[0], reaches[-1]

        def of(n_cells: int, reach: int) -> Work:
            call = self.advancing(self.cells(n_cells), reach)
            return counted(call, weights=weights).total

        one, two, long = of(1, near), of(2, near), of(2, far)
        further = (long + -1.0 * two) * (0.5 / max(far - near, 1))
        each = two + -1.0 * one + (-1.0 * near) * further
        return [one + -1.0 * each + (-1.0 * near) * further, each, further]

    def watched(self) -> list[float]:
        """Calls that each of some cells takes."""
        if self.decoding.ends_on_time:
            return [float(self.n_genes)]
        cells = self.cells(_WATCHED)
        if self.drawn_as_expected:
            present = self.fitted.decoder.log_present(cells.cache.genes).exp().sum(1)
            return [1.0 + value for value in present.tolist()]
        drawn = not isinstance(self.decoding, Speculative)
        wanted = self.n_genes if drawn else min(_FIRST_GENES, self.n_genes)
        n_calls, took, reach = 0, torch.zeros(_WATCHED), 0
        while bool((going := ~cells.done & (cells.position < wanted)).any()):
            reach = min(reach + self.decoding.stride, self.n_genes)
            took += going.cpu()
            self.decoding.advance(cells, reach=reach)
            n_calls += 1
        times = self.n_genes / wanted  # means grow with the genes, spreads with their root
        calls: list[float] = (took.mean() * times + (took - took.mean()) * times**0.5).tolist()
        return calls


def _task(model: "CausalBaseline", file: AnnData, *, missing_genes: str) -> CountTask:
    """A condition of which control cells are in the file."""
    labels, contexts, named = questions(model, file, missing_genes=missing_genes)
    question = model._ask(file, labels[:1], contexts=contexts[:1], n_cells=1, **named)
    condition, controls = model._with_controls_of(question)[0]
    target = model.fitted.target(condition, controls)
    n_cells = max(_CELLS)
    return model.fitted.task(condition, controls, target, n_cells=n_cells, seed=0)
