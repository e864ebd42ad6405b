"""Formulas for more than one device against a small simulation of events."""

import heapq
from itertools import count

import pytest

from perturbdiff._errors import ConfigError
from perturbdiff.profiling import Course, Pools, pipeline, replicas, set_parallel
from perturbdiff.profiling._devices import balanced

COURSE = Course(
    calls=6, layer_seconds=(1.0, 2.0, 1.5, 1.5, 2.0), layer_bytes=(10.0, 20.0, 15.0, 15.0, 20.0),
    batch_bytes=5.0,
)  # fmt: skip


def simulated(jobs, capacity):
    """Finish times of jobs that visit resources in turn, each first come first served.

    A visit is (resource, seconds that it is held, seconds until the next visit). Events are taken
    in order of time.
    """
    free, waiting, order = dict(capacity), {name: [] for name in capacity}, count()
    events, done = [], [0.0] * len(jobs)

    def arrive(now, job, step):
        if step == len(jobs[job]):
            done[job] = now
            return
        waiting[jobs[job][step][0]].append((job, step))
        start(now, jobs[job][step][0])

    def start(now, name):
        while free[name] and waiting[name]:
            job, step = waiting[name].pop(0)
            free[name] -= 1
            heapq.heappush(events, (now + jobs[job][step][1], next(order), "leave", job, step))

    for job in range(len(jobs)):
        heapq.heappush(events, (0.0, next(order), "arrive", job, 0))
    while events:
        now, _, what, job, step = heapq.heappop(events)
        if what == "arrive":
            arrive(now, job, step)
            continue
        name, _, delay = jobs[job][step]
        free[name] += 1
        heapq.heappush(events, (now + delay, next(order), "arrive", job, step + 1))
        start(now, name)
    return done


def staged(course, n_devices, handover, n_calls=None):
    parts = balanced(course.layer_seconds, n_devices)
    once = [(f"device {n}", sum(course.layer_seconds[p]), handover) for n, p in enumerate(parts)]
    return once * (n_calls or course.calls)


@pytest.mark.parametrize("n_devices", [1, 2, 3, 5])
@pytest.mark.parametrize("handover", [0.0, 0.25])
def test_a_pipeline_is_as_slow_as_one_device_and_smaller(n_devices, handover):
    placed = pipeline(COURSE, n_devices, handover=handover)
    jobs = [staged(COURSE, n_devices, handover)]
    found = simulated(jobs, {f"device {n}": 1 for n in range(n_devices)})
    assert placed.latency == pytest.approx(found[0])
    assert placed.latency >= COURSE.seconds
    assert placed.memory <= COURSE.memory
    if n_devices > 1:
        assert placed.memory < 0.75 * COURSE.memory


@pytest.mark.parametrize("in_flight", [1, 2, 3, 6])
def test_batches_in_flight_fill_a_pipeline(in_flight):
    n_devices, handover, n_calls = 3, 0.1, 400
    placed = pipeline(COURSE, n_devices, handover=handover, in_flight=in_flight)
    jobs = [staged(COURSE, n_devices, handover, n_calls)] * in_flight
    end = max(simulated(jobs, {f"device {n}": 1 for n in range(n_devices)}))
    assert placed.throughput == pytest.approx(in_flight * n_calls / COURSE.calls / end, rel=0.02)
    assert placed.throughput <= 1 / (COURSE.calls * 3.0) + 1e-12  # the longest stage


@pytest.mark.parametrize("n_devices", [1, 2, 4, 16, 32])
def test_sets_on_several_devices_share_all_but_the_overhead(n_devices):
    n_sets, calls, overhead, each, exchange = 16, 5, 0.5, 0.25, 0.1
    placed = set_parallel(
        n_devices, calls=calls, n_sets=n_sets, overhead=overhead, each=each, exchange=exchange,
        weight_bytes=100.0, set_bytes=3.0,
    )  # fmt: skip
    own = [len(range(n, n_sets, n_devices)) for n in range(n_devices)]
    jobs = [[(f"device {n}", calls * (overhead + each * k + exchange), 0.0)]
            for n, k in enumerate(own) if k]  # fmt: skip
    assert placed.latency == pytest.approx(
        max(simulated(jobs, {f"device {n}": 1 for n in range(n_devices)}))
    )
    assert placed.latency >= calls * overhead
    assert placed.memory == 100.0 + 3.0 * max(own)


def test_replicas_raise_throughput_alone():
    n_devices, n_jobs = 4, 40
    placed = replicas(COURSE, n_devices)
    done = simulated([[("device", COURSE.seconds, 0.0)]] * n_jobs, {"device": n_devices})
    assert placed.throughput == pytest.approx(n_jobs / max(done))
    assert (placed.latency, placed.memory) == (COURSE.seconds, COURSE.memory)


@pytest.mark.parametrize(("n_prefill", "n_decode"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_separate_pools_let_through_what_the_slower_does(n_prefill, n_decode):
    pools = Pools(prefill=1.0, send=0.5, decode=6.0, slots=4, weight_bytes=10, cache_bytes=2)
    visits = [("prefill", pools.prefill, pools.send), ("slot", pools.decode, 0.0)]
    capacity = {"prefill": n_prefill, "slot": n_decode * pools.slots}
    first, second = pools.placed(n_prefill, n_decode)
    assert first.latency == pytest.approx(simulated([visits], capacity)[0])
    n_jobs = 4000
    end = max(simulated([visits] * n_jobs, capacity))
    assert first.throughput == second.throughput == pytest.approx(n_jobs / end, rel=0.02)
    assert (first.memory, second.memory) == (10, 18)


def test_pools_are_balanced_where_neither_waits():
    pools = Pools(prefill=1.0, send=0.0, decode=2.0, slots=4)
    assert pools.balance == 2
    assert pools.placed(2, 1)[0].throughput == 2 == pools.placed(3, 1)[0].throughput
    assert pools.placed(1, 1)[0].throughput == 1


def test_parts_are_as_even_as_can_be():
    assert balanced([1, 1, 1, 3], 2) == [slice(0, 3), slice(3, 4)]
    assert balanced([2, 1], 3)[-1].stop == 2
    assert [sum([4, 1, 1, 4][part]) for part in balanced([4, 1, 1, 4], 3)] in (
        [4, 2, 4],
    )  # fmt: skip


def test_nothing_runs_on_no_device():
    for split in (lambda: pipeline(COURSE, 0), lambda: replicas(COURSE, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            split()
    with pytest.raises(ConfigError, match="one for each"):
        Course(calls=1, layer_seconds=(1.0,), layer_bytes=())
