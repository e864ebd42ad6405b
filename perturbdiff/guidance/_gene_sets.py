"""Constraints on several genes at once: sets, genes that stay, measured panels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perturbdiff._errors import ConfigError, ConstraintError, GeneError, UnknownKeyError, counted
from perturbdiff.guidance._bounds import Bounds, Scope
from perturbdiff.guidance._constraints import (
    SIGNS,
    Constraint,
    Relation,
    ScaleName,
    check_choice,
    check_genes,
    check_number,
    names_of,
    range_of,
    shown,
)
from perturbdiff.guidance._reference import Reference


@dataclass(frozen=True)
class GeneSetShift(Constraint):
    """Mean log1p value over a set of genes, less that of control cells.

    Parameters
    ----------
    genes
        Names; those that the model does not have are an error, see :meth:`from_gmt`.
    shift
        In log1p.
    relation
        ``"exactly"``, ``"at_least"``, ``"at_most"``.
    per
        The mean over the cells of the condition, or every cell.
    name
        Of the set, for reports.
    """

    genes: Sequence[str]
    shift: float
    relation: Relation = field(default="exactly", kw_only=True)
    per: Scope = field(default="population", kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not self.genes or isinstance(self.genes, str):
            rule = "must be a sequence of one gene or more"
            raise ConfigError("GeneSetShift.genes", self.genes, rule=rule)
        check_genes("GeneSetShift.genes", self.genes)
        check_number("GeneSetShift.shift", self.shift, least=-inf)
        check_choice("GeneSetShift.relation", self.relation, tuple(SIGNS))
        check_choice("GeneSetShift.per", self.per, ("cell", "population"))

    @classmethod
    def from_gmt(
        cls,
        path: str | Path,
        name: str,
        shift: float,
        *,
        among: Sequence[str],
        relation: Relation = "exactly",
        per: Scope = "population",
    ) -> "GeneSetShift":
        """The set of this name in a GMT file, as far as its genes are among those given.

        Parameters
        ----------
        path, name
            File and set.
        shift, relation, per
            As in the class.
        among
            Genes to keep, usually ``model.registry.genes``.

        Raises
        ------
        UnknownKeyError, counted
            When the file has no such set.
        GeneError
            When none of its genes is among those given.
        """
        sets = read_gmt(path)
        if name not in sets:
            raise UnknownKeyError(str(Path(path).name), name, known=list(sets))
        known = set(among)
        kept = tuple(gene for gene in sets[name] if gene in known)
        if not kept:
            msg = f"None of the {len(sets[name])} genes of {name!r} is among those of the model."
            raise GeneError(msg)
        return cls(kept, shift, relation=relation, per=per, name=name)

    def describe(self) -> str:
        sign, what = SIGNS[self.relation], self.name or shown(names_of(self.genes))
        return f"mean of {what} {sign} control {self.shift:+g} log1p per {self.per}"

    def bind(self, reference: Reference) -> Bounds:
        columns = reference.columns(names_of(self.genes), who=self.describe())
        value = reference.control_log1p[columns].double().mean() + self.shift
        lower, upper = range_of(value.view(1, 1), self.relation)
        if float(upper) < 0:
            msg = (
                f"{self.describe()}: the mean would fall below zero; control cells are at "
                f"{float(value) - self.shift:.3g}. Ask for a smaller shift."
            )
            raise ConstraintError(msg)
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.full((1, len(columns)), 1 / len(columns), dtype=torch.float64),
            lower=lower,
            upper=upper,
            unit="log1p",
            per=self.per,
        )


def read_gmt(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Gene sets of a GMT file, each gene once.

    Raises
    ------
    ConfigError
        When a line has no name, description and gene, separated by tabs.
    """
    sets: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split("\t")]
        if len(parts) < 3:
            where = f"{Path(path).name}, line {number}"
            raise ConfigError(where, line[:40], rule="needs a name, a description and genes")
        sets[parts[0]] = tuple(dict.fromkeys(gene for gene in parts[2:] if gene))
    return sets


@dataclass(frozen=True)
class Unchanged(Constraint):
    """The mean log1p value of each gene is that of the control cells of the context.

    Parameters
    ----------
    genes
        One or several.
    tolerance
        In log1p; 0 holds to one count.
    """

    genes: str | Sequence[str]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_genes("Unchanged.genes", self.genes)
        check_number("Unchanged.tolerance", self.tolerance)

    def describe(self) -> str:
        return f"{shown(names_of(self.genes))} unchanged within {self.tolerance:g} log1p"

    def bind(self, reference: Reference) -> Bounds:
        columns = reference.columns(names_of(self.genes), who=self.describe())
        level = reference.control_log1p[columns][None].double()
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(columns), dtype=torch.float64),
            lower=level - self.tolerance,
            upper=level + self.tolerance,
            unit="log1p",
            per="population",
        )


@dataclass(frozen=True, eq=False)
class Observed(Constraint):
    """Genes were measured; the rest is filled in so that it goes with them.

    Parameters
    ----------
    genes
        Measured genes.
    values
        ``[genes]`` for all cells alike, or ``[cells, genes]``: row i is cell i of every condition.
    scale
        ``"log1p"`` makes the genes real-valued; ``"counts"`` are taken to the cell's library size.
    """

    genes: Sequence[str]
    values: Any  # becomes an array, cells or one row × genes
    scale: ScaleName = field(default="log1p", kw_only=True)

    def __post_init__(self) -> None:
        check_genes("Observed.genes", self.genes)
        check_choice("Observed.scale", self.scale, ("log1p", "counts"))
        try:
            values = np.atleast_2d(np.asarray(self.values, dtype=np.float64))
        except (TypeError, ValueError):
            rule = "must be numbers, one a gene, or rows of as many"
            raise ConfigError("Observed.values", self.values, rule=rule) from None
        n_genes = len(names_of(self.genes))
        if values.ndim != 2 or values.shape[1] != n_genes:
            rule = f"needs one column for each of {counted(n_genes, 'gene')}"
            raise ConfigError("Observed.values", np.shape(self.values), rule=rule)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ConfigError("Observed.values", "some", rule="must be finite and at least 0")
        if self.scale == "counts" and (values != np.round(values)).any():
            raise ConfigError("Observed.values", "some", rule="must be whole numbers of counts")
        object.__setattr__(self, "values", values)

    def describe(self) -> str:
        return f"{counted(len(names_of(self.genes)), 'gene')} as observed ({self.scale})"

    def bind(self, reference: Reference) -> Bounds:
        columns = reference.columns(names_of(self.genes), who=self.describe())
        values = torch.from_numpy(self.values)
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(columns), dtype=torch.float64),
            lower=values,
            upper=values,
            unit=self.scale,
            per="cell",
        )
