"""What a shell may complete: names of data sets, of shipped runs, of settings and their values."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from perturbdiff._typing import ModelKind
from perturbdiff.cli._files import DATASETS
from perturbdiff.config._runs import PARTS, shipped_configs

Found = list[tuple[str, str]]  # a word, and what it is


def data_sets(incomplete: str) -> Found:
    """Data sets; where none begins so, the shell goes on with files."""
    return [(name, words) for name, words in DATASETS.items() if name.startswith(incomplete)]


def data_or_settings(incomplete: str) -> Found:
    """Data sets, and settings once a section is named."""
    return [*data_sets(incomplete), *settings(incomplete)]


def sampling_settings(incomplete: str) -> Found:
    """Settings of the sections that a prediction listens to."""
    return [one for one in settings(incomplete) if one[0].startswith(("sample", "decode."))]


def data_or_sampling(incomplete: str) -> Found:
    """Data sets, and settings of sampling."""
    return [*data_sets(incomplete), *sampling_settings(incomplete)]


def serve_settings(incomplete: str) -> Found:
    """Settings of a server, which need no section."""
    start = f"serve.{incomplete}"
    return [(name.removeprefix("serve."), words) for name, words in settings(start)]


def runs(incomplete: str) -> Found:
    """Shipped runs."""
    return _files("runs", incomplete)


def serve_files(incomplete: str) -> Found:
    """Shipped settings of a server, alone or in a run."""
    return [*_files("serve", incomplete), *_files("runs", incomplete)]


def kinds(incomplete: str) -> Found:
    """Kinds of models."""
    return [(kind, "") for kind in get_args(ModelKind) if kind.startswith(incomplete)]


def settings(incomplete: str) -> Found:
    """Sections, then their settings, then values where there are few."""
    name, equals, value = incomplete.partition("=")
    section, dot, _ = name.partition(".")
    if not dot:
        return [(f"{part}.", "section") for part in PARTS if part.startswith(name)]
    if section not in PARTS:
        return []
    if equals:
        return [one for one in _values(name) if one[0].startswith(f"{name}={value}")]
    return [
        (f"{section}.{one.name}=", "")
        for one in fields(PARTS[section])
        if f"{section}.{one.name}".startswith(name)
    ]


def _values(name: str) -> Iterator[tuple[str, str]]:
    section, _, last = name.partition(".")
    hint: Any = get_type_hints(PARTS[section]).get(last)
    if get_origin(hint) is Literal:
        yield from ((f"{name}={choice}", "") for choice in get_args(hint))
    elif name in ("data.source", "data.path"):
        yield from ((f"{name}={known}", words) for known, words in DATASETS.items())


def _files(folder: str, incomplete: str) -> Found:
    paths = sorted((shipped_configs() / folder).glob("*.yaml"))
    return [(path.stem, "shipped") for path in paths if path.stem.startswith(incomplete)]
