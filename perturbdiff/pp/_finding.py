"""One line of the table that ``check`` returns."""

from dataclasses import dataclass
from typing import Final

from perturbdiff._errors import PerturbDiffError

FAULT, WARNING, FACT = "fault", "warning", "fact"
LEVELS: Final = (FAULT, WARNING, FACT)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found, where, of how many cells, genes or conditions, and what to do about it."""

    level: str
    about: str
    where: str
    n: int
    found: str
    what_to_do: str = ""


def refused(error: PerturbDiffError, *, about: str, where: str, n: int) -> Finding:
    """The finding that a model would refuse the file for: first what is wrong, then what to do."""
    found, _, rest = str(error).partition(". ")
    return Finding(
        level=FAULT, about=about, where=where, n=n, found=found.removesuffix("."), what_to_do=rest
    )
