"""What more devices would buy, on paper: latency, throughput and memory of ways to split.

A request is a *course*: ``calls`` calls of the network one after another, each of which needs what
the one before it made. A call runs through layers that take t₁ ... t_L seconds for the batch.

*Pipeline*: contiguous layers on each of P devices, x seconds to hand over from one to the next and
from the last back to the first. A batch is on one device at a time, since its next call needs this
one, so its latency is ``calls · (Σ t + P · x)``: that of one device and the handing over. Other
batches fill the devices meanwhile: m in flight return every ``max(Σ t + P · x, m · T)`` seconds, T
being the longest stage, so throughput is ``m / (calls · that)`` and at most ``1 / (calls · T)``.
Each device holds its own layers: memory falls, latency does not.

*Set parallel*: the sets of a batch on P devices. Sets know nothing of each other, so devices need
not meet before the end. A call takes ``o + c · sets``, and only the second part is divided: latency
is ``calls · (o + c · ⌈B / P⌉)``. Cells of one set on several devices must see each other's keys and
values in every block; then e seconds of exchange come to each call. Weights are on all.

*Replicas*: whole requests on whole devices. Latency and memory are those of one, throughput is P
times that of one.

*Separate pools* for prefill and decode of the sibling: a request takes p seconds in one of A
prefill workers, x to send its cache, then d seconds in one of the s slots of one of Z decode
workers. Latency of an idle system is ``p + x + d``; each pool lets through ``A / p`` and
``Z · s / d``, and the lesser of the two is the throughput. Equal at ``A / Z = p · s / d``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from perturbdiff._errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Course:
    """Calls one after another, for one batch.

    Parameters
    ----------
    calls
        How many.
    layer_seconds
        Of each layer, for the batch.
    layer_bytes
        Weights of each layer.
    batch_bytes
        Activations and caches of the batch.
    """

    calls: int
    layer_seconds: tuple[float, ...]
    layer_bytes: tuple[float, ...]
    batch_bytes: float = 0.0

    def __post_init__(self) -> None:
        if len(self.layer_bytes) != len(self.layer_seconds):
            field, rule = "course.layer_bytes", "must be one for each of course.layer_seconds"
            raise ConfigError(field, self.layer_bytes, rule=rule)

    @property
    def seconds(self) -> float:
        """On one device."""
        return self.calls * sum(self.layer_seconds)

    @property
    def memory(self) -> float:
        """On one device."""
        return sum(self.layer_bytes) + self.batch_bytes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a way to split gives.

    Parameters
    ----------
    devices
        How many there are.
    latency
        Seconds of one request in an idle system.
    throughput
        Requests a second when enough of them wait.
    memory
        Bytes of the fullest device.
    """

    devices: int
    latency: float
    throughput: float
    memory: float


def balanced(costs: Sequence[float], n_parts: int) -> list[slice]:
    """Contiguous parts whose costliest is as cheap as can be; some may be empty."""
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(costs)]
    for _ in range(n_parts):
        last = best[-1]
        row = [
            min((max(last[k][0], sum(costs[k:end])), k) for k in range(end + 1))
            for end in range(len(costs) + 1)
        ]
        best.append(row)
    parts, end = [], len(costs)
    for row in reversed(best[1:]):
        parts.append(slice(row[end][1], end))
        end = row[end][1]
    return parts[::-1]


def pipeline(
    course: Course, n_devices: int, *, handover: float = 0.0, in_flight: int = 1
) -> Placement:
    """Layers on several devices.

    Parameters
    ----------
    course
        A batch on one device.
    n_devices
        Stages; no more than there are layers have anything to do.
    handover
        Seconds from one device to the next.
    in_flight
        Batches that are under way together.

    Returns
    -------
    Latency of a batch that is alone, throughput of so many in flight, memory of the fullest stage,
    which holds its share of what belongs to each batch, as it has of the layers.
    """
    _devices(n_devices)
    parts = balanced(course.layer_seconds, n_devices)
    stages = [sum(course.layer_seconds[part]) for part in parts]
    around = sum(stages) + n_devices * handover
    period = max(around, in_flight * max(stages))
    n_layers = len(course.layer_seconds)
    memory = [
        sum(course.layer_bytes[part])
        + in_flight * course.batch_bytes * len(course.layer_bytes[part]) / n_layers
        for part in parts
    ]
    return Placement(
        devices=n_devices,
        latency=course.calls * around,
        throughput=in_flight / (course.calls * period),
        memory=max(memory),
    )


def set_parallel(
    n_devices: int,
    *,
    calls: int,
    n_sets: int,
    overhead: float,
    each: float,
    weight_bytes: float = 0.0,
    set_bytes: float = 0.0,
    exchange: float = 0.0,
) -> Placement:
    """Sets of a batch on several devices.

    Parameters
    ----------
    n_devices
        How many; more than there are sets have nothing to do.
    calls
        Of the network.
    n_sets
        Sets of a request.
    overhead, each
        Seconds of a call: fixed, and for each set.
    weight_bytes, set_bytes
        Weights, and what belongs to each set.
    exchange
        Seconds a call that cells of one set need to see each other's keys; 0 where sets are whole.

    Returns
    -------
    Latency, throughput of one request after another, and memory.
    """
    _devices(n_devices)
    own = ceil(n_sets / n_devices)
    latency = calls * (overhead + each * own + exchange)
    return Placement(
        devices=n_devices,
        latency=latency,
        throughput=1 / latency,
        memory=weight_bytes + own * set_bytes,
    )


def replicas(course: Course, n_devices: int) -> Placement:
    """Whole requests on whole devices.

    Parameters
    ----------
    course
        A request on one device.
    n_devices
        How many there are.

    Returns
    -------
    Latency and memory of one, throughput of all.
    """
    _devices(n_devices)
    return Placement(
        devices=n_devices,
        latency=course.seconds,
        throughput=n_devices / course.seconds,
        memory=course.memory,
    )


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Prefill and decode of the sibling on workers of their own.

    Parameters
    ----------
    prefill, send, decode
        Seconds of each for one request.
    slots
        Requests that a decode worker advances together.
    weight_bytes, prefix_bytes, cache_bytes
        Weights, the cache as it travels, and with room for every gene.
    """

    prefill: float
    send: float
    decode: float
    slots: int = 1
    weight_bytes: float = 0.0
    prefix_bytes: float = 0.0
    cache_bytes: float = 0.0

    @property
    def balance(self) -> float:
        """Prefill workers for each decode worker at which neither waits."""
        return self.prefill * self.slots / self.decode

    def placed(self, n_prefill: int, n_decode: int) -> tuple[Placement, Placement]:
        """What so many workers give; latency and throughput are those of the whole.

        Parameters
        ----------
        n_prefill, n_decode
            Workers of each kind.

        Returns
        -------
        The same twice but for the memory: of a prefill worker, and of a decode worker.
        """
        _devices(min(n_prefill, n_decode))
        through = min(n_prefill / self.prefill, n_decode * self.slots / self.decode)
        memory = (
            self.weight_bytes + self.prefix_bytes,
            self.weight_bytes + self.slots * self.cache_bytes,
        )
        first, second = (
            Placement(
                devices=n_prefill + n_decode,
                latency=self.prefill + self.send + self.decode,
                throughput=through,
                memory=each,
            )
            for each in memory
        )
        return first, second


def _devices(count: int) -> None:
    if count < 1:
        raise ConfigError("n_devices", count, rule="must be at least 1")
