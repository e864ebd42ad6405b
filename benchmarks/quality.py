"""Quality of predicted cells of conditions that were held out.

    python -m benchmarks.quality --data kang2018.h5ad
    python -m benchmarks.quality --data norman2019_k562.h5ad --annotation human_gene2go.tsv.gz

Fits are kept in ``benchmarks/cache``: an interrupted run goes on where it stopped.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import anndata as ad
import torch

from benchmarks.cache import Cache, write_json
from benchmarks.contexts import ContextStudy, seeds_of
from benchmarks.fits import Recipe
from benchmarks.perturbations import PerturbationStudy
from benchmarks.report import contexts_report, contexts_result, perturbations_report

HERE = Path(__file__).resolve().parent
SEVERAL = ("B", "CD16 Mono", "NK")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="h5ad file")
    add("--task", choices=("auto", "contexts", "perturbations"), default="auto",
        help="what is held out: contexts (Kang 2018) or perturbations (Norman 2019)")  # fmt: skip
    add("--types", default="", help="contexts to hold out, separated by commas; all by default")
    add("--seeds", type=int, default=3, help=f"seeds for {', '.join(SEVERAL)}; one for the rest")
    add("--steps", type=int, help="most training steps, instead of the default")
    add("--n-top-genes", type=int, default=2000)
    add("--baselines-only", action="store_true", help="fit no model")
    add("--jobs", type=int, default=1, help="fits at the same time; times are only fair with 1")
    add("--threads", type=int, help="threads of torch")
    add("--accelerator", default="auto")
    add("--annotation", type=Path, help="gene sets: gene2go table (tsv, tsv.gz) or .gmt")
    add("--folds", type=int, default=5, help="folds of single perturbations")
    add("--perturbation-key")
    add("--control")
    add("--covariates", help="column of the contexts; '' for none")
    add("--cache", type=Path, default=HERE / "cache")
    add("--out", type=Path, help="JSON file; the report goes to reports/ or beside it")
    return parser.parse_args(given)


def task_of(options: argparse.Namespace) -> str:
    """What is held out, from the columns of the file where it is not said."""
    if options.task != "auto":
        return str(options.task)
    columns = ad.read_h5ad(options.data, backed="r").obs.columns
    return "perturbations" if "perturbation" in columns else "contexts"


def places(options: argparse.Namespace, *, whole: bool) -> tuple[Path, Path]:
    """Result and report; what is only a part of the question goes to the cache by default."""
    name = f"quality_{options.data.stem}"
    if options.out is not None:
        return options.out, options.out.with_suffix(".md")
    if not whole:
        return options.cache / "trials" / f"{name}.json", options.cache / "trials" / f"{name}.md"
    return HERE / "results" / f"{name}.json", HERE / "reports" / f"{name}.md"


def as_asked(options: argparse.Namespace) -> bool:
    """Whether the model is fitted, with nothing that was changed from the defaults."""
    usual = arguments(["--data", str(options.data)])
    kept = ("steps", "n_top_genes", "baselines_only", "seeds", "folds")
    return not options.baselines_only and all(
        getattr(options, name) == getattr(usual, name) for name in kept
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def context_study(options: argparse.Namespace) -> ContextStudy:
    return ContextStudy(
        path=options.data,
        perturbation_key=options.perturbation_key or "condition",
        control=options.control or "ctrl",
        context_key=options.covariates or "cell_type",
        recipe=Recipe(
            steps=options.steps, n_top_genes=options.n_top_genes, accelerator=options.accelerator
        ),
        cache=Cache(options.cache),
    )


def fit_in_process(options: argparse.Namespace, context: str, seed: int) -> str:
    """One fit, left in the cache for whoever started this process."""
    if options.threads:
        torch.set_num_threads(options.threads)
    context_study(options).fit(context, seed)
    return f"{context} seed {seed}"


def run_contexts(options: argparse.Namespace, command: str) -> None:
    study = context_study(options)
    wanted = [name.strip() for name in options.types.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(study.contexts)):
        msg = f"No such type: {unknown}. The file has {', '.join(study.contexts)}."
        raise SystemExit(msg)
    names = [name for name in study.contexts if not wanted or name in wanted]
    seeds = seeds_of(names, several=SEVERAL, n_seeds=options.seeds)
    pairs = [(n, s) for n in names for s in range(0 if options.baselines_only else seeds[n])]
    simple = {}
    for name in names:
        say(f"{name}: baselines")
        simple[name] = study.simple(name)
    if options.jobs > 1 and pairs:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(fit_in_process, options, *pair) for pair in pairs]
            for done in waiting:
                say(f"{done.result()}: fitted")
    fits = []
    for name, seed in pairs:
        say(f"{name} seed {seed}: model")
        fits.append(study.fit(name, seed))
    result = contexts_result(
        simple, fits, several=SEVERAL, command=command, recipe=study.recipe,
        data={"file": options.data.name, "sha256": study.checksum, "cells": study.adata.n_obs,
              "genes": study.adata.n_vars},
    )  # fmt: skip
    whole = as_asked(options) and len(names) == len(study.contexts)
    finish(result, contexts_report(result), places(options, whole=whole))


def run_perturbations(options: argparse.Namespace, command: str) -> None:
    if options.annotation is None:
        msg = "Unseen perturbations need features: name gene sets with --annotation."
        raise SystemExit(msg)
    study = PerturbationStudy(
        path=options.data,
        annotation=options.annotation,
        perturbation_key=options.perturbation_key or "perturbation",
        control=options.control or "control",
        n_folds=options.folds,
        recipe=Recipe(steps=options.steps, n_top_genes=None, accelerator=options.accelerator),
        cache=Cache(options.cache),
    )
    result = study.result(fit=not options.baselines_only, command=command, say=say)
    finish(result, perturbations_report(result), places(options, whole=as_asked(options)))


def finish(result: dict[str, object], report: str, where: tuple[Path, Path]) -> None:
    write_json(where[0], result)
    where[1].parent.mkdir(parents=True, exist_ok=True)
    where[1].write_text(report, encoding="utf-8")
    print(report)
    say(f"written: {where[0]}, {where[1]}")


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    command = " ".join(["python -m benchmarks.quality", *shown(sys.argv[1:])])
    task = task_of(options)
    say(f"task: {task}")
    {"contexts": run_contexts, "perturbations": run_perturbations}[task](options, command)


def shown(words: list[str]) -> list[str]:
    """The command line without folders, which say nothing about the result."""
    out = []
    for word in words:
        flag, equals, value = word.partition("=")
        text = f"{flag}={Path(value).name}" if equals else word
        text = Path(text).name if "/" in text and not equals else text
        out.append(f"'{text}'" if " " in text else text)
    return out


if __name__ == "__main__":
    main()
