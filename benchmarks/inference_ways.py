"""What each way of making predictions faster bought: the same work before and after, in turns."""

import copy
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

import perturbdiff as ptd
from benchmarks.inference_batches import task_of
from benchmarks.inference_models import Models, plain_decoding
from perturbdiff.model import _fitted
from perturbdiff.model._fitted import PILOT_CELLS, Recipe
from perturbdiff.model._quote_causal import DecoderCost
from perturbdiff.model._quote_diffusion import DenoiserCost, made_context
from perturbdiff.prior import _expectations
from perturbdiff.profiling._machine import run_seconds

WIDE = {"width": 256, "n_blocks": 3, "n_heads": 4, "expansion": 4}
SECONDS = 0.5
TURNS = 3
WRITTEN = 256  # cells that the sibling writes together
Call = Callable[[], Any]


def ways(models: Models) -> dict[str, Any]:
    """Seconds before and after each."""
    device = torch.device(models.device)
    kinds = [_network, _products, _solving]
    if device.type == "cuda" or shutil.which("c++"):  # what torch.compile writes must be built
        kinds.append(_compiled)
    with torch.inference_mode():
        return {"rows": [row for kind in kinds for row in kind(models, device)]}


def _row(what: str, device: torch.device, *, before: Call, after: Call) -> dict[str, Any]:
    """Medians of turns, so that what else the machine does meets both."""
    took: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(TURNS):
        took["before"].append(run_seconds(device, before, SECONDS)[0])
        took["after"].append(run_seconds(device, after, SECONDS)[0])
    middle = {name: sorted(seconds)[TURNS // 2] for name, seconds in took.items()}
    return {"what": what, **middle, "times": middle["before"] / middle["after"]}


def _network(models: Models, device: torch.device) -> Iterator[dict[str, Any]]:
    small, wide = models.diffusion(500), models.diffusion(500, **WIDE)
    fresh = made_context(small.fitted, 16, 32)
    known = small.fitted.denoiser.network.remember(fresh)
    xt = torch.zeros(16, 32, DenoiserCost(small.fitted, 32).shape.n_latent, device=device)
    sigma, denoise = torch.ones(16, device=device), small.fitted.denoiser
    yield _row(
        "control cells encoded once, not at every step (16 sets of 32)", device,
        before=lambda: denoise(xt, sigma, replace(fresh, memory=None)),
        after=lambda: denoise(xt, sigma, known),
    )  # fmt: skip
    one, many = (DenoiserCost(small.fitted, 32).call(n) for n in (1, 64))
    yield _row(
        "64 conditions of one set in a batch, not one after another", device,
        before=lambda: [one() for _ in range(64)], after=many,
    )  # fmt: skip
    step = DenoiserCost(wide.fitted, 256).call(4)
    yield _row(
        "fused attention in a step (width 256, 4 sets of 256)",
        device,
        before=_plain(step),
        after=step,
    )
    call = _sibling_call(models)
    yield _row(
        f"fused attention in a decode call ({WRITTEN} cells)",
        device,
        before=_plain(call),
        after=call,
    )


def _products(models: Models, device: torch.device) -> Iterator[dict[str, Any]]:
    for what, call in (
        ("a step (16 sets of 32)", DenoiserCost(models.diffusion(500).fitted, 32).call(16)),
        (
            "a step (width 256, 64 sets of 32)",
            DenoiserCost(models.diffusion(500, **WIDE).fitted, 32).call(64),
        ),
        (f"a decode call ({WRITTEN} cells)", _sibling_call(models)),
    ):
        words = f"float32 products as they are by default, not `medium`, in {what}"
        yield _row(words, device, before=_in_products(call, "medium"), after=call)


def _solving(models: Models, device: torch.device) -> Iterator[dict[str, Any]]:
    config = ptd.SampleConfig()
    for n_genes in (500, 2000):
        model = models.diffusion(n_genes)
        condition, controls = model._with_controls_of(
            model._ask(None, **models.question, n_cells=PILOT_CELLS)
        )[0]
        target, task = model.fitted.target(condition, controls), task_of(model, models, 1)
        sets = list(range(PILOT_CELLS // config.set_size))
        (latent,), _ = model.fitted.sampler.sample([task], [sets], config, seed=0)
        recipe = Recipe(task=task, controls=controls, target=target, config=config, seed=0)

        def solve(model: Any = model, recipe: Recipe = recipe, latent: Tensor = latent) -> None:
            model.fitted.solve(recipe, latent)

        for what, module, name, value in (
            ("low rates summed, not integrated", _expectations, "_LOW", -1.0),
            ("some genes after others, not all at once", _fitted, "AT_ONCE", 1 << 40),
        ):
            words = f"transport solved with {what} ({n_genes:,} genes)"
            yield _row(words, device, before=_with(solve, module, {name: value}), after=solve)


def _compiled(models: Models, device: torch.device) -> Iterator[dict[str, Any]]:
    small, wide = models.diffusion(500), models.diffusion(500, **WIDE)
    for model, precision, n_sets in (
        (small, "float32", 1), (small, "float32", 16), (small, "int8", 16),
        (wide, "float32", 64), (wide, "bfloat16", 64), (wide, "int8", 64),
    ):  # fmt: skip
        plain = model.in_precision(precision)
        cost = DenoiserCost(plain.fitted, 32)
        other = copy.copy(cost)
        other.fitted = plain.compiled().fitted  # not yet timed, so not yet compiled
        eager, compiled = cost.call(n_sets), other.call(n_sets)
        began = time.perf_counter()
        compiled()
        took = time.perf_counter() - began
        words = f"compiled, {precision} (width {plain.fitted.network.width}, sets of 32: {n_sets})"
        yield _row(words, device, before=eager, after=compiled) | {"once": took}


def _sibling_call(models: Models) -> Call:
    """The call for the last gene, which looks back at all others."""
    sibling = models.sibling(500)
    config = replace(plain_decoding()["decode"], set_size=WRITTEN)
    cost = DecoderCost(sibling.fitted, task_of(sibling, models, WRITTEN), config)
    return cost.advancing(cost.cells(WRITTEN), cost.n_genes)


def _plain(call: Call) -> Call:
    """The same with attention as two products and what lies between."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ value

    return _with(call, functional, {"scaled_dot_product_attention": attend})


def _in_products(call: Call, products: str) -> Call:
    def changed() -> None:
        torch.set_float32_matmul_precision(products)
        call()
        torch.set_float32_matmul_precision("highest")

    return changed


def _with(call: Call, module: Any, values: Mapping[str, Any]) -> Call:
    def changed() -> None:
        with patch.multiple(module, **values):
            call()

    return changed
