"""Numbers that all processes of a server see: who lives, what waits, what was cancelled.

Every number has one writer, so nothing is locked, and nothing is lost with a process that dies.
"""

import fcntl
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_RING = 1024  # cancellations of an HTTP process that are remembered


class Board:
    """Shared memory between the processes that speak HTTP and those that compute.

    Parameters
    ----------
    folder
        Folder of the server's own, for a file a worker. A worker holds a lock on its file for as
        long as it lives, and the system lets go of it in the moment it dies.
    n_workers, n_servers
        Processes that compute, and that speak HTTP.
    """

    def __init__(self, folder: Path, *, n_workers: int, n_servers: int) -> None:
        shared = multiprocessing.get_context("spawn")
        self.folder, self.n_workers, self.n_servers = folder, n_workers, n_servers
        self._draining = shared.RawValue("b", 0)
        self._lives = shared.RawArray("q", n_workers)  # times that a worker became ready
        self._backlog = shared.RawArray("d", n_workers)
        self._running = shared.RawArray("q", n_workers)
        self._waiting = shared.RawArray("q", n_servers)
        self._rings = shared.RawArray("q", n_servers * (_RING + 1))  # a count, then numbers

    @property
    def draining(self) -> bool:
        """Whether the server takes nothing on any more."""
        return bool(self._draining.value)

    def drain(self) -> None:
        """Take nothing on any more."""
        self._draining.value = 1

    def life(self, worker: int) -> int:
        """Which life of a worker this is: 0 before it is first ready."""
        return int(self._lives[worker])

    def born(self, worker: int) -> IO[str]:
        """A worker is ready; it keeps what it gets open for as long as it lives."""
        file = self._file(worker).open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        self._running[worker], self._backlog[worker] = 0, 0.0
        self._lives[worker] += 1
        return file

    def alive(self, worker: int) -> bool:
        """Whether a worker is there and ready, at this moment."""
        if not self.life(worker):
            return False
        try:
            with self._file(worker).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    @property
    def ready(self) -> bool:
        """Whether every worker is there and ready."""
        return all(self.alive(worker) for worker in range(self.n_workers))

    def work(self, worker: int, *, running: int, backlog_s: float) -> None:
        """A worker says what it has to do."""
        self._running[worker], self._backlog[worker] = running, backlog_s

    @property
    def running(self) -> int:
        """Requests that workers hold."""
        return sum(self._running)

    @property
    def backlog_s(self) -> float:
        """Seconds of work that the least busy worker has to do."""
        return float(min(self._backlog))

    def wait(self, server: int, change: int) -> None:
        """A request came to an HTTP process, or left it."""
        self._waiting[server] += change

    @property
    def waiting(self) -> int:
        """Requests that HTTP processes hold, those in work among them."""
        return sum(self._waiting)

    def cancel(self, server: int, number: int) -> None:
        """Nobody wants the answer to a request any more."""
        start = server * (_RING + 1)
        count = self._rings[start]
        self._rings[start + 1 + count % _RING] = number
        self._rings[start] = count + 1

    def cancelled(self, seen: list[int]) -> Iterator[int]:
        """Requests that were cancelled since; ``seen`` counts, for each HTTP process."""
        for server in range(self.n_servers):
            start = server * (_RING + 1)
            count = self._rings[start]
            for number in range(max(seen[server], count - _RING), count):
                yield int(self._rings[start + 1 + number % _RING])
            seen[server] = count

    def _file(self, worker: int) -> Path:
        return self.folder / f"worker-{worker}-{os.getuid()}.lock"
