"""Commands that say what is wrong with their own words in one line, as for any other mistake."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from perturbdiff.cli._show import USER_ERROR

_UsageError: Any = typer.BadParameter.__base__  # typer names no other of its kind


class OneLineGroup(TyperGroup):
    """A group whose usage errors are one line that begins with ``Error:``."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command and end the process with its code."""
        try:
            code = super().main(*args, **{**settings, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                path = "perturbdiff" if error.ctx is None else error.ctx.command_path
                words = " ".join(error.format_message().split()).rstrip(".")
                end = "" if words.endswith("?") else "."
                typer.echo(f"Error: {words}{end} See {path} --help.", err=True)
            sys.exit(USER_ERROR)
        except typer.Abort:
            typer.echo("Interrupted.", err=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)
