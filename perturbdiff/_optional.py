"""Packages that only some parts need, and what to install for them."""

from importlib import import_module
from typing import Any


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
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        msg = f"{package} is not installed. Run: pip install 'perturbdiff[{group}]'"
        raise ImportError(msg, name=package) from error
