"""The server over HTTP, with its worker in a thread: forms, limits, streams, health, metrics."""

import base64
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from inspect import unwrap
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import (
    BundleError,
    ConfigError,
    GeneError,
    PerturbDiffError,
    ScaleError,
    UnknownLevelError,
)
from perturbdiff.model import _fitted
from perturbdiff.serve import Client, ServeConfig
from perturbdiff.serve import _client as client_module
from perturbdiff.serve._board import Board
from perturbdiff.serve._client import ServerError
from perturbdiff.serve._formats import ARROW, EVENTS, H5AD, from_h5ad
from perturbdiff.serve._launch import _draining, check_port, described, prepared, run

testclient = pytest.importorskip("fastapi.testclient")
litserve = pytest.importorskip("litserve")
loops = pytest.importorskip("litserve.loops.loops")
transport = pytest.importorskip("litserve.transport.process_transport")

ASK = {
    "perturbations": ["P1"],
    "contexts": [{"cell_type": "T1"}],
    "n_cells": 20,
    "sample": {"n_steps": 4},
}


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 96)
        yield


@pytest.fixture(scope="module")
def bundle(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "bundle"
    small_model.save(folder, include_controls=30)
    return folder


class Worker:
    """What LitServe would start as a process, as a thread."""

    def __init__(self, server):
        self.api = server.litapi_connector.lit_apis[0]
        self.server = server
        self.start()

    def start(self):
        server = self.server
        callbacks = loops.CallbackRunner([])
        arguments = (self.api, "cpu", 0, server.litapi_request_queues["/predict"])
        self.api.loop.closed = False
        self.thread = threading.Thread(
            target=self.run,
            args=(*arguments, server._transport, server.workers_setup_status, callbacks, True),
        )
        self.thread.start()

    @staticmethod
    def run(*arguments):
        try:
            loops.inference_worker(*arguments)
        except SystemExit:
            pass
        finally:
            os.environ.pop("LITSERVE_WORKER_ID", None)

    def end(self):
        """End it, as if it had died: the lock on its file is gone."""
        self.api.loop.closed = True
        self.thread.join(30)
        if self.api.lock is not None:
            self.api.lock.close()


@contextmanager
def serving(bundle, tmp_path, *, api_key=None, work=True, **settings):
    config = ServeConfig(accelerator="cpu", cost_model=False, **settings)
    about = described(bundle, config)
    server, board = prepared(bundle, config, tmp_path, about=about, api_key=api_key)
    server.app.response_queue_id = 0
    server.litapi_request_queues = {"/predict": queue.Queue()}
    server._transport = transport.MPQueueTransport(None, [queue.Queue()])
    server.workers_setup_status = {"predict_0": "starting"}
    with testclient.TestClient(server.app) as http:
        http.board, http.server, http.worker = board, server, None
        if work:
            http.worker = Worker(server)
            until = time.monotonic() + 30
            while not board.ready and time.monotonic() < until:
                time.sleep(0.02)
        try:
            yield http
        finally:
            if http.worker is not None:
                http.worker.end()


@pytest.fixture(scope="module")
def http(bundle, tmp_path_factory, small_pilot):
    with serving(bundle, tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(scope="module")
def model(bundle):
    return ptd.load(bundle)


@pytest.fixture(scope="module")
def want(model, small_pilot):
    return model.predict(
        None, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=20,
        sample=ptd.SampleConfig(n_steps=4),
    )  # fmt: skip


def settled(http):
    """Whether nothing is in the house any more, soon."""
    until = time.monotonic() + 20
    service = http.worker.api.service
    while (http.board.waiting or service.jobs) and time.monotonic() < until:
        time.sleep(0.02)
    return http.board.waiting == 0 and not service.jobs and service.flow.engine.idle


# Forms


def test_answers_come_as_h5ad_json_and_arrow(http, want):
    pa = pytest.importorskip("pyarrow")
    found = http.post("/predict", json=ASK, headers={"Accept": H5AD})
    assert (found.status_code, found.headers["content-type"]) == (200, H5AD)
    pred = from_h5ad(found.content)
    np.testing.assert_array_equal(pred.X.toarray(), want.X.toarray())
    counts = want.layers["counts"].toarray()
    said = http.post("/predict", json=ASK).json()
    assert said["genes"] == want.var_names.tolist()
    assert said["obs"]["perturbation"] == ["P1"] * 20
    dense = np.zeros(want.shape)
    for name in ("counts", "log1p"):
        rows = np.repeat(np.arange(20), np.diff(said[name]["indptr"]))
        dense[:] = 0
        dense[rows, said[name]["indices"]] = said[name]["data"]
        expected = counts if name == "counts" else want.X.toarray()
        np.testing.assert_allclose(dense, expected, atol=1e-6)
    assert said["provenance"]["model"] == "set_diffusion"
    stream = http.post("/predict", json=ASK, headers={"Accept": ARROW})
    table = pa.ipc.open_stream(stream.content).read_all()
    assert table.num_rows == 20
    assert table["cell_type"].to_pylist() == ["T1"] * 20
    genes = json.loads(table.schema.metadata[b"genes"])
    first = dict(zip(table["count_gene"][0].as_py(), table["count"][0].as_py(), strict=True))
    assert [first.get(place, 0) for place in range(len(genes))] == counts[0].tolist()
    assert json.loads(table.schema.metadata[b"provenance"])["seed"] == 0


def test_a_form_that_there_is_not_is_refused(http):
    assert http.post("/predict", json=ASK, headers={"Accept": "image/png"}).status_code == 406


def test_pages_describe_every_route(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/predict", "/quote", "/rank", "/model", "/health", "/metrics"} <= set(paths)
    schema = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "perturbations" in schema["required"]
    assert http.get("/docs").status_code == 200


def test_the_model_is_described(http, model):
    said = http.get("/model").json()
    assert said["genes"] == list(model.registry.genes)
    assert said["perturbations"] == ["P1", "P2"]
    assert {"context": {"cell_type": "T1"}, "control_cells": 30} in said["contexts"]
    assert said["bundle_checksum"] == model.checksum
    assert said["answers"]["scale"] == "log1p_cp10k"


# G01: four at once, two of them bad


def test_bad_requests_fail_alone(http, want, simulated_cells):
    lacking = simulated_cells[:, simulated_cells.var_names != want.var_names[0]].copy()
    with_client = Client("http://testserver")
    with_client._http = http
    sent = with_client._controls(lacking)
    asked = {
        "good": ASK,
        "unknown": ASK | {"perturbations": ["P9"]},
        "one gene too few": ASK | {"control_cells": sent},
        "also good": ASK,
    }
    found = {}

    def ask(name):
        found[name] = http.post("/predict", json=asked[name], headers={"Accept": H5AD})

    threads = [threading.Thread(target=ask, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: answer.status_code for name, answer in found.items()} == {
        "good": 200, "unknown": 422, "one gene too few": 422, "also good": 200,
    }  # fmt: skip
    assert want.var_names[0] in found["one gene too few"].json()["detail"]
    for name in ("good", "also good"):
        pred = from_h5ad(found[name].content)
        np.testing.assert_array_equal(pred.X.toarray(), want.X.toarray())


# G06: limits before parsing


def test_huge_and_hollow_bodies_are_refused_before_they_are_parsed(bundle, tmp_path):
    with serving(bundle, tmp_path, max_body_mb=0.1) as http:
        assert http.post("/predict", content=b"x" * 200_000).status_code == 413

        def chunks():
            for _ in range(1000):
                yield b"[" * 1000

        assert http.post("/predict", content=chunks()).status_code == 413
        assert http.post("/predict", content=b"[" * 90_000).status_code == 422
        assert http.post("/predict", json=ASK | {"n_cells": 10**9}).status_code == 422
        nan = json.dumps(ASK | {"deadline_s": float("nan")})
        assert http.post("/predict", content=nan).status_code == 422
        lying = http.post("/predict", content=b"{}", headers={"content-length": "many"})
        assert lying.status_code == 413
        assert settled(http)
        assert http.post("/predict", json=ASK).status_code == 200


def test_a_key_is_wanted_where_one_is_set(bundle, tmp_path):
    with serving(bundle, tmp_path, api_key="secret", work=False) as http:
        assert http.get("/model").status_code == 401
        assert http.get("/model", headers={"X-API-Key": "other"}).status_code == 401
        assert http.get("/model", headers={"X-API-Key": "secret"}).status_code == 200
        assert http.get("/model", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert http.get("/metrics").status_code == 200


def test_one_request_more_than_may_wait_is_sent_away(bundle, tmp_path):
    with serving(bundle, tmp_path, max_requests=1) as http:
        http.board.wait(0, 1)
        full = http.post("/predict", json=ASK)
        http.board.wait(0, -1)
        assert full.status_code == 429
        assert int(full.headers["Retry-After"]) >= 1
        assert http.post("/predict", json=ASK).status_code == 200


@pytest.mark.parametrize("route", ["/predict", "/quote"])
def test_constraints_that_cannot_hold_are_refused_before_they_are_quoted(http, model, route):
    gene = model.registry.genes[0]
    for wishes, word in (
        ([{"kind": "at_least", "gene": "NOWHERE", "value": 1}], "NOWHERE"),
        (
            [
                {"kind": "at_least", "gene": gene, "value": 2},
                {"kind": "at_most", "gene": gene, "value": 1},
            ],
            gene,
        ),
    ):
        answer = http.post(route, json=ASK | {"constraints": wishes})
        assert answer.status_code == 422
        assert word in answer.text


# G04: health


def test_health_follows_the_worker(bundle, tmp_path, monkeypatch):
    with serving(bundle, tmp_path, work=False) as http:
        assert http.get("/health").status_code == 503  # before the model is loaded
        http.worker = Worker(http.server)
        until = time.monotonic() + 30
        while http.get("/health").status_code != 200 and time.monotonic() < until:
            time.sleep(0.02)
        assert http.get("/health").status_code == 200
        http.worker.end()
        assert http.get("/health").status_code == 503
        http.worker.start()
        while http.get("/health").status_code != 200 and time.monotonic() < until:
            time.sleep(0.02)
        assert http.get("/health").status_code == 200

        def broken():
            msg = "the hook itself fails"
            raise RuntimeError(msg)

        with monkeypatch.context() as patch:
            patch.setattr(http.worker.api, "health", broken)
            assert http.get("/health").status_code == 503
        assert http.get("/health").status_code == 200


def test_a_request_whose_worker_dies_is_sent_to_the_next(bundle, tmp_path, want):
    with serving(bundle, tmp_path) as http:
        found = []
        slow = ASK | {"sample": {"n_steps": 60}, "n_cells": 1500}
        thread = threading.Thread(target=lambda: found.append(http.post("/predict", json=slow)))
        thread.start()
        service = http.worker.api.service
        until = time.monotonic() + 30
        while service.flow.engine.tally.calls < 3 and time.monotonic() < until:
            time.sleep(0.01)
        http.worker.end()
        http.worker.start()
        thread.join(60)
        assert found[0].status_code == 200


def test_draining_takes_nothing_on(bundle, tmp_path):
    with serving(bundle, tmp_path) as http:
        assert http.get("/health").status_code == 200
        http.board.drain()
        assert http.get("/health").status_code == 503
        late = http.post("/predict", json=ASK)
        assert late.status_code == 503
        assert "Retry-After" in late.headers
        assert http.get("/metrics").status_code == 200


# Streams, cancelling


def events(response):
    return list(client_module._events(response.iter_lines()))


def test_a_stream_tells_its_progress_and_ends_with_the_answer(http, want):
    seen = []
    with http.stream(
        "POST", "/predict", json=ASK | {"seed": 8, "n_cells": 150}, headers={"Accept": EVENTS}
    ) as response:
        assert response.headers["content-type"].startswith(EVENTS)
        seen = events(response)
    names = [name for name, _ in seen]
    assert names.count("answer") == 1
    assert names[-1] == "answer"
    assert any("x0_hat" in said for name, said in seen if name == "progress")
    pred = from_h5ad(base64.b64decode(seen[-1][1]["base64"]))
    assert pred.n_obs == 150


def test_a_stream_of_a_bad_question_is_an_error_by_status(http):
    bad = http.post("/predict", json=ASK | {"perturbations": ["Q"]}, headers={"Accept": EVENTS})
    assert bad.status_code == 422


def test_a_stream_that_fails_on_its_way_says_so(http):
    late = ASK | {"n_cells": 2500, "sample": {"n_steps": 400}, "deadline_s": 0.6, "seed": 41}
    with http.stream("POST", "/predict", json=late, headers={"Accept": EVENTS}) as response:
        name, said = events(response)[-1]
    assert (name, said["status"]) == ("error", 504)
    assert settled(http)


def test_a_client_that_leaves_within_its_body_is_no_error(http, caplog):
    parts = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )
    sent = []

    async def receive():
        return next(parts)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict",
        "query_string": b"", "headers": [], "root_path": "", "scheme": "http",
        "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    http.portal.call(http.server.app, scope, receive, send)
    assert sent[0]["status"] == 499
    assert "Traceback" not in caplog.text
    assert settled(http)


def test_metrics_count_requests_phases_and_calls(http):
    http.post("/predict", json=ASK)
    text = http.get("/metrics").text
    for name in (
        'perturbdiff_requests_total{route="predict",status="200"}',
        'perturbdiff_phase_seconds_count{phase="draw"}',
        "perturbdiff_network_calls_total",
        "perturbdiff_batch_sets_count",
        "perturbdiff_queue_requests",
        "perturbdiff_workers_ready 1.0",
    ):
        assert name in text


# The client


@pytest.fixture
def client(http):
    made = Client("http://testserver")
    made._http.close()
    made._http = http
    return made


def test_the_client_asks_as_tl_predict_does(client, model, simulated_cells, want, capsys):
    settings = {
        "perturbations": ["P1"],
        "contexts": [{"cell_type": "T1"}],
        "n_cells": 20,
        "sample": ptd.SampleConfig(n_steps=4),
    }
    own = client.predict(None, **settings)
    np.testing.assert_array_equal(own.X.toarray(), want.X.toarray())
    assert own.obs.equals(want.obs)
    sent = client.predict(simulated_cells, progress=True, **settings)
    local = ptd.tl.predict(simulated_cells, model, **settings)
    np.testing.assert_array_equal(sent.X.toarray(), local.X.toarray())
    assert sent.uns["perturbdiff"]["bundle_checksum"] == model.checksum
    assert "drawing" in capsys.readouterr().err
    quote = client.quote(perturbations=["P1"], n_cells=40)
    assert quote["seconds"] > 0
    wish = ptd.AtMost(model.registry.genes[2], 0.5)
    obeying = client.predict(None, constraints=wish, enforce="hard", **settings)
    same = model.predict(None, constraints=wish, enforce="hard", **settings)
    np.testing.assert_array_equal(obeying.X.toarray(), same.X.toarray())


def test_the_client_quotes_what_it_would_ask(client, model, simulated_cells):
    asked = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 40}
    free = client.quote(**asked)
    wish = {"constraints": ptd.AtLeast(model.registry.genes[2], 0.5, per="population")}
    searched = client.quote(**asked, **wish, enforce=ptd.BestOf(n=8), adata=simulated_cells)
    assert searched["seconds"] > free["seconds"]
    with pytest.raises(GeneError, match="NOPE"):
        client.quote(**asked, constraints=ptd.AtLeast("NOPE", 0.5))
    with pytest.raises((ConfigError, ServerError), match="decoding"):
        client.quote(**asked, decoding="transport")


def test_the_client_ranks_as_tl_rank_perturbations_does(client, model, simulated_cells):
    wish = [ptd.AtLeast(model.registry.genes[0], 0.5, per="population")]
    asked = {
        "target": wish, "contexts": [{"cell_type": "T1"}], "n_cells": 16,
        "sample": ptd.SampleConfig(n_steps=2, set_size=8), "seed": 3,
    }  # fmt: skip
    local = ptd.tl.rank_perturbations(simulated_cells, model, copy=True, **asked)
    want = local.uns["perturbation_ranking"]
    assert len(want) == 2
    through = ptd.tl.rank_perturbations(simulated_cells, client, copy=True, **asked)
    for table in (
        client.rank(simulated_cells, **asked),
        unwrap(Client.rank)(client, simulated_cells, **asked | {"target": wish[0]}),
        through.uns["perturbation_ranking"],
    ):
        pd.testing.assert_frame_equal(table, want, check_exact=False, rtol=1e-6)
    some = client.rank(None, **asked | {"perturbations": ["P2"]})
    assert some["perturbation"].tolist() == ["P2"]
    with pytest.raises(ConfigError, match="target = \\[\\]: needs a constraint or more"):
        client.rank(None, target=[])
    with pytest.raises(ConfigError, match="no form in JSON"):
        ptd.tl.rank_perturbations(simulated_cells, client, target=[lambda values, genes: True])
    with pytest.raises(ServerError, match="'P9'"):
        client.rank(None, **asked | {"perturbations": ["P9"]})
    assert "perturbation_ranking" not in simulated_cells.uns


def test_the_client_raises_what_the_model_raises(client, simulated_cells, model):
    with pytest.raises(ServerError, match=r"422 \(UnknownLevelError\): .*'P9'") as caught:
        client.predict(None, perturbations=["P9"])
    assert caught.value.kind == UnknownLevelError.__name__
    few = simulated_cells[:, simulated_cells.var_names != model.registry.genes[0]].copy()
    with pytest.raises(GeneError, match=model.registry.genes[0]):
        client.predict(few, perturbations=["P1"])
    some = simulated_cells[:, list(model.registry.genes)].copy()
    del some.obs["library_size"]
    some.raw = simulated_cells
    with pytest.raises(ScaleError, match=r"adata\.raw has 40 genes"):
        client.predict(some, perturbations=["P1"])
    with pytest.raises(ServerError, match="422"):
        client.predict(None, perturbations=["P9"], progress=True)
    with pytest.raises(ConfigError, match="no form in JSON"):
        client.predict(None, perturbations=["P1"], constraints=lambda values, genes: True)


def test_the_client_takes_what_tl_predict_takes(client, want):
    pred = unwrap(Client.predict)(
        client, None, perturbations=(name for name in ["P1"]), contexts={"cell_type": "T1"},
        n_cells=20, sample=ptd.SampleConfig(n_steps=4), constraints=None,
    )  # fmt: skip
    np.testing.assert_array_equal(pred.X.toarray(), want.X.toarray())
    quote = unwrap(Client.quote)(client, perturbations="P1", contexts={"cell_type": "T1"})
    assert quote["seconds"] > 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"adata": "cells.h5ad"}, r"anndata\.read_h5ad\('cells.h5ad'\)"),
        ({"adata": [1, 2]}, "must be an AnnData"),
        ({"sample": {"n_steps": 4}}, r"perturbdiff\.SampleConfig\(n_steps=4\)"),
        ({"decode": {"temperature": 1.0}}, r"perturbdiff\.DecodeConfig"),
        ({"enforce": {"kind": "soft"}}, "must be the name of a way"),
        ({"n_cells": 1j}, "no form in JSON"),
        ({"perturbations": 5}, "422"),
        ({"contexts": 5}, "422"),
        ({"contexts": ["T1"]}, "422"),
    ],
)
def test_the_client_refuses_in_words(client, asked, words):
    with pytest.raises(PerturbDiffError, match=words):
        unwrap(Client.predict)(client, **{"adata": None, "perturbations": ["P1"]} | asked)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://there", "http://a:b"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="url = "):
        Client(url)


