"""Seconds and memory of everything in a prediction but the network, measured on short predictions.

Most of it is solving for the scale of count transport and drawing counts, which depends on the
data, so it is measured on the model's own conditions and the very control cells. Each phase is

    a + b · contexts + c · conditions + d · cells

with coefficients of at least 0, fitted to relative errors. Memory is the larger of what solving on
the pilot takes and what drawing the cells of one condition takes (which was counted for two numbers
of cells), and the other conditions, which wait for the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from anndata import AnnData
from scipy.optimize import nnls

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import ConfigError
from perturbdiff.config import SampleConfig
from perturbdiff.config._checks import whole_number
from perturbdiff.data import Condition
from perturbdiff.data._matrix import require_anndata
from perturbdiff.model._fitted import PILOT_CELLS
from perturbdiff.model._quote_points import twin_of
from perturbdiff.model._reservoir import draw_reservoir, reservoir_file, reservoir_tensors
from perturbdiff.profiling import CONDITION, PHASES, Phase, Probe, watching
from perturbdiff.profiling._machine import cache_file, machine_names, read_cache, write_cache

if TYPE_CHECKING:
    from perturbdiff.model._network_predictor import NetworkPredictor

_SEED = 1 << 40  # far from seeds that people choose
_REPEATS = 3
_MANY = 1024  # cells beyond the pilot, so that the time of a cell can be told
_CONTROLS = 512  # of each context, where a model was not given a file


@dataclass(frozen=True, kw_only=True)
class Request:
    """How much is asked for: what the cost depends on."""

    contexts: int
    conditions: int
    cells: int  # of each condition, whole sets

    @classmethod
    def of(cls, n_cells: object, n_conditions: object, n_contexts: object) -> "Request":
        """As a user asks, checked.

        Raises
        ------
        ConfigError
            When one is no whole number of at least 1, or there are more contexts than conditions.
        """
        conditions = whole_number("n_conditions", n_conditions, least=1)
        contexts = whole_number("n_contexts", n_contexts, least=1)
        if contexts > conditions:
            rule = f"must be at most n_conditions = {conditions}"
            raise ConfigError("n_contexts", contexts, rule=rule)
        cells = whole_number("n_cells", n_cells, least=1)
        return cls(contexts=contexts, conditions=conditions, cells=cells)

    @property
    def features(self) -> tuple[float, ...]:
        """What takes time."""
        return 1.0, self.contexts, self.conditions, self.conditions * self.cells


@runtime_checkable
class Rest(Protocol):
    """Everything in a prediction but the network."""

    @property
    def spread(self) -> float:
        """Relative error to be expected."""
        ...

    def phases(self, request: Request) -> dict[str, float]:
        """Seconds of each phase."""
        ...

    def memory_bytes(self, request: Request) -> float:
        """Most bytes at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class RestCost:
    """Coefficients by phase; bytes at most for some numbers of cells, and for a cell that waits."""

    seconds: dict[str, tuple[float, ...]]
    peaks: tuple[tuple[float, float], ...]
    waiting: float
    spread: float

    def phases(self, request: Request) -> dict[str, float]:
        """Seconds of each phase."""
        return {name: float(np.dot(request.features, each)) for name, each in self.seconds.items()}

    def memory_bytes(self, request: Request) -> float:
        """Most bytes at once."""
        (_, least), (some, drawn), (many, most) = self.peaks
        near = drawn * request.cells / some
        further = drawn + (most - drawn) * (request.cells - some) / (many - some)
        own = max(least, near if request.cells <= some else further)
        return own + self.waiting * (request.conditions - 1) * request.cells


def own_controls(model: "NetworkPredictor[Any, Any, Any]") -> AnnData:
    """Control cells that came with the model, or that it was fitted on.

    Raises
    ------
    ConfigError
        When there are none.
    """
    if model._reservoir is not None:
        return model._reservoir
    if model._controls is None:
        rule = (
            "this model has no control cells of its own, and the time depends on them; give a "
            "file with those of the contexts, or load a model that was saved with include_controls"
        )
        raise ConfigError("adata", None, rule=rule)
    kept = draw_reservoir(model._controls, _CONTROLS, seed=model.seed)
    return reservoir_file(reservoir_tensors(kept, model.registry), model.registry)


def questions(
    model: "NetworkPredictor[Any, Any, Any]", file: AnnData, *, missing_genes: str
) -> tuple[list[str], list[dict[str, str]], dict[str, Any]]:
    """Perturbations and contexts that short predictions may ask for, and what else to name."""
    registry, known = model.registry, model.fitted.prior.conditions
    named: dict[str, Any] = {"missing_genes": missing_genes}
    n_times = int(registry.time_key is not None)
    numbers = known[0].numbers
    if registry.dose_key is not None:
        named["doses"] = [numbers[0]]
    if n_times:
        named["times"] = [numbers[-1]]
    labels = list(dict.fromkeys(member for one in known for member in one.members))
    found = model._ask(file, labels[:1], contexts=None, n_cells=1, **named)
    return labels, _by_size(found.conditions, found.controls.controls(), registry), named


def _by_size(
    conditions: Sequence[Condition], rows: Mapping[tuple[str, ...], Any], registry: Any
) -> list[dict[str, str]]:
    """Contexts, those of middling size first."""
    contexts = sorted({one.context for one in conditions}, key=lambda c: len(rows[c]))
    middle = len(contexts) // 2
    order = sorted(range(len(contexts)), key=lambda number: abs(number - middle))
    keys = [vocabulary.key for vocabulary in registry.covariates]
    return [dict(zip(keys, contexts[number], strict=True)) for number in order]


