"""What enforcing constraints reaches, and what it costs in distribution.

    python -m benchmarks.constraints --kang kang2018.h5ad

Sets of 32 cells under constraints that 50 %, 10 % and 1 % of unconstrained sets meet. The truth
under the constraint is sampled by rejection: fresh cells of the simulated world, measured cells of
the held-out type for Kang 2018. The energy distance to it stands beside that of unconstrained
cells. What a way costs is said in network calls and in seconds a set, and beside it how often the
autoregressive sibling succeeds in as many seconds. Half of the genes observed: how well the other
half is predicted.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perturbdiff as ptd
from benchmarks.cache import write_json
from benchmarks.constraint_questions import Question, kang_question, simulated_question
from benchmarks.constraint_report import picture, report_of
from benchmarks.constraint_tasks import (
    SET_SIZE,
    Task,
    best_of,
    distance,
    first_that_obey,
    kinds,
    tasks,
    ways,
)
from benchmarks.environment import environment
from benchmarks.fits import Recipe
from benchmarks.quality import say, shown
from perturbdiff._errors import PerturbDiffError
from perturbdiff.model._causal_fitted import CELLS_AT_ONCE

HERE = Path(__file__).resolve().parent
RATES = (0.5, 0.1, 0.01)
TRUE_SETS = 2048
CURVE = (1, 2, 4, 8, 16)


class Study:
    """All tasks of one question."""

    def __init__(self, question: Question, *, n_free: int, n_sibling: int, n_sets: int) -> None:
        self.question, self.n_sets = question, n_sets
        self.genes = question.model.registry.genes
        free, pred, seconds = question.ask(n_free * SET_SIZE)
        self.free = free.reshape(n_free, SET_SIZE, -1)
        own, other, sibling_seconds = question.ask(n_sibling * SET_SIZE, model=question.sibling)
        self.sibling = own.reshape(n_sibling, SET_SIZE, -1)
        self.true = question.true_sets(TRUE_SETS)
        self.seconds = seconds / n_free
        self.sibling_seconds = sibling_seconds / n_sibling
        self.calls = int(pred.uns["perturbdiff"]["n_steps"])
        batches = -(-n_sibling * SET_SIZE // CELLS_AT_ONCE)
        self.sibling_calls = other.uns["perturbdiff"]["nfe"] / batches

    def result(self, rates: tuple[float, ...]) -> dict[str, Any]:
        """Every task, and what an unconstrained set costs."""
        found = kinds(self.genes, self.free.reshape(-1, len(self.genes)), self.question.control_RG)
        return {
            "name": self.question.name,
            "context": self.question.context,
            "seconds_fit": self.question.seconds_fit,
            "bundles": {
                "set_diffusion": self.question.model.checksum,
                "causal_baseline": self.question.sibling.checksum,
            },
            "n_free_sets": len(self.free),
            "n_sibling_sets": len(self.sibling),
            "n_sets": self.n_sets,
            "calls_per_trajectory": self.calls,
            "seconds_per_set": self.seconds,
            "sibling_calls_per_set": self.sibling_calls,
            "sibling_seconds_per_set": self.sibling_seconds,
            "tasks": [self.row(task) for task in tasks(found, self.free, rates)],
        }

    def row(self, task: Task) -> dict[str, Any]:
        """One task: truth, no constraint, every way, the sibling."""
        say(f"{self.question.name}: {task.name}")
        truth = task.conditional(self.true)
        obeying, own = (int(task.obeys(sets).sum()) for sets in (self.free, self.sibling))
        free = self.free[: self.n_sets].reshape(-1, len(self.genes))
        return {
            "task": task.name,
            "kind": task.kind.name,
            "rate": task.rate,
            "per_cell": task.kind.gene is not None,
            "true_rate": task.share(self.true),
            "n_true_cells": 0 if truth is None else len(truth),
            "unconstrained": distance(free, truth, self.question.axes),
            "curve": {str(n): best_of(obeying, len(self.free), n) for n in CURVE},
            "ways": {name: self.tried(task, way, truth) for name, way in ways().items()},
            "sibling": {
                "rate": task.share(self.sibling),
                "curve": {str(n): best_of(own, len(self.sibling), n) for n in CURVE},
                "best_of_distance": distance(
                    first_that_obey(task, self.sibling, CURVE[-1]).reshape(-1, len(self.genes)),
                    truth,
                    self.question.axes,
                ),
                "masking": None if task.kind.gene is None else self.masked(task, truth),
            },
        }

    def tried(self, task: Task, way: Any, truth: np.ndarray | None) -> dict[str, Any]:
        """Satisfaction, distances and cost of one way; or why it is not offered."""
        try:
            return self.enforced(task, truth, enforce=way)
        except PerturbDiffError as error:
            return {"refused": str(error)}

    def masked(self, task: Task, truth: np.ndarray | None) -> dict[str, Any]:
        """The sibling with the logits of other counts masked."""
        return self.enforced(task, truth, model=self.question.sibling)

    def enforced(self, task: Task, truth: np.ndarray | None, **how: Any) -> dict[str, Any]:
        """Cells under the constraint."""
        cells, pred, seconds = self.question.ask(
            self.n_sets * SET_SIZE, constraints=[task.kind.make(task.threshold)], **how
        )
        report = pred.uns["perturbdiff"]["constraints"].iloc[0]
        obeys = task.obeys(cells.reshape(self.n_sets, SET_SIZE, -1))
        each = seconds / self.n_sets
        afford = max(1, min(CURVE[-1], int(each / self.sibling_seconds)))
        own = int(task.obeys(self.sibling).sum())
        return {
            "satisfied_sets": float(obeys.mean()),
            "satisfied": bool(report["satisfied"]),
            "energy_distance": distance(cells, truth, self.question.axes),
            "energy_distance_to_unconstrained": float(report["energy_distance"]),
            "cost": float(report["cost"]),
            "calls_per_set": float(report["cost"]) * self.calls,
            "seconds_per_set": each,
            "sibling_draws_in_that_time": afford,
            "sibling_in_that_time": best_of(own, len(self.sibling), afford),
            "supported": bool(report["supported"]),
        }


def observed(question: Question, *, seed: int = 0) -> dict[str, Any]:
    """Half of the genes observed in true cells: error on the other half, beside a ridge."""
    from sklearn.linear_model import Ridge  # noqa: PLC0415 - slow to import

    say(f"{question.name}: half of the genes observed")
    model, rng = question.model, np.random.default_rng(seed)
    genes = np.array(model.registry.genes)
    half = np.zeros(len(genes), dtype=bool)
    half[rng.permutation(len(genes))[: len(genes) // 2]] = True
    n_cells = min(256, len(question.true_NG))
    true = question.true_NG[rng.permutation(len(question.true_NG))[:n_cells]]
    wish = ptd.Observed(tuple(genes[half]), true[:, half])
    answers = {
        "without": question.ask_often(n_cells),
        "observed": question.ask_often(n_cells, constraints=[wish]),
    }
    training = question.training_cells()
    ridge = Ridge(alpha=len(training) ** 0.5).fit(training[:, half], training[:, ~half])
    guessed = ridge.predict(true[:, half])
    errors = {name: cells[:, ~half] for name, cells in answers.items()} | {"ridge": guessed}
    goal = true[:, ~half].mean(0)
    return {
        "n_cells": n_cells,
        "mae_of_means": {k: float(np.abs(x.mean(0) - goal).mean()) for k, x in errors.items()},
        "mae_of_cells": {k: float(np.abs(x - true[:, ~half]).mean()) for k, x in errors.items()},
        "observed_exactly": float(np.abs(answers["observed"][:, half] - true[:, half]).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.constraints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kang", type=Path, help="h5ad file with cell types; left out where it is not given")
    add("--context", default="NK", help="cell type of Kang 2018 that is held out")
    add("--sets", type=int, default=12, help="sets under each constraint")
    add("--free-sets", type=int, default=512, help="sets without, for thresholds and best of N")
    add("--sibling-sets", type=int, default=40, help="sets of the sibling, for best of N")
    add("--genes", type=int, default=500, help="variable genes of Kang 2018")
    add("--steps", type=int, help="most training steps, instead of the default")
    add("--threads", type=int, help="threads of torch")
    add("--accelerator", default="auto")
    add("--models", type=Path, default=HERE / "cache" / "constraints", help="where models are kept")
    add("--out", type=Path, help="JSON file; report and picture go beside it")
    add("--only", choices=("simulated", "kang2018"), help="one question; the JSON keeps the other")
    add("--again", action="store_true", help="make report and picture from the JSON that is there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    small = options.steps or options.free_sets < 512
    out = options.out or (
        options.models / "trial.json" if small else HERE / "results" / "constraints.json"
    )
    if options.again:
        show(json.loads(out.read_text(encoding="utf-8")), out)
        return
    result: dict[str, Any] = {"questions": []}
    if options.only and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))["questions"]
        result["questions"] = [one for one in before if one["name"] != options.only]
    made = {
        "command": " ".join(["python -m benchmarks.constraints", *shown(sys.argv[1:])]),
        "made_with": environment(),
    }
    for one in questions(options):
        study = Study(
            one,
            n_free=options.free_sets,
            n_sibling=options.sibling_sets,
            n_sets=options.sets,
        )
        result["questions"].append(study.result(RATES) | {"observed": observed(one)} | made)
        write_json(out, result)
    show(result, out)


def questions(options: argparse.Namespace) -> Iterator[Question]:
    """The simulated one, and that of the file."""
    recipe = Recipe(steps=options.steps, n_top_genes=None, accelerator=options.accelerator)
    if options.only != "kang2018":
        yield simulated_question(recipe, options.models)
    if options.kang and options.only != "simulated":
        import anndata  # noqa: PLC0415

        adata = anndata.read_h5ad(options.kang)
        top = replace(recipe, n_top_genes=options.genes)
        yield kang_question(adata, top, options.models, context=options.context)


def show(result: dict[str, Any], out: Path) -> None:
    """Write the report and the picture."""
    report = out.with_suffix(".md")
    if out.parent.name == "results":
        report = HERE / "reports" / "constraints.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(report_of(result, about=__doc__ or ""), encoding="utf-8")
    picture(result, report.with_suffix(".png"))
    say(f"written: {out}, {report}")


if __name__ == "__main__":
    main()