@pytest.mark.parametrize("progress", [False, True])
def test_no_server_there_is_said(progress):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url) as client:
            with pytest.raises(ServerError, match=f"No answer: {url} could not be reached"):
                client.predict(None, perturbations=["P1"], progress=progress)
            with pytest.raises(ServerError, match="Is it running"):
                _ = client.about


def test_another_server_is_told_apart(client, monkeypatch):
    page = SimpleNamespace(content=b"<html>")
    monkeypatch.setattr(client, "_asked", lambda *asked: page)
    with pytest.raises(ServerError, match="is no JSON"):
        _ = client.about


@pytest.mark.parametrize("progress", [False, True])
def test_the_client_comes_again_when_there_is_too_much_to_do(
    client, http, monkeypatch, want, progress
):
    waited, board = [], http.board
    monkeypatch.setattr(client_module.time, "sleep", lambda s: (waited.append(s), free()))
    held = 300

    def free():
        nonlocal held
        board.wait(0, -held)
        held = 0

    board.wait(0, held)
    pred = client.predict(
        None, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=20,
        sample=ptd.SampleConfig(n_steps=4), progress=progress,
    )  # fmt: skip
    assert len(waited) == 1
    assert waited[0] > 0.5
    np.testing.assert_array_equal(pred.X.toarray(), want.X.toarray())


