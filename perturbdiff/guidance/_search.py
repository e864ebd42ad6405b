"""Search for sets of cells that obey: best of n, branching, particles, depth first.

A search sees candidates only through a course, which takes them along the schedule and judges
them; every wanted set is searched by itself, so what else is asked stays invisible.
B candidates, W wanted sets.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbdiff._batch import Context, Sets
from perturbdiff._random import forked_keys, stream_key, uniform
from perturbdiff.diffusion import State
from perturbdiff.guidance._enforcement import BestOf, Branch, DepthFirst, Particles, Search


@dataclass(frozen=True, kw_only=True)
class Candidates(Sets):
    """Sets on their way, each for one wanted set."""

    state: State
    context: Context
    owner: Int[Tensor, " sets"]  # which wanted set, by number within the condition
    draw_key: Int[Tensor, "sets cells"]  # of the random numbers that counts are made from
    partner: Int[Tensor, "sets cells"]  # control cell that each cell is made from


@runtime_checkable
class Course(Protocol):
    """Takes candidates along a schedule of ``n_steps`` intervals, and judges them."""

    n_steps: int

    def start(self, owners: Sequence[int], copies: int) -> Candidates:
        """Candidates before their first step, copies next to each other."""
        ...

    def advance(self, candidates: Candidates, first: int, last: int) -> Candidates:
        """Candidates at step ``first`` taken to step ``last``."""
        ...

    def part(
        self, candidates: Candidates, branch: Int[Tensor, " sets"], *, at: int, redraw: bool
    ) -> Candidates:
        """Candidates with fresh noise, except where the branch is 0.

        With ``redraw`` their counts are drawn afresh too, and from other control cells.
        """
        ...

    def promise(self, candidates: Candidates) -> Float[Tensor, " sets"]:
        """Energy of what the candidates are expected to become."""
        ...

    def verdict(
        self, candidates: Candidates
    ) -> tuple[Candidates, Float[Tensor, " sets"], Bool[Tensor, " sets"]]:
        """Finished cells with the best of their draws, their energy, and whether they obey."""
        ...

    def calls(self, first: int, last: int) -> int:
        """Network calls that the intervals cost a candidate."""
        ...


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stretch of one candidate's way: the tree of a search, and where the calls went."""

    owner: int
    node: int
    parent: int  # -1 at the root
    first: int
    last: int
    calls: int
    energy: float
    satisfied: bool
    kept: bool = False


@dataclass(kw_only=True)
class Found:
    """One candidate for each wanted set, and how it was found."""

    kept: Candidates
    tree: list[Node] = field(default_factory=list)
    effective: list[float] = field(default_factory=list)  # sample size of particles, by step


def search(way: Search, course: Course, owners: Sequence[int], *, seed: int) -> Found:
    """Look for sets that obey.

    Parameters
    ----------
    way
        Which search.
    course
        What candidates run along.
    owners
        Numbers of the wanted sets.
    seed
        Seed of resampling.

    Returns
    -------
    One candidate a set: the first that obeys, else the one with least energy.
    """
    if isinstance(way, BestOf):
        return _branched(course, owners, k=way.n, share=0)
    if isinstance(way, Branch):
        return _branched(course, owners, k=way.k, share=min(way.share, course.n_steps))
    if isinstance(way, Particles):
        return _particles(way, course, owners, seed=seed)
    return _depth_first(way, course, owners)


def _chosen(energy: Tensor, satisfied: Tensor, n_each: int) -> Int[Tensor, " wanted"]:
    """The first that obeys, as rejection sampling would; else the least violating."""
    rank = torch.where(satisfied, -1.0, energy.double()).view(-1, n_each)
    best = rank.argmin(1)  # the first of equals
    return torch.arange(len(rank)) * n_each + best


def _branched(course: Course, owners: Sequence[int], *, k: int, share: int) -> Found:
    n = course.n_steps
    tree: list[Node] = []
    if share == 0:
        candidates = course.start(owners, k)
        parents = [-1] * len(candidates.owner)
    else:
        trunk = course.advance(course.start(owners, 1), 0, share)
        promise = course.promise(trunk).tolist()
        for number, owner in enumerate(owners):
            tree.append(
                Node(
                    owner=owner, node=0, parent=-1, first=0, last=share,
                    calls=course.calls(0, share), energy=promise[number], satisfied=False,
                    kept=True,
                )
            )  # fmt: skip
        branch = torch.arange(k).repeat(len(owners))
        candidates = course.part(trunk.repeat(k), branch, at=share, redraw=True)
        parents = [0] * len(candidates.owner)
    candidates = course.advance(candidates, share, n)
    candidates, energy, satisfied = course.verdict(candidates)
    index = _chosen(energy, satisfied, k)
    kept = set(index.tolist())
    for place, owner in enumerate(candidates.owner.tolist()):
        tree.append(
            Node(
                owner=owner, node=place % k + (share > 0), parent=parents[place], first=share,
                last=n, calls=course.calls(share, n), energy=float(energy[place]),
                satisfied=bool(satisfied[place]), kept=place in kept,
            )
        )  # fmt: skip
    return Found(kept=candidates[index], tree=tree)


