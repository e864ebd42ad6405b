"""Quotes of set diffusion predictions under constraints.

How often the network is called, and for how many sets, is known before for every way of enforcing
but depth-first search, which ends as soon as it has found a set that obeys: of it the most is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from anndata import AnnData

from perturbdiff.config import SampleConfig
from perturbdiff.guidance import Enforcement, Observed
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._enforcement import BestOf, Branch, DepthFirst, Particles
from perturbdiff.guidance._logic import AllOf, AnyOf, Bound, conjuncts
from perturbdiff.model import _fitted
from perturbdiff.model._constrained import Wish
from perturbdiff.model._constrained_answer import Rules, is_trivial, reference_of
from perturbdiff.model._constrained_course import _SETS_AT_ONCE, LatentCourse
from perturbdiff.model._fitted import Fitted
from perturbdiff.model._quote_diffusion import (
    DenoiserCost,
    assembled,
    batches,
    diffusion_quote,
)
from perturbdiff.model._quote_obeying import ObeyingRest, ShortRun, obeying_cost, short_sizes
from perturbdiff.model._quote_rest import Request, own_controls, questions, rest_cost
from perturbdiff.model._room import require_room
from perturbdiff.profiling import DENOISE, Quote, Work

if TYPE_CHECKING:
    from perturbdiff.model._set_diffusion import SetDiffusion

_STEPS = (4, 10)  # of short predictions


@dataclass(frozen=True, kw_only=True)
class Load:
    """Calls of the network by the number of sets that each is for."""

    parts: tuple[tuple[float, float], ...] = ()

    @property
    def calls(self) -> float:
        """All of them."""
        return sum(calls for _, calls in self.parts)

    @property
    def evaluations(self) -> float:
        """Sets in them."""
        return sum(sets * calls for sets, calls in self.parts)

    def __add__(self, other: "Load") -> "Load":
        return Load(parts=(*self.parts, *other.parts))

    @classmethod
    def of(cls, n_sets: int, calls: float, *, at_once: int) -> "Load":
        """Some sets in batches, so many calls each."""
        found = batches(n_sets, at_once=at_once) if calls else []
        return cls(parts=tuple((sets, count * calls) for sets, count in found))


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the calls along a schedule are: settings, and how often a step is taken again."""

    config: SampleConfig
    again: int = 0

    def calls(self, first: int, last: int) -> int:
        """Of the network, for a batch of candidates taken from one step to another."""
        config = self.config
        each = 2 if config.sampler == "heun" else 1
        ends = last == config.n_steps and last > first
        steps = last - first - ends
        taken = steps * each * (1 + self.again) + ends
        return taken * (1 if config.guidance_scale in {0.0, 1.0} else 2)

    def load(self, n_sets: int, first: int, last: int) -> Load:
        """Of candidates taken from one step to another."""
        return Load.of(n_sets, self.calls(first, last), at_once=_SETS_AT_ONCE)

    def whole(self, n_sets: int) -> Load:
        """Of candidates from the first step to the last."""
        return self.load(n_sets, 0, self.config.n_steps)


def course_loads(ways: Enforcement, course: Course, n_sets: int) -> tuple[Load, Load]:
    """Least and most calls that the sets of a condition take under guidance or in a search.

    Parameters
    ----------
    ways
        How constraints are enforced.
    course
        How a step is taken.
    n_sets
        Sets that are wanted.

    Returns
    -------
    The two are the same but for depth-first search.
    """
    search, n_steps = ways.search, course.config.n_steps
    if isinstance(search, DepthFirst):
        return course.whole(n_sets), deepest(search, course, n_sets)
    if isinstance(search, Branch) and (share := min(search.share, n_steps)):
        trunk = course.load(n_sets, 0, share)
        load = trunk + course.load(n_sets * search.k, share, n_steps)
    elif isinstance(search, Branch):
        load = course.whole(n_sets * search.k)
    elif isinstance(search, BestOf):
        load = course.whole(n_sets * search.n)
    elif isinstance(search, Particles):
        stochastic = replace(course, config=replace(course.config, sampler="stochastic"))
        load = stochastic.whole(n_sets * search.n)
    else:
        load = course.whole(n_sets)
    return load, load


