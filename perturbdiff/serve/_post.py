"""The way of a request from an HTTP process to a worker and back."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from litserve import LitServer
from litserve.utils import ResponseBufferItem

from perturbdiff.serve._board import Board
from perturbdiff.serve._jobs import Refusal, Reply, refused
from perturbdiff.serve._settings import ServeConfig

_LOOK_S = 0.2  # how often it is looked whether the client and the worker are still there
_TRIES = 2  # workers that may die over a request
_SPARE_S = 10.0  # after its deadline a worker that says nothing is given up


class Letter:
    """A request under way; close it when nobody wants its answer any more.

    Parameters
    ----------
    post
        What carries it.
    payload
        What the service is given.
    gone
        Whether the client has left.
    """

    def __init__(
        self, post: "Post", payload: dict[str, Any], gone: Callable[[], Awaitable[bool]]
    ) -> None:
        self.uid = str(secrets.randbits(62))
        self._post, self._payload, self._gone = post, payload, gone
        self._until = time.monotonic() + post.config.deadline_s + _SPARE_S
        self._worker: int | None = None
        self._lives: list[int] = []  # of all workers, when it was sent
        self._tries, self._ended, self._closed = 0, False, False
        self._event, self._inbox = asyncio.Event(), deque[Any]()
        post.server.response_buffer[self.uid] = ResponseBufferItem(
            event=self._event, response_queue=self._inbox
        )
        post.board.wait(post.number, 1)

    async def replies(self) -> AsyncIterator[Reply]:
        """Replies until the final one, which always comes, unless the client leaves."""
        await self._send()
        while True:
            try:
                await asyncio.wait_for(self._event.wait(), timeout=_LOOK_S)
            except TimeoutError:
                if await self._gone():
                    return
                if (lost := await self._looked_after()) is not None:
                    self._ended = True
                    yield lost
                    return
            self._event.clear()
            while self._inbox:
                (what, content), _ = self._inbox.popleft()
                if what == "started":
                    self._worker = content
                    continue
                status, media, headers, body, final = content
                self._ended = final
                yield Reply(
                    uid=self.uid, status=status, media=media, headers=headers, body=body,
                    final=final,
                )  # fmt: skip
                if final:
                    return

    def close(self) -> None:
        """Forget it; what is still being done for it is stopped."""
        if self._closed:
            return
        self._closed = True
        post = self._post
        post.board.wait(post.number, -1)
        post.server.response_buffer.pop(self.uid, None)
        if not self._ended:
            post.board.cancel(post.number, int(self.uid))

    async def _send(self) -> None:
        self._tries, self._worker = self._tries + 1, None
        self._lives = self._post.lives()
        await self._post.put(self.uid, self._payload)

    async def _looked_after(self) -> Reply | None:
        """Send again what died with its worker; give up what takes too long."""
        if time.monotonic() > self._until:
            return refused(self.uid, Refusal(504, "No worker answered in time."))
        if not self._lost():
            return None
        if self._tries >= _TRIES:
            reason = "Workers died over this request. It may need more memory than there is."
            return refused(self.uid, Refusal(503, reason, retry_after=10.0))
        await self._send()
        return None

    def _lost(self) -> bool:
        """Whether the worker that has it, or may have taken it, died and is there again."""
        now = self._post.lives()
        if self._worker is None:
            return now != self._lives and self._post.board.ready
        return now[self._worker] != self._lives[self._worker]


class Post:
    """Sends requests to the workers, and sees to it that each gets an answer.

    A request whose worker dies is sent again, since its answer is the same; one over which two
    workers died is given up. Nobody is stuck: what the worker does not end at the deadline, we do.

    Parameters
    ----------
    server
        LitServe's, with its queues and buffers.
    board
        Shared numbers.
    config
        Limits.
    """

    def __init__(self, server: LitServer, board: Board, config: ServeConfig) -> None:
        self.server, self.board, self.config = server, board, config

    @property
    def number(self) -> int:
        """Which of the HTTP processes this is."""
        return int(self.server.app.response_queue_id or 0)

    def lives(self) -> list[int]:
        """Which life each worker is in."""
        return [self.board.life(worker) for worker in range(self.board.n_workers)]

    async def put(self, uid: str, payload: dict[str, Any]) -> None:
        """Into the queue that all workers share."""
        path = self.server.litapi_connector.lit_apis[0].api_path
        queue = self.server.litapi_request_queues[path]
        await asyncio.to_thread(queue.put, (self.number, uid, time.monotonic(), payload))

    def check_room(self) -> None:
        """Refuse one request more than may wait.

        Raises
        ------
        Refusal
            With 429, and when to ask again.
        """
        board = self.board
        if board.waiting >= self.config.max_requests * board.n_workers:
            seconds = board.backlog_s
            reason = (
                f"{board.waiting} requests are waiting already, about {seconds:.0f} s of work. "
                "Ask again later."
            )
            raise Refusal(429, reason, retry_after=max(1.0, seconds))
