"""The course that candidates run along: denoiser, decoding to genes, and judges.

B candidates, S cells, K latent axes, G genes that the constraints look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._batch import Context, Denoiser
from perturbdiff._constants import DEPTH
from perturbdiff._random import cell_keys, forked_keys
from perturbdiff.config import SampleConfig
from perturbdiff.diffusion import State, karras_schedule, sample
from perturbdiff.diffusion._samplers import network_calls
from perturbdiff.guidance import CellValues, ClassifierFreeGuidance, Enforcement, wrap
from perturbdiff.guidance._bounds import Bounds
from perturbdiff.guidance._logic import Bound
from perturbdiff.guidance._logits import judged
from perturbdiff.guidance._search import Candidates, parted
from perturbdiff.guidance._steering import ProjectionPull, SoftGuidance
from perturbdiff.model._constrained_plan import of_genes
from perturbdiff.model._fitted import Fitted, Recipe
from perturbdiff.model._response import ResponseCells, ResponsePlan

_SETS_AT_ONCE = 64
_REDRAW = 1 << 20  # branches that no search forks


@dataclass(kw_only=True)
class CountSets:
    """Counts calls, and the sets in them, that reach the network."""

    nfe: int = 0
    sets: int = 0

    def __call__(self, denoise: Denoiser) -> Denoiser:
        def counted(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            self.nfe += 1
            self.sets += len(xt)
            return denoise(xt, sigma, context)

        return counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Revealed:
    """What latent values mean, for one batch of candidates and the genes that are looked at."""

    cells: ResponseCells  # flat over candidates
    plan: ResponsePlan
    decoder: Float[Tensor, "genes latent"]
    number: Int[Tensor, "sets cells"]

    def deviation(self, x0: Tensor) -> Tensor:
        """What latent values say of each gene."""
        return (x0 @ self.decoder.to(x0).mT).double()

    def values(self, deviation: Tensor) -> CellValues:
        """Expected values of the cells."""
        flat = replace(self.cells, deviation=deviation.flatten(0, 1).cpu())
        return self.shaped(self.plan.expected_log1p(flat))

    def drawn(self, x0: Tensor) -> CellValues:
        """Values of the counts that would be drawn."""
        flat = replace(self.cells, deviation=self.deviation(x0).flatten(0, 1).cpu())
        size = flat.library_size[:, None] / DEPTH
        return self.shaped(torch.log1p(self.plan.draw(flat) / size))

    def shaped(self, log1p: Tensor) -> CellValues:
        """Flat values by candidate."""
        shape = self.number.shape
        return CellValues(
            log1p=log1p.view(*shape, -1),
            library_size=self.cells.library_size.view(shape),
            number=self.number,
        )


@dataclass(frozen=True, kw_only=True)
class Passing:
    """How the candidates stood at one step."""

    step: int
    sigma: float
    constraint: int
    energy: float
    satisfied: float  # share of sets whose expected values obey
    n_sets: int


@dataclass(kw_only=True, eq=False)
class LatentCourse:
    """Runs candidates of one condition along the schedule.

    Parameters
    ----------
    fitted, recipe, config, plan
        The model, what cells are made from, how to sample, and the plan of the population.
    genes
        Those that constraints look at.
    bounds
        What shall hold, on these genes.
    soft_bounds
        What the soft pull looks at: those with a gradient, with their margins.
    noise
        Variance of each of these genes around what is expected of it.
    ways
        How to enforce.
    """

    fitted: Fitted
    recipe: Recipe
    config: SampleConfig
    plan: ResponsePlan
    genes: Int[Tensor, " genes"]
    bounds: Sequence[Bound]
    soft_bounds: Sequence[Bound]
    noise: Float[Tensor, " genes"]
    ways: Enforcement
    resamples: int = 0
    counter: CountSets = field(default_factory=CountSets)
    passed: list[Passing] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.n_steps = config.n_steps
        self.schedule = karras_schedule(
            config.n_steps, config.sigma_min, config.sigma_max, rho=config.rho
        )
        self.small_plan = of_genes(self.plan, self.genes)
        self.decoder = self.fitted.codec.decoder[self.genes.to(self.fitted.codec.decoder.device)]
        self.lanes = self.fitted.lanes[self.genes]
        guided = ClassifierFreeGuidance(config.guidance_scale)
        self.denoise = wrap(self.fitted.denoiser, self.counter, guided)

    def calls(self, first: int, last: int) -> int:
        """Network calls that the intervals cost a candidate."""
        if last == first:
            return 0
        ends = last == self.n_steps
        whole = network_calls(self.config.sampler, last - first)
        calls = whole if ends or self.config.sampler != "heun" else 2 * (last - first)
        return calls * (1 if self.config.guidance_scale in {0.0, 1.0} else 2)

    @classmethod
    def calls_of(cls, config: SampleConfig) -> int:
        """Network calls of one trajectory."""
        calls = network_calls(config.sampler, config.n_steps)
        return calls * (1 if config.guidance_scale in {0.0, 1.0} else 2)

    def start(self, owners: Sequence[int], copies: int) -> Candidates:
        """Candidates before their first step; the first copy is the unconstrained one."""
        recipe, device = self.recipe, self.fitted.sampler.device
        keys = cell_keys(
            recipe.seed, recipe.task.condition.name, list(owners), n_cells=self.config.set_size
        )
        keys = keys.repeat_interleave(copies, dim=0)
        branch = torch.arange(copies).repeat(len(owners))
        keys = forked_keys(keys, branch[:, None])
        most = len(recipe.task.condition.members)
        context = self.fitted.sampler._context(
            recipe.task, list(owners), self.config, most_members=most
        )
        # what was made under inference cannot be followed by a gradient
        context = context._map(torch.clone).repeat(copies)
        return Candidates(
            state=self._initial(keys.to(device)),
            context=context,
            owner=torch.tensor(list(owners)).repeat_interleave(copies),
            draw_key=keys,
        )

    def _initial(self, keys: Tensor) -> State:
        return State.initial(keys, self.decoder.shape[1], self.config.sigma_max)

    def part(self, candidates: Candidates, branch: Tensor, *, at: int, redraw: bool) -> Candidates:
        """Candidates with fresh noise, except where the branch is 0."""
        levels = None
        if at > 0 and self.config.sampler != "stochastic" and at < self.n_steps:
            levels = float(self.schedule[at - 1]), float(self.schedule[at])
        there = parted(
            candidates, branch.to(candidates.state.key.device), levels=levels, redraw=redraw
        )
        if at == 0:
            initial = self._initial(there.state.key)
            there = replace(there, state=initial)
        return there

    def advance(self, candidates: Candidates, first: int, last: int) -> Candidates:
        """Candidates at step ``first`` taken to step ``last``, in batches."""
        if first == last:
            return candidates
        count = len(candidates.owner)
        parts = [
            self._advance(candidates[start : start + _SETS_AT_ONCE], first, last)
            for start in range(0, count, _SETS_AT_ONCE)
        ]
        return Candidates.join(parts)

    def _advance(self, candidates: Candidates, first: int, last: int) -> Candidates:
        reveal = self.reveal(candidates)
        denoise = self._guided(reveal)
        state = candidates.state
        for step in range(first, last):
            state = self._step(denoise, state, candidates.context, step=step)
            self._note(state, reveal, step + 1)
        return replace(candidates, state=state)

    def _step(self, denoise: Denoiser, state: State, context: Context, *, step: int) -> State:
        """One interval, and again from its start with fresh noise as often as asked."""
        with torch.no_grad():
            levels = self.schedule[step : step + 2]
            for turn in range(self.resamples + 1):
                after = sample(denoise, state, levels, context, sampler=self.config.sampler)
                if turn == self.resamples or step + 1 == self.n_steps:
                    break
                now, following = float(levels[0]), float(levels[1])
                again = replace(
                    state, key=forked_keys(state.key, turn + 1), step=state.step + self.n_steps
                )
                noise = again.noise()
                state = replace(state, x=after.x + (now**2 - following**2) ** 0.5 * noise)
        return after

    def _guided(self, reveal: Revealed) -> Denoiser:
        denoise = self.denoise
        soft = self.ways.soft
        if soft is not None and self.soft_bounds:
            start, stop = (round(share * self.n_steps) for share in soft.window)
            most = float(self.schedule[start]) * (1 + 1e-6)
            least = float(self.schedule[max(stop - 1, start)]) * (1 - 1e-6)
            denoise = SoftGuidance(
                soft=soft, bounds=self.soft_bounds, reveal=reveal, levels=(most, least)
            )(denoise)
        cellwise = [b for b in self.bounds if isinstance(b, Bounds) and b.per == "cell"]
        if self.ways.hard is not None and cellwise:
            denoise = ProjectionPull(bounds=cellwise, reveal=reveal, noise=self.noise)(denoise)
        return denoise

    def reveal(self, candidates: Candidates) -> Revealed:
        """What the latent values of these candidates mean."""
        task, controls, size = self.recipe.task, self.recipe.controls, self.config.set_size
        number = candidates.owner[:, None] * size + torch.arange(size)
        rows = task.partners[number.flatten()]
        cells = ResponseCells.make(
            torch.zeros(len(rows), len(self.genes), dtype=torch.float64),
            controls.counts(rows)[:, self.genes],
            controls.library_size(rows),
            keys=candidates.draw_key.flatten(),
            lanes=self.lanes,
        )
        return Revealed(cells=cells, plan=self.small_plan, decoder=self.decoder, number=number)

    def _note(self, state: State, reveal: Revealed, step: int) -> None:
        """How the estimates stand; ``history`` is the last one."""
        with torch.no_grad():
            cells = reveal.values(reveal.deviation(state.history))
            for number, bound in enumerate(self.bounds):
                self.passed.append(
                    Passing(
                        step=step,
                        sigma=float(self.schedule[step]),
                        constraint=number,
                        energy=float(bound.energy(cells).mean()),
                        satisfied=float(bound.holds(cells).all(-1).double().mean()),
                        n_sets=len(state.x),
                    )
                )

    def promise(self, candidates: Candidates) -> Tensor:
        """Energy of what the candidates are expected to become."""
        with torch.no_grad():
            reveal = self.reveal(candidates)
            return self._energy(reveal.values(reveal.deviation(candidates.state.history)))

    def verdict(self, candidates: Candidates) -> tuple[Candidates, Tensor, Bool[Tensor, " sets"]]:
        """Finished cells with the first draw that obeys, or the least violating one."""
        energy, satisfied = self._judged(candidates)
        for turn in range(1, self.ways.redraws):
            waiting = (~satisfied).nonzero()[:, 0]
            if not len(waiting):
                break
            again = candidates[waiting]
            again = replace(again, draw_key=forked_keys(again.draw_key, _REDRAW + turn))
            found, obeys = self._judged(again)
            better = obeys | (found < energy[waiting])
            rows = waiting[better]
            keys = candidates.draw_key.clone()
            keys[rows] = again.draw_key[better]
            candidates = replace(candidates, draw_key=keys)
            energy[rows], satisfied[rows] = found[better], obeys[better]
        return candidates, energy, satisfied

    def _judged(self, candidates: Candidates) -> tuple[Tensor, Bool[Tensor, " sets"]]:
        """Energy of drawn counts, and whether they obey."""
        with torch.no_grad():
            return judged(self.bounds, self.reveal(candidates).drawn(candidates.state.x))

    def _energy(self, cells: CellValues) -> Tensor:
        return torch.stack([bound.energy(cells) for bound in self.bounds]).sum(0).double()
