"""No process outlives the one that started the server, however that one ended."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from multiprocessing.managers import SyncManager
from threading import Thread
from typing import Any

from fastapi import FastAPI
from litserve import LitServer


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone; a first process has none."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()  # the system closes the parent's end of a pipe, so SIGKILL is seen too
        os._exit(1)

    Thread(target=watch, name="watch", daemon=True).start()


class _Sent:
    """Starts the watch where it is received."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return end_with_parent, ()


class WatchedServer(LitServer):  # type: ignore[misc]
    """LitServe's server, whose manager and HTTP processes watch the first process.

    A worker starts its watch itself, when it is told to load the model.
    """

    def _init_manager(self, num_api_servers: int) -> SyncManager:
        manager: SyncManager = super()._init_manager(num_api_servers)
        manager.list([_Sent()])  # LitServe lets nobody else into the manager's process
        return manager

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[Any]:
        """What surrounds the life of an HTTP process."""
        end_with_parent()
        async with super().lifespan(app) as state:
            yield state
