"""Quotes of the set diffusion model: calls of the network times what one takes, and the rest.

The number of calls is known before anything runs, so is the size of every call, and nothing that
the network does depends on the values of cells: that is why a quote can be close.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from anndata import AnnData

from perturbdiff._batch import Context
from perturbdiff.config import SampleConfig
from perturbdiff.diffusion import network_calls
from perturbdiff.model._fitted import PILOT_CELLS, Fitted
from perturbdiff.model._quote_points import denoiser_shape, precision_of
from perturbdiff.model._quote_rest import Request, Rest, rest_cost
from perturbdiff.profiling import DENOISE, Quote, Timing, Work, counted, this_machine
from perturbdiff.profiling._machine import (
    cache_file,
    machine_names,
    read_cache,
    typical_seconds,
    write_cache,
)

if TYPE_CHECKING:
    from perturbdiff.model._set_diffusion import SetDiffusion

_SETS = (1, 2, 6, 20, 60)
_SECONDS_EACH = 0.06
_MOST_OPERATIONS = 2e10  # of a call that is timed
_NOISE = 0.05  # spread of a quiet machine from run to run


class DenoiserCost:
    """Seconds and bytes of one call, from the number of sets; for one set size.

    Parameters
    ----------
    fitted
        Model.
    set_size
        Cells of a set.
    """

    def __init__(self, fitted: Fitted, set_size: int) -> None:
        self.fitted, self.set_size = fitted, set_size
        self.shape = denoiser_shape(fitted)
        found = self._known()
        self.timing = Timing.from_json(found["timing"])
        self.fixed, self.each = Work.from_json(found["fixed"]), Work.from_json(found["each"])

    def seconds(self, n_sets: float) -> float:
        """Of one call."""
        return self.timing((1.0, n_sets), (n_sets,))

    def work(self, n_sets: float) -> Work:
        """Of one call: operations by hand, bytes as they were counted on two small calls."""
        moved = self.fixed + n_sets * self.each
        operations = self.shape.denoise(n_sets, self.set_size)
        return Work(**{**asdict(moved), "operations": operations})

    def _known(self) -> dict[str, Any]:
        names = machine_names(self.fitted.sampler.device)
        how = precision_of(self.fitted), "compiled" if self.fitted.compiled else "eager"
        path = cache_file("denoiser", *names, self.shape, self.set_size, *how)
        if (known := read_cache(path)) is None:
            known = self._measured()
            write_cache(path, known)
        return known

    @torch.inference_mode()
    def _measured(self) -> dict[str, Any]:
        one = self.shape.denoise(1, self.set_size)
        sizes = [n for n in _SETS if n <= 2 or n * one <= _MOST_OPERATIONS]
        calls = [self.call(n_sets) for n_sets in sizes]
        took = [typical_seconds(self.fitted.sampler.device, call, _SECONDS_EACH) for call in calls]
        timing = Timing.fit([(1.0, n) for n in sizes], [(n,) for n in sizes], took)
        denoiser = self.fitted.denoiser
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        first, second = (counted(call, weights=weights).total for call in calls[:2])
        each = second + -1.0 * first
        return {
            "timing": timing.to_json(),
            "fixed": (first + -1.0 * each).to_json(),
            "each": each.to_json(),
        }

    def call(self, n_sets: int) -> Any:
        """A call on numbers of the right shape, control cells encoded."""
        context, shape = made_context(self.fitted, n_sets, self.set_size), self.shape
        network: Any = self.fitted.denoiser.network
        context = network.remember(context)
        xt = torch.zeros(n_sets, self.set_size, shape.n_latent, device=context.partner.device)
        sigma = torch.ones(n_sets, device=xt.device)
        return lambda: self.fitted.denoiser(xt, sigma, context)


def made_context(fitted: Fitted, n_sets: int, set_size: int) -> Context:
    """A context of the right shape for some sets, with nothing in it."""
    shape, vocabulary = denoiser_shape(fitted), fitted.vocabulary
    ones = partial(torch.ones, dtype=torch.bool)
    context = Context(
        partner=torch.zeros(n_sets, set_size, shape.n_axes),
        has_partner=ones(n_sets),
        control=torch.zeros(n_sets, shape.n_controls, shape.n_axes),
        control_mask=ones(n_sets, shape.n_controls),
        mask=ones(n_sets, set_size),
        shift=torch.ones(n_sets, shape.n_latent),
        members=torch.ones(n_sets, 1, dtype=torch.int64),
        features=torch.zeros(n_sets, shape.n_features),
        covariates=torch.zeros(n_sets, len(vocabulary.registry.covariates), dtype=torch.int64),
        conditional=ones(n_sets),
    )
    return context.to(fitted.sampler.device)


def batches(n_sets: int, *, at_once: int) -> list[tuple[int, int]]:
    """Sizes of the batches that some sets are sampled in, and how many there are of each."""
    full, left = divmod(n_sets, at_once)
    found = [(at_once, full)] if full else []
    return [*found, (left, 1)] if left else found


def diffusion_quote(
    model: "SetDiffusion",
    adata: AnnData | None,
    *,
    request: Request,
    config: SampleConfig,
    missing_genes: str,
) -> Quote:
    """Cost of a question that was not asked before.

    Parameters
    ----------
    model
        Fitted.
    adata
        File with control cells; ``None`` for the model's own.
    request
        Contexts, conditions, and cells of each.
    config
        How to sample.
    missing_genes
        As in ``predict``.

    Returns
    -------
    Seconds and memory.
    """
    size = config.set_size
    rounded = Request(
        contexts=request.contexts,
        conditions=request.conditions,
        cells=-(-request.cells // size) * size,
    )
    n_sets = request.conditions * max(-(-PILOT_CELLS // size), rounded.cells // size)
    per_step = 1 if config.guidance_scale in (0.0, 1.0) else 2
    calls = network_calls(config.sampler, config.n_steps) * per_step
    cost = DenoiserCost(model.fitted, size)
    quick = {"sample": SampleConfig(n_steps=1)}
    rest = rest_cost(model, adata, settings=quick, missing_genes=missing_genes)
    sizes = batches(n_sets, at_once=model.fitted.sampler.sets_at_once(size))
    network = calls * sum(count * cost.seconds(sets) for sets, count in sizes)
    work = sum((calls * count * cost.work(sets) for sets, count in sizes), Work())
    return assembled(
        model.fitted,
        network=(DENOISE, network, cost.timing.spread),
        work=work,
        rest=rest,
        request=rounded,
        network_calls=float(calls * sum(count for _, count in sizes)),
        how=_told(sizes, calls, n_sets),
    )


def assembled(
    fitted: Any,
    *,
    network: tuple[str, float, float],
    work: Work,
    rest: Rest,
    request: Request,
    network_calls: float,
    how: Sequence[str],
) -> Quote:
    """The parts of a quote put together."""
    name, seconds, spread = network
    phases = rest.phases(request)
    others = sum(phases.values())
    phases[name] = phases.get(name, 0.0) + seconds
    whole = others + seconds
    error = _NOISE + (spread * seconds + rest.spread * others) / whole
    machine = this_machine(fitted.sampler.device)
    judged = machine.judged(work, seconds, dtype=precision_of(fitted))
    return Quote(
        seconds=whole,
        low=whole / (1 + 2 * error),
        high=whole * (1 + 2 * error),
        memory_bytes=rest.memory_bytes(request),
        network_calls=network_calls,
        work=work,
        phases=phases,
        bound=judged["bound"],
        share_of_limit=judged["share_of_limit"],
        how=" ".join(how),
    )


def _told(sizes: Sequence[tuple[int, int]], calls: int, n_sets: int) -> list[str]:
    named = " and ".join(f"{count} x {sets} sets" for sets, count in sizes)
    return [
        f"{n_sets} sets (at least {PILOT_CELLS} pilot cells a condition) in batches of {named},",
        f"{calls} network calls a batch; seconds of a call from calls of other sizes timed on this",
        "machine; all else from short predictions of this model, on these control cells. It holds",
        "for a question that was not asked before; asked again, the pilot is kept.",
    ]