def deepest(search: DepthFirst, course: Course, n_sets: int) -> Load:
    """The most that depth-first search takes, where no set ever obeys.

    A set takes its budget, or one trajectory where that is more. Sets go on together, in turns of
    one stretch each. Between the judged places a stretch has the calls c_1 ... c_L, and a turn has
    at most one batch of each kind for so many sets: their sum is a trajectory. There are at most
    ``L + (budget - trajectory) / min c`` turns.

    Parameters
    ----------
    search, course, n_sets
        As for all ways.

    Returns
    -------
    Sets in calls, spread evenly over the most calls that there can be.
    """
    plain, n_steps = replace(course, again=0), course.config.n_steps
    levels = min(search.levels, n_steps)
    edges = [round(n_steps * level / levels) for level in range(levels + 1)]
    each = [plain.calls(*ends) for ends in pairwise(edges)]
    budget = max(search.budget, sum(each))
    turns = levels + (budget - sum(each)) // min(each)
    turns = min(turns, sum(search.width**depth for depth in range(1, levels + 1)))
    n_batches = -(-n_sets // _SETS_AT_ONCE)
    calls = min(n_sets * budget, turns * sum(each) * n_batches)
    return Load(parts=((n_sets * budget / calls, calls * (1 + course.again)),))


@dataclass(frozen=True, kw_only=True)
class ConditionLoad:
    """Calls of one condition: without constraints, and along the course that obeys."""

    plain: Load
    course: Load = Load()

    @property
    def whole(self) -> Load:
        """All of them."""
        return self.plain + self.course

    def candidates(self, config: SampleConfig, request: Request) -> float:
        """Trajectories of a set."""
        n_sets = -(-request.cells // config.set_size)
        return self.course.evaluations / (n_sets * LatentCourse.calls_of(config))


def condition_loads(
    fitted: Fitted, rules: Rules, config: SampleConfig, *, n_cells: int
) -> tuple[ConditionLoad, ConditionLoad]:
    """Least and most calls of one condition: the pilot, and what its sets take.

    Parameters
    ----------
    fitted
        Model.
    rules
        What shall hold, and how.
    config
        How to sample.
    n_cells
        Cells of the condition.

    Returns
    -------
    Calls and sets.
    """
    size, ways = config.set_size, rules.ways
    at_once, each = fitted.sampler.sets_at_once(size), LatentCourse.calls_of(config)
    n_sets, n_pilot = -(-n_cells // size), -(-_fitted.PILOT_CELLS // size)
    pilot = Load.of(n_pilot, each, at_once=at_once)
    plain = ConditionLoad(plain=pilot + Load.of(max(n_sets - n_pilot, 0), each, at_once=at_once))
    steers, may = ways.soft is not None or ways.search is not None, False
    if ways.hard is not None:
        steers |= any(map(_pulls, conjuncts(rules.bounds)))
        may = any(map(_pulls, _alternatives(rules.bounds)))
    if not (steers or may):
        return plain, plain
    again = ways.hard.resamples if ways.hard is not None and _observes(rules) else 0
    least, most = course_loads(ways, Course(config=config, again=again), n_sets)
    surely, at_most = (ConditionLoad(plain=pilot, course=one) for one in (least, most))
    return (surely if steers else plain), at_most


def _observes(rules: Rules) -> bool:
    """Whether genes were measured in log values, which others are to go with."""
    return any(
        isinstance(constraint, Observed) and isinstance(bound, Bounds) and bound.unit == "log1p"
        for constraint, bound in zip(rules.constraints, rules.bounds, strict=True)
    )


def _pulls(bound: Bound) -> bool:
    """Whether estimates are pulled to it at every step."""
    return isinstance(bound, Bounds) and bound.per == "cell" and not is_trivial(bound)


def _alternatives(bounds: Sequence[Bound]) -> list[Bound]:
    """Members of every *any*: which is taken is known when the pilot is."""
    found: list[Bound] = []
    for bound in bounds:
        if isinstance(bound, AnyOf):
            found += [*conjuncts(bound.members), *_alternatives(bound.members)]
        elif isinstance(bound, AllOf):
            found += _alternatives(bound.members)
    return found


def quote_with(
    model: "SetDiffusion",
    adata: AnnData | None,
    *,
    request: Request,
    config: SampleConfig,
    missing_genes: str,
    wish: Wish,
) -> Quote:
    """Cost of a question, with constraints where there are any.

    Parameters
    ----------
    model, adata, request, config, missing_genes
        As for a quote without.
    wish
        Constraints, and how to enforce them.

    Returns
    -------
    Seconds and memory; where a search may end early, the most, and a range that begins at the
    least.
    """
    require_room(request.cells, len(model.fitted.mean))
    if not wish.constraints:
        wish.refuse_ways_alone()
        return diffusion_quote(
            model, adata, request=request, config=config, missing_genes=missing_genes
        )
    fitted, size = model.fitted, config.set_size
    file = own_controls(model) if adata is None else adata
    rules = _rules(model, file, wish, n_cells=request.cells, missing_genes=missing_genes)
    loads = condition_loads(fitted, rules, config, n_cells=request.cells)
    cost = DenoiserCost(fitted, size)
    quick = {"sample": SampleConfig(n_steps=1)}
    rest = rest_cost(model, file, settings=quick, missing_genes=missing_genes)
    asked = [
        _short(fitted, rules, replace(config, n_steps=steps), n_cells=n_cells)
        for n_cells in short_sizes(
            rules.bounds, size, request.cells, candidates=loads[1].candidates(config, request)
        )
        for steps in _STEPS
    ]
    obeying = obeying_cost(
        model, file, wish=wish, asked=asked, rest=rest, missing_genes=missing_genes
    )
    n = request.conditions
    quotes = [
        assembled(
            fitted,
            network=(
                DENOISE,
                n * sum(calls * cost.seconds(sets) for sets, calls in load.whole.parts),
                cost.timing.spread,
            ),
            work=sum((n * calls * cost.work(sets) for sets, calls in load.whole.parts), Work()),
            rest=ObeyingRest(
                rest=rest,
                cost=obeying,
                calls=load.course.calls,
                evaluations=load.course.evaluations,
            ),
            request=request,
            network_calls=n * load.whole.calls,
            how=_told(rules, loads),
        )
        for load in loads
    ]
    return Quote(**{**vars(quotes[1]), "low": quotes[0].low})


def _rules(
    model: "SetDiffusion", file: AnnData, wish: Wish, *, n_cells: int, missing_genes: str
) -> Rules:
    """What shall hold in a context of the file, checked as a prediction checks it."""
    labels, contexts, named = questions(model, file, missing_genes=missing_genes)
    question = model._ask(file, labels[:1], contexts=contexts[:1], n_cells=1, **named)
    _, controls = model._with_controls_of(question)[0]
    return wish.bound(reference_of(model.fitted, controls), n_cells=n_cells)


def _short(fitted: Fitted, rules: Rules, config: SampleConfig, *, n_cells: int) -> ShortRun:
    """A prediction that is timed."""
    load, _ = condition_loads(fitted, rules, config, n_cells=n_cells)
    return ShortRun(
        n_cells=n_cells, settings={"sample": config}, pilot_calls=round(load.plain.calls)
    )


def _told(rules: Rules, loads: tuple[ConditionLoad, ConditionLoad]) -> list[str]:
    least, most = (one.whole.calls for one in loads)
    how = [f"enforce = {rules.ways.method!r}: {most:.0f} network calls a condition"]
    if least == most:
        how.append("for its pilot and its sets;")
    else:
        why = "ends when a set obeys" if rules.ways.search else "depends on the pilot"
        how.append(
            f"at most, for its pilot and its sets; the work {why}, {least:.0f} calls at least, "
            "so this is the most, and the range begins at the least;"
        )
    return [
        *how,
        "seconds of a call from calls timed on this machine; what obeying costs besides from short",
        "predictions under these constraints, on these control cells. How often sets that miss are",
        "drawn again is taken from them. It holds for a question that was not asked before.",
    ]
