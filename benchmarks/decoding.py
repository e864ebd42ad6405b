"""How fast the causal decoder says its genes: from a cache, in slots, guessed ahead.

    python -m benchmarks.decoding --data kang2018.h5ad

Trains a decoder and a draft for a while on part of the file, then times ways of decoding against
each other, in turns within one run. Cells are of training conditions: their times do not depend on
it, and neither does how well a draft guesses its decoder.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anndata as ad
import torch
from torch import Tensor

from benchmarks.cache import file_checksum
from benchmarks.environment import environment
from benchmarks.tables import markdown
from perturbdiff._random import cell_keys
from perturbdiff.autoregressive import (
    Decoding,
    DrawnOrder,
    Engine,
    GeneOrder,
    Guessing,
    KnownOrder,
    Sampling,
    Speculative,
    decode,
)
from perturbdiff.config import DecoderConfig, TrainConfig
from perturbdiff.data import Registry
from perturbdiff.data._counts import CountBatch, CountDataModule
from perturbdiff.model._causal_lesson import CausalLesson, prepare_causal
from perturbdiff.model._training_data import prepare
from perturbdiff.nn import CausalDecoder, DraftDecoder, KeyValueCache
from perturbdiff.train import TrainerOptions
from perturbdiff.train._causal_task import gene_inputs
from perturbdiff.train._draft import fit_draft
from perturbdiff.train._fit import train

HERE = Path(__file__).resolve().parent
SIZES = (1, 16, 256)
LENGTHS = range(2, 9)
BY_SIZE = {
    "cells": "cells",
    "seconds_prefill": "prefill, s",
    "seconds_decode": "decode, s",
    "network_calls": "calls",
    "milliseconds_per_call": "ms a call",
    "cache_bytes": "cache, bytes",
    "seconds_without_cache": "without cache, s",
    "times_faster_than_without_cache": "times faster",
}
GUESSED = {
    "cells": "cells",
    "checked_by": "checked by",
    "draft_length": "draft length",
    "acceptance": "acceptance",
    "genes_per_call": "genes a call",
    "times_faster": "times faster",
}
RECOMPUTED = 25  # prefixes that are timed where all would take too long


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A decoder, its draft unless it draws genes, and cells to make."""

    decoder: CausalDecoder
    order: GeneOrder
    lanes: Tensor
    batch: CountBatch
    draft: DraftDecoder | None = None

    def cells(self, n_cells: int) -> CountBatch:
        """The first cells: a part of a set, or whole sets."""
        size = self.batch.counts.shape[1]
        part, each = self.batch[: -(-n_cells // size)], min(n_cells, size)
        context = replace(
            part.context, partner=part.context.partner[:, :each], mask=part.context.mask[:, :each]
        )
        return replace(
            part,
            context=context,
            counts=part.counts[:, :each],
            partner=part.partner[:, :each],
            log_size=part.log_size[:, :each],
        )

    def prefilled(self, n_cells: int, *, room: bool = True) -> KeyValueCache:
        """Caches of the first cells."""
        cells = self.cells(n_cells)
        with torch.inference_mode():
            return self.decoder.prefill(cells.context, gene_inputs(cells), room=room)

    def plain(self, sampling: Sampling | None = None) -> Decoding:
        """One gene a call."""
        kind = DrawnOrder if self.order.drawn else KnownOrder
        return kind(self.decoder, self.order, self.lanes, sampling=sampling)


def keys_of(n_cells: int) -> Tensor:
    return cell_keys(0, "decoding", 0, n_cells=n_cells)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of them."""
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done


def decoded(subject: Subject, decoding: Decoding, n_cells: int) -> tuple[float, int, Tensor]:
    """Seconds from the cache to the last gene, calls of the network, and the cells."""
    cache = subject.prefilled(n_cells)
    seconds, (bins, n_calls) = timed(lambda: decode(decoding, cache, keys_of(n_cells)))
    return seconds, n_calls, bins


def recomputed(subject: Subject, n_cells: int, *, every: bool) -> float:
    """Seconds to say every gene with the prefix computed anew each time.

    Where not ``every`` gene is, the time is that of evenly spaced prefixes, scaled up.
    """
    n_genes = len(subject.lanes)
    apart = 1 if every else max(n_genes // RECOMPUTED, 1)
    lengths = range(apart // 2, n_genes, apart)
    cells = subject.cells(n_cells)
    genes = gene_inputs(cells)
    bins = torch.zeros(n_cells, n_genes, dtype=torch.int64)
    said = subject.order.sequences(bins, subject.decoder.n_bins)
    sampling, total = Sampling(), 0.0

    def one(length: int) -> Tensor:
        gene = said.gene[:, : length + 1]
        hidden, cache = subject.decoder(
            cells.context,
            genes,
            said_gene=said.said_gene[:, : length + 1],
            said_bin=said.said_bin[:, : length + 1],
            next_gene=gene,
        )
        logits = subject.decoder.bin_logits(hidden[:, -1:], gene[:, -1:], cache)
        return sampling.choose(logits, torch.full((n_cells, 1), 0.5))

    with torch.inference_mode():
        one(3)
        for length in lengths:
            total += timed(lambda at=length: one(at))[0]
    return total * n_genes / len(lengths)


def by_size(subject: Subject, *, repeats: int) -> list[dict[str, Any]]:
    """Wall time, calls and memory for one, some and many cells."""
    rows = []
    for n_cells in SIZES:
        prefill = statistics.median(
            timed(lambda n=n_cells: subject.prefilled(n))[0] for _ in range(repeats)
        )
        decoded(subject, subject.plain(), n_cells)
        runs = [decoded(subject, subject.plain(), n_cells) for _ in range(repeats)]
        seconds = statistics.median(run[0] for run in runs)
        cache = subject.prefilled(n_cells)
        config, each = subject.decoder.config, cache.keys.element_size()
        places = cache.prefix.shape[1] + len(subject.lanes)
        row = {
            "cells": n_cells,
            "seconds_prefill": prefill,
            "seconds_decode": seconds,
            "network_calls": runs[0][1],
            "network_evaluations_per_cell": runs[0][1],
            "milliseconds_per_call": 1e3 * seconds / runs[0][1],
            "cache_bytes": cache.bytes,
            "cache_bytes_by_formula": 2 * config.n_blocks * n_cells * places * config.width * each,
            "share_of_zeros": float((runs[0][2] == 0).float().mean()),
        }
        if not subject.order.drawn:
            row["seconds_without_cache"] = recomputed(subject, n_cells, every=n_cells == 1)
            row["times_faster_than_without_cache"] = row["seconds_without_cache"] / seconds
        rows.append(row)
    return rows


def guessed(subject: Subject, *, n_cells: int, repeats: int) -> list[dict[str, Any]]:
    """Speculative decoding by draft length, each run next to a plain one."""
    assert subject.draft is not None
    rows = []
    for shared in (True, False):
        for length in LENGTHS:
            guessing = Guessing(length=length, shared=shared)
            way = Speculative(
                subject.decoder, subject.order, subject.lanes, draft=subject.draft,
                guessing=guessing,
            )  # fmt: skip
            plain = subject.plain()
            decoded(subject, way, n_cells)
            pairs = [
                (decoded(subject, plain, n_cells), decoded(subject, way, n_cells))
                for _ in range(repeats)
            ]
            rows.append(
                {
                    "checked_by": "shared number" if shared else "rejection",
                    "draft_length": length,
                    "cells": n_cells,
                    **_acceptance(subject, way),
                    "network_calls": pairs[0][1][1],
                    "seconds_plain": statistics.median(one[0] for one, _ in pairs),
                    "seconds": statistics.median(two[0] for _, two in pairs),
                    "times_faster": statistics.median(one[0] / two[0] for one, two in pairs),
                    "the_very_cells": bool(torch.equal(pairs[0][0][2], pairs[0][1][2])),
                }
            )
    return rows


def _acceptance(subject: Subject, way: Speculative, n_cells: int = 64) -> dict[str, float]:
    """Share of guesses that stay, and genes said for each call of a cell."""
    cells, reach, n_calls = way.begin(subject.prefilled(n_cells), keys_of(n_cells)), 0, 0
    with torch.inference_mode():
        while not bool(cells.done.all()):
            reach = min(reach + way.stride, way.n_genes)
            n_calls += int((~cells.done).sum())
            way.advance(cells, reach=reach)
    return {
        "acceptance": float(cells.kept.sum() / cells.tried.sum()),
        "genes_per_call": n_cells * way.n_genes / n_calls,
    }


def in_slots(subject: Subject, *, n_cells: int, n_slots: int) -> dict[str, float]:
    """Requests of one cell each, a new one every few genes: slots against one after another."""
    cache, keys = subject.prefilled(n_cells, room=False), keys_of(n_cells)
    decoding = subject.plain()
    each = decode(decoding, subject.prefilled(1), keys[:1])[1]
    apart = max(each // n_slots, 1)

    def served() -> int:
        engine = Engine(decoding, n_slots=n_slots, n_prefix=cache.prefix.shape[1])
        waiting, step = list(range(n_cells)), 0
        while waiting or not engine.idle:
            if waiting and step % apart == 0:
                own = slice(waiting[0], waiting.pop(0) + 1)
                engine.submit(cache[own], keys[own])
            engine.step()
            step += 1
        return engine.n_calls

    seconds, n_calls = timed(served)
    rows = torch.arange(n_cells)[:, None]
    alone, counted = timed(
        lambda: sum(decode(decoding, subject.prefilled(n_cells)[row], keys[row])[1] for row in rows)
    )
    return {
        "cells": n_cells,
        "slots": n_slots,
        "seconds": seconds,
        "network_calls": n_calls,
        "seconds_one_after_another": alone,
        "network_calls_one_after_another": counted,
        "times_faster": alone / seconds,
    }


def measured(subject: Subject, *, repeats: int = 5) -> dict[str, Any]:
    """Everything about one decoder."""
    found: dict[str, Any] = {
        "order": subject.order.name,
        "n_genes": len(subject.lanes),
        "parameters": sum(p.numel() for p in subject.decoder.parameters()),
        "by_size": by_size(subject, repeats=repeats),
        "slots": in_slots(subject, n_cells=24, n_slots=8),
    }
    if subject.draft is not None:
        found["draft_parameters"] = sum(p.numel() for p in subject.draft.parameters())
        found["speculative"] = [
            row
            for n_cells in SIZES[:2]
            for row in guessed(subject, n_cells=n_cells, repeats=repeats)
        ]
    return found


def taught(
    path: Path, network: DecoderConfig, config: TrainConfig, *, n_genes: int, draft_steps: int
) -> Subject:
    """A decoder and a draft, trained on the file."""
    adata = ad.read_h5ad(path)
    registry = Registry.from_anndata(
        adata,
        perturbation_key="condition",
        control="ctrl",
        covariate_keys=["cell_type"],
        scale="counts",
    )
    data = prepare(adata, registry, holdout=None, n_top_genes=n_genes, n_axes=network.n_axes)
    lesson = prepare_causal(data, network, config, seed=0)
    module = lesson.data_module(lesson.populations)
    options = TrainerOptions(progress=False, accelerator="cpu")
    task = train(lesson.new_task(), module, steps=config.max_steps, options=options)
    decoder = task.averaged.eval()
    return with_draft(decoder, lesson, draft_steps=draft_steps)


def with_draft(decoder: CausalDecoder, lesson: CausalLesson, *, draft_steps: int) -> Subject:
    """A draft beside a decoder, and cells to make."""
    many = replace(lesson.config, max_steps=draft_steps, check_every=draft_steps)
    module = CountDataModule(lesson.populations, config=many, seed=1)
    batches = module.train_dataloader()
    batch = CountBatch.join(
        [module.train[number] for number in range(-(-max(SIZES) // many.set_size))]
    )
    draft = None
    if not lesson.order.drawn:
        draft = fit_draft(
            decoder, batches, bins=lesson.bins, order=lesson.order, seed=0, n_steps=draft_steps
        )
    return Subject(
        decoder=decoder,
        order=lesson.order,
        lanes=lesson.new_task().lanes,
        batch=batch,
        draft=draft,
    )


def told(report: Mapping[str, Any]) -> str:
    """The report as text."""
    made, settings = report["made_with"], report["settings"]
    lines = [
        "# How fast the causal decoder says its genes",
        "",
        "## What was asked",
        "",
        "How much does the cache save over computing the prefix anew for every gene? What do slots "
        "that are refilled save under staggered arrivals? How often is a guess of the draft right, "
        "and what does guessing save?",
        "",
        "## How it was measured",
        "",
        f"{settings['genes']} genes of Kang 2018; decoder trained for {settings['steps']} steps of "
        f"{settings['sets']} set(s), draft for {settings['draft_steps']}: times do not depend on "
        "it, acceptance may. Ways of decoding run in turns; medians. Acceptance is over 64 cells. "
        f"{made['cpu']}, {made['threads']} thread, torch {made['packages']['torch']}. "
        f"{report.get('note', '')}",
        "",
    ]
    for one in report["decoders"]:
        slots = one["slots"]
        lines += [
            f"## Order: {one['order']}",
            "",
            markdown(list(BY_SIZE.values()), _columns(one["by_size"], BY_SIZE)),
            "",
            f"{slots['cells']} requests of one cell in {slots['slots']} slots: "
            f"{slots['network_calls']} calls where one after another takes "
            f"{slots['network_calls_one_after_another']}: "
            f"{slots['times_faster']:.2f} times faster.",
            "",
        ]
        if "speculative" in one:
            lines += [markdown(list(GUESSED.values()), _columns(one["speculative"], GUESSED)), ""]
    return "\n".join(lines)


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[list[Any]]:
    return [[row.get(name) for name in names] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--sets", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--draft-steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--orders", nargs="+", default=["coexpression", "descending"])
    parser.add_argument("--note", default="", help="what else to know, such as a busy machine")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decoding_kang2018.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    made_with = environment()
    rows: list[Mapping[str, Any]] = []
    for order in chosen.orders:
        subject = taught(
            chosen.data,
            DecoderConfig(order=order),
            TrainConfig(max_steps=chosen.steps, n_sets=chosen.sets, warmup_steps=20),
            n_genes=chosen.genes,
            draft_steps=chosen.draft_steps,
        )
        rows.append(measured(subject, repeats=chosen.repeats))
    report = {
        "question": __doc__.splitlines()[0],
        "data_checksum": file_checksum(chosen.data),
        "settings": {
            name: getattr(chosen, name) for name in ("genes", "sets", "steps", "draft_steps")
        },
        "made_with": made_with,
        "note": chosen.note,
        "decoders": rows,
    }
    chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (HERE / "reports" / f"{chosen.out.stem}.md").write_text(told(report), encoding="utf-8")


if __name__ == "__main__":
    main()
