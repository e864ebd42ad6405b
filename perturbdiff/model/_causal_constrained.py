"""Constraints on a model that writes one gene after another: masks, and drawing again.

What is about one gene of one cell is met while the cell is written. What is about a whole cell, or
a population, is known when the set is finished: sets that do not obey are drawn again, and of
those that never do the least violating draw stays.

N cells, S cells a set, G genes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from perturbdiff._errors import ConstraintError
from perturbdiff.config import DecodeConfig
from perturbdiff.guidance import CellValues, CountMask, check_together
from perturbdiff.guidance._logic import Bound
from perturbdiff.guidance._logits import judged
from perturbdiff.guidance._search import Node
from perturbdiff.guidance._settling import Draft, settle
from perturbdiff.model import _fitted
from perturbdiff.model._causal_fitted import CausalFitted, CountTask
from perturbdiff.model._causal_rules import Rules, draws_of
from perturbdiff.model._constrained import Constrained, Wish, joined_tables, warn_of
from perturbdiff.model._constrained_answer import Asked, reference_of
from perturbdiff.model._constrained_finish import as_values
from perturbdiff.model._constrained_report import (
    COLUMNS,
    in_sets,
    moved_by,
    naming,
    row_of,
    support,
    tree_table,
)
from perturbdiff.model._fitted import Drawn, as_drawn
from perturbdiff.model._questions import forked_partners
from perturbdiff.model._response import ResponseCells, ResponsePlan


def written_with(
    fitted: CausalFitted,
    asked: Sequence[Asked],
    wish: Wish,
    *,
    decoding: str,
    n_cells: int,
    config: DecodeConfig,
    seed: int,
) -> Constrained:
    """Cells of each condition; with constraints, that obey as far as masks and draws go.

    Parameters
    ----------
    fitted
        The model.
    asked
        Conditions.
    wish
        Constraints; with none, just what the model answers.
    decoding
        ``"raw"`` or ``"transport"``.
    n_cells
        Cells a condition.
    config, seed
        How to decode.

    Returns
    -------
    Counts and library sizes, network calls, and the report.

    Raises
    ------
    ConstraintError, GeneError, ConfigError
        Before anything is written, when constraints cannot hold, cannot be met by this model, or
        name unknown genes.
    """
    if not wish.constraints:
        wish.refuse_ways_alone()
        make = fitted.written if decoding == "raw" else fitted.respond
        return _plain(make, asked, n_cells=n_cells, config=config, seed=seed)
    n_draws = draws_of(wish.ways)
    rules = []
    for one in asked:
        reference = reference_of(fitted, one.controls)
        bounds = [constraint.bind(reference) for constraint in wish.constraints]
        check_together(bounds, reference, n_cells=n_cells)
        rules.append(Rules.of(bounds))
        rules[-1].check(fitted, decoding=decoding, n_draws=n_draws)
    answers = [
        CausalAnswer(
            fitted=fitted, asked=one, rules=rule, decoding=decoding, n_draws=n_draws or 1,
            n_cells=n_cells, config=config, seed=seed,
        )
        for one, rule in zip(asked, rules, strict=True)
    ]  # fmt: skip
    parts = []
    for answer in answers:
        with naming(answer.asked.condition):
            parts.append(as_drawn(*answer.run()))
    report = pd.concat([answer.report for answer in answers], ignore_index=True)
    warn_of(report)
    genes = fitted.vocabulary.registry.genes
    real = sorted({int(gene) for answer in answers for gene in answer.real.nonzero()[:, 0]})
    return Constrained(
        drawn=parts,
        nfe=sum(answer.nfe for answer in answers),
        report=report,
        course=joined_tables([]),
        tree=joined_tables([(a.asked.condition.name, tree_table(a.tree)) for a in answers]),
        real_valued=tuple(genes[number] for number in real),
    )


def _plain(
    make: Callable[..., tuple[list[Drawn], int]],
    asked: Sequence[Asked],
    **settings: Any,
) -> Constrained:
    """Without constraints: what the model answers, and nothing more."""
    cells, nfe = make(
        [one.condition for one in asked],
        [one.controls for one in asked],
        [one.target for one in asked],
        **settings,
    )
    none = pd.DataFrame()
    return Constrained(drawn=cells, nfe=nfe, report=none, course=none, tree=none, real_valued=())


@dataclass(kw_only=True, eq=False)
class CausalAnswer:
    """The cells of one condition."""

    fitted: CausalFitted
    asked: Asked
    rules: Rules
    decoding: str
    n_draws: int
    n_cells: int
    config: DecodeConfig
    seed: int
    nfe: int = 0
    tree: list[Node] = field(default_factory=list)
    report: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        if self.decoding == "raw":  # cells of a set know nothing of each other
            self.config = replace(self.config, set_size=min(self.config.set_size, self.n_cells))
        size = self.config.set_size
        self.n_sets = -(-self.n_cells // size)
        most = max(self.n_sets, -(-_fitted.PILOT_CELLS // size)) * size
        one = self.asked
        self.task = self.fitted.task(
            one.condition, one.controls, one.target, n_cells=most, seed=self.seed
        )
        self.size = one.controls.library_size(self.task.partners[: self.n_sets * size])
        self.plan: ResponsePlan | None = None
        self.real = torch.zeros(len(self.fitted.lanes), dtype=torch.bool)

    def run(self) -> tuple[Tensor, Tensor]:
        """Counts and library sizes; leaves the report behind."""
        first = self._again(0)
        counts, size = self._unconstrained(), self.size
        before, calls = as_values(counts, size), self.nfe
        if self.rules.masked:
            counts = self._draw(first, range(self.n_sets))
            calls = self.nfe - calls
        counts, size, n_written = self._drawn_again(counts, calls=calls)
        counts = counts if bool(self.real.any()) else counts.round().long()
        counts, size = counts[: self.n_cells], size[: self.n_cells]
        self._write(before, as_values(counts.double(), size), n_written=n_written)
        return counts, size

    def _again(self, branch: int) -> CountTask:
        """Another draw of the same cells: other noise, other partners, a mask for these."""
        one, task = self.asked, replace(self.task, branch=branch)
        if branch:
            keys = task.keys(range(self.n_sets), self.config, self.seed).flatten()
            task = replace(task, partners=forked_partners(keys, len(one.controls)))
        if not self.rules.masked:
            return task
        size = one.controls.library_size(task.partners[: len(self.size)])
        mask = CountMask.of(self.rules.masked, size, n_genes=len(self.real))
        nothing = (mask.least > mask.most).any(0)
        if bool(nothing.any()):
            gene = self.fitted.vocabulary.registry.genes[int(nothing.nonzero()[0, 0])]
            msg = (
                f"{self.rules.masked[0].text}: together with the other constraints it leaves no "
                f"count of {gene!r} for some library sizes. Widen a range."
            )
            raise ConstraintError(msg)
        return replace(task, mask=mask)

    def _unconstrained(self) -> Float[Tensor, "cells genes"]:
        """Counts of whole sets as the model would answer without constraints."""
        asked = self.asked
        make = self.fitted.written if self.decoding == "raw" else self.fitted.respond
        [(counts, _)], self.nfe = make(
            [asked.condition], [asked.controls], [asked.target],
            n_cells=len(self.size), config=self.config, seed=self.seed,
        )  # fmt: skip
        if self.decoding == "transport":
            device = str(self.fitted.sampler.device)
            known = self.fitted.plans.get(
                (self.task.condition.name, self.task.digest, self.seed, self.config, device)
            )
            assert known is not None  # `respond` has just solved it
            _, self.plan = known
        return torch.from_numpy(counts.toarray()).double()

    def _draw(self, task: CountTask, sets: Sequence[int]) -> Float[Tensor, "cells genes"]:
        """Counts of some sets, each gene within its mask."""
        cells = _cells_of(sets, self.config.set_size)
        if self.plan is not None:
            return self._transported(task, sets, self.plan, cells=cells)
        [by_set], calls = self.fitted.sampler.counts([task], [sets], self.config, seed=self.seed)
        self.nfe += calls
        counts = by_set.flatten(0, 1).double()
        if task.mask is None:
            return counts
        draft = Draft(
            counts=counts,
            library_size=task.controls.library_size(task.partners[cells]),
            rate=counts,  # only means need it, and the order
            chance=counts,
            number=cells,
        )
        self.real |= settle(draft, self.rules.masked)
        return draft.counts

    def _transported(
        self, task: CountTask, sets: Sequence[int], plan: ResponsePlan, *, cells: Tensor
    ) -> Float[Tensor, "cells genes"]:
        """Counts made from the partners', as the unconstrained ones are."""
        fitted = self.fitted
        [latent], calls = fitted.sampler.sample([task], [sets], self.config, seed=self.seed)
        self.nfe += calls
        made = ResponseCells.make(
            fitted.codec.deviation(latent.flatten(0, 1)).double().cpu(),
            task.controls.counts(task.partners[cells]),
            task.controls.library_size(task.partners[cells]),
            keys=task.keys(sets, self.config, self.seed).flatten(),
            lanes=fitted.lanes,
        )
        return plan.draw(made).double()

    def _drawn_again(self, counts: Tensor, *, calls: int) -> tuple[Tensor, Tensor, int]:
        """Sets that do not obey drawn again: counts, library sizes, and sets drawn in all."""
        n_each = self.config.set_size
        kept, size, n_drawn = counts.clone(), self.size.clone(), self.n_sets
        if not self.rules.rest:
            return kept, size, n_drawn
        bounds, every = self._scaled(), range(self.n_sets)
        energy, obeys = judged(bounds, self._sets(kept, size, every))
        best = torch.zeros(self.n_sets, dtype=torch.int64)
        self._note(every, energy, obeys, turn=0, calls=calls)
        for turn in range(1, self.n_draws):
            sets = (~obeys).nonzero()[:, 0].tolist()
            if not sets:
                break
            before, task = self.nfe, self._again(turn)
            again = self._draw(task, sets)
            cells = _cells_of(sets, n_each)
            new_size = task.controls.library_size(task.partners[cells])
            found, holds = judged(bounds, self._sets(again, new_size, sets))
            self._note(sets, found, holds, turn=turn, calls=self.nfe - before)
            n_drawn += len(sets)
            better = holds | (found < energy[sets])
            rows = torch.tensor(sets)[better]
            chosen = better.repeat_interleave(n_each)
            kept[cells[chosen]], size[cells[chosen]] = again[chosen], new_size[chosen]
            energy[rows], obeys[rows], best[rows] = found[better], holds[better], turn
        self.tree = [replace(node, kept=int(best[node.owner]) == node.node) for node in self.tree]
        return kept, size, n_drawn

    def _scaled(self) -> list[Bound]:
        """Bounds that measure violations by how sets of control cells spread."""
        controls = self.asked.controls
        rows = torch.arange(len(controls))
        cells = as_values(controls.counts(rows).double(), controls.library_size(rows))
        sets = in_sets(cells, min(self.config.set_size, len(controls)))
        return [bound.scaled(sets) for bound in self.rules.rest]

    def _sets(self, counts: Tensor, size: Tensor, sets: Sequence[int]) -> CellValues:
        cells = _cells_of(sets, self.config.set_size)
        values = as_values(counts, size)
        return replace(in_sets(values, self.config.set_size), number=cells.view(len(sets), -1))

    def _note(
        self, sets: Sequence[int], energy: Tensor, obeys: Tensor, *, turn: int, calls: int
    ) -> None:
        """Which draws there were; the sets of a turn share its calls."""
        self.tree += [
            Node(
                owner=owner, node=turn, parent=-1, first=0, last=len(self.fitted.lanes),
                calls=calls, energy=float(energy[place]), satisfied=bool(obeys[place]),
            )
            for place, owner in enumerate(sets)
        ]  # fmt: skip

    def _write(self, before: CellValues, after: CellValues, *, n_written: int) -> None:
        """One row a constraint."""
        n_cells, asked = self.n_cells, self.asked
        free = CellValues(
            log1p=before.log1p[:n_cells], library_size=before.library_size[:n_cells],
            number=before.number[:n_cells],
        )  # fmt: skip
        control = torch.from_numpy(asked.controls.cells.log1p.toarray()).double()
        distance, rows = moved_by(free, after, self.fitted.loadings), []
        for bound in self.rules.bounds:
            inside, outside = support(
                bound, free, control=control, known=self.fitted.prior.conditions,
                set_size=self.config.set_size,
            )  # fmt: skip
            rows.append(
                row_of(bound, free, after, set_size=self.config.set_size)
                | {
                    "condition": asked.condition.name,
                    "method": self.rules.method,
                    "promised": self.rules.promised(bound),
                    "set_evaluations": n_written,
                    "cost": n_written / self.n_sets,
                    "effective_particles": np.nan,
                    "energy_distance": distance,
                    "energy_distance_to_truth": np.nan,
                    "supported": inside,
                    "outside": outside,
                }
            )
        self.report = pd.DataFrame(rows)[list(COLUMNS)]


def _cells_of(sets: Sequence[int], set_size: int) -> Tensor:
    numbers = torch.tensor(list(sets), dtype=torch.int64)
    return (numbers[:, None] * set_size + torch.arange(set_size)).flatten()
