"""The page of commands, from the parser itself."""

from collections.abc import Iterator
from typing import Any

import typer

from perturbdiff.cli import app


def commands_page() -> str:
    """Usage, arguments and options of every command."""
    group: Any = typer.main.get_command(app)
    return "\n".join(line for name in group.commands for line in _command(name, group))


def _command(name: str, group: Any) -> Iterator[str]:
    command = group.commands[name]
    context = typer.Context(command, info_name=f"perturbdiff {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## perturbdiff {name}", "", "```text", f"perturbdiff {name} {usage}", "```", "")
    for paragraph in (command.help or "").split("\n\n"):
        words = " ".join(paragraph.split())
        example = words.removeprefix("Example: ")
        yield from (words, "") if example == words else ("```bash", example, "```", "")
    yield from ("| argument or option | is | default |", "|---|---|---|")
    for parameter in command.params:
        if parameter.name != "help":
            yield _row(parameter)
    yield ""


def _row(parameter: Any) -> str:
    called = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        called = (parameter.metavar or parameter.name.upper()).split("|")
    names = ", ".join(f"`{text}`" for text in called)
    words = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", r"\|")
    default = parameter.default
    shown = "needed" if parameter.required else ""
    if default is not None and default is not False and not callable(default) and default != []:
        shown = f"`{default}`" if not parameter.required else shown
    return f"| {names} | {words} | {shown} |"
