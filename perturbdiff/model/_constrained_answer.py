"""One condition under constraints, from the pilot to the report.

N cells, G genes, K latent axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._random import uniform
from perturbdiff.config import SampleConfig
from perturbdiff.data import Condition
from perturbdiff.guidance import CellValues, Constraint, Enforcement, Observed, Reference
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._enforcement import Particles
from perturbdiff.guidance._logic import Bound, InState, conjuncts
from perturbdiff.guidance._search import Candidates, Found, search
from perturbdiff.model import _fitted
from perturbdiff.model._constrained_course import LatentCourse, Revealed
from perturbdiff.model._constrained_finish import Finish, as_values
from perturbdiff.model._constrained_observed import completed_target, matched_partners
from perturbdiff.model._constrained_plan import of_genes, retarget, solved, with_target
from perturbdiff.model._constrained_report import (
    COLUMNS,
    course_table,
    moved_by,
    row_of,
    support,
)
from perturbdiff.model._fitted import Fitted, Recipe, Responding, Target
from perturbdiff.model._questions import Controls
from perturbdiff.model._response import ResponseCells, ResponsePlan

_LEAST_NOISE = 1e-4
_MATCH = 4  # step of uniform numbers
_FEWEST = 32  # cells that a population is solved on


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One condition that is asked about."""

    condition: Condition
    controls: Controls
    target: Target


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """What shall hold in one context, and how that is enforced."""

    constraints: tuple[Constraint, ...]
    bounds: list[Bound]  # of the constraints, in their order
    ways: Enforcement


def reference_of(fitted: Responding, controls: Controls) -> Reference:
    """What constraints are read against."""
    mean = torch.from_numpy(np.asarray(controls.summary.mean, dtype=np.float64))
    depth = torch.from_numpy(np.asarray(controls.cells.log1p.expm1().mean(0)).ravel())
    if controls.panel is not None:
        depth = torch.where(torch.from_numpy(controls.panel.present), depth, torch.expm1(mean))
    return Reference(
        genes=fitted.vocabulary.registry.genes,
        control_log1p=mean,
        control_depth=depth.double(),
        library_size=controls.library_size(torch.arange(len(controls))),
    )


