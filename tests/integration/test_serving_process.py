"""A real server in processes of its own: start, answer, lose a worker, drain, end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError

pytest.importorskip("litserve")
httpx = pytest.importorskip("httpx")
launch = pytest.importorskip("perturbdiff.serve._launch")

ASK = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 20}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "bundle"
    small_model.save(folder, include_controls=30)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def taken(port):
    """Whether a server that is started now would be refused this port."""
    try:
        launch.check_port(ptd.serve.ServeConfig(port=port))
    except ConfigError:
        return True
    return False


def command(bundle, port, *more):
    return [
        sys.executable, "-m", "perturbdiff.cli", "serve", str(bundle), "--port", str(port),
        "--accelerator", "cpu", "--set", "cost_model=false", *more,
    ]  # fmt: skip


def children(pid, *, field=1):
    """Processes whose parent this is, or whose group (field 2), by what they were started as."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if int(stat[field]) == pid and stat[0] != "Z":
                found[int(entry.name)] = words
    return found


def health(http):
    try:
        return http.get("/health").status_code
    except httpx.TransportError:
        return None


def wait_for(wanted, http, *, seconds=60.0):
    until = time.monotonic() + seconds
    while (status := health(http)) != wanted:
        assert time.monotonic() < until, status
        time.sleep(0.05)


@contextmanager
def running(bundle, log):
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            command(bundle, port), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while process.poll() is None and health(http) is None:
                time.sleep(0.05)
            wait_for(200, http)
            yield process, http
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_a_server_lives_through_what_happens_to_it(bundle, tmp_path, simulated_cells):
    log = tmp_path / "log"
    with running(bundle, log) as (process, http):
        # it answers as the model does, through the client
        model = ptd.load(bundle)
        with ptd.serve.Client(str(http.base_url)) as client:
            given = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 20}
            pred = client.predict(simulated_cells, **given)
            assert client.about["kind"] == "set_diffusion"
        want = model.predict(simulated_cells, **given)
        np.testing.assert_array_equal(
            pred.layers["counts"].toarray(), want.layers["counts"].toarray()
        )

        # a client that stops reading stops the work
        slow = ASK | {"n_cells": 4000, "sample": {"n_steps": 200}}
        endless = ASK | {"n_cells": 20_000, "sample": {"n_steps": 300}, "seed": 9}
        events = {"Accept": "text/event-stream"}
        with http.stream("POST", "/predict", json=endless, headers=events) as stream:
            assert "x0_hat" in "".join(
                line for line, _ in zip(stream.iter_lines(), range(2), strict=False)
            )
        until = time.monotonic() + 30
        while "running_requests 0.0" not in (text := http.get("/metrics").text):
            assert time.monotonic() < until, text
            time.sleep(0.05)

        # its worker is killed while it works: not ready at once, ready again, and no request lost
        found = []
        thread = threading.Thread(target=lambda: found.append(http.post("/predict", json=slow)))
        thread.start()
        (worker,) = [pid for pid, words in children(process.pid).items() if "spawn_main" in words]
        time.sleep(0.3)
        os.kill(worker, signal.SIGKILL)
        wait_for(503, http, seconds=10)
        wait_for(200, http)
        thread.join(60)
        again = found.pop()
        assert again.status_code == 200, again.text + log.read_text()
        assert http.post("/predict", json=ASK).status_code == 200
        assert 'status="200"' in http.get("/metrics").text

        # it is told to end while it works
        thread = threading.Thread(target=lambda: found.append(http.post("/predict", json=slow)))
        thread.start()
        until = time.monotonic() + 30
        while "queue_requests 1.0" not in http.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.02)
        theirs = children(process.pid)
        process.terminate()
        until = time.monotonic() + 30
        while health(http) == 200 and time.monotonic() < until:
            time.sleep(0.01)
        assert http.post("/predict", json=ASK).status_code == 503
        thread.join(60)
        assert found.pop().status_code == 200
        assert process.wait(60) == 0
        until = time.monotonic() + 10
        while (
            left := [p for p in theirs if Path(f"/proc/{p}").exists()]
        ) and until > time.monotonic():
            time.sleep(0.02)
        assert not left, [theirs[pid] for pid in left]
    assert "Traceback" not in log.read_text()
    assert '"max_requests":' in log.read_text()  # the settings that it runs with


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_nothing_outlives_a_first_process_that_is_killed(bundle, tmp_path):
    with running(bundle, tmp_path / "log") as (process, http):
        endless = ASK | {"n_cells": 20_000, "sample": {"n_steps": 300}}
        found = []

        def ask():
            try:
                found.append(http.post("/predict", json=endless))
            except httpx.TransportError as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until = time.monotonic() + 30
        while "running_requests 1.0" not in httpx.get(http.base_url.join("/metrics")).text:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert len(children(process.pid, field=2)) > 3  # manager, worker and HTTP beside the first
        process.kill()
        process.wait(10)
        until = time.monotonic() + 20
        while (left := children(process.pid, field=2)) or taken(http.base_url.port):
            assert time.monotonic() < until, left
            time.sleep(0.02)
        thread.join(10)
        (answer,) = found
        assert isinstance(answer, httpx.TransportError), answer


def test_what_is_wrong_is_one_line(bundle, tmp_path):
    newer = tmp_path / "newer"
    newer.mkdir()
    for file in bundle.iterdir():
        (newer / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    done = subprocess.run(
        command(newer, 8000), capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has format 99" in line
