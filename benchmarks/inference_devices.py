"""What more devices would buy, from costs that were measured on one and formulas tested elsewhere.

Nothing here runs on several devices. Seconds of layers are those of a call, shared out by
operations; a link hands over 10 GB/s after 20 microseconds.
"""

from typing import Any

import perturbdiff as ptd
from benchmarks.inference_batches import task_of
from benchmarks.inference_models import Models, plain_decoding
from perturbdiff.model._quote_causal import DecoderCost
from perturbdiff.model._quote_diffusion import DenoiserCost
from perturbdiff.profiling import Course, Placement, Pools, pipeline, replicas, set_parallel

N_SETS, SET_SIZE, N_BLOCKS = 64, 32, 4
LINK_BYTES, LINK_SECONDS = 10e9, 20e-6
FLOAT = 4


def placements(models: Models) -> dict[str, Any]:
    """Latency, throughput and memory a device of the ways to split, for both models."""
    config, model = ptd.SampleConfig(), models.diffusion(1000, n_blocks=N_BLOCKS)
    cost = DenoiserCost(model.fitted, SET_SIZE)
    course = _course(cost, config.n_steps)
    handover = LINK_SECONDS + N_SETS * SET_SIZE * cost.shape.width * FLOAT / LINK_BYTES
    each = (cost.seconds(N_SETS) - cost.seconds(N_SETS // 4)) / (N_SETS - N_SETS // 4)
    overhead = max(0.0, cost.seconds(N_SETS) - N_SETS * each)
    rows = []
    for n in (1, 2, 4):
        ways = {
            "pipeline, one batch": pipeline(course, n, handover=handover),
            "pipeline, as many batches": pipeline(course, n, handover=handover, in_flight=n),
            "set parallel": set_parallel(
                n, calls=config.n_steps, n_sets=N_SETS, overhead=overhead, each=each,
                weight_bytes=sum(course.layer_bytes), set_bytes=course.batch_bytes / N_SETS,
            ),
            "replicas": replicas(course, n),
        }  # fmt: skip
        rows += [{"way": way, **vars(found)} for way, found in ways.items()]
    return {"rows": rows, "sets": N_SETS, "pools": _pools(models)}


def _course(cost: DenoiserCost, calls: int) -> Course:
    """A batch on one device, block by block; what is around the blocks is with the outer ones."""
    shape, seconds = cost.shape, cost.seconds(N_SETS)
    block, ends = shape.block(N_SETS, SET_SIZE), shape.ends(N_SETS, SET_SIZE)
    ends += shape.condition(N_SETS)
    whole = shape.n_blocks * block + ends
    layers = [block / whole * seconds] * shape.n_blocks
    layers[0] += ends / whole * seconds
    weights = sum(p.numel() for p in cost.fitted.denoiser.parameters()) * FLOAT
    made = shape.memory_numbers(N_SETS) + N_SETS * SET_SIZE * shape.width
    return Course(
        calls=calls,
        layer_seconds=tuple(layers),
        layer_bytes=(weights / shape.n_blocks,) * shape.n_blocks,
        batch_bytes=float(made * FLOAT),
    )


def _pools(models: Models) -> dict[str, Any]:
    """Prefill and decode of the sibling apart: 16 cells a request, 16 requests a decode worker."""
    model, cells, slots = models.sibling(1000), 16, 16
    cost = DecoderCost(model.fitted, task_of(model, models, cells), plain_decoding(cells)["decode"])
    prefill = cost.prefill((1.0, cells), (cells,))
    decode = cost.seconds(cells * slots) - cost.prefill((1.0, cells * slots), (cells * slots,))
    full = cost.shape.cache_numbers(cells) * FLOAT
    prefix = full * (cost.shape.n_controls + 1) / (cost.shape.n_controls + 1 + cost.n_genes)
    weights = sum(p.numel() for p in model.fitted.decoder.parameters()) * FLOAT
    pools = Pools(
        prefill=prefill, send=LINK_SECONDS + prefix / LINK_BYTES, decode=decode, slots=slots,
        weight_bytes=float(weights), prefix_bytes=prefix, cache_bytes=full,
    )  # fmt: skip
    rows = []
    for n_prefill, n_decode in ((1, 1), (1, 4), (1, 16)):
        first, second = pools.placed(n_prefill, n_decode)
        rows.append(
            {
                "prefill": n_prefill,
                "decode": n_decode,
                **_figures(first),
                "decode_memory": second.memory,
            }
        )
    return {"rows": rows, "balance": pools.balance, "cells": cells, "slots": slots}


def _figures(placed: Placement) -> dict[str, float]:
    return {name: getattr(placed, name) for name in ("latency", "throughput", "memory")}
