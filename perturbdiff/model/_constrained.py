"""Answers that obey: generation under constraints, and what it cost.

The plan of the population is solved first, without constraints, on the pilot that an unconstrained
question would have; so nothing that is solved once depends on what is asked for. Then sets are
generated under guidance or by search, means are moved on the pilot, counts are drawn, and what was
asked hard is projected on the drawn cells.

What a set is made of, and what is solved on the pilot, never depends on how many cells are asked
for, nor do projections of single cells. Projections of means and shares are over the cells that
are returned, since that is what they promise: they touch only the genes (or cells) that they name.

N cells, G genes, K latent axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from anndata import AnnData
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff._random import forked_keys, stream_key, uniform
from perturbdiff.config import SampleConfig
from perturbdiff.data import Condition
from perturbdiff.guidance import (
    CellValues,
    Constraint,
    Enforcement,
    Observed,
    Reference,
    as_constraints,
    check_together,
    enforcement,
)
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._enforcement import Particles, Way
from perturbdiff.guidance._logic import Bound, InState, Sized, conjuncts
from perturbdiff.guidance._search import Candidates, Found, search
from perturbdiff.guidance._settling import Draft, settle
from perturbdiff.model import _fitted
from perturbdiff.model._constrained_course import LatentCourse, Revealed
from perturbdiff.model._constrained_observed import completed_target, matched_partners
from perturbdiff.model._constrained_plan import (
    bounded_genes,
    of_genes,
    retarget,
    truncated_uniform,
    with_target,
)
from perturbdiff.model._constrained_report import (
    COLUMNS,
    course_table,
    moved_by,
    row_of,
    support,
    tree_table,
)
from perturbdiff.model._fitted import Fitted, Recipe, Target
from perturbdiff.model._questions import Controls
from perturbdiff.model._response import ResponseCells, ResponsePlan

Verify = Callable[[np.ndarray, tuple[str, ...]], Any]
Ways = str | Way | Sequence[str | Way] | None

_SETTLE, _SCALE, _POOL = 2, 3, 16  # steps of uniform numbers; turns of the pool
_LEAST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One condition that is asked about."""

    condition: Condition
    controls: Controls
    target: Target


@dataclass(frozen=True, kw_only=True, eq=False)
class Wish:
    """Constraints, and how to enforce them."""

    constraints: tuple[Constraint, ...]
    ways: Ways = None

    @classmethod
    def of(cls, constraints: Sequence[object], ways: Ways) -> "Wish":
        """Constraints as a user gives them: functions are verifiers."""
        return cls(constraints=as_constraints(constraints), ways=ways)

    def bound(self, reference: Reference, *, n_cells: int) -> tuple[list[Bound], Enforcement]:
        """The constraints for one context, checked; and the ways of enforcing them."""
        bounds = [constraint.bind(reference) for constraint in self.constraints]
        check_together(bounds, reference, n_cells=n_cells)
        firm = [bound.text for bound in bounds if not bound.projects]
        ways = enforcement(self.ways, projects=not firm, promised=firm)
        if ways.soft is not None and not any(bound.differentiable for bound in bounds):
            msg = f"{bounds[0].text}: has no gradient, so it cannot be enforced softly. Search."
            raise ConstraintError(msg)
        return bounds, ways


@dataclass(frozen=True, kw_only=True, eq=False)
class Constrained:
    """Cells of every condition, and the report."""

    drawn: list[tuple[Tensor, Tensor]]
    nfe: int
    report: pd.DataFrame
    course: pd.DataFrame
    tree: pd.DataFrame
    real_valued: tuple[str, ...]

    @property
    def notes(self) -> dict[str, Any]:
        """What a prediction says about its constraints."""
        if not len(self.report):
            return {"constraint_violation": 0.0}
        return {
            "constraint_violation": float(self.report["violation"].max()),
            "constraints": self.report,
            "constraint_course": self.course,
            "constraint_tree": self.tree,
            "real_valued_genes": list(self.real_valued),
        }


def reference_of(fitted: Fitted, controls: Controls) -> Reference:
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


