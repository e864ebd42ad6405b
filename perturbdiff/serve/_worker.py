"""The computing process: LitServe starts, watches and replaces it; this is what runs in it."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import IO, Any

import litserve
from litserve.loops import LitLoop
from litserve.specs.base import LitSpec
from litserve.utils import LitAPIStatus, LoopResponseType

from perturbdiff.serve._board import Board
from perturbdiff.serve._jobs import Reply
from perturbdiff.serve._metrics import WorkerMeters
from perturbdiff.serve._service import Service
from perturbdiff.serve._settings import ServeConfig
from perturbdiff.serve._watch import end_with_parent

_IDLE_S = 0.05
_TAKEN_AHEAD = 16  # requests that a worker takes on while another may be idle


class ModelAPI(litserve.LitAPI):  # type: ignore[misc]
    """What LitServe is told about the model.

    Parameters
    ----------
    bundle
        Folder of a saved model.
    config
        Settings of the server.
    board
        Shared numbers.
    """

    def __init__(self, bundle: Path, config: ServeConfig, board: Board) -> None:
        super().__init__(stream=True, loop=StepLoop(), spec=Questions())
        self.bundle, self.config, self.board = bundle, config, board
        self.service: Service | None = None
        self.lock: IO[str] | None = None

    def setup(self, device: str) -> None:
        """Load the model; called once in each worker."""
        end_with_parent()
        import torch  # noqa: PLC0415 - only workers need it

        from perturbdiff.model import load  # noqa: PLC0415 - slow to import

        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server drains, then ends us
            sys.setswitchinterval(1e-3)  # the denoising thread needs its turn
            torch.set_num_threads(self.config.threads)
            if device.startswith("cuda"):
                torch.set_float32_matmul_precision("high")
        model = load(self.bundle, device=device)
        self.service = Service(model, self.config, meters=WorkerMeters())
        if self.config.cost_model:
            self.service.measure()
        self.lock = self.board.born(worker_number())

    def health(self) -> bool:
        """Whether requests are answered at this moment; asked by the HTTP processes."""
        return self.board.ready and not self.board.draining


def worker_number() -> int:
    """Which of the workers this process is."""
    return int(os.environ.get("LITSERVE_WORKER_ID", "0"))


class Questions(LitSpec):  # type: ignore[misc]
    """Requests come through routes of our own, and are told their progress."""

    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/predict"

    @property
    def stream(self) -> bool:
        """Answers come in parts."""
        return True


class StepLoop(LitLoop):  # type: ignore[misc]
    """Feeds requests to the service and its replies back, one denoising step at a time."""

    def run(  # noqa: PLR0917 - LitServe calls it like this
        self,
        lit_api: ModelAPI,
        device: str,
        worker_id: int,
        request_queue: Any,
        transport: Any,
        workers_setup_status: Any,
        callback_runner: Any,
    ) -> None:
        """Serve until the process ends, or the manager of its queues is gone."""
        service, board = lit_api.service, lit_api.board
        assert service is not None  # LitServe called setup
        queues: dict[str, int] = {}
        mail = _Mail(self, transport, queues)
        seen = [0] * board.n_servers
        list(board.cancelled(seen))  # those of an earlier life
        taking = partial(
            self._take, service, request_queue, queues, mail, worker_id, board.n_workers
        )
        intake = Thread(target=taking, name="intake", daemon=True)
        intake.start()
        while not mail.broken and not self.closed:
            for number in board.cancelled(seen):
                service.cancel(str(number))
                queues.pop(str(number), None)
            for reply in service.turn(_IDLE_S):
                mail.send(reply)
            board.work(worker_id, running=len(service.jobs), backlog_s=service.backlog_s)
        self.closed = True  # a request that is taken by nobody is sent to the next worker
        service.close()
        intake.join()
        raise SystemExit

    closed = False

    def _take(  # noqa: PLR0917 - the body of a thread
        self,
        service: Service,
        request_queue: Any,
        queues: dict[str, int],
        mail: "_Mail",
        worker_id: int,
        n_workers: int,
    ) -> None:
        """Take requests from the queue that all workers share."""
        alone = service.config.max_requests
        most = alone if n_workers == 1 else min(alone, _TAKEN_AHEAD)
        while not self.closed:
            if len(service.jobs) >= most:
                time.sleep(_IDLE_S / 10)
                continue
            try:
                item = request_queue.get(timeout=_IDLE_S)
            except Empty:
                continue
            except (EOFError, OSError):
                mail.broken = True
                return
            server, uid, _, payload = item
            queues[uid] = server
            mail.started(uid, worker_id)
            service.post(partial(service.submit, uid, **payload))


class _Mail:
    """A thread that sends replies, so that no step waits for it."""

    def __init__(self, loop: StepLoop, transport: Any, queues: dict[str, int]) -> None:
        self.broken = False
        self._loop, self._transport, self._queues = loop, transport, queues
        self._box: SimpleQueue[tuple[str, Any, str]] = SimpleQueue()
        Thread(target=self._deliver, name="mail", daemon=True).start()

    def started(self, uid: str, worker: int) -> None:
        """A worker took a request on."""
        self._box.put((uid, ("started", worker), LitAPIStatus.OK))

    def send(self, reply: Reply) -> None:
        """Send a reply to the HTTP process that asked."""
        content = (reply.status, reply.media, dict(reply.headers), reply.body, reply.final)
        self._box.put((reply.uid, ("reply", content), LitAPIStatus.OK))

    def _deliver(self) -> None:
        while True:
            uid, content, status = self._box.get()
            server = self._queues.get(uid)
            if server is None:
                continue
            if content[0] == "reply" and content[1][-1]:
                self._queues.pop(uid, None)
            try:
                self._loop.put_response(
                    self._transport, server, uid, content, status, LoopResponseType.STREAMING
                )
            except (EOFError, OSError):
                self.broken = True
                return
