"""Asking a server as one asks a model."""

import base64
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
from anndata import AnnData
from tqdm import tqdm

from perturbdiff._errors import (
    BundleError,
    ConfigError,
    ConstraintError,
    ExpressionError,
    GeneError,
    LabelError,
    PerturbDiffError,
    ScaleError,
)
from perturbdiff._optional import needed
from perturbdiff.config import DecodeConfig, SampleConfig
from perturbdiff.data._matrix import require_anndata
from perturbdiff.serve._asking import (
    constraints_of,
    controls_of,
    prediction,
    several,
    shared,
    written,
)
from perturbdiff.serve._formats import EVENTS, H5AD, from_h5ad, to_h5ad

if TYPE_CHECKING:
    from perturbdiff.guidance import Constraint
    from perturbdiff.guidance._enforcement import Way

_KINDS: dict[str, type[PerturbDiffError]] = {
    kind.__name__: kind
    for kind in (BundleError, ConstraintError, ExpressionError, GeneError, LabelError, ScaleError)
}
_BUSY = (429, 503)
_NUMBERS = ("satisfied_sets", "energy", "worst_violation")  # of a ranking; null is NaN
_LONGEST_WAIT_S = 60.0


class ServerError(PerturbDiffError, RuntimeError):
    """A server did not answer a question; ``status`` is that of HTTP.

    Parameters
    ----------
    status
        Of the answer; 0 where none came.
    detail
        What the server says is wrong.
    kind
        Name of the error there.
    """

    def __init__(self, status: int, detail: str, *, kind: str = "") -> None:
        said = f" ({kind})" if kind else ""
        super().__init__(
            f"The server answered {status}{said}: {detail}" if status else f"No answer: {detail}"
        )
        self.status, self.kind = status, kind


