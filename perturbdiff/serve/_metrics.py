"""Metrics in Prometheus' form, over all processes of a server."""

import os
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from perturbdiff._optional import needed
from perturbdiff.serve._board import Board

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SETS = (1, 2, 4, 8, 16, 32, 64, 128)


@cache
def instruments() -> SimpleNamespace:
    """The metrics of this process; those of all are added up when they are read."""
    made = needed("prometheus_client", group="serve")
    registry = made.CollectorRegistry()
    return SimpleNamespace(
        registry=registry,
        requests=made.Counter(
            "perturbdiff_requests", "Answered requests", ["route", "status"], registry=registry
        ),
        latency=made.Histogram(
            "perturbdiff_request_seconds", "From the first byte of a request to its answer",
            ["route"], buckets=_SECONDS, registry=registry,
        ),
        phases=made.Histogram(
            "perturbdiff_phase_seconds", "Phases of requests in the workers", ["phase"],
            buckets=_SECONDS, registry=registry,
        ),
        fill=made.Histogram(
            "perturbdiff_batch_sets", "Sets in each denoising call", buckets=_SETS,
            registry=registry,
        ),
        calls=made.Counter("perturbdiff_network_calls", "Calls of the network", registry=registry),
    )  # fmt: skip


class WorkerMeters:
    """What a worker measures."""

    def __init__(self) -> None:
        self._made = instruments()

    def phase(self, name: str, seconds: float) -> None:
        """A phase of a request took so long."""
        self._made.phases.labels(phase=name).observe(seconds)

    def calls(self, fill: list[int]) -> None:
        """The network was called, with so many sets each time."""
        for sets in fill:
            self._made.fill.observe(sets)
        self._made.calls.inc(len(fill))


class _Now:
    """What is so at this moment, as gauges."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Any]:
        """The gauges."""
        core = needed("prometheus_client.core", group="serve")
        board = self._board
        for name, words, value in (
            ("queue_requests", "Requests that wait or are in work", board.waiting),
            ("running_requests", "Requests that workers hold", board.running),
            ("backlog_seconds", "Work of the least busy worker, as quoted", board.backlog_s),
            ("workers", "Workers that are there", board.n_workers),
            ("workers_ready", "Workers that are ready",
             sum(board.alive(worker) for worker in range(board.n_workers))),
            ("draining", "Whether the server takes nothing on any more", board.draining),
        ):  # fmt: skip
            yield core.GaugeMetricFamily(f"perturbdiff_{name}", words, value=float(value))


def exposition(board: Board) -> tuple[bytes, str]:
    """All metrics as text, and its media type."""
    made = needed("prometheus_client", group="serve")
    registry = instruments().registry
    if FOLDER in os.environ:
        registry = made.CollectorRegistry()
        needed("prometheus_client.multiprocess", group="serve").MultiProcessCollector(registry)
    gauges = made.CollectorRegistry()
    gauges.register(_Now(board))
    text: bytes = made.generate_latest(registry) + made.generate_latest(gauges)
    return text, str(made.CONTENT_TYPE_LATEST)
