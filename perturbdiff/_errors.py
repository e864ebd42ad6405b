"""Every error of the package: what is wrong, where, and what to do about it.

Each type also is the built-in kind that a caller would catch.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_LISTED = 5


def _plain(value: object) -> object:
    """One or a few numbers or labels of NumPy as Python's own, which is how they were meant."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    size, plain = getattr(value, "size", None), getattr(value, "tolist", None)
    return plain() if plain and isinstance(size, int) and size <= _LISTED else value


def listed(names: Iterable[object], *, limit: int = _LISTED) -> str:
    """First few names, and how many more there are."""
    items = [repr(_plain(name)) for name in names]
    more = f", ... ({len(items)} in all)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def counted(number: int, what: str) -> str:
    """The number and its noun, with a plural s where there is not one of them."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def nearest(name: str, known: Sequence[str]) -> str:
    """A sentence with the known name closest to ``name``, and the first few where it is far."""
    if not known:
        return "Known: none."
    plain = {text: text.casefold().strip() for text in known}
    wanted = str(name).casefold().strip()  # what was asked for may be no text
    close = get_close_matches(wanted, plain.values(), n=1)
    within = [text for text in plain.values() if wanted and (wanted in text or text in wanted)]
    found = close or sorted(within, key=len)[:1]
    best = found or get_close_matches(wanted, plain.values(), n=1, cutoff=0.0)
    closest = next(text for text in known if plain[text] == best[0])
    if found:
        return f"Did you mean {closest!r}?"
    if len(known) <= _LISTED:
        return f"Known: {listed(known)}."
    return f"Nearest: {closest!r}. Known: {listed(known)}."


class PerturbDiffError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(PerturbDiffError, ValueError):
    """A setting has a value that it must not have."""

    def __init__(self, field: str, value: object, *, rule: str) -> None:
        super().__init__(f"{field} = {_plain(value)!r}: {rule}.")


class UnknownKeyError(PerturbDiffError, KeyError):
    """A key (obs column, layer, uns entry, setting) is not there."""

    def __init__(self, where: str, key: str, *, known: Sequence[str]) -> None:
        super().__init__(f"{where} has no {_plain(key)!r}. {nearest(key, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownLevelError(PerturbDiffError, ValueError):
    """A label was not there in training."""

    def __init__(self, key: str, unknown: Sequence[str], *, known: Sequence[str]) -> None:
        hint = nearest(unknown[0], known)
        super().__init__(
            f"obs[{key!r}] has {counted(len(unknown), 'level')} unseen in training: "
            f"{listed(unknown)}. {hint}"
        )


class ScaleError(PerturbDiffError, ValueError):
    """The numbers are not on the declared scale, or no scale is declared."""


class ExpressionError(PerturbDiffError, ValueError):
    """The expression matrix holds something it must not (NaN, negatives, fractions in counts)."""


class GeneError(PerturbDiffError, ValueError):
    """Gene names are duplicated, or genes of the model are missing."""


class GeneOverlapError(GeneError):
    """Not one gene of the model was measured."""


class LabelError(PerturbDiffError, ValueError):
    """Labels of cells are missing, contradictory or cannot be read (control, dose, time)."""


class SplitError(PerturbDiffError, ValueError):
    """A split is empty, or cells of a held-out condition are among the training cells."""


class UndefinedBaselineError(PerturbDiffError, ValueError):
    """A baseline has no answer for this question; the message is the reason shown as n/a."""


class NotFittedError(PerturbDiffError, RuntimeError):
    """The model was asked for something that needs ``fit`` first."""


class BundleError(PerturbDiffError, ValueError):
    """A saved model is missing, damaged, or newer than this package."""


class MetricError(PerturbDiffError, ValueError):
    """A score is not defined for these inputs."""


class ConstraintError(PerturbDiffError, ValueError):
    """A constraint cannot hold, contradicts another, or was asked for what it does not offer."""


class VerifierError(ConstraintError):
    """A function or classifier of the user's raised an error, or gave no verdict."""


class DownloadError(PerturbDiffError, OSError):
    """A data set could not be obtained; the message holds the one command to run."""


class TrainingError(PerturbDiffError, RuntimeError):
    """Training cannot go on (non-finite loss, wrong checkpoint)."""