class Client:
    """A server's model, as if it were here.

    Parameters
    ----------
    url
        Where ``perturbdiff serve`` listens, such as ``http://127.0.0.1:8000``.
    api_key
        Key, where the server wants one.
    timeout_s
        Seconds to wait for a server that says nothing.
    retries
        Times that a request is asked again when the server has too much to do.

    Raises
    ------
    ConfigError
        When the URL is none of HTTP.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 660.0,
        retries: int = 8,
    ) -> None:
        httpx = needed("httpx", group="serve")
        headers = {} if api_key is None else {"X-API-Key": api_key}
        if not str(url).lower().startswith(("http://", "https://")):
            rule = "must say how to reach the server, such as http://127.0.0.1:8000"
            raise ConfigError("url", url, rule=rule)
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        except httpx.InvalidURL as error:
            raise ConfigError("url", url, rule=f"is no URL ({error})") from error
        self._retries = retries
        self._about: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def about(self) -> dict[str, Any]:
        """What the model knows (perturbations, contexts, genes, scale, limits); asked once.

        Raises
        ------
        ServerError
            When the server does not say.
        """
        if self._about is None:
            content = self._asked("GET", "/model").content
            try:
                self._about = json.loads(content)
            except ValueError as error:
                detail = "what it said of its model is no JSON; is it perturbdiff's?"
                raise ServerError(200, detail) from error
        return self._about

    def predict(  # noqa: PLR0913 - each is something that a question may name
        self,
        adata: AnnData | None,
        *,
        perturbations: Sequence[str],
        contexts: Sequence[Mapping[str, str]] | None = None,
        n_cells: int = 256,
        seed: int = 0,
        doses: Sequence[float] | None = None,
        times: Sequence[float] | None = None,
        sample: SampleConfig | None = None,
        decode: DecodeConfig | None = None,
        decoding: str | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        constraints: "Constraint | Sequence[Constraint]" = (),
        enforce: "str | Way | Sequence[str | Way] | None" = None,
        progress: bool = False,
    ) -> AnnData:
        """Predicted cells of every perturbation in every context.

        Parameters
        ----------
        adata
            File with control cells of the contexts; only those are sent. ``None`` where the served
            model was saved with control cells of its own.
        perturbations, contexts, n_cells, seed, doses, times, sample, decode, decoding
            As in :func:`~perturbdiff.tl.predict`: every perturbation at every dose and time.
        missing_genes, constraints, enforce
            Likewise; constraints must be of the declared kinds, since functions are not sent.
        progress
            Show a progress bar.

        Returns
        -------
        What :func:`~perturbdiff.tl.predict` returns.

        Raises
        ------
        PerturbDiffError
            What the model raises about the question: of the same class where that is told by
            its message alone, else a :class:`ServerError`, as where no server answers.
        ConfigError
            When something has no form in JSON, such as a function, or ``adata`` is no AnnData.
        """
        question = prediction(
            perturbations, contexts, n_cells=n_cells, seed=seed, sample=sample, doses=doses,
            times=times, decode=decode, decoding=decoding, missing_genes=missing_genes,
            constraints=constraints, enforce=enforce,
        )  # fmt: skip
        body = written({**question, "control_cells": self._controls(adata)})
        if progress:
            return from_h5ad(self._followed(body))
        return from_h5ad(self._asked("POST", "/predict", body, accept=H5AD).content)

    def quote(  # noqa: PLR0913 - each is something that a question may name
        self,
        *,
        perturbations: Sequence[str],
        contexts: Sequence[Mapping[str, str]] | None = None,
        n_cells: int = 256,
        seed: int = 0,
        doses: Sequence[float] | None = None,
        times: Sequence[float] | None = None,
        sample: SampleConfig | None = None,
        decode: DecodeConfig | None = None,
        decoding: str | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        constraints: "Constraint | Sequence[Constraint]" = (),
        enforce: "str | Way | Sequence[str | Way] | None" = None,
        adata: AnnData | None = None,
    ) -> dict[str, float]:
        """Seconds and memory that a prediction would take, and seconds of work before it.

        Parameters
        ----------
        perturbations, contexts, n_cells, seed, doses, times, sample, decode, decoding
            As in :meth:`predict`.
        missing_genes, constraints, enforce, adata
            Likewise.

        Returns
        -------
        ``seconds``, ``memory_bytes``, ``waiting_s`` and the parts of the seconds.
        """
        question = prediction(
            perturbations, contexts, n_cells=n_cells, seed=seed, sample=sample, doses=doses,
            times=times, decode=decode, decoding=decoding, missing_genes=missing_genes,
            constraints=constraints, enforce=enforce,
        )  # fmt: skip
        body = written({**question, "control_cells": self._controls(adata)})
        found: dict[str, float] = self._asked("POST", "/quote", body).json()
        return found

    def rank(  # noqa: PLR0913 - each is something that a question may name
        self,
        adata: AnnData | None,
        *,
        target: "Constraint | Sequence[Constraint]",
        perturbations: Sequence[str] | None = None,
        contexts: Sequence[Mapping[str, str]] | None = None,
        n_cells: int = 128,
        seed: int = 0,
        doses: Sequence[float] | None = None,
        times: Sequence[float] | None = None,
        sample: SampleConfig | None = None,
    ) -> pd.DataFrame:
        """Perturbations by how well their predicted cells meet a wish.

        Parameters
        ----------
        adata
            As in :meth:`predict`.
        target, perturbations, contexts, n_cells, seed, doses, times, sample
            As in :func:`~perturbdiff.tl.rank_perturbations`; the wish must be of the declared
            kinds, since functions are not sent.

        Returns
        -------
        The table that :func:`~perturbdiff.tl.rank_perturbations` writes: one row a condition, the
        best first.

        Raises
        ------
        PerturbDiffError
            As :meth:`predict`.
        ConfigError
            When there is no wish, or something has no form in JSON.
        """
        wish = constraints_of(target)
        if wish is None:
            raise ConfigError("target", target, rule="needs a constraint or more")
        question: dict[str, Any] = {
            "target": wish,
            "perturbations": None if perturbations is None else several(perturbations, str),
            **shared(contexts, n_cells=n_cells, seed=seed, doses=doses, times=times, sample=sample),
            "control_cells": self._controls(adata),
        }
        rows = self._asked("POST", "/rank", written(question)).json()["ranking"]
        return pd.DataFrame(rows).astype(dict.fromkeys(_NUMBERS, np.float64))

    def _controls(self, adata: Any) -> str | None:
        """Control cells of a file, without what the model does not read, in base64."""
        if adata is None:
            return None
        require_anndata(adata)
        return base64.b64encode(to_h5ad(controls_of(adata, self.about))).decode()

    def _asked(
        self, method: str, path: str, body: bytes | None = None, *, accept: str = "*/*"
    ) -> Any:
        """The answer; asked again for as long as the server has too much to do."""
        headers = {"Accept": accept, "Content-Type": "application/json"}
        for turn in range(self._retries + 1):
            with _reaching(self._http.base_url):
                answer = self._http.request(method, path, content=body, headers=headers)
            if answer.status_code not in _BUSY or turn == self._retries:
                break
            time.sleep(_wait(answer.headers.get("Retry-After"), turn))
        _check(answer.status_code, answer.content)
        return answer

    def _followed(self, body: bytes) -> bytes:
        """The answer at the end of a stream, with a bar that shows how far it is."""
        headers = {"Accept": EVENTS, "Content-Type": "application/json"}
        for turn in range(self._retries + 1):
            with (
                _reaching(self._http.base_url),
                self._http.stream("POST", "/predict", content=body, headers=headers) as stream,
            ):
                if stream.status_code in _BUSY and turn < self._retries:
                    wait = _wait(stream.headers.get("Retry-After"), turn)
                else:
                    if stream.status_code != 200:
                        _check(stream.status_code, stream.read())
                    return _shown(_events(stream.iter_lines()))
            time.sleep(wait)
        raise ServerError(503, "it has too much to do")


@contextmanager
def _reaching(url: object) -> Iterator[None]:
    """A server that cannot be reached, or breaks off, is told in our words."""
    import httpx  # noqa: PLC0415 - an optional dependency

    try:
        yield
    except httpx.RequestError as error:
        detail = f"{url} could not be reached ({error or type(error).__name__}). Is it running?"
        raise ServerError(0, detail) from error


def _shown(events: Iterator[tuple[str, dict[str, Any]]]) -> bytes:
    with tqdm(unit="step") as bar:
        for name, content in events:
            if name == "progress":
                bar.set_description(content["phase"])
                bar.total, bar.n = content["of"], content["done"]
                bar.refresh()
            elif name == "answer":
                return base64.b64decode(content["base64"])
            else:
                _raise(int(content["status"]), content)
    raise ServerError(500, "the stream ended without an answer")


def _events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events of which each has one line of data."""
    name = ""
    for line in lines:
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, json.loads(line.removeprefix("data:"))


def _wait(said: str | None, turn: int) -> float:
    """Seconds to wait: what the server says, else more each time; not all shall return at once."""
    seconds = float(said) if said is not None and said.isdigit() else 0.5 * 2.0**turn
    return min(seconds, _LONGEST_WAIT_S) * random.uniform(0.8, 1.2)


def _check(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        said = json.loads(content)
    except ValueError:
        said = {"detail": content[:200].decode(errors="replace")}
    _raise(status, said)


def _raise(status: int, said: Mapping[str, Any]) -> None:
    """The error that was raised there, where it can be made of its words."""
    kind, detail = str(said.get("error", "")), str(said.get("detail", ""))
    if kind in _KINDS:
        raise _KINDS[kind](detail)
    raise ServerError(status, detail, kind=kind)
