"""An open-loop load: requests come when they come, whether or not the last was answered."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from perturbdiff.serve._formats import EVENTS, H5AD

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a request."""

    kind: str
    status: int  # 0 where the client left, -1 where nothing came
    seconds: float
    at: float
    question: Mapping[str, Any]
    body: bytes = b""
    quoted: float | None = None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    arrangement: str, bundle: Path, *, workers: int = 1, threads: int = 1
) -> Iterator[tuple[str, int]]:
    """A server of an arrangement: where it listens, and its process."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks.serving_arrangements", arrangement, str(bundle),
            "--port", str(port), "--workers", str(workers), "--threads", str(threads),
        ],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process)
        yield url, process.pid
    finally:
        # LitServe ends its workers at SIGINT alone; ours ends at either.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    msg = f"no server at {url}"
    raise RuntimeError(msg)


async def _one(
    client: httpx.AsyncClient, kind: str, question: Mapping[str, Any], *, start: float, keep: bool
) -> Outcome:
    """Ask one question in the way of its kind."""
    begun, quoted, body, status = time.perf_counter(), None, b"", -1
    try:
        if kind == "quoted":
            said = (await client.post("/quote", json=question)).json()
            quoted = said["seconds"] + said["waiting_s"]
            begun = time.perf_counter()
        if kind == "cancelled":
            headers = {"Accept": EVENTS}
            async with client.stream("POST", "/predict", json=question, headers=headers) as stream:
                async for _ in stream.aiter_lines():
                    break
            status = 0
        elif kind == "malformed":
            status = (await client.post("/predict", content=str(question).encode())).status_code
        else:
            found = await client.post("/predict", json=question, headers={"Accept": H5AD})
            status, body = found.status_code, found.content if keep else b""
    except httpx.HTTPError:
        pass
    seconds = time.perf_counter() - begun
    return Outcome(
        kind=kind, status=status, seconds=seconds, at=begun - start, question=question, body=body,
        quoted=quoted,
    )  # fmt: skip


async def _load(
    url: str,
    questions: Iterator[tuple[str, Mapping[str, Any]]],
    *,
    rate: float,
    seconds: float,
    seed: int,
    keep: Callable[[int], bool],
    done: Callable[[Outcome], None],
) -> None:
    rng, start, tasks, number = np.random.default_rng(seed), time.perf_counter(), set(), 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        due = start
        while (due := due + rng.exponential(1 / rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if (asked := next(questions, None)) is None:
                break
            kind, question = asked
            task = asyncio.create_task(_one(client, kind, question, start=start, keep=keep(number)))
            number += 1
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda ended: done(ended.result()))
        if tasks:
            await asyncio.wait(tasks)


def load(
    url: str,
    questions: Iterator[tuple[str, Mapping[str, Any]]],
    *,
    rate: float,
    seconds: float,
    seed: int = 0,
    keep: Callable[[int], bool] = lambda number: False,
    done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Send questions at random times, so many a second, and wait for all answers.

    Parameters
    ----------
    url
        Server.
    questions
        Kinds and questions; the load ends where they do.
    rate, seconds
        Mean number a second, for so long.
    seed
        Of the times.
    keep
        Whether the body of an answer is kept, by its number.
    done
        Told each outcome.

    Returns
    -------
    What became of each, in the order in which they ended.
    """
    outcomes: list[Outcome] = []

    def both(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if done is not None:
            done(outcome)

    asyncio.run(_load(url, questions, rate=rate, seconds=seconds, seed=seed, keep=keep, done=both))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Throughput and latency of the answers."""
    answered = [one for one in outcomes if one.status == 200]
    latency = np.array([one.seconds for one in answered] or [np.nan])
    span = max((one.at + one.seconds for one in answered), default=0.0) - min(
        (one.at for one in answered), default=0.0
    )
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "per_second": len(answered) / span if span else 0.0,
        **{f"p{q}": float(np.quantile(latency, q / 100)) for q in (50, 95, 99)},
    }


def _family(pid: int) -> list[tuple[int, list[str]]]:
    """A process and all that it started, with their numbers as the system tells them."""
    parents: dict[int, list[int]] = {}
    numbers: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(stat[1]), []).append(int(entry.name))
            numbers[int(entry.name)] = stat
    todo, found = [pid], []
    while todo:
        one = todo.pop()
        todo += parents.get(one, [])
        if one in numbers:
            found.append((one, numbers[one]))
    return found


def resident_mb(pid: int) -> float:
    """Memory of a process and all that it started, in millions of bytes."""
    pages = sum(int(stat[21]) for _, stat in _family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and all that it started have taken."""
    ticks = sum(int(stat[11]) + int(stat[12]) for _, stat in _family(pid))
    return ticks / os.sysconf("SC_CLK_TCK")
