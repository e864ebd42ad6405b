"""The course that candidates run along: denoiser, decoding to genes, and judges.

B candidates, S cells, K latent axes, G genes that the constraints look at.
"""

from collections.abc import Callable, Sequence
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
from perturbdiff.model._questions import forked_partners
from perturbdiff.model._response import ResponseCells, ResponsePlan

_SETS_AT_ONCE = 64
_DRAWS_AT_ONCE = 256  # sets whose counts are drawn together
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
    free_partners: bool = True  # whether candidates may be made from other control cells
    counter: CountSets = field(default_factory=CountSets)
    passed: list[Passing] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.n_steps = config.n_steps
        self.schedule = karras_schedule(
            config.n_steps, config.sigma_min, config.sigma_max, rho=config.rho
        )
        every = torch.arange(len(self.recipe.controls))
        self.own_counts = self.recipe.controls.counts(every)[:, self.genes]
        self.own_size = self.recipe.controls.library_size(every)
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
        owner = torch.tensor(list(owners)).repeat_interleave(copies)
        number = owner[:, None] * self.config.set_size + torch.arange(self.config.set_size)
        first = Candidates(
            state=self._initial(keys.to(device)),
            context=context,
            owner=owner,
            draw_key=keys,
            partner=recipe.task.partners[number],
        )
        return self._anew(first, branch > 0, torch.zeros_like(first.state.x))

    def _anew(
        self, candidates: Candidates, anew: Bool[Tensor, " sets"], estimate: Tensor
    ) -> Candidates:
        """Some of the candidates made from control cells that are drawn anew.

        Most of what tells one set from another is which control cells it is made from, and what
        counts are drawn: draws are looked at before the network is called, and the first that
        would obey if the estimate came true is taken, or the least violating one.
        """
        rows = anew.nonzero()[:, 0]
        if not self.free_partners or not len(rows):
            return candidates
        n_controls = len(self.recipe.controls)
        kept = candidates[rows]
        kept = replace(kept, partner=forked_partners(kept.draw_key, n_controls))

        def draw(places: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
            keys = forked_keys(kept.draw_key[places], _REDRAW + turns)
            return keys, forked_partners(keys, n_controls)

        kept, _, _ = self._best_draws(kept, estimate[rows], draw)
        partner, keys = candidates.partner.clone(), candidates.draw_key.clone()
        partner[rows], keys[rows] = kept.partner, kept.draw_key
        along = self.recipe.task.control[partner].to(candidates.context.partner.device)
        context = replace(candidates.context, partner=along)
        return replace(candidates, partner=partner, draw_key=keys, context=context)

    def _best_draws(
        self,
        candidates: Candidates,
        x0: Tensor,
        draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Candidates, Tensor, Bool[Tensor, " sets"]]:
        """The first draw of each that obeys, else the least violating; energy; whether it obeys.

        ``draw`` gives keys and control cells of further draws: of which candidates, which draws.
        """
        owner, keys, partner = candidates.owner, candidates.draw_key, candidates.partner
        keys, partner, turn = keys.clone(), partner.clone(), 1
        energy, satisfied = self._judged(owner, partner, keys, x0=x0)
        while turn < self.ways.redraws and len(waiting := (~satisfied).nonzero()[:, 0]):
            count = len(waiting)
            block = min(self.ways.redraws - turn, max(_DRAWS_AT_ONCE // count, 1))
            places = waiting.repeat(block)
            turns = torch.arange(turn, turn + block).repeat_interleave(count)
            new_keys, new_partner = draw(places, turns[:, None])
            found, obeys = self._judged(owner[places], new_partner, new_keys, x0=x0[places])
            rank = torch.where(obeys, -1.0, found).view(block, count)
            pick = rank.argmin(0) * count + torch.arange(count)  # the first of equals
            better = obeys[pick] | (found[pick] < energy[waiting])
            rows, pick = waiting[better], pick[better]
            keys[rows], partner[rows] = new_keys[pick], new_partner[pick]
            energy[rows], satisfied[rows] = found[pick], obeys[pick]
            turn += block
        return replace(candidates, draw_key=keys, partner=partner), energy, satisfied

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
        if not redraw:
            return there
        nothing = torch.zeros_like(there.state.x)
        return self._anew(there, branch != 0, there.state.history if at > 0 else nothing)

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
        return self._revealed(candidates.owner, candidates.partner, candidates.draw_key)

    def _revealed(self, owner: Tensor, partner: Tensor, keys: Tensor) -> Revealed:
        size, rows = self.config.set_size, partner.flatten()
        cells = ResponseCells.make(
            torch.zeros(len(rows), len(self.genes), dtype=torch.float64),
            self.own_counts[rows],
            self.own_size[rows],
            keys=keys.flatten(),
            lanes=self.lanes,
        )
        number = owner[:, None] * size + torch.arange(size)
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
        """Energy of the counts that would be drawn were the denoised estimate the last.

        They are drawn by the numbers that the counts will be drawn by in the end.
        """
        owner, partner, keys = candidates.owner, candidates.partner, candidates.draw_key
        return self._judged(owner, partner, keys, x0=candidates.state.history)[0]

    def verdict(self, candidates: Candidates) -> tuple[Candidates, Tensor, Bool[Tensor, " sets"]]:
        """Finished cells with the first draw that obeys, or the least violating one."""
        own = candidates.state.key.to(candidates.draw_key.device)

        def draw(places: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
            return forked_keys(own[places], 2 * _REDRAW + turns), candidates.partner[places]

        return self._best_draws(candidates, candidates.state.x, draw)

    def _judged(
        self, owner: Tensor, partner: Tensor, keys: Tensor, *, x0: Tensor
    ) -> tuple[Tensor, Bool[Tensor, " sets"]]:
        """Energy of the counts that these latent values would give, and whether they obey."""
        with torch.no_grad():
            return judged(self.bounds, self._revealed(owner, partner, keys).drawn(x0))
