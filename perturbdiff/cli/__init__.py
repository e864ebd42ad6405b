"""Command line: the same names as the API, checked before anything is read or written."""

from perturbdiff.cli._app import app, main
from perturbdiff.cli._files import DATASETS

__all__ = ["DATASETS", "app", "main"]
