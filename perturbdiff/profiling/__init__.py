"""What a prediction costs: probes, the machine's limits, quotes, and reports of them."""

from perturbdiff.profiling._compare import compare
from perturbdiff.profiling._counting import Counting, counted
from perturbdiff.profiling._devices import (
    Course,
    Placement,
    Pools,
    pipeline,
    replicas,
    set_parallel,
)
from perturbdiff.profiling._machine import Machine, this_machine
from perturbdiff.profiling._networks import DecoderShape, DenoiserShape
from perturbdiff.profiling._probe import (
    CONDITION,
    CONTROL,
    DENOISE,
    GENES,
    PHASES,
    POST,
    STEPS,
    Phase,
    Probe,
    Span,
    Stage,
    watching,
)
from perturbdiff.profiling._quote import Quote
from perturbdiff.profiling._report import table, write
from perturbdiff.profiling._subject import Profiled, Subject
from perturbdiff.profiling._timing import Timing
from perturbdiff.profiling._work import Work

__all__ = [
    "CONDITION",
    "CONTROL",
    "DENOISE",
    "GENES",
    "PHASES",
    "POST",
    "STEPS",
    "Counting",
    "Course",
    "DecoderShape",
    "DenoiserShape",
    "Machine",
    "Phase",
    "Placement",
    "Pools",
    "Probe",
    "Profiled",
    "Quote",
    "Span",
    "Stage",
    "Subject",
    "Timing",
    "Work",
    "compare",
    "counted",
    "pipeline",
    "replicas",
    "set_parallel",
    "table",
    "this_machine",
    "watching",
    "write",
]