def _particles(way: Particles, course: Course, owners: Sequence[int], *, seed: int) -> Found:
    """Feynman-Kac steering with difference potentials: Singhal et al. (2025), section 3."""
    n, count = way.n, len(owners)
    candidates = course.start(owners, n)
    log_weight = torch.zeros(count, n, dtype=torch.float64)
    before = torch.zeros(count, n, dtype=torch.float64)
    line = torch.full((count, n), -1, dtype=torch.int64)  # node of each particle's last stretch
    tree: list[Node] = []
    effective: list[float] = []
    for step in range(course.n_steps):
        candidates = course.advance(candidates, step, step + 1)
        last = step + 1 == course.n_steps
        satisfied = torch.zeros(count * n, dtype=torch.bool)
        if last:
            candidates, energy, satisfied = course.verdict(candidates)
        else:
            energy = course.promise(candidates)
        energy = energy.double().view(count, n)
        log_weight = log_weight - (energy - before) / way.temperature
        for place, owner in enumerate(owners):
            for particle in range(n):
                node = step * n + particle
                tree.append(
                    Node(
                        owner=owner, node=node, parent=int(line[place, particle]), first=step,
                        last=step + 1, calls=course.calls(step, step + 1),
                        energy=float(energy[place, particle]),
                        satisfied=bool(satisfied[place * n + particle]),
                    )
                )  # fmt: skip
                line[place, particle] = node
        weight = log_weight.softmax(1)
        size = 1 / weight.square().sum(1)
        effective.append(float(size.mean()))
        before = energy
        if last:
            break
        tired = size < way.resample_below * n
        pick = _resampled(weight, owners, seed=seed, step=step)
        pick = torch.where(tired[:, None], pick, torch.arange(n))
        rows = (torch.arange(count)[:, None] * n + pick).flatten()
        copies = _copy_number(pick)
        branch = torch.where(copies > 0, copies + n * (step + 1), 0).flatten()
        candidates = course.part(candidates[rows], branch, at=step + 1, redraw=False)
        log_weight = torch.where(tired[:, None], 0.0, log_weight)
        before, line = before.gather(1, pick), line.gather(1, pick)
    energy_B = before.flatten()
    index = _chosen(energy_B, satisfied, n)
    ends = {(int(candidates.owner[i]), int(line.flatten()[i])) for i in index.tolist()}
    tree = [replace(node, kept=(node.owner, node.node) in ends) for node in tree]
    return Found(kept=candidates[index], tree=tree, effective=effective)


def _resampled(weight: Tensor, owners: Sequence[int], *, seed: int, step: int) -> Tensor:
    """Systematic resampling of each set's particles, with numbers of the set's own."""
    keys = torch.tensor([stream_key(seed, "particles", owner) for owner in owners])
    start = uniform(keys, torch.zeros(1, dtype=torch.int64), step=step)
    n = weight.shape[1]
    points = (torch.arange(n, dtype=torch.float64) + start) / n
    return torch.searchsorted(weight.cumsum(1).contiguous(), points).clamp_max(n - 1)


def _copy_number(pick: Tensor) -> Tensor:
    """0 for the first copy of a particle, and then on."""
    same = pick[:, :, None] == pick[:, None, :]
    return torch.tril(same, diagonal=-1).sum(2)


Stretch = tuple[Candidates, int, int]  # to be taken from one step to another
Outcome = tuple[Candidates, float, bool]  # where it got, its energy, whether it obeys


def _depth_first(way: DepthFirst, course: Course, owners: Sequence[int]) -> Found:
    """Every set has a search of its own; stretches that they wait for are run together."""
    searches = [_DepthFirst(way, course, owner) for owner in owners]
    running = {number: one.stretches() for number, one in enumerate(searches)}
    waiting = {number: next(way) for number, way in running.items()}
    while waiting:
        ends = {(first, last) for _, first, last in waiting.values()}
        for first, last in sorted(ends):
            numbers = [n for n, stretch in waiting.items() if stretch[1:] == (first, last)]
            outcomes = _run_together(course, [waiting[n] for n in numbers])
            for number, outcome in zip(numbers, outcomes, strict=True):
                try:
                    waiting[number] = running[number].send(outcome)
                except StopIteration:
                    del waiting[number]
    found = [one.found() for one in searches]
    return Found(
        kept=Candidates.join([each.kept for each in found]),
        tree=[node for each in found for node in each.tree],
    )


