"""What bounds are joined to: all, any, not, states of a classifier, and verifiers.

Signed distances make the algebra: the largest for *all*, the smallest for *any*, minus for *not*.
N cells, G genes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol, Self, SupportsFloat, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._errors import PerturbDiffError, VerifierError, counted
from perturbdiff.guidance._bounds import TOLERANCE, Bounds
from perturbdiff.guidance._reference import CellValues


@runtime_checkable
class Bound(Protocol):
    """A constraint that knows the genes of the model and the control cells."""

    @property
    def text(self) -> str:
        """One line for reports."""
        ...

    @property
    def projects(self) -> bool:
        """Whether cells can be made to obey."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether the energy has a gradient in the values."""
        ...

    @property
    def needed(self) -> Int[Tensor, " genes"]:
        """Columns that are looked at."""
        ...

    def scaled(self, cells: CellValues) -> Self:
        """The same, measuring violations by how these cells spread."""
        ...

    def distance(self, cells: CellValues) -> Float[Tensor, "*sets n"]:
        """Signed distance, positive where violated, one a cell or one for the population."""
        ...

    def energy(self, cells: CellValues) -> Float[Tensor, "*sets"]:
        """Mean violation of each set; 0 where it holds."""
        ...

    def holds(self, cells: CellValues) -> Bool[Tensor, "*sets n"]:
        """Whether each cell, or the population, obeys."""
        ...

    def violation(self, cells: CellValues) -> float:
        """Violation left, in the constraint's own unit."""
        ...

    def reached(self, cells: CellValues) -> float:
        """What was reached, in the constraint's own unit."""
        ...