def rest_cost(
    model: "NetworkPredictor[Any, Any, Any]",
    adata: AnnData | None,
    *,
    settings: Mapping[str, Any],
    missing_genes: str = "refuse",
    shorten: Callable[[Any], None] = lambda fitted: None,
) -> RestCost:
    """Measured now, or read where it was measured before on this machine.

    Parameters
    ----------
    model
        Fitted.
    adata
        File with control cells; ``None`` for the model's own.
    settings
        Sampling that makes the network's part short, in sets of the usual size.
    missing_genes
        As in ``predict``.
    shorten
        What else to do to the copy of the fitted model that is run.

    Returns
    -------
    Coefficients.
    """
    if adata is not None:
        require_anndata(adata)
    file = own_controls(model) if adata is None else adata
    names = (*machine_names("cpu"), model.checksum, *file.shape, missing_genes)
    path = cache_file("rest", *names, dict(settings))
    if (known := read_cache(path)) is not None:
        return RestCost(
            seconds={name: tuple(each) for name, each in known["seconds"].items()},
            peaks=tuple((cells, peak) for cells, peak in known["peaks"]),
            waiting=known["waiting"],
            spread=known["spread"],
        )
    runs = _Runs(model, file, settings=settings, missing_genes=missing_genes, shorten=shorten)
    cost = runs.measured()
    write_cache(path, asdict(cost))
    return cost


class _Runs:
    """Short predictions of a copy of the model, so that nothing it keeps is touched."""

    def __init__(
        self,
        model: "NetworkPredictor[Any, Any, Any]",
        file: AnnData,
        *,
        settings: Mapping[str, Any],
        missing_genes: str,
        shorten: Callable[[Any], None],
    ) -> None:
        self.model, self.file, self.settings = twin_of(model), file, settings
        self.shorten = shorten
        self.labels, self.contexts, self.named = questions(model, file, missing_genes=missing_genes)
        self.number = self.answer_bytes = 0
        self.notes: dict[str, Any] = {}  # of the last prediction

    def measured(self) -> RestCost:
        """Coefficients from one run of each kind; the first is only to warm up."""
        few = Request(contexts=1, conditions=1, cells=SampleConfig().set_size)
        asked = [few, replace(few, cells=PILOT_CELLS + _MANY)]
        if len(self.contexts) > 1:
            n = min(4, len(self.contexts))
            asked.append(replace(few, contexts=n, conditions=n))
        if len(self.labels) > 1:
            asked.append(replace(few, conditions=min(4, len(self.labels))))
        self.seconds(few)
        times = [self.seconds(one) for one in asked]
        features = np.array([one.features for one in asked])
        seconds = {
            name: _solved(features, np.array([found.get(name, 0.0) for found in times]))
            for name in PHASES
            if any(name in found for found in times)
        }
        sizes = [few, asked[1], replace(few, cells=2 * asked[1].cells)]
        peaks = tuple((float(one.cells), self.peak(one)) for one in sizes)
        waiting = self.answer_bytes / sizes[-1].cells
        whole = np.array([sum(found.values()) for found in times])
        fitted = sum(features @ np.array(each) for each in seconds.values())
        spread = float(np.abs(fitted / whole - 1).max())
        return RestCost(seconds=seconds, peaks=peaks, waiting=waiting, spread=spread)

    def seconds(self, request: Request) -> dict[str, float]:
        """Least seconds of each phase, the network's calls taken out."""
        runs = [self.run(request, Probe()) for _ in range(_REPEATS)]
        best = min(runs, key=lambda probe: sum(p.outside_network for p in probe.phases.values()))
        found = dict.fromkeys(PHASES, 0.0)
        for name, phase in best.phases.items():
            found[name] += phase.outside_network
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def peak(self, request: Request) -> float:
        """Most bytes of tensors at once, and the answer."""
        probe = Probe()
        with probe.counts(self.model.probe_points().weights) as counting:
            self.run(request, probe)
        return float(counting.peak_bytes + self.answer_bytes)

    def run(self, request: Request, probe: Probe) -> Probe:
        """One prediction."""
        self.number += 1
        points = self.model.probe_points()
        points.forget()
        self.shorten(self.model.fitted)
        stages = [s for s in self.model.probe_points().stages if s.name != "remember"]
        n_labels = request.conditions // request.contexts
        with watching(probe, stages):
            pred = probe.run(
                lambda: self.model.predict(
                    self.file,
                    perturbations=self.labels[:n_labels],
                    contexts=self.contexts[: request.contexts],
                    n_cells=request.cells,
                    seed=_SEED + self.number,
                    **self.named,
                    **self.settings,
                )
            )
        self.notes = pred.uns[UNS_KEY]
        self.answer_bytes = sum(
            part.nbytes for x in (pred.X, pred.layers["counts"]) for part in
            (x.data, x.indices, x.indptr)
        )  # fmt: skip
        probe.phases.setdefault(CONDITION, Phase())
        return probe


def _solved(features: np.ndarray, values: np.ndarray) -> tuple[float, ...]:
    """Coefficients of at least 0 that meet the values with the least relative errors."""
    scale = np.where(features.max(0) > 0, features.max(0), 1.0)
    floor = max(float(values.max()) * 1e-3, 1e-9)
    weight = 1 / np.maximum(values, floor)
    found, _ = nnls(features / scale * weight[:, None], values * weight)
    return tuple((found / scale).tolist())
