"""Pages of the reference, one a room, and links to where each thing is described."""

import inspect
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOMS = (
    "perturbdiff", "perturbdiff.pp", "perturbdiff.tl", "perturbdiff.pl",
    "perturbdiff.data.datasets", "perturbdiff.data", "perturbdiff.config", "perturbdiff.train",
    "perturbdiff.metrics", "perturbdiff.guidance", "perturbdiff.profiling", "perturbdiff.serve",
    "perturbdiff.model", "perturbdiff.prior", "perturbdiff.diffusion", "perturbdiff.nn",
    "perturbdiff.autoregressive",
)  # fmt: skip
ERRORS = "perturbdiff._errors"
_DESCRIPTORS = (property, cached_property, classmethod, staticmethod)


def offered(room: str) -> dict[str, Any]:
    """What a room offers by name, but for other rooms."""
    module = import_module(room)
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: thing for name, thing in found.items() if not isinstance(thing, ModuleType)}


def errors() -> dict[str, Any]:
    """Every error by name."""
    return {
        name: thing
        for name, thing in vars(import_module(ERRORS)).items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    }


@cache
def homes() -> dict[int, str]:
    """Where each class and function is described: the first room that offers it."""
    found: dict[int, str] = {id(thing): f"{ERRORS}.{name}" for name, thing in errors().items()}
    for room in ROOMS:
        for name, thing in offered(room).items():
            if inspect.isclass(thing) or inspect.isroutine(thing):
                found.setdefault(id(thing), f"{room}.{name}")
    return found


@cache
def spellings() -> dict[str, str]:
    """Other names of what is described: those of its own module, and those of later rooms."""
    found: dict[str, str] = {}
    for room in (*ROOMS, ERRORS):
        for name, thing in (errors() if room == ERRORS else offered(room)).items():
            if home := homes().get(id(thing)):
                found[f"{room}.{name}"] = home
                found[f"{thing.__module__}.{thing.__qualname__}"] = home
    return found


def pages() -> dict[str, str]:
    """Text of each page by its name."""
    return {**{room: "\n".join(_page(room)) for room in ROOMS}, "errors": "\n".join(_errors())}


def _page(room: str) -> Iterator[str]:
    yield from (room, "=" * len(room), "", f".. automodule:: {room}", "")
    elsewhere = []
    for name, thing in sorted(offered(room).items(), key=lambda item: item[0].lower()):
        home = homes().get(id(thing))
        if home is None:
            yield from (f".. autodata:: {room}.{name}", "   :no-value:", "")
        elif home != f"{room}.{name}":
            elsewhere.append(f":obj:`{name} <{home}>`")
        elif inspect.isclass(thing):
            yield f".. autoclass:: {home}"
            if listed := ", ".join(_members(thing)):
                yield f"   :members: {listed}"
            yield ""
        else:
            yield from (f".. autofunction:: {home}", "")
    if elsewhere:
        yield from ("Described elsewhere: " + ", ".join(elsewhere) + ".", "")


def _errors() -> Iterator[str]:
    yield from ("Errors", "======", "")
    yield "Every error that is raised on purpose; each also is the built-in kind that a caller"
    yield from ("would catch.", "")
    for name in errors():
        yield from (f".. autoexception:: {ERRORS}.{name}", "   :show-inheritance:", "")


def _members(kind: type) -> list[str]:
    """Public methods and properties that are explained in this package."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("perturbdiff")]
    names = {
        name
        for base in own
        for name, thing in vars(base).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or isinstance(thing, _DESCRIPTORS))
    }
    return sorted(name for name in names if _explained(kind, name))


def _explained(kind: type, name: str) -> bool:
    for base in kind.__mro__:
        if name in vars(base) and inspect.getdoc(getattr(base, name)):
            return base.__module__.startswith("perturbdiff")
    return False


def _home_of(target: str, room: str) -> str | None:
    """Full name of what is meant, also where the name is that of its own module or bare."""
    known = spellings()
    for place in (target, f"{room}.{target}"):
        head, tail = place, ""
        while head:
            if head in known:
                return known[head] + tail
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
    first, _, rest = target.partition(".")
    found = {home for home in known.values() if home.rpartition(".")[2] == first}
    return f"{found.pop()}{'.' + rest if rest else ''}" if len(found) == 1 else None


def resolve(  # noqa: PLR0917 - the signature is Sphinx's
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, contnode: nodes.Element
) -> nodes.Element | None:
    """A link to where something is described, by whatever name it is called."""
    if node.get("refdomain") != "py":
        return None
    home = _home_of(node["reftarget"], node.get("py:module") or "perturbdiff")
    if home is None or home == node["reftarget"]:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", home, node, contnode
    )  # fmt: skip
