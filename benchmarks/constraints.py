"""What enforcing constraints reaches, and what it costs in distribution.

    python -m benchmarks.constraints --kang kang2018.h5ad

Sets of 32 cells under constraints that 50 %, 10 % and 1 % of unconstrained sets meet. The truth
under the constraint is sampled by rejection: fresh cells of the simulated world, measured cells of
the held-out type for Kang 2018. The energy distance to it stands beside that of unconstrained
cells. Half of the genes observed: how well the other half is predicted.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perturbdiff as ptd
from benchmarks.cache import Cache, write_json
from benchmarks.constraint_tasks import (
    SET_SIZE,
    Task,
    best_of,
    conditional,
    distance,
    kinds,
    tasks,
    ways,
)
from benchmarks.environment import environment
from benchmarks.fits import Recipe
from benchmarks.quality import say, shown
from benchmarks.tables import markdown
from benchmarks.worlds import SimulatedWorld
from perturbdiff._errors import PerturbDiffError
from perturbdiff.data import Condition
from perturbdiff.data.datasets import SimulationConfig
from perturbdiff.data.datasets._simulate import Treatment

HERE = Path(__file__).resolve().parent
RATES = (0.5, 0.1, 0.01)
DRAWS = 8
CURVE = (1, 2, 4, 8, 16)
WORLD = SimulationConfig(
    n_genes=400,
    n_contexts=5,
    n_perturbations=3,
    n_unseen=0,
    n_pairs=0,
    doses=(),
    hours=(),
    n_cells=200,
    n_controls=512,
    responder_share=0.5,
    effect_size=2.0,
)
MOST_TRUE = 20_000


class Question:
    """One held-out condition, the models that answer it, and its true cells."""

    def __init__(
        self,
        name: str,
        model: Any,
        adata: Any,
        *,
        perturbation: str,
        context: dict[str, str],
        true_NG: np.ndarray,
        control_RG: np.ndarray,
        sibling: Any = None,
    ) -> None:
        self.name, self.model, self.adata, self.sibling = name, model, adata, sibling
        self.perturbation, self.context = perturbation, context
        self.true_NG, self.control_RG = true_NG, control_RG
        self.axes = model.fitted.loadings[:, :30]

    def ask(self, n_cells: int, *, model: Any = None, **wish: Any) -> tuple[np.ndarray, Any, float]:
        """Cells, the prediction, and seconds."""
        started = time.perf_counter()
        pred = (model or self.model).predict(
            self.adata,
            perturbations=[self.perturbation],
            contexts=[self.context],
            n_cells=n_cells,
            **{"seed": 1, **wish},
        )
        seconds = time.perf_counter() - started
        return np.asarray(pred.X.toarray(), dtype=np.float64), pred, seconds

    def ask_often(self, n_cells: int, **wish: Any) -> np.ndarray:
        """Mean over several seeds: what is expected of each cell."""
        every = [self.ask(n_cells, seed=seed, **wish)[0] for seed in range(DRAWS)]
        return np.asarray(np.mean(every, axis=0))

    def true_sets(self, n_sets: int) -> np.ndarray:
        """Sets of true cells, drawn anew where there are not enough."""
        rng = np.random.default_rng(0)
        enough = len(self.true_NG) >= n_sets * SET_SIZE
        rows = (
            rng.permutation(len(self.true_NG))[: n_sets * SET_SIZE]
            if enough
            else rng.integers(0, len(self.true_NG), n_sets * SET_SIZE)
        )
        return self.true_NG[rows].reshape(n_sets, SET_SIZE, -1)


def study(question: Question, *, n_free: int, n_sets: int) -> dict[str, Any]:
    """All tasks of one question."""
    genes = question.model.registry.genes
    free, _, seconds = question.ask(n_free * SET_SIZE)
    free_sets = free.reshape(n_free, SET_SIZE, -1)
    true_sets = question.true_sets(min(4 * n_free, MOST_TRUE // SET_SIZE))
    sibling_sets, sibling_seconds = None, None
    if question.sibling is not None:
        cells, _, sibling_seconds = question.ask(n_free * SET_SIZE, model=question.sibling)
        sibling_sets = cells.reshape(n_free, SET_SIZE, -1)
    rows = []
    for task in tasks(kinds(genes, free, question.control_RG), free_sets, RATES):
        say(f"{question.name}: {task.name}")
        truth = conditional(task, true_sets)
        row: dict[str, Any] = {
            "task": task.name,
            "kind": task.kind.name,
            "rate": task.rate,
            "true_rate": float(task.obeys(true_sets).mean()),
            "n_true_cells": 0 if truth is None else len(truth),
            "unconstrained": distance(free[: n_sets * SET_SIZE], truth, question.axes),
            "curve": {str(n): best_of(task.obeys(free_sets), n) for n in CURVE},
            "ways": {
                name: _tried(question, task, way, truth=truth, n_sets=n_sets)
                for name, way in ways().items()
            },
        }
        if sibling_sets is not None:
            own = task.obeys(sibling_sets)
            row["sibling"] = {
                "curve": {str(n): best_of(own, n) for n in CURVE},
                "energy_distance": distance(
                    sibling_sets[own].reshape(-1, len(genes)), truth, question.axes
                )
                if own.any()
                else None,
                "masking": "meets it" if task.kind.masks else "cannot: decided only at the end",
            }
        rows.append(row)
    return {
        "name": question.name,
        "seconds_unconstrained_per_set": seconds / n_free,
        "seconds_sibling_per_set": None if sibling_seconds is None else sibling_seconds / n_free,
        "tasks": rows,
    }


def _tried(
    question: Question, task: Task, way: Any, *, truth: np.ndarray | None, n_sets: int
) -> dict[str, Any]:
    """Satisfaction, distances and cost of one way; or why it is not offered."""
    try:
        cells, pred, seconds = question.ask(
            n_sets * SET_SIZE, constraints=[task.kind.make(task.threshold)], enforce=way
        )
    except PerturbDiffError as error:
        return {"refused": str(error)}
    report = pred.uns["perturbdiff"]["constraints"].iloc[0]
    obeys = task.obeys(cells.reshape(n_sets, SET_SIZE, -1))
    return {
        "satisfied_sets": float(obeys.mean()),
        "satisfied": bool(report["satisfied"]),
        "energy_distance": distance(cells, truth, question.axes),
        "energy_distance_to_unconstrained": float(report["energy_distance"]),
        "cost": float(report["cost"]),
        "seconds_per_set": seconds / n_sets,
        "supported": bool(report["supported"]),
    }


def observed(question: Question, *, seed: int = 0) -> dict[str, Any]:
    """Half of the genes observed in true cells: error on the other half, beside a ridge."""
    from sklearn.linear_model import Ridge  # noqa: PLC0415 - slow to import

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
    training = _training_cells(question)
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


def _training_cells(question: Question) -> np.ndarray:
    """Log1p values of cells that the model was trained on: not those of the question."""
    cells = ptd.data.encode(question.adata, question.model.registry)
    asked = Condition((question.perturbation,), tuple(question.context.values()))
    kept = np.ones(len(cells), dtype=bool)
    kept[cells.conditions().get(asked, [])] = False
    return np.asarray(cells.log1p.toarray(), dtype=np.float64)[kept]


def simulated_question(recipe: Recipe, cache: Cache, *, sibling: bool) -> Question:
    """The response that depends on the state of the cell, of a context never seen treated."""
    world = SimulatedWorld(
        label="constraints", config=WORLD, seed=0, recipe=recipe, cache=cache, with_features=False
    )
    adata, holdout = world.simulation.adata, {"cell_type": ["T1"]}
    model = _fit(ptd.SetDiffusion(world.registry), adata, holdout=holdout, recipe=recipe)
    world.registry = model.registry
    perturbation = world.measured[0]
    true = world.fresh_log1p(Treatment(perturbation, "T1"), MOST_TRUE, seed=1)
    controls = world.fresh_log1p(Treatment("control", "T1"), 512, seed=2)
    other = _sibling(world.registry, adata, holdout=holdout, recipe=recipe) if sibling else None
    return Question(
        "simulated",
        model,
        adata,
        perturbation=perturbation,
        context={"cell_type": "T1"},
        true_NG=true.astype(np.float64),
        control_RG=controls.astype(np.float64),
        sibling=other,
    )


def kang_question(adata: Any, recipe: Recipe, *, context: str, sibling: bool) -> Question:
    """Interferon in a cell type that was never seen treated."""
    columns = {
        "perturbation_key": "condition",
        "control": "ctrl",
        "covariate_keys": ["cell_type"],
        "scale": "counts",
    }
    holdout = {"cell_type": [context]}
    registry = ptd.Registry.from_anndata(adata, **columns)
    model = _fit(ptd.SetDiffusion(registry), adata, holdout=holdout, recipe=recipe)
    cells = ptd.data.encode(adata, model.registry)
    log1p = np.asarray(cells.log1p.toarray(), dtype=np.float64)
    treated = log1p[cells.conditions()[Condition(("stim",), (context,))]]
    control = log1p[cells.controls()[context,]]
    other = _sibling(registry, adata, holdout=holdout, recipe=recipe) if sibling else None
    return Question(
        "kang2018",
        model,
        adata,
        perturbation="stim",
        context={"cell_type": context},
        true_NG=treated,
        control_RG=control,
        sibling=other,
    )


def _fit(model: Any, adata: Any, *, holdout: Any, recipe: Recipe) -> Any:
    options = ptd.TrainerOptions(progress=False, accelerator=recipe.accelerator)
    return model.fit(
        adata,
        holdout=holdout,
        n_top_genes=recipe.n_top_genes,
        seed=0,
        train=recipe.train,
        options=options,
    )


def _sibling(registry: Any, adata: Any, *, holdout: Any, recipe: Recipe) -> Any:
    say("the causal sibling learns")
    return _fit(ptd.CausalBaseline(registry), adata, holdout=holdout, recipe=recipe)


def verdicts(result: dict[str, Any]) -> list[str]:
    """What was set out to be reached, and whether it was."""
    lines = []
    for one in result["questions"]:
        rows = one["tasks"]
        hard = [r["ways"]["hard"] for r in rows if "refused" not in r["ways"]["hard"]]
        share = np.mean([h["satisfied"] for h in hard])
        lines.append(f"- {one['name']}, hard: {share:.0%} of {len(hard)} tasks satisfied exactly.")
        tenth = [r for r in rows if 0.03 < r["rate"] < 0.2]
        for name in ("soft", "soft, best of 4", "particles", "branching", "depth first"):
            tried = [(r, r["ways"][name]) for r in tenth if "refused" not in r["ways"][name]]
            if not tried:
                continue
            sets = np.mean([w["satisfied_sets"] for _, w in tried])
            ratios = [
                w["energy_distance"] / r["unconstrained"]
                for r, w in tried
                if w["energy_distance"] is not None and (r["unconstrained"] or 0) > 0.02
            ]
            worst = f"{max(ratios):.2f} x the unconstrained distance at most" if ratios else "n/a"
            lines.append(f"- {one['name']}, 10 %, {name}: {sets:.0%} of sets; {worst}.")
        rare = [r for r in rows if 0 < r["rate"] <= 0.03]
        for row in rare:
            able = {k: w["satisfied_sets"] for k, w in row["ways"].items() if "refused" not in w}
            best = max(able, key=able.__getitem__)
            own = row["curve"]["16"]
            text = (
                f"- {one['name']}, {row['task']}: {best} {able[best]:.0%}, own best of 16 {own:.0%}"
            )
            if "sibling" in row:
                text += f", sibling's best of 16 {row['sibling']['curve']['16']:.0%}"
            lines.append(text + ".")
    return lines


def report_of(result: dict[str, Any]) -> str:
    """The report."""
    parts = [
        "# Constraints",
        "",
        __doc__ or "",
        f"Made by `{result['command']}`.",
        "",
        "## Read",
        "",
    ]
    parts += [*verdicts(result), ""]
    for one in result["questions"]:
        names = list(ways())
        for value, title in [
            ("satisfied_sets", "share of sets that obey"),
            ("energy_distance", "energy distance to the conditional truth"),
            ("cost", "network calls, in trajectories"),
        ]:
            table = []
            for row in one["tasks"]:
                cells = [_cell(row["ways"][name], value) for name in names]
                first = {
                    "satisfied_sets": f"{row['curve']['1']:.2f}",
                    "energy_distance": _number(row["unconstrained"]),
                    "cost": "1",
                }[value]
                table.append([row["task"], _number(row["true_rate"]), first, *cells])
            parts += [
                f"## {one['name']}: {title}",
                "",
                markdown(["task", "true rate", "unconstrained", *names], table),
                "",
            ]
        table = []
        for row in one["tasks"]:
            for who, curve in [
                ("SetDiffusion", row["curve"]),
                ("sibling", row.get("sibling", {}).get("curve")),
            ]:
                if curve:
                    table.append([row["task"], who, *(f"{curve[str(n)]:.2f}" for n in CURVE)])
        parts += [
            f"## {one['name']}: best of N without steering",
            "",
            markdown(["task", "model", *map(str, CURVE)], table),
            "",
        ]
        seen = one["observed"]
        table = [
            [name, f"{seen['mae_of_means'][name]:.4f}", f"{seen['mae_of_cells'][name]:.4f}"]
            for name in seen["mae_of_means"]
        ]
        parts += [
            f"## {one['name']}: half of the genes observed",
            "",
            markdown(["other half predicted by", "MAE of means", "MAE of cells"], table),
            "",
        ]
    return "\n".join(parts)


def _cell(way: dict[str, Any], value: str) -> str:
    return "refused" if "refused" in way else _number(way[value])


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def picture(result: dict[str, Any], path: Path) -> None:
    """Satisfaction against energy distance, a panel for each question."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(5.2 * len(result["questions"]), 4.2), layout="constrained")
    panels = figure.subplots(1, len(result["questions"]), squeeze=False)[0]
    for panel, one in zip(panels, result["questions"], strict=True):
        for number, name in enumerate(ways()):
            found = [(r["ways"][name], r) for r in one["tasks"] if "refused" not in r["ways"][name]]
            points = [
                (w["energy_distance"] - r["unconstrained"], w["satisfied_sets"])
                for w, r in found
                if w["energy_distance"] is not None and r["unconstrained"] is not None
            ]
            if points:
                x, y = np.array(points).T
                panel.scatter(x, y, s=18, color=f"C{number}", label=name, alpha=0.8)
        panel.set(title=one["name"], ylabel="share of sets that obey", ylim=(-0.05, 1.05))
        panel.set_xlabel("energy distance to the conditional truth, less that without constraints")
        panel.axvline(0, color="0.7", lw=0.8)
    panels[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.constraints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kang", type=Path, help="h5ad file with cell types; left out where it is not given")
    add("--context", default="NK", help="cell type of Kang 2018 that is held out")
    add("--sets", type=int, default=32, help="sets under each constraint")
    add("--free-sets", type=int, default=512, help="sets without, for thresholds and best of N")
    add("--steps", type=int, help="most training steps, instead of the default")
    add("--no-sibling", action="store_true", help="leave the causal model out")
    add("--threads", type=int, help="threads of torch")
    add("--accelerator", default="auto")
    add("--cache", type=Path, default=HERE / "cache")
    add("--out", type=Path, help="JSON file; report and picture go beside it")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = Recipe(steps=options.steps, n_top_genes=None, accelerator=options.accelerator)
    sibling = not options.no_sibling
    questions = [simulated_question(recipe, Cache(options.cache), sibling=sibling)]
    if options.kang:
        import anndata  # noqa: PLC0415

        top = Recipe(steps=options.steps, n_top_genes=1000, accelerator=options.accelerator)
        questions.append(
            kang_question(
                anndata.read_h5ad(options.kang), top, context=options.context, sibling=sibling
            )
        )
    result = {
        "command": " ".join(["python -m benchmarks.constraints", *shown(sys.argv[1:])]),
        "made_with": environment(),
        "questions": [
            study(one, n_free=options.free_sets, n_sets=options.sets) | {"observed": observed(one)}
            for one in questions
        ],
    }
    trial = options.cache / "trials" / "constraints.json"
    small = options.steps or options.free_sets < 512 or options.no_sibling
    out = options.out or (trial if small else HERE / "results" / "constraints.json")
    report = (
        HERE / "reports" / "constraints.md"
        if out.parent.name == "results"
        else (out.with_suffix(".md"))
    )
    write_json(out, result)
    text = report_of(result)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text, encoding="utf-8")
    picture(result, report.with_suffix(".png"))
    print(text)
    say(f"written: {out}, {report}")


if __name__ == "__main__":
    main()
