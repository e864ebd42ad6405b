"""Constraints on whole cells: library size, sign, states of a classifier, verifiers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import inf
from typing import Any

import numpy as np
import torch

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import finite_number
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._constraints import (
    SIGNS,
    Constraint,
    Relation,
    check_choice,
    check_genes,
    names_of,
    range_of,
    shown,
)
from perturbdiff.guidance._logic import Checked, InState, Sized, users_code
from perturbdiff.guidance._reference import Reference


@dataclass(frozen=True)
class LibrarySize(Constraint):
    """Bounds on the counts of every cell over all measured genes.

    Parameters
    ----------
    at_least, at_most
        Counts; ``None`` for no bound.
    """

    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        for name in ("at_least", "at_most"):
            if (value := getattr(self, name)) is not None:
                finite_number(f"LibrarySize.{name}", value)
        if self.at_least is None and self.at_most is None:
            raise ConfigError("LibrarySize", None, rule="needs at_least or at_most")
        low, high = self._limits
        if not (0 <= low <= high and high > 0):
            raise ConfigError("LibrarySize", (low, high), rule="at_least must not pass at_most")

    @property
    def _limits(self) -> tuple[float, float]:
        return (
            0.0 if self.at_least is None else float(self.at_least),
            inf if self.at_most is None else float(self.at_most),
        )

    def describe(self) -> str:
        low, high = self._limits
        return f"library size from {low:g} to {high:g} per cell"

    def bind(self, reference: Reference) -> Sized:
        del reference
        low, high = self._limits
        return Sized(text=self.describe(), lower=low, upper=high)


@dataclass(frozen=True)
class NonNegative(Constraint):
    """No value below zero. Counts never are; this states it of what steers them too.

    Parameters
    ----------
    genes
        Some of them; ``None`` for all.
    """

    genes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.genes is not None:
            check_genes("NonNegative.genes", self.genes)

    def describe(self) -> str:
        return "all genes >= 0" if self.genes is None else f"{shown(names_of(self.genes))} >= 0"

    def bind(self, reference: Reference) -> Bounds:
        names = reference.genes if self.genes is None else names_of(self.genes)
        columns = reference.columns(names, who=self.describe())
        lower = torch.zeros((1, len(columns)), dtype=torch.float64)
        return Bounds(
            text=self.describe(),
            genes=columns,
            weights=torch.eye(len(columns), dtype=torch.float64),
            lower=lower,
            upper=torch.full_like(lower, inf),
            unit="log1p",
            per="cell",
        )


@dataclass(frozen=True, eq=False)
class StateFraction(Constraint):
    """Share of the cells of a condition that a classifier finds in a state.

    Parameters
    ----------
    classifier
        Fitted on log1p values: a scikit-learn classifier (``classes_`` and ``predict``), or a torch
        module that gives logits.
    state
        One of ``classifier.classes_``, or the number of a logit.
    share
        From 0 to 1.
    relation
        ``"exactly"`` (to one cell), ``"at_least"``, ``"at_most"``.
    genes
        What the classifier reads, in its order; ``None`` for all genes of the model.
    name
        Of the state, for reports.
    """

    classifier: Any
    state: Any
    share: float
    relation: Relation = field(default="exactly", kw_only=True)
    genes: Sequence[str] | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("StateFraction.relation", self.relation, tuple(SIGNS))
        if not 0 <= finite_number("StateFraction.share", self.share) <= 1:
            raise ConfigError("StateFraction.share", self.share, rule="must be from 0 to 1")
        if not isinstance(self.classifier, torch.nn.Module):
            if not hasattr(self.classifier, "classes_"):
                rule = "must be a fitted scikit-learn classifier or a torch module"
                name = "StateFraction.classifier"
                raise ConfigError(name, self.classifier, rule=rule)
            if not callable(getattr(self.classifier, "predict", None)):
                name = "StateFraction.classifier"
                rule = "has no predict, which says the state of each cell, one of classes_"
                raise ConfigError(name, self.classifier, rule=rule)
            if self.state not in list(self.classifier.classes_):
                rule = f"must be one of {list(self.classifier.classes_)}"
                raise ConfigError("StateFraction.state", self.state, rule=rule)

    def describe(self) -> str:
        what = self.name or str(self.state)
        return f"share of cells in {what} {SIGNS[self.relation]} {self.share:g}"

    def bind(self, reference: Reference) -> InState:
        names = reference.genes if self.genes is None else tuple(self.genes)
        value = torch.tensor([self.share], dtype=torch.float64)
        lower, upper = range_of(value, self.relation)
        return InState(
            text=self.describe(),
            needed=reference.columns(names, who=self.describe()),
            probability=self._probability,
            member=self._member,
            lower=max(float(lower), 0.0),
            upper=min(float(upper), 1.0),
            differentiable=isinstance(self.classifier, torch.nn.Module) or self._is_linear,
        )

    def _probability(self, log1p: torch.Tensor) -> torch.Tensor:
        with users_code(f"The classifier of {self.describe()}", log1p.shape):
            return self._chance(log1p)

    def _chance(self, log1p: torch.Tensor) -> torch.Tensor:
        if isinstance(self.classifier, torch.nn.Module):
            dtype = next((p.dtype for p in self.classifier.parameters()), torch.float32)
            logits = self.classifier(log1p.to(dtype))
            chance: torch.Tensor = logits.softmax(-1)[:, int(self.state)].double()
            return chance
        if self._is_linear:
            return self._linear_probability(log1p.double())
        if not hasattr(self.classifier, "predict_proba"):
            return self._found(log1p).double()
        chances = self.classifier.predict_proba(log1p.detach().cpu().numpy())
        place = list(self.classifier.classes_).index(self.state)
        return torch.from_numpy(np.asarray(chances)[:, place]).double()

    @property
    def _is_linear(self) -> bool:
        """Whether it is a logistic regression, whose gradient is known."""
        names = ("coef_", "intercept_", "predict_proba")
        return all(hasattr(self.classifier, name) for name in names)

    def _linear_probability(self, log1p: torch.Tensor) -> torch.Tensor:
        weights, offset = (
            torch.as_tensor(np.asarray(part, dtype=np.float64))
            for part in (self.classifier.coef_, self.classifier.intercept_)
        )
        place = list(self.classifier.classes_).index(self.state)
        scores = log1p @ weights.mT + offset
        if len(weights) == 1:  # two classes: the score is that of the second
            return torch.sigmoid(scores[:, 0] if place == 1 else -scores[:, 0])
        return scores.softmax(-1)[:, place]

    def _member(self, log1p: torch.Tensor) -> torch.Tensor:
        with users_code(f"The classifier of {self.describe()}", log1p.shape):
            return self._found(log1p)

    def _found(self, log1p: torch.Tensor) -> torch.Tensor:
        if isinstance(self.classifier, torch.nn.Module):
            with torch.no_grad():
                dtype = next((p.dtype for p in self.classifier.parameters()), torch.float32)
                winner: torch.Tensor = self.classifier(log1p.to(dtype)).argmax(-1)
            return winner == int(self.state)
        found = np.asarray(self.classifier.predict(log1p.detach().cpu().numpy()))
        same: torch.Tensor = torch.from_numpy(found == self.state)
        return same


@dataclass(frozen=True, eq=False)
class Verifier(Constraint):
    """Any function of the cells: it can steer a search, and promises nothing.

    Parameters
    ----------
    check
        ``check(log1p, genes)`` with an array cells × genes and the names of its columns; returns
        whether the cells will do, or by how much they miss (0 where they do not).
    genes
        What it reads; ``None`` for all genes of the model.
    name
        For reports.
    """

    check: Callable[[np.ndarray, tuple[str, ...]], Any]
    genes: Sequence[str] | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not _takes_two(self.check):
            rule = "must take two arguments, (log1p, genes): cells by genes, and names of genes"
            raise ConfigError("Verifier.check", self.describe(), rule=rule)

    def describe(self) -> str:
        return self.name or getattr(self.check, "__name__", type(self.check).__name__)

    def bind(self, reference: Reference) -> Checked:
        names = reference.genes if self.genes is None else tuple(self.genes)
        columns = reference.columns(names, who=self.describe())
        return Checked(text=self.describe(), needed=columns, names=names, check=self.check)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments, as far as it tells."""
    try:
        signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a compiled function without a signature
        return True
    return True
