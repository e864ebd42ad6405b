"""Constraints on single genes, by name and in units of expression."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch

from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff.config._checks import finite_number
from perturbdiff.guidance._bounds import Bounds, Scope
from perturbdiff.guidance._logic import Bound
from perturbdiff.guidance._reference import Reference

ScaleName = Literal["log1p", "counts"]
Relation = Literal["exactly", "at_least", "at_most"]


class Constraint(ABC):
    """A wish over cells. Each kind says its unit and whether it is per cell or per population."""

    @abstractmethod
    def bind(self, reference: Reference) -> Bound:
        """The constraint for one context: genes are looked up, fold changes become numbers.

        Raises
        ------
        GeneError
            When a gene is not one of the model's.
        ConstraintError
            When it cannot hold.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for reports."""


def names_of(gene: str | Sequence[str]) -> tuple[str, ...]:
    return (gene,) if isinstance(gene, str) else tuple(gene)


def shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def check_number(field_name: str, value: float, *, least: float = 0.0) -> None:
    if finite_number(field_name, value) < least:
        raise ConfigError(field_name, value, rule=f"must be finite and at least {least:g}")


def check_genes(field_name: str, genes: str | Sequence[str]) -> None:
    names = [genes] if isinstance(genes, str) else genes
    if not (
        isinstance(names, Collection) and len(names) and all(isinstance(n, str) for n in names)
    ):
        rule = "must be the name of a gene, or a list of one name or more"
        raise ConfigError(field_name, genes, rule=rule)


def check_choice(field_name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(field_name, value, rule=f"must be one of {', '.join(choices)}")


def range_of(value: torch.Tensor, relation: Relation) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bound of a relation to a value."""
    low = value if relation != "at_most" else torch.full_like(value, -inf)
    high = value if relation != "at_least" else torch.full_like(value, inf)
    return low, high


SIGNS: dict[str, str] = {"exactly": "=", "at_least": ">=", "at_most": "<="}


@dataclass(frozen=True)
class _Valued(Constraint):
    """One value for one gene, or for each of several."""

    gene: str | Sequence[str]
    value: float
    scale: ScaleName = field(default="log1p", kw_only=True)
    per: Scope = field(default="cell", kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_genes(f"{name}.gene", self.gene)
        check_number(f"{name}.value", self.value)
        check_choice(f"{name}.scale", self.scale, ("log1p", "counts"))
        check_choice(f"{name}.per", self.per, ("cell", "population"))
        where = f"{name}.value"
        whole = self.scale == "counts" and self.per == "cell" and self._relation == "exactly"
        if whole and self.value != round(self.value):
            rule = "must be a whole number of counts; scale='log1p' makes the gene real-valued"
            raise ConfigError(where, self.value, rule=rule)

    @property
    @abstractmethod
    def _relation(self) -> Relation:
        """How the gene compares with the value."""

    def describe(self) -> str:
        sign = SIGNS[self._relation]
        return f"{shown(names_of(self.gene))} {sign} {self.value:g} {self.scale} per {self.per}"

    def bind(self, reference: Reference) -> Bounds:
        names = names_of(self.gene)
        columns = reference.columns(names, who=self.describe())
        value = torch.full((1, len(names)), float(self.value), dtype=torch.float64)
        lower, upper = range_of(value, self._relation)
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(names), dtype=torch.float64),
            lower=lower,
            upper=upper,
            unit=self.scale,
            per=self.per,
        )


@dataclass(frozen=True)
class Fix(_Valued):
    """A gene has this value. In log1p the gene becomes real-valued; a count stays an integer.

    Parameters
    ----------
    gene
        One or several.
    value
        At least 0.
    scale
        ``"log1p"`` of counts per 10,000, or ``"counts"``.
    per
        Every cell, or the mean over the cells of the condition.
    """

    @property
    def _relation(self) -> Relation:
        return "exactly"


@dataclass(frozen=True)
class AtLeast(_Valued):
    """A gene has at least this value; parameters as in :class:`Fix`."""

    @property
    def _relation(self) -> Relation:
        return "at_least"


@dataclass(frozen=True)
class AtMost(_Valued):
    """A gene has at most this value; parameters as in :class:`Fix`."""

    @property
    def _relation(self) -> Relation:
        return "at_most"


@dataclass(frozen=True)
class FoldChange(Constraint):
    """Counts per 10,000 are so many times the mean of the control cells of the context.

    Parameters
    ----------
    gene
        One or several; each must be expressed in control cells.
    fold
        1 = as in control.
    relation
        ``"exactly"``, ``"at_least"``, ``"at_most"``.
    per
        The mean over the cells of the condition, or every cell.
    """

    gene: str | Sequence[str]
    fold: float
    relation: Relation = field(default="exactly", kw_only=True)
    per: Scope = field(default="population", kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_genes(f"{name}.gene", self.gene)
        check_number(f"{name}.fold", self.fold)
        check_choice(f"{name}.relation", self.relation, tuple(SIGNS))
        check_choice(f"{name}.per", self.per, ("cell", "population"))

    def describe(self) -> str:
        sign = SIGNS[self.relation]
        return f"{shown(names_of(self.gene))} {sign} {self.fold:g} x control per {self.per}"

    def bind(self, reference: Reference) -> Bounds:
        names = names_of(self.gene)
        columns = reference.columns(names, who=self.describe())
        level = reference.control_depth[columns]
        silent = [name for name, value in zip(names, level.tolist(), strict=True) if value <= 0]
        if silent and self.fold > 0:
            msg = (
                f"{self.describe()}: {shown(silent)} has no counts in the control cells of the "
                "context, so a fold change says nothing. State a value with AtLeast or Fix."
            )
            raise ConstraintError(msg)
        lower, upper = range_of(level[None].double() * self.fold, self.relation)
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(names), dtype=torch.float64),
            lower=lower,
            upper=upper,
            unit="cp10k",
            per=self.per,
        )


@dataclass(frozen=True)
class KnockDown(Constraint):
    """What is left of a gene's mean counts per 10,000 in control cells, at most.

    Parameters
    ----------
    gene
        One or several.
    remaining
        Share from 0 to 1.
    per
        The mean over the cells of the condition, or every cell.
    """

    gene: str | Sequence[str]
    remaining: float = 0.25
    per: Scope = field(default="population", kw_only=True)

    def __post_init__(self) -> None:
        check_genes("KnockDown.gene", self.gene)
        if not 0 <= finite_number("KnockDown.remaining", self.remaining) <= 1:
            raise ConfigError("KnockDown.remaining", self.remaining, rule="must be from 0 to 1")
        check_choice("KnockDown.per", self.per, ("cell", "population"))

    def describe(self) -> str:
        genes = shown(names_of(self.gene))
        return f"{genes} knocked down to {self.remaining:g} of control per {self.per}"

    def bind(self, reference: Reference) -> Bounds:
        columns = reference.columns(names_of(self.gene), who=self.describe())
        upper = reference.control_depth[columns][None].double() * self.remaining
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(columns), dtype=torch.float64),
            lower=torch.full_like(upper, -inf),
            upper=upper,
            unit="cp10k",
            per=self.per,
        )
