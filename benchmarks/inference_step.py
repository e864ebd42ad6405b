"""One denoising step against the rate of this machine, and what a sampler adds to its network."""

from typing import Any

import torch

import perturbdiff as ptd
from benchmarks.inference_models import Models
from perturbdiff.model._quote_diffusion import DenoiserCost
from perturbdiff.profiling import Probe, this_machine, watching
from perturbdiff.profiling._machine import run_seconds

WIDTHS = (256, 384, 512)
SET_SIZE = 256
N_SETS = (1, 2, 4)
SECONDS = 0.6
TOGETHER = {"cpu": (1, 4, 16, 32, 64, 128, 256), "cuda": (16, 64, 256, 512, 1024, 2048, 4096)}


def step_shares(models: Models) -> dict[str, Any]:
    """Share of the matrix rate that a step of wide networks reaches at set size 256.

    Step and rate are measured at the same setting of float32 products: as torch makes them by
    default, and ``medium``.
    """
    before, found = torch.get_float32_matmul_precision(), {}
    for products in ("highest", "medium"):
        torch.set_float32_matmul_precision(products)
        found[products] = _shares(models)
    torch.set_float32_matmul_precision(before)
    return {"products": found, "asked": 0.6}


def _shares(models: Models) -> dict[str, Any]:
    device = torch.device(models.device)
    rate = this_machine(device, refresh=True).rate("float32")
    assert rate is not None  # float32 runs everywhere
    rows = []
    for width in WIDTHS:
        model = models.diffusion(500, width=width, n_blocks=3, n_heads=width // 64, expansion=4)
        cost = DenoiserCost(model.fitted, SET_SIZE)
        for n_sets in N_SETS:
            with torch.inference_mode():
                took = run_seconds(device, cost.call(n_sets), SECONDS)
            work = cost.work(n_sets)
            rows.append(
                {
                    "width": width,
                    "sets": n_sets,
                    "set_size": SET_SIZE,
                    "seconds": took[0],
                    "seconds_median": took[len(took) // 2],
                    "operations": work.operations,
                    "intensity": work.intensity,
                    "share_of_rate": work.operations / took[0] / rate,
                }
            )
    return {"matrix_rate": rate, "rows": rows}


def sets_together(models: Models) -> dict[str, Any]:
    """Cells a second against the sets in a batch: how many the sampler should put together."""
    fitted, size = models.diffusion(500).fitted, ptd.SampleConfig().set_size
    cost, rows = DenoiserCost(fitted, size), []
    with torch.inference_mode():
        for n_sets in TOGETHER[torch.device(models.device).type]:
            took = run_seconds(torch.device(models.device), cost.call(n_sets), SECONDS)
            middle = took[len(took) // 2]
            rows.append({"sets": n_sets, "seconds": middle, "cells_each": n_sets * size / middle})
    return {"rows": rows, "set_size": size, "used": fitted.sampler.sets_at_once(size)}


def sampling_overhead(models: Models) -> dict[str, Any]:
    """Share of a sampler's run that is not in the network, control cells encoded before."""
    rows = []
    for width, n_cells in ((96, 32), (96, 512), (96, 2048), (256, 512)):
        model = models.diffusion(500, width=width)
        sample = ptd.SampleConfig()
        shares = []
        for seed in range(5):
            points, probe = model.probe_points(), Probe(models.device)
            model.fitted.plans.clear()
            with watching(probe, points.stages):
                probe.run(
                    lambda seed=seed, sample=sample, model=model, n=n_cells: model.predict(
                        **models.question, n_cells=n, seed=seed, sample=sample
                    )
                )
            phase = probe.phases["denoising steps"]
            shares.append(phase.outside_network / phase.seconds)
        sets = max(512, n_cells) // sample.set_size
        rows.append({"width": width, "sets": sets, "share_outside": sorted(shares)[2]})
    return {"rows": rows, "asked": 0.05, "n_steps": ptd.SampleConfig().n_steps}
