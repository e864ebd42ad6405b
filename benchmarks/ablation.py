"""What parts of the set diffusion model are worth, on held-out contexts.

    python -m benchmarks.ablation --data kang2018.h5ad

The energy distance in the loss is left out, and weighted ten times as much; the network is left
out, so that every gene responds on its own around the effect prior.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.cache import Cache, write_json
from benchmarks.contexts import ContextStudy
from benchmarks.environment import environment
from benchmarks.fits import Recipe
from benchmarks.quality import SEVERAL, say, shown
from benchmarks.report import SIX, made_with
from benchmarks.tables import average, score_table
from perturbdiff.config import TrainConfig

HERE = Path(__file__).resolve().parent
USUAL = TrainConfig().distribution_weight
VARIANTS = {
    f"as it is (weight {USUAL:g})": Recipe(),
    "without the distribution term": Recipe(distribution_weight=0.0),
    f"distribution term ten times ({10 * USUAL:g})": Recipe(distribution_weight=10 * USUAL),
    "without the network": Recipe(network_is_used=False),
}


def study_of(options: argparse.Namespace, recipe: Recipe) -> ContextStudy:
    recipe = replace(recipe, steps=options.steps, n_top_genes=options.n_top_genes)
    return ContextStudy(
        path=options.data, perturbation_key="condition", control="ctrl", context_key="cell_type",
        recipe=recipe, cache=Cache(options.cache),
    )  # fmt: skip


def one(options: argparse.Namespace, variant: str, context: str) -> dict[str, Any]:
    """Scores of one variant of one context."""
    torch.set_num_threads(options.threads)
    fit = study_of(options, VARIANTS[variant]).fit(context, options.seed)
    say(f"{variant}, {context}: done")
    return {"variant": variant, **fit}


def result_of(fits: Sequence[Mapping[str, Any]], *, command: str, recipe: Recipe) -> dict[str, Any]:
    """Averages over contexts of every variant."""
    by_variant = {
        name: average([fit["values"] for fit in fits if fit["variant"] == name])[0]
        for name in VARIANTS
    }
    return {
        "question": "What are the distribution term and the network worth?",
        "command": command,
        "environment": environment(),
        "recipe": recipe.key(),
        "averages": by_variant,
        "fits": list(fits),
    }


def report_of(result: Mapping[str, Any]) -> str:
    """What was asked, measured, concluded."""
    held = list(dict.fromkeys(fit["held_out"] for fit in result["fits"]))
    first = next(iter(VARIANTS))
    own = result["averages"][first]
    gaps = {
        name: {metric: values[metric] - own[metric] for metric in SIX}
        for name, values in result["averages"].items()
        if name != first
    }
    lines = [
        "# What parts of the model are worth", "", "## What was asked", "",
        str(result["question"]), "", "## How it was measured", "",
        f"Held out in turn: {', '.join(held)}, as in the quality benchmark, one seed. Steps and "
        "dependence are chosen on inner folds of each variant.", "", "## What was measured", "",
        score_table(result["averages"], SIX, first="variant"), "",
        "Steps and dependence: "
        + "; ".join(f"{f['variant']}, {f['held_out']}: {f['steps']}, {f['dependence']:g}"
                    for f in result["fits"]) + ".", "",
        "## What is concluded", "",
        *(f"- {name}: DE overlap {gap['de_overlap']:+.3f}, centred energy "
          f"{gap['centred_energy_distance']:+.3f}, variance {gap['variance_explained']:+.3f}, "
          f"energy {gap['energy_distance']:+.3f} against the model as it is."
          for name, gap in gaps.items()),
        "",
    ]  # fmt: skip
    return "\n".join([*lines, *made_with(result), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="h5ad file")
    parser.add_argument("--types", default=",".join(SEVERAL), help="contexts to hold out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="most training steps, instead of the default")
    parser.add_argument("--n-top-genes", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1, help="fits at the same time")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--cache", type=Path, default=HERE / "cache")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ablation.json")
    options = parser.parse_args()
    types = [name.strip() for name in options.types.split(",")]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(one, options, v, context) for v in VARIANTS for context in types]
        fits = [done.result() for done in waiting]
    command = " ".join(["python -m benchmarks.ablation", *shown(sys.argv[1:])])
    result = result_of(fits, command=command, recipe=next(iter(VARIANTS.values())))
    write_json(options.out, result)
    inside = options.out.parent.name == "results"
    report = HERE / "reports" / "ablation.md" if inside else options.out.with_suffix(".md")
    text = report_of(result)
    report.write_text(text, encoding="utf-8")
    print(text)
    say(f"written: {options.out}, {report}")


if __name__ == "__main__":
    main()
