"""Many requests in one process, without HTTP."""

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from perturbdiff._errors import ConfigError, counted
from perturbdiff._logging import logger
from perturbdiff.config import SampleConfig
from perturbdiff.model import CausalBaseline, SetDiffusion
from perturbdiff.model._predictor import Predictor
from perturbdiff.serve._desk import Desk, Done
from perturbdiff.serve._flow import Flow, written
from perturbdiff.serve._formats import dumps, plain
from perturbdiff.serve._jobs import Job, Meters, NoMeters, Refusal, Reply, refused
from perturbdiff.serve._lane import Lane, check_options
from perturbdiff.serve._pace import Pace, Size
from perturbdiff.serve._reading import Reader, check_constraints
from perturbdiff.serve._schemas import PredictRequest, Question, RankRequest
from perturbdiff.serve._settings import ServeConfig

SMALL = 2048  # most cells of a request that goes to the lane of small ones
_BODIES: dict[str, type[Question]] = {
    "predict": PredictRequest,
    "quote": PredictRequest,
    "rank": RankRequest,
}


class Service:
    """Answers requests to one model: submit them, and take turns until they are answered.

    Parameters
    ----------
    model
        Fitted set diffusion model or its autoregressive sibling.
    config
        Limits and sizes.
    meters
        What measures it.

    Raises
    ------
    ConfigError
        When the model is of another kind.
    """

    def __init__(
        self, model: Predictor, config: ServeConfig | None = None, *, meters: Meters | None = None
    ) -> None:
        if not isinstance(model, SetDiffusion | CausalBaseline):
            rule = "cannot be served; a set_diffusion and a causal_baseline can"
            raise ConfigError("model", getattr(model, "kind", type(model).__name__), rule=rule)
        self.model, self.config = model, config or ServeConfig()
        self.meters: Meters = meters or NoMeters()
        self.pace, self.has_cost_model = Pace(), False
        self.jobs: dict[str, Job] = {}
        self._inbox: SimpleQueue[Done | Callable[[], None]] = SimpleQueue()
        self._out: list[Reply] = []
        self.reader = Reader(
            model, most_contexts=self.config.cached_controls, most_mb=self.config.max_body_mb
        )
        self._desk = Desk(self.config.desk_threads, self._inbox.put)
        self._whole = {
            name: (Desk(1, self._inbox.put), Lane(model, most_mb=self.config.max_body_mb))
            for name in ("small", "large")
        }
        self.flow: Flow | None = None
        if isinstance(model, SetDiffusion):
            self.flow = Flow(
                model, self._desk, say=self._say, fail=self._fail,
                n_sets=self.config.n_sets, n_plans=self.config.cached_plans,
                drawn_mb=self.config.cached_cells_mb,
            )  # fmt: skip
        _ = model.checksum, model.fitted.baselines  # worked out before the first request

    @property
    def backlog_s(self) -> float:
        """Seconds until everything that was taken on is done, as quoted."""
        work = sum(job.cost * job.share_left for job in self.jobs.values())
        return work / self.config.desk_threads

    @property
    def _desks(self) -> list[Desk]:
        return [self._desk, *(desk for desk, _ in self._whole.values())]

    def post(self, call: Callable[[], None]) -> None:
        """Have something called in the thread that takes turns; from any thread."""
        self._inbox.put(call)

    def submit(
        self, uid: str, route: str, body: bytes, *, form: str = "json", watched: bool = False
    ) -> None:
        """Take a request on; everything that becomes of it comes out of :meth:`turn`.

        Parameters
        ----------
        uid
            Name of the request; one that is in the house already is not taken on again.
        route
            ``"predict"``, ``"quote"`` or ``"rank"``.
        body
            JSON, as it came.
        form
            ``"json"``, ``"h5ad"`` or ``"arrow"``; a stream says it in the body.
        watched
            Whether to tell its progress.
        """
        if uid in self.jobs:
            return
        if len(self.jobs) >= self.config.max_requests:
            self._out.append(refused(uid, self._full()))
            return
        now = monotonic()
        job = Job(
            uid=uid, route=route, body=body, form=form, watched=watched,
            since=now, until=now + self.config.deadline_s,
        )  # fmt: skip
        self.jobs[uid] = job
        self._desk.put(uid, partial(self._read, job), then=partial(self._route, job), kind="read")

    def cancel(self, uid: str) -> None:
        """Forget a request; what it had in the batch leaves before the next step."""
        if (job := self.jobs.pop(uid, None)) is not None:
            job.token.stop.set()
            for desk in self._desks:
                desk.drop(uid)
            if self.flow is not None:
                self.flow.drop(job)

    def turn(self, wait_s: float = 0.0) -> list[Reply]:
        """Deal with what was done since, take one denoising step, and say what there is to say.

        Parameters
        ----------
        wait_s
            How long to wait for something where there is nothing to denoise.

        Returns
        -------
        Replies, in the order in which they became known.
        """
        busy = self.flow is not None and not self.flow.engine.idle
        self._hear(0.0 if busy else wait_s)
        now = monotonic()
        for job in [job for job in self.jobs.values() if now > job.until]:
            late = f"The request was not done within {job.until - job.since:g} s and was given up."
            self._fail(job, Refusal(504, late))
        if self.flow is not None and not self.flow.engine.idle:
            self.flow.step(self.meters, self.pace)
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        """End all threads."""
        for job in self.jobs.values():
            job.token.stop.set()
        for desk in self._desks:
            desk.close()

    def _hear(self, wait_s: float) -> None:
        """Everything that threads have to say."""
        timeout: float | None = wait_s
        while True:
            try:
                heard = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            except Empty:
                return
            timeout = None
            if isinstance(heard, Done):
                self._deal_with(heard)
            else:
                heard()

    def _deal_with(self, done: Done) -> None:
        if done.kind in self.pace.seconds and done.error is None:
            self.pace.note(done.kind, done.seconds, done.amount)
        self.meters.phase(done.kind, done.seconds)
        job = self.jobs.get(done.owner) if isinstance(done.owner, str) else None
        if job is None:
            return
        if done.error is not None:
            self._fail(job, done.error)
            return
        try:
            done.then(done.result)
        except Exception as error:  # noqa: BLE001 - it fails this request, and no other
            self._fail(job, error)

    def _say(self, reply: Reply) -> None:
        self._out.append(reply)
        if reply.final and (job := self.jobs.get(reply.uid)) is not None:
            self.meters.phase("total", monotonic() - job.since)
            self.cancel(reply.uid)

    def _fail(self, job: Job, error: BaseException) -> None:
        reply = refused(job.uid, error)
        if reply.status >= 500 and not isinstance(error, Refusal):
            logger.error("request failed", exc_info=error)
        self.cancel(job.uid)
        self._out.append(reply)

    def _full(self) -> Refusal:
        reason = (
            f"{counted(len(self.jobs), 'request')} of about {self.backlog_s:.0f} s of work are "
            "waiting already. Ask again later."
        )
        return Refusal(429, reason, retry_after=max(1.0, self.backlog_s))

    def _read(self, job: Job) -> Any:
        """The request, checked; at the desk."""
        request = _BODIES[job.route].model_validate_json(job.body)
        job.body = b""
        asked = request if isinstance(request, PredictRequest) else self._all(request)
        least = len(asked.perturbations) * asked.n_cells
        self._check_size(least, 0)
        if isinstance(request, RankRequest):
            request.wishes()
        else:
            check_options(self.model, asked.options)
        job.reading = self.reader.read(asked)
        if isinstance(request, PredictRequest):
            check_constraints(request, job.reading)
        return request

    def _all(self, request: Question) -> PredictRequest:
        """The question behind a ranking."""
        registry = self.model.registry
        labels = getattr(request, "perturbations", None) or [
            level for level in registry.perturbations.levels if level not in registry.control
        ]
        return PredictRequest.model_construct(
            perturbations=labels, contexts=request.contexts, n_cells=request.n_cells,
            doses=request.doses, times=request.times, control_cells=request.control_cells,
        )  # fmt: skip

    def _route(self, job: Job, request: Any) -> None:
        """Decide how a request is answered, once it was read."""
        job.request = request
        if request.deadline_s is not None:
            job.until = min(job.until, job.since + request.deadline_s)
        shared = self._shares_steps(request)
        config = request.sampling or SampleConfig()
        size = self._size(job, config, shared=shared)
        self._check_size(size.all_cells * size.n_candidates, size.set_steps)
        quote = self._quote(size)
        if job.route == "quote":
            content = {**quote, "waiting_s": self.backlog_s, "shares_steps": shared}
            told = partial(self._told, job, size, content)
            if self.has_cost_model and {"constraints", "decoding"} & request.options.keys():
                desk, _ = self._whole["small"]  # short predictions, where the like was not quoted
                desk.put(job.uid, told, then=self._say, kind="quote")
            else:
                self._say(told())
            return
        waiting = self.backlog_s
        if waiting > 0 and waiting + quote["seconds"] > self.config.max_wait_s:
            raise self._full()
        job.cost = quote["seconds"]
        if job.watched:
            job.form = request.answer_as if job.route == "predict" else "json"
        if shared and self.flow is not None:
            self.flow.start(job, config)
            return
        desk, lane = self._whole["small" if size.all_cells <= SMALL else "large"]
        work, amount = partial(self._run, job, lane), size.all_cells * size.n_candidates
        desk.put(job.uid, work, then=self._say, kind="whole", amount=amount)

    def _shares_steps(self, request: Question) -> bool:
        plain_one = isinstance(request, PredictRequest) and not request.constraints
        return plain_one and self.flow is not None and request.enforce is None  # type: ignore[attr-defined]

    def _size(self, job: Job, config: SampleConfig, *, shared: bool) -> Size:
        if shared and self.flow is not None:
            return self.flow.size(job, config)
        assert job.reading is not None  # it was read
        return Size(
            n_conditions=len(job.reading.conditions),
            n_cells=job.request.n_cells,
            n_solves=0,
            n_genes=len(self.model.registry.genes),
            config=None if self.flow is None else config,
            whole=True,
            ways=job.request.ways if isinstance(job.request, PredictRequest) else (),
        )

    def _quote(self, size: Size) -> dict[str, float]:
        """Seconds and memory of a request."""
        return dict(self.pace.quote(size))

    def _told(self, job: Job, size: Size, content: dict[str, Any]) -> Reply:
        return Reply(uid=job.uid, body=dumps(content | self._cost(job, size)))

    def _cost(self, job: Job, size: Size) -> dict[str, Any]:
        """What the cost model says about the question as if nothing of it were known."""
        if not self.has_cost_model or job.reading is None:
            return {}
        contexts = len({condition.context for condition in job.reading.conditions})
        wanted: dict[str, Any] = {
            "n_cells": size.n_cells, "n_conditions": size.n_conditions, "n_contexts": contexts,
        }  # fmt: skip
        names = ("sample", "decode", "decoding", "constraints", "enforce")
        wanted |= {name: job.request.options[name] for name in names if name in job.request.options}
        said = self.model.quote(**wanted).to_json()
        return {"memory_bytes": said["memory_bytes"], "afresh": said}

    def measure(self) -> None:
        """Have the cost model look at this machine, some seconds once; quotes then use it."""
        try:
            self.model.quote()
        except ConfigError as error:  # there are no control cells to measure on
            logger.info("quotes come from what requests took: %s", error)
        else:
            self.has_cost_model = True

    def _check_size(self, n_cells: int, set_steps: int) -> None:
        """Refuse what is too large for this server, before any work.

        Raises
        ------
        Refusal
            With 422 and the limit.
        """
        for what, asked, most in (
            ("cells", n_cells, self.config.max_cells),
            ("steps of sets", set_steps, self.config.max_set_steps),
        ):
            if asked > most:
                said = asked if asked < 10**18 else "more than 10**18"
                reason = f"The request asks for {said} {what}; at most {most}. Ask for fewer."
                raise Refusal(422, reason)

    def _run(self, job: Job, lane: Lane) -> Reply:
        """A request that runs as a whole; in a lane."""
        started = perf_counter()
        if isinstance(job.request, RankRequest):
            rows = lane.rank(job.request, job.token)
            return Reply(uid=job.uid, body=dumps({"ranking": plain(rows)}))
        pred = lane.predict(job.request, job.token)
        self.meters.phase("answer", perf_counter() - started)
        return written(job, pred)
