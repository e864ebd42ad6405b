"""Requests in the house, and what they are told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from threading import Event
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from perturbdiff._errors import ExpressionError, NotFittedError, PerturbDiffError
from perturbdiff.serve._formats import JSON, dumps
from perturbdiff.serve._prediction import Part
from perturbdiff.serve._reading import Reading
from perturbdiff.serve._schemas import problems


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a request is told: its progress, or its answer."""

    uid: str
    status: int = 200
    media: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    final: bool = True


@runtime_checkable
class Meters(Protocol):
    """What is measured about the service."""

    def phase(self, name: str, seconds: float) -> None:
        """A phase of a request took so long."""
        ...

    def calls(self, fill: list[int]) -> None:
        """The network was called, with so many sets each time."""
        ...


class NoMeters:
    """Nothing is measured."""

    def phase(self, name: str, seconds: float) -> None:
        """Forget it."""

    def calls(self, fill: list[int]) -> None:
        """Forget it."""


class Cancelled(Exception):  # noqa: N818 - it is no error
    """The request was cancelled, or its time is over."""


class Refusal(Exception):  # noqa: N818 - an answer, and no error of ours
    """The request is answered with a status and a reason.

    Parameters
    ----------
    status
        Of HTTP.
    reason
        What is wrong, and what to do.
    retry_after
        Seconds after which it may be asked again.
    """

    def __init__(self, status: int, reason: str, *, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


@dataclass(kw_only=True)
class Token:
    """Lets a request that runs as a whole be stopped, and counts its calls of the network."""

    stop: Event = field(default_factory=Event)
    calls: int = 0


@dataclass(kw_only=True, eq=False)
class Job:
    """A request that is in the house."""

    uid: str
    route: str
    body: bytes
    form: str
    watched: bool
    since: float
    until: float
    request: Any = None
    reading: Reading | None = None
    parts: list[Part] = field(default_factory=list)
    token: Token = field(default_factory=Token)
    nfe: dict[int, int] = field(default_factory=dict)  # by order of the engine
    steps: dict[int, int] = field(default_factory=dict)  # of sets, by order
    steps_of: int = 0
    cost: float = 0.0  # seconds, as quoted
    share_left: float = 1.0
    begun: float = 0.0


def refused(uid: str, error: BaseException) -> Reply:
    """The answer to a request that failed: whose fault it is, and what is wrong.

    Parameters
    ----------
    uid
        Of the request.
    error
        What was raised.

    Returns
    -------
    A reply with ``{"error", "detail"}`` and the status: 422 for what was asked, 500 for us.
    """
    headers: dict[str, str] = {}
    name, detail = type(error).__name__, str(error)
    if isinstance(error, Refusal):
        status, name = error.status, "Refusal"
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(1, ceil(error.retry_after)))
    elif isinstance(error, ValidationError):
        found = problems(error)
        status, name = 422, "ValidationError"
        detail = "; ".join(f"{entry['where']}: {entry['what']}" for entry in found)
    elif isinstance(error, PerturbDiffError) and not isinstance(error, NotFittedError):
        status = 500 if isinstance(error, ExpressionError) and "no answer" in detail else 422
    else:
        status, detail = 500, "The server failed at this request; its log says more."
    body = dumps({"error": name, "detail": detail})
    return Reply(uid=uid, status=status, headers=headers, body=body)
