"""Spans as the events that Perfetto and Chrome's viewer open."""

from collections.abc import Sequence
from typing import Any

from perturbdiff.profiling._probe import Span

_MICRO = 1e6
_LANES = {False: (1, "phases"), True: (2, "network calls")}


def trace_events(spans: Sequence[Span], *, process: str, number: int) -> list[dict[str, Any]]:
    """Events of one run.

    Parameters
    ----------
    spans
        What ran when.
    process
        What the viewer calls the run.
    number
        Of the run; viewers keep runs apart by it.

    Returns
    -------
    Complete events in microseconds, after the names of the run and of its lanes.
    """
    titles = [("process_name", 0, process)]
    titles += [("thread_name", lane, name) for lane, name in _LANES.values()]
    named = [
        {"name": kind, "ph": "M", "pid": number, "tid": lane, "args": {"name": name}}
        for kind, lane, name in titles
    ]
    return named + [
        {
            "name": span.name,
            "ph": "X",
            "ts": span.begin * _MICRO,
            "dur": span.seconds * _MICRO,
            "pid": number,
            "tid": _LANES[span.network][0],
            "cat": _LANES[span.network][1],
        }
        for span in sorted(spans, key=lambda span: (span.begin, -span.seconds))
    ]
