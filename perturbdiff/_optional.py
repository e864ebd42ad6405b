"""Import of packages that are not always installed, without hiding why an import failed."""

import importlib
import importlib.util
from types import ModuleType


def require(name: str, *, extra: str) -> ModuleType:
    """Import ``name``; where it is absent say which extra brings it, where it is broken show its own error.

    Parameters
    ----------
    name
        Module to import.
    extra
        Extra of this package that installs it.

    Returns
    -------
    The imported module.

    Raises
    ------
    ModuleNotFoundError
        When the package is not installed. An error raised while an installed package is imported
        is passed on unchanged.
    """
    if importlib.util.find_spec(name) is None:
        msg = f"{name!r} is not installed. Run: pip install 'perturbdiff[{extra}]'"
        raise ModuleNotFoundError(msg, name=name)
    return importlib.import_module(name)
