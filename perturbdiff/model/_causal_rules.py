"""What of a wish a model that writes one gene after another can be held to, and how."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff.guidance import BestOf, Hard
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import Bound
from perturbdiff.guidance._logits import opened
from perturbdiff.model._causal_fitted import CausalFitted
from perturbdiff.model._constrained import Ways
from perturbdiff.model._constrained_answer import is_trivial


def draws_of(ways: Ways) -> int | None:
    """Most draws of a set, from what a user said; None where masks alone shall do.

    Raises
    ------
    ConfigError
        When something else is asked for: there is no gradient to follow, and no step at which
        unfinished cells could be judged.
    """
    listed = [ways] if isinstance(ways, str) or not isinstance(ways, Sequence) else list(ways)
    found = [_draws(way) for way in listed]
    if len(found) != 1:
        raise ConfigError("enforce", listed, rule="must be one way for an autoregressive model")
    return found[0]


def _draws(way: object) -> int | None:
    if way is None or way == "best_of":
        return BestOf().n
    if way == "hard" or isinstance(way, Hard):
        return None
    if isinstance(way, BestOf):
        if way.redraws > 1:
            rule = "must be 1 here: an autoregressive model draws counts as it says them. Raise n"
            raise ConfigError("BestOf.redraws", way.redraws, rule=rule)
        return way.n
    rule = (
        "must be 'best_of', perturbdiff.BestOf(n=...) or 'hard' for an autoregressive model, which "
        "masks what is about one gene of one cell and draws sets again for everything else"
    )
    raise ConfigError("enforce", way, rule=rule)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """What shall hold in one context, and what of it a mask meets."""

    bounds: list[Bound]
    masked: list[Bounds]
    rest: list[Bound]

    @classmethod
    def of(cls, bounds: list[Bound]) -> "Rules":
        """The parts of some bounds; what any counts obey needs neither."""
        parts = [part for part in opened(bounds) if not _is_free(part)]
        return cls(
            bounds=bounds,
            masked=[part for part in parts if isinstance(part, Bounds) and part.masks],
            rest=[part for part in parts if not _is_maskable(part)],
        )

    @property
    def method(self) -> str:
        """For the report."""
        names = [("mask", self.masked), ("best_of", self.rest)]
        return "+".join(name for name, parts in names if parts) or "none"

    def promised(self, bound: Bound) -> bool:
        """Whether masks alone make it hold."""
        return all(_is_free(part) or _is_maskable(part) for part in opened([bound]))

    def check(self, fitted: CausalFitted, *, decoding: str, n_draws: int | None) -> None:
        """Refuse what this model, decoded like this, cannot do."""
        if self.rest and n_draws is None:
            msg = (
                f"{self.rest[0].text}: is known only when a set is finished, so an autoregressive "
                "model cannot be held to it. Use enforce='best_of'."
            )
            raise ConstraintError(msg)
        if not self.masked:
            return
        text = self.masked[0].text
        if decoding == "transport":
            msg = (
                f"{text}: is met by masking what the decoder may say, and decoding='transport' "
                "makes the counts afterwards. Use decoding='raw'."
            )
            raise ConstraintError(msg)
        if fitted.order.drawn:
            msg = (
                f"{text}: is met by masking when its gene is said, and with the order "
                f"{fitted.order.name!r} a gene may never be said. Fit with another order."
            )
            raise ConstraintError(msg)


def _is_maskable(bound: Bound) -> bool:
    return isinstance(bound, Bounds) and bound.masks


def _is_free(bound: Bound) -> bool:
    return isinstance(bound, Bounds) and bound.masks and is_trivial(bound)
