"""Quotes of the autoregressive model: calls of the network times what one takes, and the rest.

Under constraints the cells of a condition are written once without, once more under a mask where
one can meet what is asked, and sets that miss in up to n draws: how many miss is known only when
they are written, so of these the most is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anndata import AnnData
from jaxtyping import Int
from torch import Tensor

from perturbdiff.autoregressive import Speculative
from perturbdiff.config import DecodeConfig
from perturbdiff.guidance import check_together
from perturbdiff.model import _fitted
from perturbdiff.model._causal_fitted import CELLS_AT_ONCE, CountTask, _cells_of
from perturbdiff.model._causal_rules import Rules, draws_of
from perturbdiff.model._constrained import Wish
from perturbdiff.model._constrained_answer import reference_of
from perturbdiff.model._quote_causal import DecoderCost, _task
from perturbdiff.model._quote_diffusion import assembled, batches
from perturbdiff.model._quote_obeying import ObeyingRest, ShortRun, obeying_cost, short_sizes
from perturbdiff.model._quote_rest import Request, Rest, own_controls, rest_cost
from perturbdiff.model._room import require_room
from perturbdiff.profiling import STEPS, Quote, Work

if TYPE_CHECKING:
    from perturbdiff.model._causal_baseline import CausalBaseline

Batches = list[tuple[int, int]]  # cells that are written together, and how often


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What of a request is written.

    Parameters
    ----------
    decoding
        ``"raw"``, or ``"transport"``, which needs a pilot.
    set_size
        Cells of a set.
    request
        How much is asked for.
    """

    decoding: str
    set_size: int
    request: Request

    @classmethod
    def of(cls, request: Request, config: DecodeConfig, decoding: str) -> "Writing":
        """Of a request; raw cells of a set know nothing of each other."""
        raw = decoding == "raw"
        size = min(config.set_size, request.cells) if raw else config.set_size
        return cls(decoding=decoding, set_size=size, request=request)

    @property
    def n_sets(self) -> int:
        """Of a condition."""
        return -(-self.request.cells // self.set_size)

    @property
    def first_sets(self) -> int:
        """Of a condition, before constraints: the pilot among them."""
        pilot = 0 if self.decoding == "raw" else -(-_fitted.PILOT_CELLS // self.set_size)
        return max(pilot, self.n_sets)

    @property
    def rounded(self) -> Request:
        """The request in whole sets."""
        asked = self.request
        return Request(
            contexts=asked.contexts, conditions=asked.conditions, cells=self.n_sets * self.set_size
        )

    def plain(self) -> Batches:
        """Without constraints all conditions share batches."""
        return self._together(self.request.conditions * self.first_sets)

    def obeying(self, rules: Rules, n_draws: int) -> tuple[Batches, Batches]:
        """Least and most under constraints: each condition by itself."""
        masked = self._together(self.n_sets) if rules.masked else []
        each = self._together(self.first_sets) + masked
        again = self._together(self.n_sets) * (n_draws - 1) if rules.rest else []
        n = self.request.conditions
        return each * n, (each + again) * n

    def _together(self, n_sets: int) -> Batches:
        at_once = max(1, CELLS_AT_ONCE // self.set_size)
        return [(sets * self.set_size, count) for sets, count in batches(n_sets, at_once=at_once)]


def written_quote(
    model: "CausalBaseline",
    adata: AnnData | None,
    *,
    request: Request,
    config: DecodeConfig,
    decoding: str,
    missing_genes: str,
    wish: Wish,
) -> Quote:
    """Cost of cells that the decoder writes.

    Parameters
    ----------
    model, adata, request, missing_genes
        As for a quote of the diffusion model.
    config, decoding
        How cells are said, and what becomes of them.
    wish
        Constraints, and how to enforce them.

    Returns
    -------
    Seconds and memory; where sets may have to be drawn again, the most, and a range that begins at
    the least.
    """
    require_room(request.cells, len(model.fitted.mean))
    file = own_controls(model) if adata is None else adata
    writing = Writing.of(request, config, decoding)
    task = _task(model, file, missing_genes=missing_genes)
    rules = None
    if wish.constraints:
        rules = _rules(model, task, wish, decoding=decoding, n_cells=request.cells)
    else:
        wish.refuse_ways_alone()
    settings: dict[str, Any] = {"decode": DecodeConfig(draft_length=0), "decoding": decoding}
    rest = rest_cost(model, file, settings=settings, missing_genes=missing_genes, shorten=_silenced)
    cost = DecoderCost(model.fitted, task, config)
    if rules is None:
        return _quoted(cost, writing, writing.plain(), rest=rest, how=[_told(cost)])
    turns = draws_of(wish.ways) or 1
    quick = settings | {"decode": DecodeConfig(set_size=config.set_size, draft_length=0)}
    asked = [
        ShortRun(n_cells=n_cells, settings=quick, pilot_calls=0)
        for n_cells in short_sizes(rules.bounds, config.set_size, request.cells, candidates=turns)
    ]
    obeying = obeying_cost(
        model, file, wish=wish, asked=asked, rest=rest, missing_genes=missing_genes,
        shorten=_silenced,
    )  # fmt: skip
    least, most = (
        _quoted(
            cost, writing, found, how=[_told(cost), _told_again(rules, turns)],
            rest=ObeyingRest(rest=rest, cost=obeying, calls=0, evaluations=sets * writing.n_sets),
        )
        for found, sets in zip(writing.obeying(rules, turns), (1, turns), strict=True)
    )  # fmt: skip
    return Quote(**{**vars(most), "low": least.low})


def _rules(
    model: "CausalBaseline", task: CountTask, wish: Wish, *, decoding: str, n_cells: int
) -> Rules:
    """What shall hold in a context of the file, checked as a prediction checks it."""
    reference = reference_of(model.fitted, task.controls)
    bounds = [constraint.bind(reference) for constraint in wish.constraints]
    check_together(bounds, reference, n_cells=n_cells)
    rules = Rules.of(bounds)
    rules.check(model.fitted, decoding=decoding, n_draws=draws_of(wish.ways))
    return rules


def _quoted(
    cost: DecoderCost, writing: Writing, found: Batches, *, rest: Rest, how: Sequence[str]
) -> Quote:
    cache = cost.cache_bytes(max(n for n, _ in found))
    quote = assembled(
        cost.fitted,
        network=(STEPS, sum(count * cost.seconds(n) for n, count in found), cost.spread),
        work=sum((count * cost.work(n) for n, count in found), Work()),
        rest=rest,
        request=writing.rounded,
        network_calls=sum(count * (1 + cost.calls(n)) for n, count in found),
        how=how,
    )
    return Quote(**{**vars(quote), "memory_bytes": max(quote.memory_bytes, 2.0 * cache)})


def _silenced(fitted: Any) -> None:
    """Let the sampler answer with the counts of the partners, at once."""

    def counts(tasks: Any, sets: Any, config: DecodeConfig, *, seed: int) -> tuple[list[Any], int]:
        del seed
        return [
            _partners(task, _cells_of(each, config.set_size))
            for task, each in zip(tasks, sets, strict=True)
        ], 0

    fitted.sampler.counts = counts


def _partners(task: CountTask, cells: Int[Tensor, "sets cells"]) -> Int[Tensor, "sets cells genes"]:
    """Counts of the partners of some cells, within their mask where they have one."""
    counts = task.controls.counts(task.partners[cells].flatten()).long()
    if task.mask is not None:
        counts = task.mask[cells.flatten()].clamped(counts)
    return counts.view(*cells.shape, -1)


def _told_again(rules: Rules, turns: int) -> str:
    masked = "Cells are written once without constraints"
    if rules.masked:
        masked += ", and again under a mask, which meets what is about a gene of a cell"
    if not rules.rest:
        return f"{masked}. What obeying costs besides is from short runs under these constraints."
    return (
        f"{masked}. Sets that miss are drawn in up to {turns} turns: how many miss is known only "
        "when they are written, so this is the most, and the range begins where none does. What "
        "obeying costs besides is from short runs under these constraints."
    )


def _told(cost: DecoderCost) -> str:
    n_genes = cost.n_genes
    if cost.decoding.ends_on_time:
        why = f"One call a gene, {n_genes} whatever the cells are: the number is known."
    elif isinstance(cost.decoding, Speculative):
        least, most = min(cost.calls_each), max(cost.calls_each)
        why = (
            f"Guesses are kept or not by what the cells are: {n_genes} genes took some cells "
            f"{least:.0f} to {most:.0f} calls, and a batch waits for its slowest; so the quote is "
            "looser than that of a diffusion model, whose number of calls is known."
        )
    else:
        stands = "the effect prior's expectation stands"
        if not cost.drawn_as_expected:
            stands = "some cells drawn at this temperature and top_p stand"
        why = (
            "A cell is done when none of its genes is left but zeros: the number of calls is that "
            f"of the genes that are there in the fullest cell of a batch, for which only {stands}; "
            "so the quote is looser than that of a diffusion model."
        )
    return f"{why} Seconds of a call from calls timed on this machine; the rest from short runs."
