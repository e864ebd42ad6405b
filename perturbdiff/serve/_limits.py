"""What is looked at before a request is parsed: its size, its key, and whether we take any."""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from perturbdiff.serve._board import Board
from perturbdiff.serve._formats import dumps

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_OPEN = ("/health", "/metrics")


class _TooLargeError(Exception):
    """More was sent than may be."""


class Gate:
    """Refuses what is too large, without a key, or too late, in front of the whole application.

    Parameters
    ----------
    app
        What is behind it.
    board
        Says whether the server drains.
    max_bytes
        Largest body. A length that is stated is believed where it is too large; what comes is
        counted.
    api_key
        Key that all routes but health and metrics want, as ``X-API-Key`` or bearer.
    """

    def __init__(self, app: App, *, board: Board, max_bytes: int, api_key: str | None) -> None:
        self.app, self._board = app, board
        self._max_bytes, self._api_key = max_bytes, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        if self._api_key and scope["path"] not in _OPEN and not self._knows(headers):
            await _answer(send, 401, "An API key is needed, as X-API-Key or as bearer token.")
            return
        if scope["method"] == "POST" and self._board.draining:
            await _answer(send, 503, "The server is being shut down. Ask another, or later.")
            return
        length = headers.get("content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            await self._refuse(send)
            return
        await self._counted(scope, receive, send)

    def _knows(self, headers: dict[str, bytes]) -> bool:
        bearer = headers.get("authorization", b"").removeprefix(b"Bearer ")
        given = headers.get("x-api-key", bearer)
        return hmac.compare_digest(given, (self._api_key or "").encode())

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and break off where more comes than may."""
        total, begun = 0, False

        async def counting() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_bytes:
                raise _TooLargeError
            return message

        async def watching(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, counting, watching)
        except _TooLargeError:
            if not begun:
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        limit = f"{self._max_bytes / 1e6:g} MB"
        await _answer(send, 413, f"The body is larger than {limit}. Send only control cells.")


async def _answer(send: Send, status: int, detail: str) -> None:
    body = dumps({"error": "Refusal", "detail": detail})
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status in (429, 503):
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
