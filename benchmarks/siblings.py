"""What an imposed order of genes costs: the set diffusion model beside its autoregressive sibling.

    python -m benchmarks.siblings --data kang2018.h5ad

Same cells, genes, priors, partners, parameters and training seconds, in one run. Each sibling is
scored as it makes cells (raw) and with the identical recentring and count decoding (transport).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from anndata import AnnData
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from benchmarks.cache import Cache, write_json
from benchmarks.contexts import ContextStudy
from benchmarks.decoding import BY_SIZE, measured, taught, timed
from benchmarks.environment import environment
from benchmarks.fits import Recipe, Wanted
from benchmarks.held_out import HeldOut
from benchmarks.quality import say, shown
from benchmarks.tables import average, better, markdown, score_table
from perturbdiff._constants import UNS_KEY
from perturbdiff.config import DecoderConfig, SampleConfig, TrainConfig
from perturbdiff.data import Condition
from perturbdiff.data.datasets import SimulationConfig, simulated
from perturbdiff.model import CausalBaseline, SetDiffusion
from perturbdiff.model._causal_baseline import CAUSAL_TRAIN
from perturbdiff.model._causal_lesson import n_parameters
from perturbdiff.model._order_sensitivity import _in_order, _spread
from perturbdiff.model._questions import Controls
from perturbdiff.train import TrainerOptions, train

HERE = Path(__file__).resolve().parent
ORDERS = ("vocabulary", "random", "coexpression", "descending")
LEARNED = "coexpression"
DIFFUSION = "SetDiffusion"
METRICS = (
    "pearson_shift", "mae_shift", "energy_distance", "centred_energy_distance", "mmd",
    "variance_explained", "de_overlap", "direction_match", "discrimination", "ranked_first",
)  # fmt: skip
STATE = SimulationConfig(
    n_contexts=6, n_perturbations=1, n_unseen=0, n_pairs=0, doses=(), hours=(), n_cells=200,
    n_controls=512, responder_share=0.5, effect_size=2.0,
)  # fmt: skip
N_CELLS = 512
SIZES = (1, 16, 256)
ENDLESS = 10**6


class Deadline(Callback):
    """Ends training at a moment of the clock.

    Parameters
    ----------
    at
        Of ``time.perf_counter``.
    """

    def __init__(self, at: float) -> None:
        self.at = at

    def on_train_batch_end(  # noqa: PLR0917 - the signature is Lightning's
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look at the clock."""
        trainer.should_stop = trainer.should_stop or time.perf_counter() >= self.at


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out context: cells to learn from, what is asked, the truth to score against."""

    adata: AnnData
    study: ContextStudy
    wanted: Wanted
    held: HeldOut
    n_genes: int | None
    accelerator: str

    @property
    def fit(self) -> dict[str, Any]:
        """Settings of every fit."""
        return {"holdout": self.wanted.holdout, "n_top_genes": self.n_genes}

    @property
    def options(self) -> TrainerOptions:
        """Of every trainer."""
        return TrainerOptions(progress=False, accelerator=self.accelerator)

    def ask(self, model: SetDiffusion | CausalBaseline, adata: AnnData, **how: Any) -> AnnData:
        """Cells of the held-out context."""
        return model.predict(
            adata,
            perturbations=self.wanted.perturbations,
            contexts=self.wanted.contexts,
            **({"n_cells": N_CELLS, "seed": 0} | how),
        )

    def score(self, cells: np.ndarray, genes: Sequence[str]) -> dict[str, Any]:
        """Every score; genes of the question's own order."""
        place = {name: number for number, name in enumerate(genes)}
        order = [place[name] for name in self.held.controls.cells.genes]
        found: dict[str, Any] = self.held.score(cells[:, order].astype(np.float32))["values"]
        return found


def diffusion_model(
    question: Question, *, seed: int, steps: int | None, order: str = "vocabulary"
) -> tuple[SetDiffusion, AnnData, float]:
    """A set diffusion model, the file that it was given, and the seconds that it took."""
    file = _in_order(question.adata, question.study.registry, order)  # type: ignore[arg-type]
    config = TrainConfig()
    if steps is not None:
        config = replace(config, max_steps=steps, check_every=min(config.check_every, steps))
    began = time.perf_counter()
    model = SetDiffusion(question.study.registry)
    model.fit(file, seed=seed, train=config, options=question.options, **question.fit)
    return model, file, time.perf_counter() - began