# Starting


def test_a_taken_port_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.port = {port}: cannot be listened on"):
            check_port(ServeConfig(port=port))


@pytest.mark.parametrize(("there", "devices"), [(0, 0), (0, 2), (1, 2)])
def test_accelerators_that_are_not_there_are_refused_before_anything_starts(
    bundle, monkeypatch, caplog, there, devices
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServeConfig(accelerator="cuda", devices=devices, port=port)
    with pytest.raises(ConfigError, match=rf"serve\.accelerator = 'cuda': .* torch sees {there}"):
        run(bundle, config)
    assert "loading" not in caplog.text


def test_what_cannot_be_served_is_refused_in_one_line(bundle, tmp_path, simulated_cells):
    with pytest.raises(BundleError, match="There is no folder"):
        described(tmp_path / "nothing", ServeConfig())
    columns = {"perturbation_key": "perturbation", "control": "control"}
    simple = ptd.MeanShift.from_anndata(simulated_cells, **columns).fit(simulated_cells)
    simple.save(tmp_path / "simple")
    with pytest.raises(BundleError, match="mean_shift, which is not served"):
        described(tmp_path / "simple", ServeConfig())


# The end


class _Elsewhere:
    """An event that another process holds, which ends as soon as the event is set."""

    def __init__(self):
        self.over = threading.Event()

    def set(self):
        self.over.set()

    def is_set(self):
        raise ConnectionResetError


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_nobody_asks_an_event_whose_process_has_ended(tmp_path):
    board = Board(tmp_path, n_workers=1, n_servers=1)
    server, held = litserve.LitServer.__new__(litserve.LitServer), _Elsewhere()
    server._shutdown_event = held
    with _draining(server, board, ServeConfig(grace_s=1)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert held.over.wait(10)
        assert board.draining
        assert server._shutdown_event.is_set()
