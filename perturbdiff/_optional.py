"""Packages that only some parts need, and what to install for them."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import tqdm


def needed(name: str, *, group: str) -> Any:
    """The module, or an error that says how to install it.

    Parameters
    ----------
    name
        Module to import.
    group
        Group of optional dependencies that it is of.

    Returns
    -------
    The module.

    Raises
    ------
    ImportError
        When it is not installed.
    """
    require(name.partition(".")[0], group=group)
    return import_module(name)


def require(package: str, *, group: str) -> None:
    """Refuse to go on without a package, which is not imported yet.

    Parameters
    ----------
    package
        Package.
    group
        Group of optional dependencies that it is of.

    Raises
    ------
    ImportError
        When it is not installed.
    """
    if find_spec(package) is None:
        msg = f"{package} is not installed. Run: pip install 'perturbdiff[{group}]'"
        raise ImportError(msg, name=package)


def progress_bars() -> Any:
    """The bars of tqdm: widgets where a notebook can show them, else text.

    ``tqdm.auto`` alone would warn in every notebook without ``ipywidgets``.

    Returns
    -------
    What a bar is made with.
    """
    return import_module("tqdm.auto").tqdm if find_spec("ipywidgets") else tqdm.tqdm