def _run_together(course: Course, stretches: Sequence[Stretch]) -> list[Outcome]:
    _, first, last = stretches[0]
    there = course.advance(Candidates.join([one for one, _, _ in stretches]), first, last)
    satisfied = torch.zeros(len(there.owner), dtype=torch.bool)
    if last == course.n_steps:
        there, energy, satisfied = course.verdict(there)
    else:
        energy = course.promise(there)
    return [(there[i : i + 1], float(energy[i]), bool(satisfied[i])) for i in range(len(stretches))]


class _DepthFirst:
    """Search of one wanted set: asks for stretches to be run, and is told what came of them."""

    def __init__(self, way: DepthFirst, course: Course, owner: int) -> None:
        self.way, self.course, self.owner = way, course, owner
        levels = min(way.levels, course.n_steps)
        self.edges = [round(course.n_steps * i / levels) for i in range(levels + 1)]
        self.left = way.budget
        self.tree: list[Node] = []
        self.best: tuple[tuple[bool, float], Candidates, int] | None = None
        self.seen = [float("inf")] * (levels + 1)
        self.forks = 0

    def stretches(self) -> Generator[Stretch, Outcome, None]:
        """What is to be run, one after another."""
        yield from self._visit(self.course.start([self.owner], 1), 0, parent=-1)

    def found(self) -> Found:
        """The best that was reached."""
        assert self.best is not None  # one trajectory is always finished
        _, kept, number = self.best
        tree = [replace(node, kept=node.node == number) for node in self.tree]
        return Found(kept=kept, tree=tree)

    def _visit(
        self, here: Candidates, depth: int, *, parent: int
    ) -> Generator[Stretch, Outcome, bool]:
        """Whether an obeying set was found below."""
        waiting: list[tuple[float, int, Candidates]] = []
        for child in range(self.way.width):
            if not self._affordable(depth):
                break
            energy, number, there = yield from self._step(here, depth, child=child, parent=parent)
            if depth + 2 == len(self.edges):
                if self.tree[number].satisfied:
                    return True
            elif energy <= self.seen[depth]:
                self.seen[depth] = energy
                if (yield from self._visit(there, depth + 1, parent=number)):
                    return True
            else:
                waiting.append((energy, number, there))
        for _, number, there in sorted(waiting, key=lambda item: item[:2]):
            if not self._affordable(depth + 1):
                continue
            if (yield from self._visit(there, depth + 1, parent=number)):
                return True
        return False

    def _affordable(self, depth: int) -> bool:
        """Whether the next stretch fits; the first trajectory always does."""
        first, last = self.edges[depth], self.edges[depth + 1]
        if self.best is None:
            on_the_way = not any(node.first == first for node in self.tree)
            return on_the_way or self.left >= self.course.calls(first, self.course.n_steps)
        return self.left >= self.course.calls(first, last)

    def _step(
        self, here: Candidates, depth: int, *, child: int, parent: int
    ) -> Generator[Stretch, Outcome, tuple[float, int, Candidates]]:
        first, last = self.edges[depth], self.edges[depth + 1]
        if child:
            self.forks += 1
            here = self.course.part(here, torch.tensor([self.forks]), at=first, redraw=True)
        there, energy, satisfied = yield here, first, last
        self.left -= self.course.calls(first, last)
        ended = last == self.course.n_steps
        number = len(self.tree)
        self.tree.append(
            Node(
                owner=self.owner, node=number, parent=parent, first=first, last=last,
                calls=self.course.calls(first, last), energy=energy, satisfied=satisfied,
            )
        )  # fmt: skip
        if ended:
            rank = (not satisfied, energy)
            if self.best is None or rank < self.best[0]:
                self.best = rank, there, number
        return energy, number, there


def parted(
    candidates: Candidates,
    branch: Int[Tensor, " sets"],
    *,
    levels: tuple[float, float] | None,
    redraw: bool,
) -> Candidates:
    """Candidates whose branch is not 0, with keys of their own and fresh noise.

    Parameters
    ----------
    candidates
        Copies that shall part.
    branch
        0 for the trajectory itself.
    levels
        Noise level of the step before and of now, for samplers that draw no noise: the noise in x
        is exchanged as the reverse diffusion would over this interval (``1 - (now / before)²`` of
        its variance is fresh). ``None`` leaves x as it is, since the sampler draws noise.
    redraw
        Give counts random numbers of their own too.

    Returns
    -------
    The parted candidates.
    """
    state = candidates.state
    keys = forked_keys(state.key, branch[:, None])
    fresh = replace(state, key=keys)
    if levels is not None:
        before, now = levels
        kept = now / before
        clean = state.history
        noise = kept * (state.x - clean) / now + (1 - kept**2) ** 0.5 * fresh.noise()
        x = torch.where((branch == 0)[:, None, None], state.x, clean + now * noise)
        fresh = replace(fresh, x=x.to(state.x.dtype))
    draws = forked_keys(candidates.draw_key, branch[:, None]) if redraw else candidates.draw_key
    return replace(candidates, state=fresh, draw_key=draws)
