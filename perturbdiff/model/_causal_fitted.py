"""A fitted autoregressive model: decoder, bins and order beside what the siblings share.

B cells, G genes, K latent axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbdiff._batch import Context
from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConfigError
from perturbdiff._random import forked_keys, uniform
from perturbdiff._typing import PrecisionName
from perturbdiff.autoregressive import (
    Decoding,
    DrawnOrder,
    ExpressionBins,
    GeneOrder,
    Guessing,
    KnownOrder,
    Sampling,
    Speculative,
    decode,
)
from perturbdiff.config import DecodeConfig, DecoderConfig, SampleConfig
from perturbdiff.data import Condition
from perturbdiff.guidance import CountMask, Masked
from perturbdiff.model._causal_lesson import context_dispersion, prior_log_rate
from perturbdiff.model._fitted import PILOT_CELLS, Drawn, Responding, Target, as_drawn
from perturbdiff.model._questions import Controls
from perturbdiff.model._sampling import LatentTask, set_contexts
from perturbdiff.nn import CausalDecoder, DraftDecoder, GeneInputs, KeyValueCache

CELLS_AT_ONCE = 256
DRAFT_LENGTH = 8  # guesses a call where nobody asks for another number
_WITHIN_BIN = 2  # uniform draws of a cell: 0 and 1 belong to transport


@dataclass(frozen=True, kw_only=True, eq=False)
class CountTask(LatentTask):
    """A condition to write: its control cells as counts, what the prior states, what is allowed."""

    controls: Controls
    target: Target
    log_rate: Float[Tensor, " genes"]
    dispersion: Float[Tensor, " genes"]
    branch: int = 0  # which draw of the same cells
    mask: CountMask | None = None  # row i is cell i of the condition

    def keys(self, sets: Sequence[int], config: SampleConfig | DecodeConfig, seed: int) -> Tensor:
        return forked_keys(super().keys(sets, config, seed), self.branch)


@dataclass(kw_only=True, eq=False)
class CausalFitted(Responding):
    """Weights, bins and order beside priors and axes."""

    network: DecoderConfig
    decoder: CausalDecoder
    bins: ExpressionBins
    order: GeneOrder
    log_dispersion: Float[Tensor, " genes"]  # that the prior's rates are solved with
    draft: DraftDecoder | None = None
    precision: PrecisionName = "float32"

    def lowered(self, precision: PrecisionName) -> Self:
        """The model with decoder and draft in another precision; nothing else is copied."""
        draft = None if self.draft is None else self.draft.lowered(precision).eval()
        decoder = self.decoder.lowered(precision).eval()
        return replace(self, decoder=decoder, draft=draft, precision=precision)

    @cached_property
    def sampler(self) -> "CausalSampler":
        """Writes cells, and reads their latent responses off them."""
        return CausalSampler(self)

    def draft_length(self, config: DecodeConfig) -> int:
        """Genes to guess ahead.

        Raises
        ------
        ConfigError
            When there is no draft to guess any.
        """
        wanted = config.draft_length
        if self.draft is not None:
            return DRAFT_LENGTH if wanted is None else wanted
        if wanted:
            why = "was fitted with decoder.draft_steps = 0"
            if self.order.drawn:
                why = f"draws its genes (order {self.order.name!r}), so none is known ahead"
            rule = f"needs a draft, and this model has none: it {why}. Leave it out, or name 0"
            raise ConfigError("decode.draft_length", wanted, rule=rule)
        return 0

    def task(
        self,
        condition: Condition,
        controls: Controls,
        target: Target,
        *,
        n_cells: int,
        seed: int,
    ) -> CountTask:
        plain = super().task(condition, controls, target, n_cells=n_cells, seed=seed)
        mean = torch.from_numpy(target.mean)
        size = controls.library_size(plain.partners[:PILOT_CELLS])
        own = controls.cells
        assert own.counts is not None  # asked for only where counts can be drawn
        assert own.library_size is not None
        change = context_dispersion(own.counts, own.library_size, self.log_dispersion)
        return CountTask(
            **vars(plain),
            controls=controls,
            target=target,
            log_rate=prior_log_rate(size, mean, self.log_dispersion + change),
            dispersion=change,
        )

    def written(
        self,
        conditions: Sequence[Condition],
        controls: Sequence[Controls],
        targets: Sequence[Target],
        *,
        n_cells: int,
        config: DecodeConfig,
        seed: int,
    ) -> tuple[list[Drawn], int]:
        """Counts as the decoder writes them, and library sizes; arguments as for ``respond``."""
        # The cells of a set know nothing of each other: none needs to be written beyond the last.
        config = replace(config, set_size=min(config.set_size, n_cells))
        size = config.set_size
        n_sets, least = -(-n_cells // size), -(-PILOT_CELLS // size)
        tasks = [
            self.task(*each, n_cells=max(n_sets, least) * size, seed=seed)
            for each in zip(conditions, controls, targets, strict=True)
        ]
        counts, calls = self.sampler.counts(tasks, [range(n_sets)] * len(tasks), config, seed=seed)
        return [
            as_drawn(
                own.flatten(0, 1)[:n_cells], task.controls.library_size(task.partners[:n_cells])
            )
            for own, task in zip(counts, tasks, strict=True)
        ], calls


class CausalSampler:
    """Writes the cells of sets, many at a time.

    Parameters
    ----------
    fitted
        Model.
    """

    def __init__(self, fitted: CausalFitted) -> None:
        self.fitted = fitted

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fitted.decoder.axes.device

    def sample(
        self,
        tasks: Sequence[CountTask],
        sets: Sequence[Sequence[int]],
        config: DecodeConfig,
        *,
        seed: int,
    ) -> tuple[list[Float[Tensor, "sets cells latent"]], int]:
        """Latent responses of the cells that :meth:`counts` writes, and the network calls made."""
        written, calls = self.counts(tasks, sets, config, seed=seed)
        encoder, out = self.fitted.codec.encoder.cpu(), []
        for task, numbers, counts in zip(tasks, sets, written, strict=True):
            rows = task.partners[_cells_of(numbers, config.set_size)]
            size = task.controls.library_size(rows.flatten()).view(*rows.shape, 1)
            out.append(torch.log1p(counts / size * DEPTH).float() @ encoder)
        return out, calls

    @torch.inference_mode()
    def counts(
        self,
        tasks: Sequence[CountTask],
        sets: Sequence[Sequence[int]],
        config: DecodeConfig,
        *,
        seed: int,
    ) -> tuple[list[Int[Tensor, "sets cells genes"]], int]:
        """Counts of the cells of some sets of each task, and the network calls made.

        Parameters
        ----------
        tasks
            Conditions.
        sets
            Numbers of the sets wanted of each.
        config
            Temperature, set size.
        seed
            Seed of all draws.

        Returns
        -------
        One tensor a task, and the number of calls of the network, prefill among them.
        """
        wanted = [(task, number) for task, numbers in enumerate(sets) for number in numbers]
        n_genes = len(self.fitted.lanes)
        done = [[torch.zeros(0, config.set_size, n_genes, dtype=torch.int64)] for _ in tasks]
        calls, at_once = 0, max(1, CELLS_AT_ONCE // config.set_size)
        for start in range(0, len(wanted), at_once):
            chunk = [
                (task, [number for _, number in group])
                for task, group in groupby(wanted[start : start + at_once], lambda x: x[0])
            ]
            named = [(tasks[task], numbers) for task, numbers in chunk]
            counts, n_calls = self._run(named, config, seed=seed)
            calls += n_calls
            for (task, _), part in zip(chunk, counts, strict=True):
                done[task].append(part)
        return [torch.cat(parts) for parts in done], calls

    def _run(
        self,
        chunk: Sequence[tuple[CountTask, list[int]]],
        config: DecodeConfig,
        *,
        seed: int,
    ) -> tuple[list[Tensor], int]:
        """One batch of cells: prefill, then decode."""
        fitted, size = self.fitted, config.set_size
        keys = torch.cat([task.keys(sets, config, seed) for task, sets in chunk]).flatten()
        cache = self.prefilled(chunk, size)
        mask = _mask_of(chunk, size)
        bins, calls = decode(self._decoding(config, mask), cache, keys.to(self.device))
        counts = fitted.bins.decode(bins.cpu(), uniform(keys, fitted.lanes, step=_WITHIN_BIN))
        depth = torch.cat(
            [
                task.controls.library_size(task.partners[_cells_of(sets, size)].flatten())
                for task, sets in chunk
            ]
        )
        counts = torch.minimum(counts, depth.long()[:, None])  # a cell has no more
        if mask is not None:
            counts = mask.clamped(counts)
        by_set = counts.view(-1, size, counts.shape[1])
        parts = torch.split(by_set, [len(sets) for _, sets in chunk])
        return list(parts), calls + 1

    def _decoding(self, config: DecodeConfig, mask: CountMask | None) -> Decoding:
        """How cells advance."""
        fitted, lanes = self.fitted, self.fitted.lanes.to(self.device)
        network: CausalDecoder | Masked = fitted.decoder
        if mask is not None:
            first = fitted.bins.first_count.to(self.device)
            network = Masked(network=network, mask=mask.to(self.device), first_count=first)
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p)
        if fitted.draft is not None and (length := fitted.draft_length(config)):
            return Speculative(
                network, fitted.order, lanes, draft=fitted.draft,
                guessing=Guessing(length=length), sampling=sampling,
            )  # fmt: skip
        if fitted.order.drawn:
            return DrawnOrder(fitted.decoder, fitted.order, lanes, sampling=sampling)
        return KnownOrder(network, fitted.order, lanes, sampling=sampling)

    def prefilled(
        self, chunk: Sequence[tuple[CountTask, Sequence[int]]], set_size: int
    ) -> KeyValueCache:
        """Condition and control cells of some sets encoded, with room for every gene."""
        fitted = self.fitted
        most = max(len(task.condition.members) for task, _ in chunk)
        context = Context.join(
            [
                set_contexts(
                    task, sets, vocabulary=fitted.vocabulary, n_shown=fitted.n_shown,
                    set_size=set_size, most_members=most,
                )
                for task, sets in chunk
            ]
        )  # fmt: skip
        genes = GeneInputs.join([self._genes(task, sets, set_size) for task, sets in chunk])
        return fitted.decoder.prefill(context.to(self.device), genes.to(self.device))

    def _genes(self, task: CountTask, sets: Sequence[int], set_size: int) -> GeneInputs:
        """What is known about each gene of the cells of some sets."""
        own = task.controls
        rows = task.partners[_cells_of(sets, set_size)].flatten()
        size = own.library_size(rows)
        level = torch.from_numpy(own.summary.mean).float()
        mean = torch.from_numpy(task.target.mean).float()
        partner = torch.log1p(own.counts(rows) / size[:, None] * DEPTH).float() - level
        if own.panel is not None:  # nothing is known about what was not measured
            partner = partner * torch.from_numpy(own.panel.present)
        return GeneInputs(
            level=level.expand(len(rows), -1),
            shift=(mean - level).expand(len(rows), -1),
            partner=partner,
            log_mean=task.log_rate + size.log().float()[:, None],
            dispersion=task.dispersion.expand(len(rows), -1),
        )


def _mask_of(chunk: Sequence[tuple[CountTask, Sequence[int]]], set_size: int) -> CountMask | None:
    """Counts that the cells of some sets may have; None where all may have any."""
    masks = [
        task.mask[_cells_of(sets, set_size).flatten()]
        for task, sets in chunk
        if task.mask is not None
    ]
    return CountMask.join(masks) if len(masks) == len(chunk) else None


def _cells_of(sets: Sequence[int], set_size: int) -> Int[Tensor, "sets cells"]:
    """Numbers of the cells of some sets."""
    return torch.tensor(list(sets), dtype=torch.int64)[:, None] * set_size + torch.arange(set_size)
