"""The page of settings, from the dataclasses that check them and the files that ship."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from perturbdiff.config._runs import PARTS, shipped_configs

_ENTRY = re.compile(r"^(\w[\w, ]*)\n((?:    .*\n?|\n)+)", re.M)


def settings_page() -> str:
    """Every section, setting and shipped file."""
    return "\n".join([*_sections(), *_files()])


def _sections() -> Iterator[str]:
    yield from ("## Every setting", "")
    for section, kind in PARTS.items():
        summary = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        yield from (f"### {section}", "", " ".join(summary.split()), "")
        yield from ("| name | type | default | is |", "|---|---|---|---|")
        meanings, hints = _meanings(kind), get_type_hints(kind)
        for one in fields(kind):
            is_ = meanings.get(one.name, "")
            yield f"| `{one.name}` | {_kind(hints[one.name])} | {_default(one)} | {is_} |"
        yield ""


def _meanings(kind: type) -> dict[str, str]:
    """What the docstring says of each parameter."""
    doc = inspect.cleandoc(kind.__doc__ or "").partition("Parameters\n----------\n")[2]
    found = {}
    for names, text in _ENTRY.findall(doc + "\n"):
        words = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
        found |= dict.fromkeys(re.split(r",\s*", names), words.replace("|", r"\|"))
    return found


def _kind(hint: Any) -> str:
    text = getattr(hint, "__name__", None) if isinstance(hint, type) else None
    words = text or str(hint).replace("typing.", "").replace("collections.abc.", "")
    return f"`{words}`".replace("|", r"\|")


def _default(one: Any) -> str:
    value = one.default if one.default is not MISSING else one.default_factory()
    return f"`{yaml.safe_dump(_plain(value), default_flow_style=True).splitlines()[0]}`"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _files() -> Iterator[str]:
    yield from ("## Shipped files", "")
    folder = shipped_configs()
    for path in sorted(folder.rglob("*.yaml"), key=_place):
        yield from (f"`configs/{path.relative_to(folder)}`", "", "```yaml")
        yield from (path.read_text(encoding="utf-8").rstrip(), "```", "")


def _place(path: Path) -> tuple[bool, str]:
    """Complete runs first."""
    return path.parent.name != "runs", str(path)
