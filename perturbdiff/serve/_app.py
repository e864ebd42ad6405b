"""Routes: what the server says over HTTP."""

import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from litserve import LitServer
from starlette.requests import ClientDisconnect

from perturbdiff._constants import VERSION
from perturbdiff.serve._board import Board
from perturbdiff.serve._formats import ARROW, EVENTS, H5AD, JSON, dumps, wanted_format
from perturbdiff.serve._jobs import Refusal, Reply, refused
from perturbdiff.serve._limits import Gate
from perturbdiff.serve._metrics import exposition, instruments
from perturbdiff.serve._post import Letter, Post
from perturbdiff.serve._schemas import PredictRequest, Question, RankRequest
from perturbdiff.serve._settings import ServeConfig
from perturbdiff.serve._watch import WatchedServer
from perturbdiff.serve._worker import ModelAPI

_Responses = dict[int | str, dict[str, Any]]
_LEFT = 499  # the client left before there was an answer


def build(
    bundle: Path, config: ServeConfig, board: Board, *, about: Mapping[str, Any],
    api_key: str | None = None,
) -> LitServer:  # fmt: skip
    """A server for a saved model, ready to be run.

    Parameters
    ----------
    bundle
        Folder of a saved model.
    config
        Settings.
    board
        Numbers that all processes share.
    about
        What ``GET /model`` says.
    api_key
        Key that clients must send.

    Returns
    -------
    LitServe's server, with our routes on its application.
    """
    server = WatchedServer(
        ModelAPI(bundle, config, board),
        accelerator=config.accelerator,
        devices=config.devices or "auto",
        workers_per_device=config.workers_per_device,
        timeout=False,  # ours stops the work, LitServe's only the waiting
        restart_workers=True,
        model_metadata={"kind": about["kind"], "version": VERSION},
        middlewares=[
            (Gate, {"board": board, "max_bytes": int(config.max_body_mb * 1e6), "api_key": api_key})
        ],
    )
    server.monitor_internal = 0.5
    server.uvicorn_graceful_timeout = int(config.grace_s)
    server.app.title, server.app.version = "perturbdiff", VERSION
    _add_routes(server.app, Post(server, board, config), board, about=about)
    return server


def _add_routes(app: FastAPI, post: Post, board: Board, *, about: Mapping[str, Any]) -> None:
    async def predict(request: Request) -> Response:
        return await _asked(request, post, "predict")

    async def quote(request: Request) -> Response:
        return await _asked(request, post, "quote")

    async def rank(request: Request) -> Response:
        return await _asked(request, post, "rank")

    async def model() -> Response:
        return JSONResponse(dict(about))

    async def metrics() -> Response:
        text, media = exposition(board)
        return Response(text, media_type=media)

    forms: dict[str, Any] = {media: {} for media in (JSON, H5AD, ARROW, EVENTS)}
    answers: _Responses = {
        200: {"content": forms, "description": "Cells, or events until they are."}
    }
    for path, endpoint, body, words, responses in (
        ("/predict", predict, PredictRequest, "Cells of perturbations in contexts.", answers),
        ("/quote", quote, PredictRequest, "What a prediction would take; it is not run.", {}),
        ("/rank", rank, RankRequest, "Perturbations by how well cells meet a wish.", {}),
    ):
        app.add_api_route(
            path, endpoint, methods=["POST"], summary=words, responses={**responses, **_ERRORS},
            openapi_extra=_body(body),
        )  # fmt: skip
    app.add_api_route("/model", model, methods=["GET"], summary="What the model knows.")
    app.add_api_route("/metrics", metrics, methods=["GET"], summary="Prometheus metrics.")


_ERRORS: _Responses = {
    401: {"description": "No API key, or a wrong one."},
    413: {"description": "The body is too large."},
    422: {"description": "The question makes no sense, or asks for too much; the reason is said."},
    429: {"description": "Too much is waiting; Retry-After says when to ask again."},
    503: {"description": "Not ready, or being shut down."},
    504: {"description": "Not done by the deadline; the work was stopped."},
}


def _body(model: type[Question]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


async def _asked(request: Request, post: Post, route: str) -> Response:
    """Send a question to a worker, and its answer to the client."""
    started = time.perf_counter()
    form = wanted_format(request.headers.get("accept"))
    try:
        if form is None:
            raise Refusal(406, f"There is {JSON}, {H5AD}, {ARROW} and {EVENTS}.")
        post.check_room()
    except Refusal as refusal:
        return _response(refused("", refusal), route, started)
    try:
        body = await request.body()
    except ClientDisconnect:
        return _response(Reply(uid="", status=_LEFT), route, started)
    payload = {
        "route": route,
        "body": body,
        "form": "json" if form == "events" or route != "predict" else form,
        "watched": form == "events",
    }
    letter = Letter(post, payload, request.is_disconnected)
    handed_over = False
    try:
        replies = letter.replies()
        reply = await anext(replies, None)
        if form == "events" and reply is not None and reply.status < 400:
            handed_over = True
            events = _events(letter, replies, reply, route=route)
            return StreamingResponse(events, media_type=EVENTS)
        while reply is not None and not reply.final:
            reply = await anext(replies, None)
        return _response(reply or Reply(uid="", status=_LEFT), route, started)
    finally:
        if not handed_over:
            letter.close()


async def _events(
    letter: Letter, replies: AsyncIterator[Reply], first: Reply, *, route: str
) -> AsyncIterator[bytes]:
    """Progress as it comes, then the answer; a client that leaves cancels."""
    reply: Reply | None = first
    try:
        while reply is not None:
            if reply.final:
                instruments().requests.labels(route=route, status=str(reply.status)).inc()
            yield _event(reply)
            reply = None if reply.final else await anext(replies, None)
    finally:
        letter.close()


def _event(reply: Reply) -> bytes:
    if not reply.final:
        return b"event: progress\ndata: " + reply.body + b"\n\n"
    if reply.status != 200:
        content = {"status": reply.status, **json.loads(reply.body)}
        return b"event: error\ndata: " + dumps(content) + b"\n\n"
    content = {"media_type": reply.media, "base64": base64.b64encode(reply.body).decode()}
    return b"event: answer\ndata: " + dumps(content) + b"\n\n"


def _response(reply: Reply, route: str, started: float) -> Response:
    made = instruments()
    made.requests.labels(route=route, status=str(reply.status)).inc()
    made.latency.labels(route=route).observe(time.perf_counter() - started)
    return Response(
        reply.body, status_code=reply.status, media_type=reply.media, headers=dict(reply.headers)
    )
