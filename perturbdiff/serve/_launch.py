"""Starting a server and ending it: at once where something is wrong, and never in the middle."""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import torch
from litserve import LitServer

from perturbdiff._constants import VERSION
from perturbdiff._errors import BundleError, ConfigError, counted
from perturbdiff._logging import logger
from perturbdiff.data import Registry
from perturbdiff.model._bundle import Parts, read_bundle
from perturbdiff.serve._app import build
from perturbdiff.serve._board import Board
from perturbdiff.serve._formats import ARROW, EVENTS, H5AD, JSON
from perturbdiff.serve._metrics import FOLDER
from perturbdiff.serve._settings import ServeConfig

SERVED = ("set_diffusion", "causal_baseline")
_LOOK_S = 0.1


def run(
    bundle: str | Path, config: ServeConfig | None = None, *, api_key: str | None = None
) -> None:
    """Serve a saved model until SIGTERM or SIGINT; requests that are running then end first.

    Parameters
    ----------
    bundle
        Folder of a saved model.
    config
        Settings.
    api_key
        Key that clients must send; none where left out.

    Raises
    ------
    BundleError
        When the folder is missing, damaged or newer, or holds what cannot be served.
    ConfigError
        When the port is taken, there is no such accelerator, or no worker could start.
    """
    config = config or ServeConfig()
    about = described(Path(bundle), config)
    check_port(config)
    folder = Path(tempfile.mkdtemp(prefix="perturbdiff-"))
    os.environ[FOLDER] = str(folder)
    # Of the GNU C library, for the workers to come: each thread would keep what it freed.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    try:
        server, board = prepared(Path(bundle), config, folder, about=about, api_key=api_key)
        where = f"http://{config.host}:{config.port}"
        logger.info("loading %s to serve it on %s, with pages at %s/docs", bundle, where, where)
        logger.info("settings: %s", json.dumps(asdict(config)))
        with _draining(server, board, config):
            _run(server, config)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepared(
    bundle: Path, config: ServeConfig, folder: Path, *, about: Mapping[str, Any],
    api_key: str | None = None,
) -> tuple[LitServer, Board]:  # fmt: skip
    """A server and its shared numbers, not running yet.

    Parameters
    ----------
    bundle, config, about, api_key
        As for the application.
    folder
        Folder of this server's own.

    Returns
    -------
    The server and the board.
    """
    n_workers = config.workers_per_device * _n_devices(config)
    board = Board(folder, n_workers=n_workers, n_servers=config.api_servers)
    return build(bundle, config, board, about=about, api_key=api_key), board


def _n_devices(config: ServeConfig) -> int:
    """Devices that LitServe will use.

    Raises
    ------
    ConfigError
        When there are fewer than are wanted.
    """
    from litserve.connector import _Connector  # noqa: PLC0415 - what it decides, and no other

    chosen = _Connector(accelerator=config.accelerator, devices=config.devices or "auto")
    if chosen.accelerator == "cpu":
        return 1
    wanted = max(1, config.devices)
    if chosen.accelerator == "cuda" and (there := torch.cuda.device_count()) < wanted:
        rule = (
            f"needs {counted(wanted, 'GPU')} and torch sees {there}; serve with --accelerator cpu, "
            "name fewer devices, or install a torch and a driver that see them"
        )
        raise ConfigError("serve.accelerator", config.accelerator, rule=rule)
    return chosen.devices if isinstance(chosen.devices, int) else len(chosen.devices)


def described(bundle: Path, config: ServeConfig) -> dict[str, Any]:
    """What ``GET /model`` says; reads and checks the whole bundle.

    Parameters
    ----------
    bundle
        Folder of a saved model.
    config
        Settings; their limits are told.

    Returns
    -------
    Plain values.

    Raises
    ------
    BundleError
        When the folder is missing, damaged or newer, or holds what cannot be served.
    """
    parts = read_bundle(bundle)
    if parts.kind not in SERVED:
        msg = f"The bundle {bundle} holds a {parts.kind}, which is not served: {', '.join(SERVED)}."
        raise BundleError(msg)
    registry = Registry.from_json(parts.plain["registry"])
    return {
        "kind": parts.kind,
        "version": VERSION,
        "bundle_checksum": parts.checksum,
        "perturbations": [x for x in registry.perturbations.levels if x not in registry.control],
        "control": list(registry.control),
        "perturbation_key": registry.perturbation_key,
        "separator": registry.separator,
        "covariates": {one.key: list(one.levels) for one in registry.covariates},
        "contexts": _contexts(parts, registry),
        "genes": list(registry.genes),
        "scale": registry.scale,
        "layer": registry.layer,
        "library_size_key": registry.library_size_key,
        "dose_key": registry.dose_key,
        "time_key": registry.time_key,
        "answers": {"scale": "log1p_cp10k", "forms": [JSON, H5AD, ARROW, EVENTS]},
        "limits": {
            "max_body_mb": config.max_body_mb,
            "max_cells": config.max_cells,
            "max_set_steps": config.max_set_steps,
            "deadline_s": config.deadline_s,
        },
    }


def _contexts(parts: Parts, registry: Registry) -> list[dict[str, Any]]:
    """Contexts whose control cells came with the model."""
    return [
        {
            "context": dict(zip(registry.covariate_keys, entry["context"], strict=True)),
            "control_cells": entry["cells"],
        }
        for entry in parts.listing
    ]


def check_port(config: ServeConfig) -> None:
    """Refuse a port that is taken.

    Raises
    ------
    ConfigError
        When something listens there already, or we may not.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            rule = f"cannot be listened on ({error.strerror}); name another with --port"
            raise ConfigError("serve.port", config.port, rule=rule) from error


def _run(server: LitServer, config: ServeConfig) -> None:
    try:
        server.run(
            host=config.host,
            port=config.port,
            num_api_servers=config.api_servers,
            generate_client_file=False,
            log_level="warning",
        )
    except RuntimeError as error:
        # LitServe leaves its other processes behind when a worker cannot start.
        server._perform_graceful_shutdown(server.transport_config.manager, {}, "a worker failed")
        rule = "no worker could start; what it died of is above"
        raise ConfigError("serve", str(error), rule=rule) from error


@contextmanager
def _draining(server: LitServer, board: Board, config: ServeConfig) -> Iterator[None]:
    """On SIGTERM and SIGINT take nothing on, let what runs end, then end everything."""
    ours = os.getpid()

    def end() -> None:
        until = time.monotonic() + config.grace_s
        while board.waiting > 0 and time.monotonic() < until:
            time.sleep(_LOOK_S)
        # LitServe's monitor would still ask the event when the process that holds it has ended.
        held, server._shutdown_event = server._shutdown_event, Event()
        server._shutdown_event.set()
        held.set()

    def drain(number: int, frame: FrameType | None) -> None:
        if os.getpid() != ours:  # a process that we started and that has no handler of its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if board.draining:
            return
        board.drain()
        logger.info("shutting down: %d requests end first", board.waiting)
        Thread(target=end, name="drain", daemon=True).start()

    before = {one: signal.signal(one, drain) for one in (signal.SIGTERM, signal.SIGINT)}
    logging.getLogger("litserve").setLevel(logging.WARNING)
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)
    sys.stdout.flush()
