"""Registry, door, splits and data sets. The parts that need torch load on first use."""

from importlib import import_module
from typing import Any

from perturbdiff.data._cells import Cells
from perturbdiff.data._conditions import Columns, Condition
from perturbdiff.data._door import decode, encode
from perturbdiff.data._labels import canonical, label_of
from perturbdiff.data._question import Question, ask
from perturbdiff.data._registry import Registry, Vocabulary
from perturbdiff.data._splits import Split, check_leakage, random_holdout, split

_LATER = {"SetDataModule": "perturbdiff.data._module"}

__all__ = [
    "Cells",
    "Columns",
    "Condition",
    "Question",
    "Registry",
    "Split",
    "Vocabulary",
    "ask",
    "canonical",
    "check_leakage",
    "decode",
    "encode",
    "label_of",
    "random_holdout",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