class Answer:
    """The cells of one condition."""

    def __init__(
        self,
        fitted: Fitted,
        asked: Asked,
        rules: Rules,
        *,
        n_cells: int,
        config: SampleConfig,
        seed: int,
    ) -> None:
        self.fitted, self.asked, self.rules = fitted, asked, rules
        self.bounds, self.ways = rules.bounds, rules.ways
        self.n_cells, self.seed = n_cells, seed
        self.config = config
        self.name = asked.condition.name
        self.found: Found | None = None
        self.real = torch.zeros(len(fitted.vocabulary.registry.genes), dtype=torch.bool)
        self.passed = pd.DataFrame()
        self.report = pd.DataFrame()
        self.mean = torch.from_numpy(asked.target.mean)
        self.nfe = 0
        self.evaluations = 0

    @property
    def observed(self) -> list[Bounds]:
        """Measured genes that are promised to be as measured, in log values."""
        if self.ways.hard is None:
            return []
        return [
            bound
            for constraint, bound in zip(self.rules.constraints, self.bounds, strict=True)
            if isinstance(constraint, Observed)
            and isinstance(bound, Bounds)
            and bound.unit == "log1p"
        ]

    @property
    def panels(self) -> list[Bounds]:
        """Those that were measured in every cell by itself."""
        return [bound for bound in self.observed if len(bound.lower) > 1]

    def run(self) -> tuple[Tensor, Tensor]:
        """Counts and library sizes; leaves the report behind."""
        latent, plan, before = self._unconstrained()
        hard = conjuncts(self.bounds, before) if self.ways.hard is not None else []
        plan, pilot = self._moved_plan(plan, latent, [b for b in hard if isinstance(b, Bounds)])
        kept = self._steered(plan, pilot, hard)
        cells = self._cells(self._recipe(matched=True), kept, latent)
        if self.panels and self.n_cells >= _FEWEST:
            plan = solved(plan, cells, self.mean)  # pulled cells lie elsewhere than the pilot's
            plan = retarget(
                plan, cells, [b for b in hard if isinstance(b, Bounds)], target=self.mean
            )
        finish = Finish(
            name=self.name,
            seed=self.seed,
            plan=plan,
            pilot=pilot,
            hard=hard,
            keys=self._own_keys(self.n_cells),
            lanes=self.fitted.lanes,
        )
        counts, size, self.real = finish(cells)
        self._write(before, counts, size)
        return counts, size

    def _recipe(self, *, matched: bool) -> Recipe:
        """What the cells are made from; with partners that are like measured cells, or as usual."""
        asked, config = self.asked, self.config
        most = max(self.n_cells, _fitted.PILOT_CELLS)
        n_cells = -(-most // config.set_size) * config.set_size
        task = self.fitted.task(
            asked.condition, asked.controls, asked.target, n_cells=n_cells, seed=self.seed
        )
        if matched:
            keys = task.keys(range(n_cells // config.set_size), config, self.seed).flatten()
            for bound in self.panels:
                chance = uniform(keys, torch.zeros(1, dtype=torch.int64), step=_MATCH)[:, 0]
                mean = asked.target.mean
                like = matched_partners(bound, asked.controls, mean, chance=chance)[:n_cells]
                rows = task.partners.clone()
                rows[: len(like)] = like
                task = replace(task, partners=rows)
        return Recipe(
            task=task, controls=asked.controls, target=asked.target, config=config, seed=self.seed
        )

    def _unconstrained(self) -> tuple[Tensor, ResponsePlan, CellValues]:
        """Latent values and plan of the pilot, and the cells that would be answered without."""
        asked = self.asked
        [(counts, size)], self.nfe = self.fitted.respond(
            [asked.condition], [asked.controls], [asked.target],
            n_cells=min(self.n_cells, _fitted.PILOT_CELLS), config=self.config, seed=self.seed,
        )  # fmt: skip
        task = self._recipe(matched=False).task
        latent, plan = next(
            value
            for key, value in reversed(self.fitted.plans._plans.items())
            if key[:4] == (task.condition.name, task.digest, self.seed, self.config)
        )
        before = as_values(torch.from_numpy(counts.toarray()).double(), torch.from_numpy(size))
        return latent, plan, before

    def _moved_plan(
        self, plan: ResponsePlan, latent: Tensor, hard: Sequence[Bounds]
    ) -> tuple[ResponsePlan, ResponseCells]:
        """Means as observed, what they say about the others, and means that must be.

        Cells that were measured one by one have partners of their own, which are then the pilot.
        """
        pilot = self.fitted.cells(self._recipe(matched=False), latent)
        target = torch.from_numpy(self.asked.target.mean)
        for bound in self.observed:
            new = torch.from_numpy(
                completed_target(
                    target.numpy(),
                    bound.lower.mean(0).numpy(),
                    bound.genes.numpy(),
                    control=self.asked.controls.summary.mean,
                    shifts=[c.mean - c.context.mean for c in self.fitted.prior.conditions],
                )
            )
            plan = with_target(plan, pilot, old=target, new=new)
            target = new
        if self.panels:
            measured = min(len(bound.lower) for bound in self.panels)
            cells = self.fitted.cells(self._recipe(matched=True), latent)
            pilot = _first(cells, max(min(measured, len(cells.counts)), _FEWEST))
            plan = solved(plan, pilot, target)
        self.mean = target
        return retarget(plan, pilot, hard, target=target), pilot

    def _steered(
        self, plan: ResponsePlan, pilot: ResponseCells, hard: Sequence[Bound]
    ) -> Candidates | None:
        """Sets found under guidance or by search; None where drawing again is enough."""
        cellwise = [b for b in hard if isinstance(b, Bounds) and b.per == "cell"]
        cellwise = [b for b in cellwise if not is_trivial(b)]
        searched = list(self.bounds) if self.ways.search is not None else []
        pulled = [b for b in self.bounds if b.differentiable] if self.ways.soft else []
        looked_at = [*cellwise, *searched, *pulled]
        if not looked_at:
            return None
        needed = {int(gene) for bound in looked_at for gene in bound.needed}
        genes = torch.tensor(sorted(needed), dtype=torch.int64)  # none, where only sizes are judged
        course = self._course(plan, pilot, genes, pulls=bool(pulled))
        owners = range(-(-self.n_cells // self.config.set_size))
        if self.ways.search is None:
            kept = course.advance(course.start(owners, 1), 0, course.n_steps)
            if pulled:
                kept, _, _ = course.verdict(kept)
        else:
            self.found = search(self.ways.search, course, owners, seed=self.seed)
            kept = self.found.kept
        self.nfe += course.counter.nfe
        self.evaluations = course.counter.sets
        self.passed = course_table(course.passed, [b.text for b in course.bounds])
        return kept

    def _course(
        self, plan: ResponsePlan, pilot: ResponseCells, genes: Tensor, *, pulls: bool
    ) -> LatentCourse:
        """The course for constraints on some genes, measured by how pilot sets spread."""
        config = self.config
        if isinstance(self.ways.search, Particles):
            config = replace(config, sampler="stochastic")
        chosen = torch.zeros(len(self.real), dtype=torch.bool)
        chosen[genes] = True
        expected, drawn = _pilot_values(pilot.of_genes(chosen), of_genes(plan, genes), config)
        small = reference_of(self.fitted, self.asked.controls).of_genes(genes)
        known = set(genes.tolist())
        bounds = [
            constraint.bind(small).scaled(drawn)
            for constraint, bound in zip(self.rules.constraints, self.bounds, strict=True)
            if set(bound.needed.tolist()) <= known
        ]
        noise = (drawn.log1p - expected.log1p).square().mean((0, 1))
        soft = self.ways.soft
        return LatentCourse(
            fitted=self.fitted,
            recipe=self._recipe(matched=True),
            config=config,
            plan=plan,
            genes=genes,
            bounds=bounds,
            soft_bounds=[
                _with_margin(bound, expected, drawn, margin=soft.margin)
                for bound in bounds
                if bound.differentiable
            ]
            if soft is not None and pulls
            else [],
            noise=noise.clamp_min(_LEAST_NOISE),
            ways=self.ways,
            free_partners=not self.panels,
            resamples=self.ways.hard.resamples
            if self.ways.hard is not None and self.observed
            else 0,
        )

    def _cells(self, recipe: Recipe, kept: Candidates | None, latent: Tensor) -> ResponseCells:
        """The cells that counts are drawn for."""
        if kept is None:
            if self.n_cells > latent.shape[0] * latent.shape[1]:
                n_sets = -(-self.n_cells // self.config.set_size)
                rest, calls = self.fitted.sampler.sample(
                    [recipe.task], [list(range(len(latent), n_sets))], self.config, seed=self.seed
                )
                self.nfe += calls
                latent = torch.cat([latent, rest[0]])
            cells = self.fitted.cells(recipe, latent)
        else:
            rows = kept.partner.flatten()
            controls = self.asked.controls
            cells = ResponseCells.make(
                self.fitted.codec.deviation(kept.state.x.flatten(0, 1)).double().cpu(),
                controls.counts(rows),
                controls.library_size(rows),
                keys=kept.draw_key.flatten(),
                lanes=self.fitted.lanes,
            )
        return _first(cells, self.n_cells)

    def _own_keys(self, n_cells: int) -> Tensor:
        size = self.config.set_size
        sets = range(-(-n_cells // size))
        return (
            self._recipe(matched=False).task.keys(sets, self.config, self.seed).flatten()[:n_cells]
        )

    def _write(self, before: CellValues, counts: Tensor, size: Tensor) -> None:
        """One row a constraint."""
        after = as_values(counts.double(), size)
        n_sets = -(-self.n_cells // self.config.set_size)
        one = LatentCourse.calls_of(self.config)
        control = torch.from_numpy(self.asked.controls.cells.log1p.toarray()).double()
        distance = moved_by(before, after, self.fitted.loadings)
        effective = self.found.effective if self.found is not None else []
        rows = []
        for bound in self.bounds:
            inside, outside = support(
                bound, before, control=control, known=self.fitted.prior.conditions,
                set_size=self.config.set_size,
            )  # fmt: skip
            rows.append(
                row_of(bound, before, after, set_size=self.config.set_size)
                | {
                    "condition": self.name,
                    "method": self.ways.method,
                    "promised": self.ways.hard is not None and bound.projects,
                    "set_evaluations": self.evaluations,
                    "cost": self.evaluations / (n_sets * one),
                    "effective_particles": float(np.mean(effective)) if effective else np.nan,
                    "energy_distance": distance,
                    "energy_distance_to_truth": np.nan,
                    "supported": inside,
                    "outside": outside,
                }
            )
        self.report = pd.DataFrame(rows)[list(COLUMNS)]


def is_trivial(bound: Bounds) -> bool:
    """Whether counts obey anyhow: no bound but one at or below zero."""
    return bool((bound.lower <= 0).all() and bound.upper.isinf().all())


def _pilot_values(
    pilot: ResponseCells, plan: ResponsePlan, config: SampleConfig
) -> tuple[CellValues, CellValues]:
    """Expected and drawn values of the pilot, set by set."""
    set_size = min(config.set_size, len(pilot.counts))
    n_sets = len(pilot.counts) // set_size
    pilot = _first(pilot, n_sets * set_size)
    number = torch.arange(n_sets * set_size).view(n_sets, -1)
    reveal = Revealed(
        cells=pilot, plan=plan, decoder=torch.zeros(pilot.counts.shape[1], 0), number=number
    )
    size = pilot.library_size[:, None] / DEPTH
    drawn = torch.log1p(plan.draw(pilot) / size)
    return reveal.shaped(plan.expected_log1p(pilot)), reveal.shaped(drawn)


def _with_margin(bound: Bound, expected: CellValues, drawn: CellValues, *, margin: float) -> Bound:
    """Means aimed inside their range, by how far the drawn ones scatter around expected ones.

    Shares of a state are aimed where the drawn share, not the mean probability of expected values,
    is in range; drawing again does the rest.
    """
    if isinstance(bound, InState):
        gap = bound.inside(drawn).double().mean() - bound.chance(expected).double().mean()
        return bound.moved(-float(gap))
    if not isinstance(bound, Bounds) or bound.per == "cell":
        return bound
    scatter = (bound.rows(drawn) - bound.rows(expected)).flatten(0, -2).std(0, correction=0)
    return bound.tightened(margin * scatter)


def _first(cells: ResponseCells, n_cells: int) -> ResponseCells:
    return ResponseCells(
        deviation=cells.deviation[:n_cells],
        counts=cells.counts[:n_cells],
        library_size=cells.library_size[:n_cells],
        uniform=cells.uniform[:n_cells],
        noise=cells.noise[:n_cells],
    )
