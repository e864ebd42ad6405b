"""One prediction on its way: sets that come back from the engine become counts, then an answer.

N cells, G genes, K latent axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.sparse as sp
import torch
from anndata import AnnData
from torch import Tensor

from perturbdiff.config import SampleConfig
from perturbdiff.model import SetDiffusion, _fitted
from perturbdiff.model._fitted import Fitted, Recipe
from perturbdiff.model._predictor import answer
from perturbdiff.model._response import ResponsePlan
from perturbdiff.prior._factors import ResponseFactors
from perturbdiff.serve._memo import Memo
from perturbdiff.serve._reading import Reading

SETS_A_BLOCK = 16  # drawn at a time, so that nobody holds a thread or dense counts for long
PlanKey = tuple[object, ...]
Draw = tuple[sp.csr_array, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Population:
    """What the cells of one condition, seed and way of sampling are made from, solved."""

    recipe: Recipe
    pilot: Tensor
    plan: ResponsePlan


@dataclass(kw_only=True, eq=False)
class Part:
    """One condition of a prediction."""

    place: int
    recipe: Recipe
    n_cells: int
    population: Population | None = None
    latent: dict[int, Tensor] = field(default_factory=dict)
    drawn: dict[int, tuple[sp.csr_array, np.ndarray]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # blocks that are being drawn
    solving: bool = False
    holds_back: bool = False  # what is beyond the pilot, until the pilot is there

    @property
    def config(self) -> SampleConfig:
        config = self.recipe.config
        assert isinstance(config, SampleConfig)  # only the diffusion model comes here
        return config

    @property
    def n_pilot(self) -> int:
        """Sets that the population is solved on."""
        return -(-_fitted.PILOT_CELLS // self.config.set_size)

    @property
    def n_wanted(self) -> int:
        """Sets that are asked for."""
        return -(-self.n_cells // self.config.set_size)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_wanted // SETS_A_BLOCK)

    @property
    def key(self) -> PlanKey:
        """Populations with the same key are the same."""
        task = self.recipe.task
        return task.condition, task.digest, self.recipe.seed, self.config

    @property
    def has_pilot(self) -> bool:
        """Whether the sets that the population is solved on are there."""
        return all(number in self.latent for number in range(self.n_pilot))

    def sets(self, *, pilot: bool) -> range:
        """Sets to be made: beyond the pilot, or with it."""
        return range(0 if pilot else self.n_pilot, max(self.n_wanted, self.n_pilot * pilot))

    def block(self, number: int) -> range:
        """Sets of a block."""
        return range(number * SETS_A_BLOCK, min((number + 1) * SETS_A_BLOCK, self.n_wanted))

    def ready(self) -> list[int]:
        """Blocks whose sets are all there, and that nobody draws yet."""
        if self.population is None:
            return []
        left = (number for number in range(self.n_blocks) if number not in self.asked)
        return [n for n in left if all(one in self.latent for one in self.block(n))]


def begin(
    fitted: Fitted,
    reading: Reading,
    known: Callable[[PlanKey], Population | None],
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> list[Part]:
    """The conditions of a prediction, each with its population where that is known.

    Parameters
    ----------
    fitted
        Model.
    reading
        What is asked.
    known
        Populations that were solved before.
    n_cells, config, seed
        How many, how to sample.

    Returns
    -------
    One part a condition.

    Raises
    ------
    ConfigError
        When guidance is asked of a network that was not trained for it.
    """
    fitted.check(config)
    least = -(-max(_fitted.PILOT_CELLS, n_cells) // config.set_size) * config.set_size
    parts = []
    asked = zip(reading.conditions, reading.controls, reading.targets, strict=True)
    for place, (condition, controls, target) in enumerate(asked):
        old = known((condition, controls.digest, seed, config))
        if old is not None and len(old.recipe.task.partners) >= least:
            recipe = old.recipe
        else:
            task = fitted.task(condition, controls, target, n_cells=least, seed=seed)
            recipe = Recipe(task=task, controls=controls, target=target, config=config, seed=seed)
        part = Part(place=place, recipe=recipe, n_cells=n_cells)
        if old is not None:
            accept(part, old)
        parts.append(part)
    return parts


def accept(part: Part, population: Population) -> None:
    """Take over a population that was solved, with its pilot."""
    part.population = population
    part.latent |= dict(enumerate(population.pilot[: part.n_wanted]))


def solve(fitted: Fitted, part: Part, shared: Memo[ResponseFactors]) -> Population:
    """Solve the population of a part whose pilot is there.

    Parameters
    ----------
    fitted
        Model.
    part
        Condition.
    shared
        Factors of conditions: nearly all that a plan weighs, and the same for every seed.

    Returns
    -------
    The population.
    """
    pilot = torch.stack([part.latent[number] for number in range(part.n_pilot)])
    pilot, plan = fitted.solve(part.recipe, pilot)
    name = part.recipe.task.condition, part.recipe.task.digest
    factors = shared.get(name)
    if factors is None or not torch.equal(factors.dispersion, plan.factors.dispersion):
        factors = shared.put(name, plan.factors)
    plan = replace(plan, factors=factors)
    return Population(recipe=part.recipe, pilot=pilot, plan=plan)


def draw(fitted: Fitted, part: Part, number: int, *, known: Memo[Draw]) -> Draw:
    """Counts and library sizes of a block of sets.

    Parameters
    ----------
    fitted
        Model.
    part
        Condition; the sets of the block are there.
    number
        Of the block.
    known
        Sets that were drawn before, by key and number.

    Returns
    -------
    Of the cells that are wanted.

    Raises
    ------
    ExpressionError
        When what the network made is not finite.
    """
    sets, size = part.block(number), part.config.set_size
    found = [known.get((part.key, one)) for one in sets]
    drawn = [one for one in found if one is not None]
    if len(drawn) < len(sets):
        counts, sizes = _draw(fitted, part, sets)
        drawn = []
        for place, one in enumerate(sets):
            own = slice(place * size, (place + 1) * size)
            each = counts[own], sizes[own]
            drawn.append(known.put((part.key, one), each, weight=_weight(each)))
    n_left = part.n_cells - sets.start * size
    joined = sp.csr_array(sp.vstack([counts for counts, _ in drawn], format="csr"))
    return joined[:n_left], np.concatenate([sizes for _, sizes in drawn])[:n_left]


def _weight(drawn: Draw) -> int:
    """Bytes that it takes."""
    counts, sizes = drawn
    arrays = (counts.data, counts.indices, counts.indptr, sizes)
    return int(sum(array.nbytes for array in arrays))


def _draw(fitted: Fitted, part: Part, sets: range) -> Draw:
    assert part.population is not None  # a block is ready only then
    latent = torch.stack([part.latent[one] for one in sets])
    return fitted.draw(part.recipe, latent, part.population.plan, first=sets.start)


def assembled(reading: Reading, parts: Sequence[Part], *, nfe: int) -> AnnData:
    """The answer, as the model's own ``predict`` gives it."""
    model, config, seed = reading.model, parts[0].config, parts[0].recipe.seed
    assert isinstance(model, SetDiffusion)  # only its predictions come here
    joined = [[part.drawn[number] for number in range(part.n_blocks)] for part in parts]
    return answer(
        [sp.csr_array(sp.vstack([counts for counts, _ in one], format="csr")) for one in joined],
        [np.concatenate([size for _, size in one]) for one in joined],
        model.registry,
        conditions=reading.conditions,
        set_size=config.set_size,
        provenance={
            **model._made_with(config, seed=seed, nfe=nfe),
            "constraint_violation": 0.0,
            **reading.notes,
        },
    )
