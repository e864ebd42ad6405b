"""The command that serves a saved model."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from perturbdiff._logging import logger
from perturbdiff.cli._completion import serve_files, serve_settings
from perturbdiff.cli._options import Verbose
from perturbdiff.cli._show import USER_ERROR, plainly


def serve(
    bundle: Annotated[Path, typer.Argument(help="Folder of a saved model.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE",
            help="Settings by their names, such as max_cells=10000.",
            autocompletion=serve_settings,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="127.0.0.1 for this machine alone, 0.0.0.0 for all.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8000 if not set.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="YAML file of settings, or a shipped one: standard. Of a run, its section serve.",
            autocompletion=serve_files,
        ),
    ] = None,
    accelerator: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that compute, for each device.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting by its name, such as max_cells=10000; repeatable.",
            autocompletion=serve_settings,
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve a saved model over HTTP, until SIGTERM or Ctrl-C; what runs then ends first.

    A key that clients must send is read from the environment, PERTURBDIFF_API_KEY. Save the model
    with --include-controls to have it answer by context alone.

    Example: perturbdiff serve bundle --port 8000
    """
    with plainly(verbose=verbose):
        try:
            from perturbdiff.serve import load_serve_config, run
        except ImportError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from None
        chosen: dict[str, Any] = {
            "host": host, "port": port, "accelerator": accelerator, "workers_per_device": workers,
        }  # fmt: skip
        flags = [f"{name}={value}" for name, value in chosen.items() if value is not None]
        settings = load_serve_config(
            config, overrides=(*(overrides or ()), *(changes or ()), *flags)
        )
        logger.setLevel(logging.INFO)
        run(bundle, settings, api_key=os.environ.get("PERTURBDIFF_API_KEY") or None)
