"""Settings of a server."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from perturbdiff._errors import UnknownKeyError
from perturbdiff.config._runs import load_run, run_path, shipped_configs
from perturbdiff.config._serve import HOSTS, ServeConfig
from perturbdiff.config._yaml import from_mapping, read_yaml, with_overrides

__all__ = ["HOSTS", "ServeConfig", "load_serve_config"]


def load_serve_config(
    source: str | Path | None = None, *, overrides: tuple[str, ...] = ()
) -> ServeConfig:
    """Settings of a server, from a file or from one that ships with the package.

    Parameters
    ----------
    source
        Path of a YAML file, the name of a shipped one (such as ``standard``), or ``None``. A file
        of a whole run, or the name of a shipped run (such as ``laptop``), gives its section
        ``serve``.
    overrides
        Texts such as ``port=9000``.

    Returns
    -------
    Checked settings.

    Raises
    ------
    UnknownKeyError, ConfigError
        When a name, file or value is wrong.
    """
    settings = {} if source is None else _settings(source)
    return from_mapping(ServeConfig, with_overrides(settings, overrides), where="serve")


def _settings(source: str | Path) -> dict[str, Any]:
    """What a file of server settings, or of a run, says of a server."""
    path = Path(source)
    if not (path.exists() or path.suffix):
        shipped = [shipped_configs() / folder / f"{source}.yaml" for folder in ("serve", "runs")]
        known = sorted(file.stem for one in shipped for file in one.parent.glob("*.yaml"))
        path = next((file for file in shipped if file.is_file()), path)
        if path == Path(source):
            where = "The shipped settings"
            raise UnknownKeyError(where, str(source), known=known)
    path = run_path(path)
    settings = read_yaml(path)
    return asdict(load_run(path).serve) if {"data", "serve"} & set(settings) else settings
