"""Profiles of predictors on one question, side by side, in more than one regime.

Each is run four ways: once to warm up, once while operations, bytes and memory are counted (which
takes time of its own), and some times for the clock, of which the quickest stands: that is what the
machine does when nothing disturbs it. Every run forgets what the one before it kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbdiff._errors import ConfigError
from perturbdiff.config._checks import seed_number, whole_number
from perturbdiff.profiling._machine import Machine, this_machine
from perturbdiff.profiling._memory import peak_bytes, reset_peak, resident_bytes
from perturbdiff.profiling._probe import PHASES, Phase, Probe, watching
from perturbdiff.profiling._subject import Profiled
from perturbdiff.profiling._trace import trace_events
from perturbdiff.profiling._work import Work

REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question to a predictor, and how it shall be answered."""

    model: Profiled
    adata: Any
    question: Mapping[str, Any]
    n_cells: int
    seed: int

    def run(self, probe: Probe, number: int, *, counting: bool = False) -> Probe:
        """Ask once; every number has noise of its own."""
        self.model.probe_points().forget()
        points = self.model.probe_points()

        def work() -> Any:
            return self.model.predict(
                self.adata, n_cells=self.n_cells, seed=self.seed + number, **self.question
            )

        with watching(probe, points.stages):
            if counting:
                with probe.counts(points.weights):
                    probe.run(work)
            else:
                probe.run(work)
        return probe


def compare(
    models: Mapping[str, Profiled],
    adata: Any = None,
    *,
    perturbations: Sequence[str],
    contexts: Sequence[Mapping[str, str]] | None = None,
    n_cells: int | Sequence[int] = (1, 256),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Profile predictors on the same question.

    Parameters
    ----------
    models
        Predictors by name.
    adata
        File with the control cells; ``None`` where the models have some of their own.
    perturbations, contexts
        What is asked.
    n_cells
        Regimes: cells of each condition, one number or several.
    settings
        What else to name in ``predict``, by name of the model.
    seed
        Of all noise.
    repeats
        Runs for the clock.

    Returns
    -------
    Plain values for :func:`write` and :func:`perturbdiff.pl.roofline`: ``machines`` by device, and
    ``runs``, one for each model and regime, with the whole and every phase; ``trace`` for viewers.

    Raises
    ------
    ConfigError
        When there is no model, one has no network, there are settings for one that there is not, or
        a number makes no sense.
    """
    _check(models, settings or {})
    regimes = _regimes(n_cells)
    repeats, seed = whole_number("repeats", repeats, least=1), seed_number(seed)
    machines: dict[str, Machine] = {}
    runs, events = [], []
    for name, model in models.items():
        points = model.probe_points()
        machine = machines.setdefault(str(points.device), this_machine(points.device))
        question = {
            "perturbations": perturbations, "contexts": contexts,
            **(settings or {}).get(name, {}),
        }  # fmt: skip
        for each in regimes:
            asked = Asked(
                model=model, adata=adata, question=question, n_cells=each, seed=seed
            )  # fmt: skip
            run, probe = _profiled(asked, machine, repeats=repeats)
            runs.append({"name": name, **run})
            events += trace_events(probe.spans, process=f"{name}, {each} cells", number=len(runs))
    known = {device: machine.to_json() for device, machine in machines.items()}
    return {"machines": known, "runs": runs, "trace": events}


def _check(models: object, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what is no mapping of names to predictors, and settings of others."""
    if not isinstance(models, Mapping):
        rule = "must be predictors by name, such as {'mine': model}"
        raise ConfigError("models", type(models).__name__, rule=rule)
    if not models:
        raise ConfigError("models", dict(models), rule="must name at least one")
    for name, model in models.items():
        if not isinstance(model, Profiled):
            rule = (
                f"{name!r} is a {type(model).__name__}, which has no network to profile; give a "
                "fitted SetDiffusion or CausalBaseline"
            )
            raise ConfigError("models", list(models), rule=rule)
    for name in settings:
        if name not in models:
            raise ConfigError("settings", name, rule=f"must be one of {', '.join(models)}")


def _regimes(n_cells: object) -> list[int]:
    """Numbers of cells, one or several."""
    several = list(n_cells) if isinstance(n_cells, Sequence) else [n_cells]
    if not several:
        raise ConfigError("n_cells", several, rule="must be one number of cells or more")
    return [whole_number("n_cells", each, least=1) for each in several]


def _profiled(asked: Asked, machine: Machine, *, repeats: int) -> tuple[dict[str, Any], Probe]:
    points = asked.model.probe_points()
    warm = asked.run(Probe(points.device), 0)
    counted = asked.run(Probe(points.device), 1, counting=True)
    reset_peak(points.device)
    before = resident_bytes() if points.device.type == "cpu" else 0
    timed = [asked.run(Probe(points.device), 2 + number) for number in range(repeats)]
    peak = peak_bytes(points.device)
    best = min(timed, key=lambda probe: probe.seconds)
    phases = []
    for name in PHASES:
        if name in best.phases:
            work = counted.phases.get(name, Phase())
            phases.append(
                {"name": name, **_row(best.phases[name], work, machine, dtype=points.dtype)}
            )
    whole = _whole(best)
    total = sum((phase.work for phase in counted.phases.values()), Work())
    most = max((phase.peak_bytes for phase in counted.phases.values()), default=0)
    row = _row(whole, Phase(work=total, peak_bytes=most), machine, dtype=points.dtype)
    return {
        "kind": points.kind,
        "device": str(points.device),
        "dtype": points.dtype,
        "threads": machine.threads,
        "parameters": points.n_parameters,
        "n_cells": asked.n_cells,
        "warm_up_seconds": warm.seconds,
        "spread_of_seconds": max(probe.seconds for probe in timed) / best.seconds - 1,
        "weight_bytes": float(sum(w.numel() * w.element_size() for w in points.weights)),
        "process_growth_bytes": None if peak is None or before is None else peak - before,
        **row,
        "phases": phases,
    }, best


def _whole(probe: Probe) -> Phase:
    phases = probe.phases.values()
    return Phase(
        seconds=probe.seconds,
        network_seconds=sum(phase.network_seconds for phase in phases),
        network_calls=probe.network_calls,
    )


def _row(timed: Phase, counted: Phase, machine: Machine, *, dtype: str) -> dict[str, Any]:
    """Figures of a phase: time from one run, work from another."""
    work = counted.work
    return {
        "seconds": timed.seconds,
        "network_seconds": timed.network_seconds,
        "network_calls": timed.network_calls,
        **work.to_json(),
        "intensity": work.intensity,
        "operations_per_second": work.operations / timed.seconds if timed.seconds else None,
        "peak_bytes": counted.peak_bytes,
        **machine.judged(work, timed.seconds, dtype=dtype),
    }