class _Logic(ABC):
    """What all joined constraints have in common."""

    members: tuple[Bound, ...]

    @property
    def needed(self) -> Tensor:
        names = {int(gene) for member in self.members for gene in member.needed}
        return torch.tensor(sorted(names), dtype=torch.int64)

    @property
    def differentiable(self) -> bool:
        return all(member.differentiable for member in self.members)

    def scaled(self, cells: CellValues) -> Self:
        members = tuple(member.scaled(cells) for member in self.members)
        return replace(self, members=members)  # type: ignore[type-var]

    def energy(self, cells: CellValues) -> Tensor:
        return self.distance(cells).clamp_min(0).mean(-1)

    def violation(self, cells: CellValues) -> float:
        if bool(self.holds(cells).all()):
            return 0.0
        return float(self.distance(cells).amax().clamp_min(0))

    def reached(self, cells: CellValues) -> float:
        """Share of cells, or of populations, that obey."""
        return float(self.holds(cells).double().mean())

    @abstractmethod
    def distance(self, cells: CellValues) -> Tensor:
        """How far each cell, or population, is from obeying."""

    @abstractmethod
    def holds(self, cells: CellValues) -> Tensor:
        """Which cells, or populations, obey."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AllOf(_Logic):
    """Every member holds."""

    text: str
    members: tuple[Bound, ...]

    @property
    def projects(self) -> bool:
        return all(member.projects for member in self.members)

    def distance(self, cells: CellValues) -> Tensor:
        return reduce(torch.maximum, [member.distance(cells) for member in self.members])

    def energy(self, cells: CellValues) -> Tensor:
        return torch.stack([member.energy(cells) for member in self.members]).sum(0)

    def holds(self, cells: CellValues) -> Tensor:
        return reduce(torch.logical_and, [member.holds(cells) for member in self.members])


@dataclass(frozen=True, kw_only=True, eq=False)
class AnyOf(_Logic):
    """At least one member holds."""

    text: str
    members: tuple[Bound, ...]

    @property
    def projects(self) -> bool:
        return any(member.projects for member in self.members)

    def distance(self, cells: CellValues) -> Tensor:
        return reduce(torch.minimum, [member.distance(cells) for member in self.members])

    def holds(self, cells: CellValues) -> Tensor:
        return reduce(torch.logical_or, [member.holds(cells) for member in self.members])

    def nearest(self, cells: CellValues) -> Bound:
        """The member that can be projected and asks for the least change of these cells."""
        able = [member for member in self.members if member.projects]
        return min(able, key=lambda member: float(member.energy(cells).mean()))


@dataclass(frozen=True, kw_only=True, eq=False)
class NotOf(_Logic):
    """The only member does not hold."""

    text: str
    members: tuple[Bound]

    @property
    def projects(self) -> bool:
        return self.complement is not None

    @property
    def complement(self) -> Bounds | None:
        """The opposite range, where the member is one one-sided row."""
        (member,) = self.members
        if not isinstance(member, Bounds) or member.lower.numel() != 1:
            return None
        has_lower, has_upper = bool(member.lower.isfinite()), bool(member.upper.isfinite())
        if has_lower == has_upper:
            return None
        bound = member.lower if has_lower else member.upper
        step = 3 * TOLERANCE * (1.0 if member.unit == "log1p" else bound.abs().clamp_min(1.0))
        end = torch.full_like(bound, torch.inf)
        lower, upper = (-end, bound - step) if has_lower else (bound + step, end)
        return replace(member, text=self.text, lower=lower, upper=upper)

    def distance(self, cells: CellValues) -> Tensor:
        return -self.members[0].distance(cells) + TOLERANCE

    def holds(self, cells: CellValues) -> Tensor:
        return ~self.members[0].holds(cells)


@dataclass(frozen=True, kw_only=True, eq=False)
class InState:
    """Share of the cells of a population that a classifier finds in a state."""

    text: str
    needed: Int[Tensor, " genes"]
    probability: Callable[[Tensor], Tensor]  # log1p [n, genes] → probability of the state [n]
    member: Callable[[Tensor], Tensor]  # log1p [n, genes] → whether in the state [n]
    lower: float
    upper: float
    differentiable: bool

    @property
    def projects(self) -> bool:
        return True

    def scaled(self, cells: CellValues) -> Self:
        del cells  # a share has its own scale
        return self

    def inside(self, cells: CellValues) -> Bool[Tensor, "*sets cells"]:
        """Which cells are in the state."""
        values = cells.take(self.needed)
        return self.member(values.flatten(0, -2).detach()).view(values.shape[:-1])

    def allowed(self, n_cells: int) -> tuple[int, int]:
        """Fewest and most cells in the state; a share that no number of cells is, is rounded."""
        least = int(np.ceil(self.lower * n_cells - TOLERANCE))
        most = int(np.floor(self.upper * n_cells + TOLERANCE))
        if least > most:
            least = most = round((self.lower + self.upper) / 2 * n_cells)
        return max(least, 0), min(most, n_cells)

    def moved(self, offset: float) -> Self:
        """Limits, where they bound anything, moved by an offset."""
        lower = 0.0 if self.lower <= 0 else min(max(self.lower + offset, 0.0), 1.0)
        upper = 1.0 if self.upper >= 1 else min(max(self.upper + offset, 0.0), 1.0)
        return replace(self, lower=lower, upper=upper)

    def chance(self, cells: CellValues) -> Float[Tensor, "*sets"]:
        """Mean probability of the state."""
        values = cells.take(self.needed)
        return self.probability(values.flatten(0, -2)).view(values.shape[:-1]).mean(-1)

    def distance(self, cells: CellValues) -> Tensor:
        share = self.chance(cells)[..., None]
        return torch.maximum(self.lower - share, share - self.upper)

    def energy(self, cells: CellValues) -> Tensor:
        return self.distance(cells).clamp_min(0).mean(-1)

    def holds(self, cells: CellValues) -> Tensor:
        inside = self.inside(cells)
        least, most = self.allowed(inside.shape[-1])
        number = inside.sum(-1)[..., None]
        return (number >= least) & (number <= most)

    def violation(self, cells: CellValues) -> float:
        if bool(self.holds(cells).all()):
            return 0.0
        share = self.inside(cells).double().mean(-1)
        return float(torch.maximum(self.lower - share, share - self.upper).amax().clamp_min(0))

    def reached(self, cells: CellValues) -> float:
        return float(self.inside(cells).double().mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Sized:
    """Bounds on the library size of every cell."""

    text: str
    lower: float
    upper: float

    @property
    def projects(self) -> bool:
        return True

    @property
    def differentiable(self) -> bool:
        return False

    @property
    def needed(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def scaled(self, cells: CellValues) -> Self:
        del cells
        return self

    def clamped(self, library_size: Tensor) -> Tensor:
        """Library sizes moved into range."""
        return library_size.clamp(self.lower, self.upper)

    def distance(self, cells: CellValues) -> Tensor:
        size = cells.library_size
        return torch.maximum(self.lower - size, size - self.upper) / size.mean()

    def energy(self, cells: CellValues) -> Tensor:
        return self.distance(cells).clamp_min(0).mean(-1)

    def holds(self, cells: CellValues) -> Tensor:
        return self.distance(cells) <= TOLERANCE

    def violation(self, cells: CellValues) -> float:
        size = cells.library_size
        return float(torch.maximum(self.lower - size, size - self.upper).amax().clamp_min(0))

    def reached(self, cells: CellValues) -> float:
        return float(cells.library_size.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Checked:
    """A verifier: any function of the cells of a population."""

    text: str
    needed: Int[Tensor, " genes"]
    names: tuple[str, ...]
    check: Callable[[np.ndarray, tuple[str, ...]], Any]

    @property
    def projects(self) -> bool:
        return False

    @property
    def differentiable(self) -> bool:
        return False

    def scaled(self, cells: CellValues) -> Self:
        del cells
        return self

    def distance(self, cells: CellValues) -> Tensor:
        values = cells.take(self.needed).detach()
        flat = values.reshape(-1, *values.shape[-2:]).cpu().numpy()
        found = [self._violation(self._verdict(one)) for one in flat]
        return torch.tensor(found, dtype=torch.float64).view(*values.shape[:-2], 1)

    def energy(self, cells: CellValues) -> Tensor:
        return self.distance(cells).clamp_min(0).mean(-1)

    def holds(self, cells: CellValues) -> Tensor:
        return self.distance(cells) <= 0

    def violation(self, cells: CellValues) -> float:
        return float(self.distance(cells).amax().clamp_min(0))

    def reached(self, cells: CellValues) -> float:
        return float(self.holds(cells).double().mean())

    def _verdict(self, log1p: np.ndarray) -> object:
        with users_code(f"The verifier {self.text}", log1p.shape):
            return self.check(log1p, self.names)

    def _violation(self, verdict: object) -> float:
        """1 for False, 0 for True; a number is the violation itself."""
        if isinstance(verdict, bool | np.bool_):
            return 0.0 if verdict else 1.0
        single = isinstance(verdict, SupportsFloat) and np.ndim(verdict) == 0  # type: ignore[arg-type]
        number = float(verdict) if single else np.nan  # type: ignore[arg-type]
        if np.isnan(number):
            msg = (
                f"The verifier {self.text} returned {verdict!r}. It must return whether the cells "
                "will do (True or False), or by how much they miss as one number."
            )
            raise VerifierError(msg)
        return number


@contextmanager
def users_code(what: str, shape: Sequence[int]) -> Iterator[None]:
    """Tell what of the user's raised an error, and of how many cells and genes it was asked.

    Raises
    ------
    VerifierError
        From whatever was raised.
    """
    try:
        yield
    except PerturbDiffError:
        raise
    except Exception as error:
        msg = (
            f"{what} raised {type(error).__name__}: {error}. It was asked about "
            f"{counted(shape[-2], 'cell')} of {counted(shape[-1], 'gene')}, an array of log1p "
            "values; try it on such an array."
        )
        raise VerifierError(msg) from error


def conjuncts(bounds: Sequence[Bound], cells: CellValues | None = None) -> list[Bound]:
    """Everything that must hold, one by one.

    *All* is opened; *not* becomes the opposite range where there is one; *any* becomes its nearest
    member for these cells, and is left out where there are none.
    """
    out: list[Bound] = []
    for bound in bounds:
        if isinstance(bound, AllOf):
            out += conjuncts(bound.members, cells)
        elif isinstance(bound, AnyOf):
            out += [] if cells is None else conjuncts([bound.nearest(cells)], cells)
        elif isinstance(bound, NotOf):
            opposite = bound.complement
            out.append(bound if opposite is None else opposite)
        else:
            out.append(bound)
    return out
