"""All, any and not of other constraints, and functions as constraints."""

import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perturbdiff._errors import ConfigError
from perturbdiff.guidance._constraints import Constraint
from perturbdiff.guidance._logic import AllOf, AnyOf, NotOf
from perturbdiff.guidance._reference import Reference
from perturbdiff.guidance._whole_cells import Verifier


@dataclass(frozen=True, eq=False)
class All(Constraint):
    """Every member holds.

    Parameters
    ----------
    members
        Constraints or verifiers.
    """

    members: Sequence[Constraint | Callable[..., typing.Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", _members(self))

    def describe(self) -> str:
        return f"all of ({'; '.join(member.describe() for member in as_constraints(self.members))})"

    def bind(self, reference: Reference) -> AllOf:
        members = tuple(member.bind(reference) for member in as_constraints(self.members))
        return AllOf(text=self.describe(), members=members)


@dataclass(frozen=True, eq=False)
class Any(Constraint):
    """At least one member holds; per cell where all members are per cell.

    Parameters
    ----------
    members
        Constraints or verifiers.
    """

    members: Sequence[Constraint | Callable[..., typing.Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", _members(self))

    def describe(self) -> str:
        return f"any of ({'; '.join(member.describe() for member in as_constraints(self.members))})"

    def bind(self, reference: Reference) -> AnyOf:
        members = tuple(member.bind(reference) for member in as_constraints(self.members))
        return AnyOf(text=self.describe(), members=members)


@dataclass(frozen=True, eq=False)
class Not(Constraint):
    """The member does not hold; for no cell where it is per cell.

    Parameters
    ----------
    member
        A constraint or a verifier.
    """

    member: Constraint | Callable[..., typing.Any]

    def describe(self) -> str:
        return f"not ({as_constraints([self.member])[0].describe()})"

    def bind(self, reference: Reference) -> NotOf:
        (member,) = as_constraints([self.member])
        return NotOf(text=self.describe(), members=(member.bind(reference),))


def _members(joined: "All | Any") -> tuple[Constraint, ...]:
    members = as_constraints(joined.members)
    if not members:
        raise ConfigError(type(joined).__name__, [], rule="needs a member or more")
    return members


def as_constraints(wishes: object) -> tuple[Constraint, ...]:
    """Constraints, one or several, with plain functions made verifiers.

    Raises
    ------
    ConfigError
        When something is neither.
    """
    rule = "must be constraints or functions, one or a list of them"
    if isinstance(wishes, Constraint) or callable(wishes):
        wishes = [wishes]
    if isinstance(wishes, str) or not isinstance(wishes, Iterable):
        raise ConfigError("constraints", wishes, rule=rule)
    out = []
    for wish in wishes:
        if isinstance(wish, Constraint):
            out.append(wish)
        elif callable(wish):
            out.append(Verifier(wish))
        else:
            raise ConfigError("constraints", wish, rule=rule)
    return tuple(out)