def respond_constrained(
    fitted: Fitted,
    asked: Sequence[Asked],
    wish: Wish,
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> Constrained:
    """Cells of each condition that obey, as far as was promised.

    Parameters
    ----------
    fitted
        The model.
    asked
        Conditions.
    wish
        Constraints.
    n_cells
        Cells a condition.
    config, seed
        How to sample.

    Returns
    -------
    Counts and library sizes, network calls, and the report.

    Raises
    ------
    ConstraintError, GeneError, ConfigError
        Before anything is sampled, when the constraints cannot hold or name unknown genes.
    """
    bound = [wish.bound(reference_of(fitted, one.controls), n_cells=n_cells) for one in asked]
    answers = [
        _Answer(fitted, one, wish, bounds=bounds, ways=ways, n_cells=n_cells,
                config=config, seed=seed)
        for one, (bounds, ways) in zip(asked, bound, strict=True)
    ]  # fmt: skip
    parts = [answer.run() for answer in answers]
    genes = fitted.vocabulary.registry.genes
    real = sorted({gene for answer in answers for gene in answer.real.nonzero()[:, 0].tolist()})
    return Constrained(
        drawn=parts,
        nfe=sum(answer.nfe for answer in answers),
        report=pd.concat([answer.report for answer in answers], ignore_index=True),
        course=_joined([(a.name, a.passed) for a in answers]),
        tree=_joined([(a.name, tree_table(a.found)) for a in answers]),
        real_valued=tuple(genes[number] for number in real),
    )


def _joined(tables: Sequence[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    named = [table.assign(condition=name) for name, table in tables if len(table)]
    return pd.concat(named, ignore_index=True) if named else pd.DataFrame({"condition": []})


class _Answer:
    """The cells of one condition."""

    def __init__(
        self,
        fitted: Fitted,
        asked: Asked,
        wish: Wish,
        *,
        bounds: list[Bound],
        ways: Enforcement,
        n_cells: int,
        config: SampleConfig,
        seed: int,
    ) -> None:
        self.fitted, self.asked, self.wish, self.ways = fitted, asked, wish, ways
        self.bounds, self.n_cells, self.seed = bounds, n_cells, seed
        self.config = config
        self.name = asked.condition.name
        self.found: Found | None = None
        self.real = torch.zeros(len(fitted.vocabulary.registry.genes), dtype=torch.bool)
        self.passed = pd.DataFrame()
        self.report = pd.DataFrame()
        self.nfe = 0
        self.evaluations = 0

    @property
    def observed(self) -> list[Bounds]:
        """Measured panels."""
        return [
            bound
            for constraint, bound in zip(self.wish.constraints, self.bounds, strict=True)
            if isinstance(constraint, Observed) and isinstance(bound, Bounds)
        ]

    def run(self) -> tuple[Tensor, Tensor]:
        """Counts and library sizes; leaves the report behind."""
        latent, plan, before = self._unconstrained()
        recipe = self._recipe()
        pilot = self.fitted.cells(recipe, latent)
        hard = conjuncts(self.bounds, before) if self.ways.hard is not None else []
        plan = self._moved_plan(plan, pilot, [b for b in hard if isinstance(b, Bounds)])
        kept = self._steered(recipe, plan, pilot, hard)
        cells = self._cells(recipe, kept, latent)
        counts, size = self._obeying(cells, plan, pilot, hard)
        self._write(before, counts, size)
        return counts, size

    def _recipe(self, partners: Tensor | None = None) -> Recipe:
        asked, config = self.asked, self.config
        most = max(self.n_cells, _fitted.PILOT_CELLS)
        n_cells = -(-most // config.set_size) * config.set_size
        task = self.fitted.task(
            asked.condition, asked.controls, asked.target, n_cells=n_cells, seed=self.seed
        )
        if partners is not None:
            rows = task.partners.clone()
            rows[: len(partners)] = partners
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
        task = self._recipe().task
        latent, plan = next(
            value
            for key, value in reversed(self.fitted.plans._plans.items())
            if key[:4] == (task.condition.name, task.digest, self.seed, self.config)
        )
        return latent, plan, _as_values(counts.double(), size)

    def _moved_plan(
        self, plan: ResponsePlan, pilot: ResponseCells, hard: Sequence[Bounds]
    ) -> ResponsePlan:
        """Means as observed, what they say about the others, and means that must be."""
        target = torch.from_numpy(self.asked.target.mean)
        for bound in self.observed:
            if bound.unit != "log1p" or self.ways.hard is None:
                continue
            mean = bound.lower[: self.n_cells].mean(0).numpy()
            new = torch.from_numpy(
                completed_target(
                    target.numpy(), mean, bound.genes.numpy(),
                    controls=self.asked.controls, known=list(self.fitted.prior.conditions),
                )
            )  # fmt: skip
            plan = with_target(plan, pilot, old=target, new=new)
            target = new
        return retarget(plan, pilot, hard, target=target)

    def _steered(
        self, recipe: Recipe, plan: ResponsePlan, pilot: ResponseCells, hard: Sequence[Bound]
    ) -> Candidates | None:
        """Sets found under guidance or by search; None where drawing again is enough."""
        cellwise = [b for b in hard if isinstance(b, Bounds) and b.per == "cell"]
        cellwise = [b for b in cellwise if not _is_trivial(b)]
        searched = list(self.bounds) if self.ways.search is not None else []
        pulled = [b for b in self.bounds if b.differentiable] if self.ways.soft else []
        looked_at = [*cellwise, *searched, *pulled]
        if not looked_at:
            return None
        genes = torch.tensor(sorted({int(g) for b in looked_at for g in b.needed}))
        course = self._course(recipe, plan, pilot, genes, pulls=bool(pulled))
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
        self,
        recipe: Recipe,
        plan: ResponsePlan,
        pilot: ResponseCells,
        genes: Tensor,
        *,
        pulls: bool,
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
            for constraint, bound in zip(self.wish.constraints, self.bounds, strict=True)
            if set(bound.needed.tolist()) <= known
        ]
        partners = None
        for bound in self.observed if self.ways.hard is not None else []:
            mean = self.asked.target.mean
            partners = matched_partners(bound, self.asked.controls, mean, n_cells=self.n_cells)
        noise = (drawn.log1p - expected.log1p).square().mean((0, 1))
        soft = self.ways.soft
        return LatentCourse(
            fitted=self.fitted,
            recipe=self._recipe(partners),
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
            rows = self._partners_of(kept, recipe)
            controls = self.asked.controls
            cells = ResponseCells.make(
                self.fitted.codec.deviation(kept.state.x.flatten(0, 1)).double().cpu(),
                controls.counts(rows),
                controls.library_size(rows),
                keys=kept.draw_key.flatten(),
                lanes=self.fitted.lanes,
            )
        return _first(cells, self.n_cells)

    def _partners_of(self, kept: Candidates, recipe: Recipe) -> Int[Tensor, " cells"]:
        rows = recipe.task.partners
        for bound in self.observed if self.ways.hard is not None else []:
            mean = self.asked.target.mean
            matched = matched_partners(bound, self.asked.controls, mean, n_cells=self.n_cells)
            if matched is not None:
                rows = rows.clone()
                rows[: len(matched)] = matched
        size = self.config.set_size
        return rows[(kept.owner[:, None] * size + torch.arange(size)).flatten()]

    def _obeying(
        self,
        cells: ResponseCells,
        plan: ResponsePlan,
        pilot: ResponseCells,
        hard: Sequence[Bound],
    ) -> tuple[Tensor, Tensor]:
        """Counts drawn, and projected where that was asked."""
        bounds = [bound for bound in hard if isinstance(bound, Bounds)]
        counts = _drawn_within(cells, plan, bounds).double()
        size = cells.library_size
        if not hard:
            return counts.long(), size
        rate = torch.expm1(plan.expected_log1p(cells)) * size[:, None] / DEPTH
        keys = self._own_keys(len(counts))
        lanes = self.fitted.lanes
        draft = Draft(
            counts=counts, library_size=size, rate=rate,
            chance=uniform(keys, lanes, step=_SETTLE), number=torch.arange(len(counts)),
        )  # fmt: skip
        for bound in hard:
            if isinstance(bound, Sized):
                _resize(draft, bound, chance=uniform(keys, lanes, step=_SCALE))
        states = [bound for bound in hard if isinstance(bound, InState)]
        for bound in states:
            self._exchange(draft, bound, plan=plan, pilot=pilot)
        self.real = settle(draft, bounds)
        for bound in states:
            if not bool(bound.holds(draft.values).all()):
                msg = f"{bound.text}: does not hold together with the constraints on its genes."
                raise ConstraintError(msg)
        whole = not bool(self.real.any())
        return (draft.counts.round().long() if whole else draft.counts), draft.library_size

    def _own_keys(self, n_cells: int) -> Tensor:
        size = self.config.set_size
        sets = range(-(-n_cells // size))
        return self._recipe().task.keys(sets, self.config, self.seed).flatten()[:n_cells]

    def _exchange(
        self, draft: Draft, bound: InState, *, plan: ResponsePlan, pilot: ResponseCells
    ) -> None:
        """Cells of the wrong state exchanged for others that the model makes, one by one."""
        inside = bound.inside(draft.values)
        least, most = bound.allowed(len(inside))
        surplus = int(inside.sum()) - most
        wanted = surplus < 0 and int(inside.sum()) < least
        number = least - int(inside.sum()) if wanted else surplus
        if number <= 0:
            return
        out = (inside != wanted).nonzero()[:, 0]
        order = draft.chance[out, 0].argsort(stable=True)
        place = out[order][:number]
        key = torch.tensor(stream_key(self.seed, "pool", self.name))
        keys = forked_keys(key.expand(len(pilot.counts)), torch.arange(len(pilot.counts)) + 1)
        filled = 0
        for turn in range(_POOL):
            again = replace(
                pilot,
                uniform=uniform(keys, self.fitted.lanes, step=2 * turn),
                noise=torch.special.ndtri(uniform(keys, self.fitted.lanes, step=2 * turn + 1)),
            )
            counts = plan.draw(again).double()
            fits = bound.inside(_as_values(counts, again.library_size)) == wanted
            rows = fits.nonzero()[:, 0][: number - filled]
            into = place[filled : filled + len(rows)]
            draft.counts[into] = counts[rows]
            draft.library_size = draft.library_size.index_copy(0, into, again.library_size[rows])
            filled += len(rows)
            if filled == number:
                return
        msg = (
            f"{bound.text}: of {_POOL * len(pilot.counts)} cells that the model makes, only "
            f"{filled} would help and {number} are needed. Ask for a share nearer to "
            f"{float(inside.double().mean()):.3g}."
        )
        raise ConstraintError(msg)

    def _write(self, before: CellValues, counts: Tensor, size: Tensor) -> None:
        """One row a constraint."""
        after = _as_values(counts.double(), size)
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


def _as_values(counts: Float[Tensor, "cells genes"], size: Tensor) -> CellValues:
    log1p = torch.log1p(counts * (DEPTH / size[:, None])).float().double()
    return CellValues(log1p=log1p, library_size=size, number=torch.arange(len(counts)))


def _first(cells: ResponseCells, n_cells: int) -> ResponseCells:
    return ResponseCells(
        deviation=cells.deviation[:n_cells],
        counts=cells.counts[:n_cells],
        library_size=cells.library_size[:n_cells],
        uniform=cells.uniform[:n_cells],
        noise=cells.noise[:n_cells],
    )


def _is_trivial(bound: Bounds) -> bool:
    """Whether counts obey anyhow: no bound but one at or below zero."""
    return bool((bound.lower <= 0).all() and bound.upper.isinf().all())


def _pilot_values(
    pilot: ResponseCells, plan: ResponsePlan, config: SampleConfig
) -> tuple[CellValues, CellValues]:
    """Expected and drawn values of the pilot, set by set."""
    n_sets = len(pilot.counts) // config.set_size
    number = torch.arange(n_sets * config.set_size).view(n_sets, -1)
    reveal = Revealed(cells=pilot, plan=plan, decoder=torch.zeros(0), number=number)
    size = pilot.library_size[:, None] / DEPTH
    drawn = torch.log1p(plan.draw(pilot) / size)
    return reveal.shaped(plan.expected_log1p(pilot)), reveal.shaped(drawn)


def _with_margin(bound: Bound, expected: CellValues, drawn: CellValues, *, margin: float) -> Bound:
    """Means aimed inside their range, by how far the drawn ones scatter around expected ones."""
    if not isinstance(bound, Bounds) or bound.per == "cell":
        return bound
    scatter = (bound.rows(drawn) - bound.rows(expected)).flatten(0, -2).std(0, correction=0)
    return bound.tightened(margin * scatter)


def _drawn_within(
    cells: ResponseCells, plan: ResponsePlan, bounds: Sequence[Bounds]
) -> Int[Tensor, "cells genes"]:
    """Counts; those that must lie in a range are drawn from their distribution within it."""
    chosen = bounded_genes(bounds, cells.counts.shape[1])
    if not bool(chosen.any()):
        return plan.draw(cells)
    genes = chosen.nonzero()[:, 0]
    place = torch.full((len(chosen),), -1)
    place[genes] = torch.arange(len(genes))
    low = torch.zeros(len(cells.counts), len(genes), dtype=torch.float64)
    high = torch.full_like(low, torch.inf)
    values = _as_values(cells.counts.double(), cells.library_size)
    for bound in bounds:
        if bound.per == "cell" and bound.separate and not bound.exact:
            least, most = bound.counts(values)
            columns = place[bound.genes]
            low[:, columns] = torch.maximum(low[:, columns], least.expand(len(low), -1))
            high[:, columns] = torch.minimum(high[:, columns], most.expand(len(low), -1))
    part = of_genes(plan, genes)
    moved = truncated_uniform(cells.of_genes(chosen), part, low=low, high=high)
    within = cells.uniform.index_copy(1, genes, moved)
    return plan.draw(replace(cells, uniform=within))


def _resize(draft: Draft, bound: Sized, *, chance: Float[Tensor, "cells genes"]) -> None:
    """Library sizes into range, counts with them; rounding is random and right on average."""
    size = bound.clamped(draft.library_size)
    counts = draft.counts * (size / draft.library_size)[:, None]
    draft.counts = (counts + chance).floor()
    draft.library_size = size


def respond_with(
    fitted: Fitted,
    asked: Sequence[Asked],
    wish: Wish,
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> Constrained:
    """Cells of each condition; without constraints, just what the model answers.

    Parameters
    ----------
    fitted, asked, wish, n_cells, config, seed
        As in :func:`respond_constrained`.

    Returns
    -------
    Cells and report; the report is empty where nothing was asked.
    """
    if wish.constraints:
        return respond_constrained(fitted, asked, wish, n_cells=n_cells, config=config, seed=seed)
    if wish.ways is not None:
        name, rule = "enforce", "says how to enforce constraints, and there are none"
        raise ConfigError(name, wish.ways, rule=rule)
    drawn, nfe = fitted.respond(
        [one.condition for one in asked],
        [one.controls for one in asked],
        [one.target for one in asked],
        n_cells=n_cells,
        config=config,
        seed=seed,
    )
    none = pd.DataFrame()
    return Constrained(drawn=drawn, nfe=nfe, report=none, course=none, tree=none, real_valued=())


def with_exact_values(pred: AnnData, found: Constrained) -> AnnData:
    """Put the genes that became real-valued in, which no count can say."""
    if not found.real_valued:
        return pred
    columns = pred.var_names.get_indexer(list(found.real_valued))
    counts = pred.layers["counts"].toarray().astype(np.float64)
    log1p = pred.X.toarray()
    exact = torch.cat([counts.double() for counts, _ in found.drawn]).numpy()[:, columns]
    size = torch.cat([size for _, size in found.drawn]).numpy()[:, None]
    counts[:, columns] = exact
    log1p[:, columns] = np.log1p(exact * (DEPTH / size))
    pred.layers["counts"], pred.X = sp.csr_matrix(counts), sp.csr_matrix(log1p)
    return pred
