"""Predictions that share denoising batches: from a reading to the bytes of an answer."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from anndata import AnnData

from perturbdiff.config import SampleConfig
from perturbdiff.model import SetDiffusion
from perturbdiff.serve._desk import Desk
from perturbdiff.serve._engine import Finished, Seen, StepBatch
from perturbdiff.serve._formats import MEDIA, WRITERS, check_finite, dumps
from perturbdiff.serve._jobs import Job, Meters, Reply
from perturbdiff.serve._memo import Memo
from perturbdiff.serve._pace import Pace, Size
from perturbdiff.serve._prediction import (
    Draw,
    Part,
    PlanKey,
    Population,
    accept,
    assembled,
    begin,
    draw,
    solve,
)

if TYPE_CHECKING:
    from perturbdiff.prior._factors import ResponseFactors

_KEPT = 5  # digits of a summary
_CONDITIONS = 64  # whose factors are shared between seeds


class Flow:
    """Takes predictions through denoising, solving, drawing and writing.

    Only one thread calls it; what takes long is done at the desk. Two predictions that need the
    same population solve it once.

    Parameters
    ----------
    model
        Model.
    desk
        Threads for everything but denoising.
    say
        Called with every reply.
    fail
        Called with a job and what it failed of.
    """

    def __init__(
        self,
        model: SetDiffusion,
        desk: Desk,
        *,
        say: Callable[[Reply], None],
        fail: Callable[[Job, BaseException], None],
        n_sets: int,
        n_plans: int,
        drawn_mb: float,
    ) -> None:
        self.fitted, self.desk, self._say, self._fail = model.fitted, desk, say, fail
        self.engine = StepBatch(model.fitted.sampler, n_sets=n_sets)
        self.plans: Memo[Population] = Memo(n_plans)
        self._factors: Memo[ResponseFactors] = Memo(_CONDITIONS)
        self.cells: Memo[Draw] = Memo(int(drawn_mb * 1e6))
        self._solving: dict[PlanKey, list[tuple[Job, Part]]] = {}  # who solves it is the first
        self._orders: dict[int, tuple[Job, list[Part]]] = {}

    def size(self, job: Job, config: SampleConfig) -> Size:
        """How much a request asks for."""
        reading, seed = job.reading, job.request.seed
        assert reading is not None  # it was read
        asked = zip(reading.conditions, reading.controls, strict=True)
        keys: list[PlanKey] = [(c, own.digest, seed, config) for c, own in asked]
        n_sets = -(-job.request.n_cells // config.set_size)
        drawn = [(key, one) in self.cells for key in keys for one in range(n_sets)]
        return Size(
            n_conditions=len(reading.conditions),
            n_cells=job.request.n_cells,
            n_solves=sum(key not in self.plans for key in keys),
            n_drawn=sum(drawn) * config.set_size,
            n_genes=len(reading.model.registry.genes),
            config=config,
        )

    def start(self, job: Job, config: SampleConfig) -> None:
        """Begin a prediction that was read."""
        job.begun = perf_counter()
        assert job.reading is not None  # it was read
        work = partial(
            begin, self.fitted, job.reading, self.plans.get,
            n_cells=job.request.n_cells, config=config, seed=job.request.seed,
        )  # fmt: skip
        self.desk.put(job.uid, work, then=partial(self._ordered, job), kind="begin")

    def _ordered(self, job: Job, parts: list[Part]) -> None:
        """Order the sets that are missing, and draw what is there."""
        job.parts = parts
        wanted: list[list[int]] = []
        for part in parts:
            population = part.population or self.plans.get(part.key)
            if population is not None:
                accept(part, population)
                wanted.append(list(part.sets(pilot=False)))
                continue
            waiting = self._solving.setdefault(part.key, [])
            waiting.append((job, part))
            # Who solves it makes its pilot first, and the others while it is being solved.
            part.holds_back = len(waiting) == 1
            wanted.append(list(range(part.n_pilot) if part.holds_back else part.sets(pilot=False)))
        n_sets = sum(map(len, wanted))
        n_sets += sum(len(part.sets(pilot=False)) for part in parts if part.holds_back)
        job.steps_of = n_sets * parts[0].config.n_steps
        self._order(job, parts, wanted)
        for part in parts:
            self._draw(job, part)

    def _order(self, job: Job, parts: list[Part], wanted: list[list[int]]) -> None:
        if not any(wanted):
            return
        order = self.engine.submit(
            [part.recipe.task for part in parts], wanted, parts[0].config,
            seed=job.request.seed, watched=job.watched,
        )  # fmt: skip
        self._orders[order] = job, parts

    def step(self, meters: Meters, pace: Pace) -> None:
        """One step of the shared batch."""
        started = perf_counter()
        turn = self.engine.step()
        fill, self.engine.tally.fill = self.engine.tally.fill, []
        pace.note("set_step", perf_counter() - started, sum(fill))
        meters.calls(fill)
        for order, error in turn.failed.items():
            job, _ = self._orders.pop(order)
            self._fail(job, error)
        for finished in turn.finished:
            self._finished(finished, meters)
        for seen in turn.seen:
            self._seen(seen)

    def _finished(self, finished: Finished, meters: Meters) -> None:
        if finished.order not in self._orders:
            return
        job, parts = self._orders[finished.order]
        part = parts[finished.task]
        part.latent[finished.number] = finished.latent
        job.nfe[finished.order] = finished.calls
        if part.population is not None:
            self._draw(job, part)
        elif self._solving[part.key][0][1] is part and part.has_pilot and not part.solving:
            part.solving = True
            if part.holds_back:
                self._order(job, [part], [list(part.sets(pilot=False))])
            work = partial(solve, self.fitted, part, self._factors)
            self.desk.put(job.uid, work, then=partial(self._solved, part), kind="solve")
            meters.phase("denoise", perf_counter() - job.begun)

    def _solved(self, part: Part, population: Population) -> None:
        self.plans.put(part.key, population)
        for job, other in self._solving.pop(part.key, []):
            accept(other, population)
            self._draw(job, other)

    def _draw(self, job: Job, part: Part) -> None:
        for number in part.ready():
            part.asked.add(number)
            amount = len(part.block(number)) * part.config.set_size
            again = all((part.key, one) in self.cells for one in part.block(number))
            self.desk.put(
                job.uid, partial(
                    draw, self.fitted, part, number, known=self.cells
                ),
                then=partial(self._drawn, job, part, number=number),
                kind="recall" if again else "draw", amount=amount,
            )  # fmt: skip

    def _drawn(self, job: Job, part: Part, drawn: Draw, *, number: int) -> None:
        part.drawn[number] = drawn
        for one in part.block(number):
            part.latent.pop(one, None)
        total = sum(one.n_blocks for one in job.parts)
        done = sum(len(one.drawn) for one in job.parts)
        job.share_left = 1 - done / (total + 1)
        if job.watched:
            self._say(_progress(job, {"phase": "drawing", "done": done, "of": total}))
        if done == total:
            amount = sum(one.n_cells for one in job.parts)
            work = partial(self._written, job)
            self.desk.put(job.uid, work, then=self._say, kind="write", amount=amount)

    @staticmethod
    def _written(job: Job) -> Reply:
        """The answer in the form that was asked for."""
        assert job.reading is not None  # it was read
        pred = assembled(job.reading, job.parts, nfe=sum(job.nfe.values()))
        return written(job, pred)

    def _seen(self, seen: Seen) -> None:
        if seen.order not in self._orders:
            return
        job, _ = self._orders[seen.order]
        job.steps[seen.order] = seen.done
        self._say(
            _progress(
                job,
                {
                    "phase": "denoising",
                    "done": sum(job.steps.values()),
                    "of": job.steps_of,
                    "x0_hat": {
                        "spread": [round(x, _KEPT) for x in seen.spread.tolist()],
                        "moved": None if seen.moved is None else round(seen.moved, _KEPT),
                    },
                },
            )
        )

    def drop(self, job: Job) -> None:
        """Stop working for a job; who waited for what it solved goes on by itself."""
        for order, (owner, _) in list(self._orders.items()):
            if owner is job:
                self.engine.cancel(order)
                del self._orders[order]
        for part in job.parts:
            waiting = self._solving.get(part.key, [])
            if not any(other is part for _, other in waiting):
                continue
            first = waiting[0][1]
            waiting[:] = [entry for entry in waiting if entry[1] is not part]
            if not waiting:
                del self._solving[part.key]
            elif first is part:
                heir, own = waiting[0]
                missing = [number for number in own.sets(pilot=True) if number not in own.latent]
                pilot = [number for number in missing if number < own.n_pilot]
                heir.steps_of += len(pilot) * own.config.n_steps
                self._order(heir, [own], [pilot])


def written(job: Job, pred: AnnData) -> Reply:
    """An answer in the form that was asked for, checked for what is no number."""
    check_finite(pred)
    return Reply(uid=job.uid, media=MEDIA[job.form], body=WRITERS[job.form](pred))


def _progress(job: Job, content: dict[str, object]) -> Reply:
    return Reply(uid=job.uid, status=102, body=dumps(content), final=False)
