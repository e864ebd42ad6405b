"""Cells inside the door: arrays in canonical order, and the names they came with."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import scipy.sparse as sp
from jaxtyping import Bool, Float, Int

from perturbdiff.data._conditions import Condition
from perturbdiff.data._matrix import align_genes


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Labelled cells, sorted by name, with expression of the genes asked for.

    ``counts`` is None for log values without library sizes. Conditions are positions in
    ``distinct``; ``rows`` are positions in the AnnData that was read.
    """

    log1p: sp.csr_array  # float32, log1p of counts per 10,000
    counts: sp.csr_array | None
    library_size: Float[np.ndarray, " cells"] | None
    genes: tuple[str, ...]
    names: tuple[str, ...]
    rows: Int[np.ndarray, " cells"]
    distinct: tuple[Condition, ...]  # sorted, controls included
    condition: Int[np.ndarray, " cells"]
    n_missing_labels: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def is_control(self) -> Bool[np.ndarray, " cells"]:
        """Which cells are unperturbed."""
        return np.take(np.array([c.is_control for c in self.distinct], bool), self.condition)

    @cached_property
    def contexts(self) -> tuple[tuple[str, ...], ...]:
        """Distinct contexts, sorted."""
        return tuple(sorted({item.context for item in self.distinct}))

    @cached_property
    def context(self) -> Int[np.ndarray, " cells"]:
        """Position of each cell's context in ``contexts``."""
        position = {context: number for number, context in enumerate(self.contexts)}
        of_condition = np.array([position[item.context] for item in self.distinct], np.int64)
        return np.take(of_condition, self.condition)

    @property
    def members(self) -> list[tuple[str, ...]]:
        """Perturbations of each cell; empty for control."""
        return [self.distinct[number].members for number in self.condition]

    @property
    def n_empty(self) -> int:
        """Cells without a single count."""
        return int((np.diff(self.log1p.indptr) == 0).sum())

    def conditions(self) -> dict[Condition, Int[np.ndarray, " cells"]]:
        """Rows of each treated condition, in sorted order."""
        rows = _groups(self.condition, len(self.distinct))
        return {c: rows[n] for n, c in enumerate(self.distinct) if not c.is_control}

    def controls(self) -> dict[tuple[str, ...], Int[np.ndarray, " cells"]]:
        """Rows of the control cells of each context that has any, in sorted order."""
        rows = _groups(self.condition, len(self.distinct))
        return {c.context: rows[n] for n, c in enumerate(self.distinct) if c.is_control}

    def take(self, rows: np.ndarray) -> Self:
        """A part of the cells, by mask or positions, in the order given."""
        used, condition = np.unique(self.condition[rows], return_inverse=True)
        return replace(
            self,
            log1p=self.log1p[rows],
            counts=None if self.counts is None else self.counts[rows],
            library_size=None if self.library_size is None else self.library_size[rows],
            names=tuple(np.array(self.names, dtype=object)[rows].tolist()),
            rows=self.rows[rows],
            distinct=tuple(self.distinct[number] for number in used),
            condition=condition.astype(np.int64),
        )

    def select(self, genes: Iterable[str]) -> Self:
        """The same cells on some of their genes; library sizes stay those of all measured genes.

        Raises
        ------
        GeneError
            When a gene is not among them.
        """
        columns, names = align_genes(self.genes, tuple(genes))
        return replace(
            self,
            log1p=pick_columns(self.log1p, columns),
            counts=None if self.counts is None else pick_columns(self.counts, columns),
            genes=names,
        )


def pick_columns(matrix: sp.csr_array, columns: np.ndarray) -> sp.csr_array:
    """Columns in the order given, with sorted indices."""
    if np.array_equal(columns, np.arange(matrix.shape[1])):
        return matrix
    picked = matrix[:, columns]
    picked.sort_indices()
    return picked


def _groups(codes: Int[np.ndarray, " cells"], n_codes: int) -> list[Int[np.ndarray, " rows"]]:
    """Positions of each code, ascending."""
    order = np.argsort(codes, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(codes, minlength=n_codes))[:-1])
