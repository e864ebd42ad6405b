"""A saved model behind HTTP, on LitServe, and a client for it.

Everything is loaded when it is first used: a client needs httpx alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from perturbdiff._optional import require

if TYPE_CHECKING:
    from perturbdiff.serve._client import Client, ServerError
    from perturbdiff.serve._launch import run
    from perturbdiff.serve._service import Service
    from perturbdiff.serve._settings import ServeConfig, load_serve_config

_FROM = {
    "Client": "_client",
    "ServeConfig": "_settings",
    "ServerError": "_client",
    "Service": "_service",
    "load_serve_config": "_settings",
    "run": "_launch",
}

_NEEDS = {
    "Client": ("httpx", "pydantic"),
    "ServerError": ("httpx", "pydantic"),
    "Service": ("pydantic",),
    "run": ("litserve", "prometheus_client", "pydantic"),
}

__all__ = ["Client", "ServeConfig", "ServerError", "Service", "load_serve_config", "run"]


def __getattr__(name: str) -> object:
    if name not in _FROM:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    for package in _NEEDS.get(name, ()):
        require(package, group="serve")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