def causal_model(
    question: Question, order: str, *, seed: int, seconds: float
) -> tuple[CausalBaseline, float]:
    """The sibling after as many seconds of preparation and training, and the true number."""
    began = time.perf_counter()
    model = CausalBaseline(question.study.registry)
    task, data = model.prepare_training(
        question.adata,
        seed=seed,
        # A draft would change no cell, and its training would come on top of the seconds.
        network=DecoderConfig(order=order, draft_steps=0),  # type: ignore[arg-type]
        train=replace(CAUSAL_TRAIN, max_steps=ENDLESS),
        **question.fit,
    )
    stop = Deadline(began + seconds)
    model.adopt(train(task, data, steps=ENDLESS, options=question.options, callbacks=[stop]))
    return model, time.perf_counter() - began


def raw_diffusion(question: Question, model: SetDiffusion) -> np.ndarray:
    """Cells as the diffusion makes them: the prior's mean and its deviations along latent axes.

    Neither recentred, nor with anything of the partner's counts, nor made into counts; values below
    zero are set to zero.
    """
    fitted, held = model.fitted, question.held
    config = SampleConfig()
    condition = Condition(held.condition.members, held.condition.context)
    controls = Controls(held.controls.cells, held.controls.context, fitted.loadings, fitted.mean)
    target = fitted.target(condition, controls)
    task = fitted.task(condition, controls, target, n_cells=N_CELLS, seed=0)
    sets = list(range(N_CELLS // config.set_size))
    (latent,), _ = fitted.sampler.sample([task], [sets], config, seed=0)
    back = torch.linalg.pinv(fitted.codec.encoder.double().cpu())
    cells = target.mean + (latent.flatten(0, 1).double().cpu() @ back).numpy()
    return np.clip(cells, 0, None)


def network_calls(pred: AnnData, *, order: str) -> float:
    """Network evaluations in which one cell takes part, without the prefill."""
    genes = float(pred.n_vars)
    return float((pred.X > 0).sum(1).mean()) + 1 if order == "descending" else genes


def seconds_by_size(
    question: Question, model: SetDiffusion | CausalBaseline, file: AnnData, **how: Any
) -> dict[int, float]:
    """Seconds of a whole prediction, control cells to counts: medians of three new seeds a size.

    A new seed, so that nothing of an earlier answer is used again: cells of the pilot, where the
    answer is recentred, are counted in.
    """
    question.ask(model, file, n_cells=1, seed=100, **how)
    return {
        size: statistics.median(
            timed(lambda s=size, k=seed: question.ask(model, file, n_cells=s, seed=k, **how))[0]
            for seed in range(1000 * size, 1000 * size + 3)
        )
        for size in SIZES
    }


def one_context(
    question: Question,
    *,
    steps: int | None,
    sensitivity: bool,
    timing: bool,
    orders: Sequence[str],
) -> dict[str, Any]:
    """Both siblings on one held-out context."""
    name = question.wanted.label
    say(f"{name}: {DIFFUSION}")
    diffusion, file, seconds = diffusion_model(question, seed=0, steps=steps)
    rows: dict[str, Any] = {}
    cells: dict[str, AnnData] = {DIFFUSION: question.ask(diffusion, file)}
    genes = diffusion.registry.genes
    one_batch = question.ask(diffusion, file, n_cells=32, seed=1)
    about = {
        "seconds": seconds,
        "steps": diffusion.fitted.steps,
        "parameters": n_parameters(diffusion.fitted.denoiser),
        "calls_a_cell": float(one_batch.uns[UNS_KEY]["nfe"]),
    }
    rows[f"{DIFFUSION}, raw"] = {
        **about, "scores": question.score(raw_diffusion(question, diffusion), genes),
    }  # fmt: skip
    if timing:
        about["wall"] = seconds_by_size(question, diffusion, file)
    rows[f"{DIFFUSION}, transport"] = {
        **about, "scores": question.score(cells[DIFFUSION].X.toarray(), genes),
    }  # fmt: skip
    for order in orders:
        say(f"{name}: {order}, {seconds:.0f} s")
        model, taken = causal_model(question, order, seed=0, seconds=seconds)
        for decoding in ("raw", "transport"):
            pred = question.ask(model, question.adata, decoding=decoding)
            if decoding == "raw":
                cells[order] = pred
            rows[f"{order}, {decoding}"] = {
                "seconds": taken,
                "steps": model.fitted.steps,
                "parameters": n_parameters(model.fitted.decoder),
                "calls_a_cell": network_calls(cells[order], order=order),
                "scores": question.score(pred.X.toarray(), list(pred.var_names)),
            }
            if timing:
                wall = seconds_by_size(question, model, question.adata, decoding=decoding)
                rows[f"{order}, {decoding}"]["wall"] = wall
    ceiling = question.held.ceiling()["values"]
    found: dict[str, Any] = {"context": name, "rows": rows, "ceiling": ceiling}
    if sensitivity:
        found["sensitivity"] = moved(question, cells, steps=steps, seconds=seconds)
    return found


def moved(
    question: Question, cells: Mapping[str, AnnData], *, steps: int | None, seconds: float
) -> dict[str, Any]:
    """How far predictions move when only the order of genes changes, and from seed to seed."""
    name = question.wanted.label
    say(f"{name}: order and seed")
    by_name = _sorted(question)
    known = [order for order in cells if order not in (DIFFUSION, "descending")]
    causal, _ = causal_model(question, LEARNED, seed=1, seconds=seconds)
    other, file, _ = diffusion_model(question, seed=0, steps=steps, order="random")
    seed, own, _ = diffusion_model(question, seed=1, steps=steps)
    found = {
        "CausalBaseline": {
            "orders": _spread([by_name(cells[order]) for order in known]),
            "seeds": _spread(
                [by_name(pred) for pred in (cells[LEARNED], question.ask(causal, question.adata))]
            ),
        },
        DIFFUSION: {
            "orders": _spread(
                [by_name(pred) for pred in (cells[DIFFUSION], question.ask(other, file))]
            ),
            "seeds": _spread(
                [by_name(pred) for pred in (cells[DIFFUSION], question.ask(seed, own))]
            ),
        },
    }
    if "descending" in cells:
        found["CausalBaseline"]["orders_and_descending"] = _spread(
            [by_name(cells[order]) for order in (*known, "descending")]
        )
    return found


def _sorted(question: Question) -> Callable[[AnnData], dict[str, np.ndarray]]:
    def by_name(pred: AnnData) -> dict[str, np.ndarray]:
        order = np.argsort(pred.var_names.to_numpy(dtype=str), kind="stable")
        return {question.wanted.label: pred.X.toarray()[:, order].astype(np.float64)}

    return by_name


def averaged(contexts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of each row over contexts."""
    rows = {}
    for method in contexts[0]["rows"]:
        own = [context["rows"][method] for context in contexts]
        scores, _ = average([row["scores"] for row in own])
        numbers = ("seconds", "steps", "parameters", "calls_a_cell")
        rows[method] = {
            "scores": scores,
            **{name: float(np.mean([row[name] for row in own])) for name in numbers},
        }
    return rows


def questions(
    study: ContextStudy, names: Sequence[str], *, accelerator: str
) -> list[Callable[[], Question]]:
    """Held-out contexts, each made when its turn comes."""

    def make(name: str) -> Question:
        return Question(
            adata=study.adata, study=study, wanted=study.wanted(name), held=study._view(name),
            n_genes=study.recipe.n_top_genes, accelerator=accelerator,
        )  # fmt: skip

    return [lambda name=name: make(name) for name in names]  # type: ignore[misc]


def studies(options: argparse.Namespace) -> dict[str, tuple[ContextStudy, list[str]]]:
    """Data sets, and what is held out of each."""
    cache = Cache(options.cache)
    recipe = Recipe(n_top_genes=options.n_top_genes, accelerator=options.accelerator)
    found = {}
    if options.data is not None:
        kang = ContextStudy(
            path=options.data, perturbation_key="condition", control="ctrl",
            context_key="cell_type", recipe=recipe, cache=cache,
        )  # fmt: skip
        found[options.data.stem] = (kang, [name.strip() for name in options.types.split(",")])
    if options.simulated:
        path = options.cache / "simulated_siblings.h5ad"
        path.parent.mkdir(parents=True, exist_ok=True)
        simulated(STATE, seed=0).adata.write_h5ad(path)
        world = ContextStudy(
            path=path, perturbation_key="perturbation", control="control",
            context_key="cell_type", recipe=replace(recipe, n_top_genes=None), cache=cache,
        )  # fmt: skip
        found["simulated"] = (world, list(world.contexts[-options.simulated :]))
    return found


def report(result: Mapping[str, Any]) -> str:
    """Tables, and where either sibling is better."""
    lines = ["# An order of genes, imposed or not", "", "## What was asked", "",
             str(__doc__).splitlines()[0], "", "## How it was measured", "",
             str(__doc__).split("\n\n", 2)[2].replace("\n", " ").strip(), "",
             "## What was measured", ""]  # fmt: skip
    for name, found in result["data"].items():
        rows = found["averages"]
        table = {method: row["scores"] for method, row in rows.items()}
        table["ceiling (split halves)"] = found["ceiling"]
        held = ", ".join(context["context"] for context in found["contexts"])
        lines += [f"### {name}: {held} held out in turn", "",
                  score_table(table, METRICS, first="method"), "",
                  markdown(["method", "seconds", "steps", "parameters", "network calls a cell"],
                           [[m, r["seconds"], r["steps"], r["parameters"], r["calls_a_cell"]]
                            for m, r in rows.items()], digits=0), "",
                  *verdict(rows), "", *times(found["contexts"][0]["rows"])]  # fmt: skip
        for context in found["contexts"]:
            if "sensitivity" in context:
                lines += [f"How far predictions move ({context['context']}):", "",
                          sensitivity_table(context["sensitivity"]), ""]  # fmt: skip
    if "decoding" in result:
        lines += decoding_times(result["decoding"])
    made = result["environment"]
    place = f"Commit {made['commit'][:12]}, {made['cpu']}, {made['threads']} thread."
    lines += ["## Made with", "", f"`{result['command']}`", "", place]
    lines += ["", result["note"]] if "note" in result else []
    return "\n".join([*lines, ""])


def sensitivity_table(found: Mapping[str, Any]) -> str:
    rows = [
        [model, what, values["mean_shift_difference"], values["energy_distance"]]
        for model, parts in found.items()
        for what, values in parts.items()
    ]
    return markdown(["model", "changed", "mean shift", "energy"], rows, digits=5)


def verdict(rows: Mapping[str, Any]) -> list[str]:
    """Metric by metric, which sibling is better: raw against raw, transported against the same."""
    lines = []
    for method in (name for name in rows if not name.startswith(DIFFUSION)):
        rival = f"{DIFFUSION}, {method.rpartition(', ')[2]}"
        own, other = rows[method]["scores"], rows[rival]["scores"]
        won = [name for name in METRICS if better(name, own.get(name), other.get(name))]
        lost = [name for name in METRICS if better(name, other.get(name), own.get(name))]
        lines.append(
            f"- {method} against {rival}: better in {', '.join(won) or 'nothing'}; "
            f"worse in {', '.join(lost) or 'nothing'}."
        )
    return lines


def times(rows: Mapping[str, Any]) -> list[str]:
    """Seconds of whole predictions, where they were measured."""
    timed_rows = {method: row["wall"] for method, row in rows.items() if "wall" in row}
    if not timed_rows:
        return []
    head = ["seconds of a prediction", *(f"{size} cells" for size in SIZES)]
    table = [[method, *wall.values()] for method, wall in timed_rows.items()]
    return [markdown(head, table, digits=2), ""]


def decoding_times(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Prefill, decode and cache of each kind of order."""
    lines = ["### Decoding", ""]
    for one in found:
        table = [[row.get(name) for name in BY_SIZE] for row in one["by_size"]]
        lines += [f"{one['order']}:", "", markdown(list(BY_SIZE.values()), table), ""]
        if "speculative" in one:
            best = max(one["speculative"], key=lambda row: row["times_faster"])
            lines += [
                f"Guessed ahead, at best: {best['times_faster']:.1f} times faster "
                f"({best['cells']} cells, draft length {best['draft_length']}, acceptance "
                f"{best['acceptance']:.3f}).",
                "",
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.siblings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--data", type=Path, help="Kang 2018 as h5ad")
    add("--types", default="B,CD16 Mono,NK", help="types to hold out in turn")
    add("--simulated", type=int, default=2, help="contexts of the simulated cells; 0 for none")
    add("--n-top-genes", type=int, default=500)
    add("--orders", default=",".join(ORDERS))
    add("--steps", type=int, help="most steps of the diffusion model, instead of the default")
    add("--no-sensitivity", action="store_true")
    add("--no-timing", action="store_true", help="leave decoding times out")
    add("--accelerator", default="cpu")
    add("--cache", type=Path, default=HERE / "cache")
    add("--out", type=Path, default=HERE / "results" / "siblings.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    orders, data = options.orders.split(","), {}
    for name, (study, names) in studies(options).items():
        contexts = []
        for number, make in enumerate(questions(study, names, accelerator=options.accelerator)):
            wish = not options.no_sensitivity and number == 0
            timing = not options.no_timing and number == 0
            contexts.append(
                one_context(
                    make(), steps=options.steps, sensitivity=wish, timing=timing, orders=orders
                )
            )
        ceiling, _ = average([context["ceiling"] for context in contexts])
        data[name] = {"contexts": contexts, "averages": averaged(contexts), "ceiling": ceiling}
    command = " ".join(["python -m benchmarks.siblings", *shown(sys.argv[1:])])
    result = {"command": command, "data": data, "environment": environment()}
    if not options.no_timing and options.data is not None:
        say("times of decoding")
        few = TrainConfig(max_steps=100, n_sets=1, warmup_steps=20)
        result["decoding"] = [
            measured(
                taught(
                    options.data, DecoderConfig(order=order), few,  # type: ignore[arg-type]
                    n_genes=options.n_top_genes, draft_steps=80,
                )
            )
            for order in (LEARNED, "descending")
        ]  # fmt: skip
    write_json(options.out, result)
    where = options.out.with_suffix(".md")
    if options.out.parent.name == "results":
        where = HERE / "reports" / f"{options.out.stem}.md"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(report(result), encoding="utf-8")
    say(f"written: {options.out}, {where}")


if __name__ == "__main__":
    main()
