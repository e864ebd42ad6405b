"""Step-level batching: sets of many requests share each call of the network.

A set may join or leave between any two steps, since a step is a pure function of where each set
stands. Sets with different conditions, control cells, numbers of steps and guidance share a call;
only the sampler and the number of cells a set must be the same. What a set becomes depends on its
own noise and context alone, so it is what it would have become in a call of its own, up to the
rounding of products of another shape.

B sets, S cells a set, K latent axes.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from perturbdiff._batch import Context, Denoiser
from perturbdiff._errors import ConfigError
from perturbdiff._typing import SamplerName
from perturbdiff.config import SampleConfig
from perturbdiff.diffusion import SAMPLERS, State, karras_schedule
from perturbdiff.model._sampling import SETS_AT_ONCE, LatentSampler, LatentTask

_Lane = tuple[SamplerName, int, int]  # sampler, cells a set, order where one must be alone


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A set that reached the end of its schedule."""

    order: int
    task: int  # its place among the tasks of the order
    number: int  # of the set
    latent: Float[Tensor, "cells latent"]
    calls: int  # of the network that the order took part in until now


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the denoiser now thinks of the cells of an order: a summary of ``x0_hat``."""

    order: int
    done: int  # steps of sets
    of: int
    spread: Float[Tensor, " latent"]  # standard deviation over cells, along each response axis
    moved: float | None  # root mean square change of x0_hat since the step before


@dataclass(kw_only=True)
class Turn:
    """What a step brought."""

    finished: list[Finished] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)  # by order; the order is gone


@dataclass(kw_only=True, eq=False)
class _Order:
    """Sets that somebody wants."""

    number: int
    tasks: Sequence[LatentTask]
    config: SampleConfig
    seed: int
    watched: bool
    schedule: Tensor
    waiting: deque[tuple[int, int]]  # task, set
    n_sets: int
    running: int = 0
    steps_done: int = 0
    calls: int = 0
    alone: bool = False

    @property
    def lane(self) -> _Lane:
        return self.config.sampler, self.config.set_size, self.number if self.alone else 0

    @property
    def n_steps(self) -> int:
        return len(self.schedule) - 1


@dataclass(kw_only=True)
class _Row:
    """A set in the making."""

    order: _Order
    task: int
    number: int
    step: int = 0


@dataclass(kw_only=True)
class _Batch:
    """Sets that share calls."""

    rows: list[_Row]
    state: State
    context: Context
    scale: Tensor  # guidance of each set

    def kept(self, index: Tensor) -> "_Batch":
        return _Batch(
            rows=[self.rows[place] for place in index.tolist()],
            state=self.state[index],
            context=self.context[index],
            scale=self.scale[index],
        )

    def joined(self, other: "_Batch") -> "_Batch":
        most = max(self.context.members.shape[1], other.context.members.shape[1])
        contexts = [_padded(one.context, most) for one in (self, other)]
        return _Batch(
            rows=[*self.rows, *other.rows],
            state=State.join([self.state, other.state]),
            context=Context.join(contexts),
            scale=torch.cat([self.scale, other.scale]),
        )


@dataclass(kw_only=True)
class Tally:
    """What the engine did so far."""

    calls: int = 0  # of the network
    fill: list[int] = field(default_factory=list)  # sets in each call since it was last read


class StepBatch:
    """Denoises the sets of many orders, one step of one shared batch at a time.

    Parameters
    ----------
    sampler
        Of a fitted model; its weights, its codes, its encoded control cells.
    n_sets
        Most sets in a batch. An order that has nothing in the batch joins beyond it, with its fair
        share, so that a small one never waits for the last set of a large one.
    """

    def __init__(self, sampler: LatentSampler, *, n_sets: int = SETS_AT_ONCE) -> None:
        if n_sets < 1:
            raise ConfigError("serve.n_sets", n_sets, rule="must be at least 1")
        self.sampler, self.n_sets, self.tally = sampler, n_sets, Tally()
        self._orders: OrderedDict[int, _Order] = OrderedDict()
        self._lanes: OrderedDict[_Lane, _Batch] = OrderedDict()
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._orders

    @property
    def set_steps_left(self) -> int:
        """Steps of sets until everything that was ordered is done."""
        return sum(o.n_sets * o.n_steps - o.steps_done for o in self._orders.values())

    def submit(
        self,
        tasks: Sequence[LatentTask],
        sets: Sequence[Sequence[int]],
        config: SampleConfig,
        *,
        seed: int,
        watched: bool = False,
    ) -> int:
        """Order some sets of some conditions.

        Parameters
        ----------
        tasks
            Conditions.
        sets
            Numbers of the sets wanted of each.
        config
            Sampler, schedule, guidance.
        seed
            Seed of all noise.
        watched
            Whether to say after each step what the denoiser thinks of the cells.

        Returns
        -------
        Number of the order; one of no sets is done already.
        """
        self._count += 1
        wanted = deque((task, number) for task, numbers in enumerate(sets) for number in numbers)
        if wanted:
            self._orders[self._count] = _Order(
                number=self._count, tasks=tasks, config=config, seed=seed, watched=watched,
                schedule=karras_schedule(
                    config.n_steps, config.sigma_min, config.sigma_max, rho=config.rho
                ),
                waiting=wanted, n_sets=len(wanted),
            )  # fmt: skip
        return self._count

    def cancel(self, order: int) -> None:
        """Drop an order; its sets leave the batch before the next step."""
        if self._orders.pop(order, None) is None:
            return
        for lane, batch in list(self._lanes.items()):
            kept = [place for place, row in enumerate(batch.rows) if row.order.number != order]
            self._keep(lane, batch, kept)

    @torch.inference_mode()
    def step(self) -> Turn:
        """Let sets join, take those of one batch a step further, and hand over what is done.

        Returns
        -------
        What finished, what is thought of the cells of watched orders, and what failed. An error
        in a shared call fails nobody at once: since a step changes nothing before it is done, the
        orders go on apart from each other, and only one that fails alone has failed.
        """
        turn = Turn()
        self._admit(turn)
        if not self._lanes:
            return turn
        lane, batch = next(iter(self._lanes.items()))
        self._lanes.move_to_end(lane)  # batches take turns
        try:
            state = self._advanced(lane, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, only its cause shall suffer
            self._part(lane, batch, turn=turn, error=error)
            return turn
        before, batch.state = batch.state, state
        for row in batch.rows:
            row.step += 1
            row.order.steps_done += 1
        turn.seen = [_summary(order, batch, before) for order in _orders_of(batch) if order.watched]
        self._collect(lane, batch, turn)
        return turn

    def _advanced(self, lane: _Lane, batch: _Batch) -> State:
        device = self.sampler.device
        now, following = (
            torch.stack([row.order.schedule[row.step + more] for row in batch.rows]).to(device)
            for more in (0, 1)
        )
        return SAMPLERS[lane[0]](self._guided(batch), batch.state, now, following, batch.context)

    def _part(self, lane: _Lane, batch: _Batch, *, turn: Turn, error: Exception) -> None:
        """Let the orders of a batch go on by themselves, or give up the only one."""
        orders = _orders_of(batch)
        if len(orders) == 1:
            self.cancel(orders[0].number)
            turn.failed[orders[0].number] = error
            return
        del self._lanes[lane]
        for order in orders:
            order.alone = True
            own = [place for place, row in enumerate(batch.rows) if row.order is order]
            self._lanes[order.lane] = batch.kept(torch.tensor(own, device=self.sampler.device))

    def _guided(self, batch: _Batch) -> Denoiser:
        """The network, with each set's own guidance in the very same call."""
        orders, scale_B = _orders_of(batch), batch.scale
        free_B, told_B = scale_B != 1, scale_B != 0  # which sets need which answer
        plain = not bool(free_B.any())
        told, free = told_B.nonzero()[:, 0], free_B.nonzero()[:, 0]

        def denoise(xt: Tensor, sigma: Tensor, context: Context) -> Tensor:
            self.tally.calls += 1
            self.tally.fill.append(len(xt))
            for order in orders:
                order.calls += 1
            if plain:
                plain_out: Tensor = self.sampler.denoiser(xt, sigma, context)
                return plain_out
            rows = torch.cat([told, free])
            both = context[rows]
            both = replace(both, conditional=both.conditional & (torch.arange(
                len(rows), device=rows.device) < len(told)))  # fmt: skip
            out = self.sampler.denoiser(xt[rows], sigma[rows], both)
            conditional, unconditional = torch.zeros_like(xt), torch.zeros_like(xt)
            conditional[told], unconditional[free] = out[: len(told)], out[len(told) :]
            scale = scale_B[:, None, None]
            guided = unconditional + scale * (conditional - unconditional)
            return torch.where(free_B[:, None, None], guided, conditional)

        return denoise

    def _admit(self, turn: Turn) -> None:
        """Fill the batch: orders take turns, and a newcomer gets its share at once."""
        chosen: list[tuple[_Order, int, int]] = []
        for order in self._turns():
            task, number = order.waiting.popleft()
            order.running += 1
            chosen.append((order, task, number))
        groups: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        for order, task, number in chosen:
            groups.setdefault((order.number, task), []).append(number)
        for (number, task), sets in groups.items():
            if number not in self._orders:
                continue
            order = self._orders[number]
            try:
                fresh = self._begun(order, task, sets)
            except Exception as error:  # noqa: BLE001 - the order of this condition fails, no other
                self.cancel(number)
                turn.failed[number] = error
                continue
            there = self._lanes.get(order.lane)
            self._lanes[order.lane] = fresh if there is None else there.joined(fresh)

    def _turns(self) -> Iterator[_Order]:
        """Whose set joins next, until there is no more room."""
        running = sum(order.running for order in self._orders.values())
        share = max(1, self.n_sets // max(1, len(self._orders)))
        moved = True
        while moved:
            moved = False
            for order in list(self._orders.values()):
                room = running < self.n_sets or (
                    order.running < share and running < 2 * self.n_sets
                )
                if order.waiting and room:
                    yield order
                    running, moved = running + 1, True

    def _begun(self, order: _Order, task: int, sets: list[int]) -> _Batch:
        """Some sets before their first step."""
        one, config, device = order.tasks[task], order.config, self.sampler.device
        context = self.sampler._context(one, sets, config, most_members=len(one.condition.members))
        keys = one.keys(sets, config, order.seed).to(device)
        return _Batch(
            rows=[_Row(order=order, task=task, number=number) for number in sets],
            state=State.initial(keys, context.shift.shape[-1], config.sigma_max),
            context=context,
            scale=torch.full((len(sets),), config.guidance_scale, device=device),
        )

    def _collect(self, lane: _Lane, batch: _Batch, turn: Turn) -> None:
        kept = []
        for place, row in enumerate(batch.rows):
            if row.step < row.order.n_steps:
                kept.append(place)
                continue
            order = row.order
            turn.finished.append(
                Finished(
                    order=order.number, task=row.task, number=row.number,
                    latent=batch.state.x[place].clone(), calls=order.calls,
                )
            )  # fmt: skip
            order.running -= 1
            if not order.running and not order.waiting:
                del self._orders[order.number]
        self._keep(lane, batch, kept)

    def _keep(self, lane: _Lane, batch: _Batch, kept: list[int]) -> None:
        if not kept:
            del self._lanes[lane]
        elif len(kept) < len(batch.rows):
            index = torch.tensor(kept, device=self.sampler.device)
            self._lanes[lane] = batch.kept(index)


def _orders_of(batch: _Batch) -> list[_Order]:
    return list({row.order.number: row.order for row in batch.rows}.values())


def _summary(order: _Order, batch: _Batch, before: State) -> Seen:
    """What is seen of one order in the batch."""
    own = [place for place, row in enumerate(batch.rows) if row.order is order]
    x0_hat = batch.state.history[own]
    known = bool((before.history_sigma[own] > 0).all())
    change = (x0_hat - before.history[own]).square().mean().sqrt()
    return Seen(
        order=order.number,
        done=order.steps_done,
        of=order.n_sets * order.n_steps,
        spread=x0_hat.flatten(0, 1).std(0, correction=0).cpu(),
        moved=float(change) if known else None,
    )


def _padded(context: Context, n_members: int) -> Context:
    """The context with room for so many members of a combination."""
    more = n_members - context.members.shape[1]
    return replace(context, members=pad(context.members, (0, more))) if more else context
