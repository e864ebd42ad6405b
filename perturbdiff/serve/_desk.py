"""Threads beside the denoising: short pieces of work, one of each request in turn."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Done:
    """A piece of work that was done, or failed."""

    owner: Hashable
    kind: str
    amount: float
    then: Callable[[Any], None]  # for the thread that asked
    result: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class Desk:
    """A few threads that take pieces of work from owners in turn.

    Parameters
    ----------
    n_threads
        Threads.
    report
        Called from them with everything that was done.
    """

    def __init__(self, n_threads: int, report: Callable[[Done], None]) -> None:
        self._report, self._changed, self._open = report, Condition(), True
        self._waiting: OrderedDict[Hashable, deque[tuple[Callable[[], Any], dict[str, Any]]]] = (
            OrderedDict()
        )
        self._threads = [
            Thread(target=self._work, name=f"desk-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(
        self,
        owner: Hashable,
        work: Callable[[], Any],
        *,
        then: Callable[[Any], None],
        kind: str,
        amount: float = 1.0,
    ) -> None:
        """Let a piece of work wait for its owner's turn.

        Parameters
        ----------
        owner
            Who wants it.
        work
            What to do.
        then
            What the thread that reads the reports shall do with the result.
        kind, amount
            What it is and how much of it, for the report.
        """
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(
                (work, {"then": then, "kind": kind, "amount": amount})
            )
            self._changed.notify()

    def drop(self, owner: Hashable) -> None:
        """Forget what an owner still has waiting."""
        with self._changed:
            self._waiting.pop(owner, None)

    def close(self) -> None:
        """End the threads when they have done what they hold."""
        with self._changed:
            self._open = False
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open and not self._waiting:
                    self._changed.wait()
                if not self._open:
                    return
                owner, pieces = self._waiting.popitem(last=False)
                work, about = pieces.popleft()
                if pieces:
                    self._waiting[owner] = pieces  # behind all others
            started = perf_counter()
            try:
                result, error = work(), None
            except Exception as caught:  # noqa: BLE001 - it is its owner's, who is told
                result, error = None, caught
            seconds = perf_counter() - started
            self._report(Done(owner=owner, result=result, error=error, seconds=seconds, **about))
