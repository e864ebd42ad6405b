"""Whether intervals hold, and whether flags fire when they should and only then.

    python -m benchmarks.coverage --kang kang2018.h5ad --norman norman2019_k562.h5ad
                                  --annotation human_gene2go.tsv.gz

Each cell type of Kang 2018 (the shipped sample and the whole file), and folds of single
perturbations of Norman 2019, are held out, predicted by the effect prior with count transport, and
given intervals by ``tl.uncertainty``. Then the same questions are spoiled: genes of the context are
exchanged, cells of a leukaemia line are given as a blood cell, predicted cells are replaced by
copies of one of them or drawn together; each flag is counted.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch

import perturbdiff as ptd
from benchmarks.cache import Cache, write_json
from benchmarks.environment import environment
from benchmarks.fits import Recipe, listening
from benchmarks.perturbations import PerturbationStudy, folds_of
from benchmarks.quality import say, shown
from benchmarks.tables import markdown, mean_of
from perturbdiff.data import Cells, Registry, encode

HERE = Path(__file__).resolve().parent
LEVEL, LOW, HIGH = 0.9, 0.85, 0.95
N_CELLS, N_SIZES = 512, 5
MOST_CHANGED = 100
SILENT = 1e-9  # half-width below which nothing is said to be possible but no change at all
NARROW = 0.5  # of the deviations from their mean that drawn-together cells keep
KANG = {
    "perturbation_key": "condition",
    "control": "ctrl",
    "covariate_keys": ["cell_type"],
    "scale": "counts",
}
LEVELS = ("low", "middle", "high")
SPOILT = ("genes exchanged", "one cell repeated", "cells drawn together", "leukaemia line")


def true_shift(cells: Cells, condition: Any) -> np.ndarray:
    """Measured mean shift of a condition."""
    own = cells.log1p[cells.conditions()[condition]].mean(0, dtype=np.float64)
    base = cells.log1p[cells.controls()[condition.context]].mean(0, dtype=np.float64)
    return np.asarray(own - base).ravel()


def held_out(
    model: Any, adata: ad.AnnData, cells: Cells, *, names: Mapping[str, Any], **question: Any
) -> tuple[list[dict[str, Any]], ad.AnnData]:
    """Coverage and flags of every predicted condition, and the prediction."""
    pred = ptd.tl.predict(adata, model, n_cells=N_CELLS, seed=0, **question)
    with listening() as lines:
        ptd.tl.uncertainty(pred, model, reference=adata, level=LEVEL)
    table, flags = pred.uns["uncertainty"], pred.uns["uncertainty_flags"]
    own = cells.select(model.registry.genes)
    size = len(model.registry.genes)
    rows = []
    for place, (name, condition) in enumerate(names.items()):
        part = table.iloc[place * size : (place + 1) * size]
        truth = true_shift(own, condition)
        rows.append({
            "held_out": name, **covered(part, truth), **flags_of(flags.iloc[place]),
            "warnings": sum("do not rely" in x or "collapse" in x for x in lines),
        })  # fmt: skip
    return rows, pred


def covered(table: pd.DataFrame, truth: np.ndarray) -> dict[str, Any]:
    """Share of true shifts within their intervals: by stratum, and of the genes that change most.

    Intervals without width stand apart: they are of genes that are silent in control cells and
    in treated ones, and are right or wrong whatever the level.
    """
    inside = ((table["lower"] <= truth) & (truth <= table["upper"])).to_numpy()
    half = ((table["upper"] - table["lower"]) / 2).to_numpy()
    wide = half > SILENT
    stratum = table["stratum"].to_numpy()
    changed = np.argsort(-np.abs(truth), kind="stable")[:MOST_CHANGED]
    return {
        "covered": float(inside[wide].mean()),
        "silent": float(1 - wide.mean()),
        "silent_right": None if wide.all() else float((np.abs(truth[~wide]) < SILENT).mean()),
        "by_stratum": {
            str(number): float(inside[wide & (stratum == number)].mean())
            for number in np.unique(stratum[wide])
        },
        "covered_most_changed": float(inside[changed].mean()),
        "half_width": float(half.mean()),
        "half_width_most_changed": float(half[changed].mean()),
        "shift_most_changed": float(np.abs(truth[changed]).mean()),
    }


def flags_of(row: pd.Series) -> dict[str, Any]:
    """What the flags of a condition say, as plain values; None where there is no number."""
    kept = [
        name for name in row.index
        if name in {"supported", "collapsed", "reason"}
        or name.endswith(("distance", "limit", "alarms")) or name == "spread"
    ]  # fmt: skip
    return {
        name: None if isinstance(row[name], float) and np.isnan(row[name]) else row[name]
        if isinstance(row[name], str) else bool(row[name])
        if isinstance(row[name], bool | np.bool_) else float(row[name])
        for name in kept
    }  # fmt: skip


def judged(pred: ad.AnnData, model: Any, reference: ad.AnnData) -> dict[str, Any]:
    """Flags of a prediction of one condition."""
    made = ptd.tl.uncertainty(pred, model, reference=reference, level=LEVEL, copy=True)
    assert made is not None  # a copy was asked for
    return flags_of(made.uns["uncertainty_flags"].iloc[0])


def spoilt(model: Any, adata: ad.AnnData, pred: ad.AnnData, *, context: str) -> dict[str, Any]:
    """Flags once the context has other genes' counts, and once cells are too much alike."""
    strange = adata[(adata.obs["cell_type"] == context).to_numpy()].copy()
    order = np.random.default_rng(0).permutation(strange.n_vars)
    strange.X = sp.csr_matrix(strange.X)[:, order]
    question = {"perturbations": ["stim"], "contexts": [{"cell_type": context}]}
    other = ptd.tl.predict(strange, model, **question, n_cells=N_CELLS, seed=0)
    one = pred.copy()
    del one.layers["counts"]  # which would tell that the cells were changed
    narrow = one.copy()
    one.X = pred.X[np.zeros(pred.n_obs, dtype=int)]
    dense = pred.X.toarray()
    narrow.X = dense.mean(0) + NARROW * (dense - dense.mean(0))
    return {
        "genes exchanged": judged(other, model, strange),
        "one cell repeated": judged(one, model, adata),
        "cells drawn together": judged(narrow, model, adata),
    }


def contexts(path: Path | None, *, n_top_genes: int) -> dict[str, Any]:
    """Every cell type of Kang 2018 held out in turn."""
    adata = ptd.datasets.kang2018_small() if path is None else ad.read_h5ad(path)
    registry = Registry.from_anndata(adata, **KANG)  # type: ignore[arg-type]
    cells = encode(adata, registry)
    there = {c.context[0]: c for c in cells.conditions() if c.context in cells.controls()}
    rows, began = [], time.perf_counter()
    for name, condition in there.items():
        say(f"{'sample' if path is None else path.stem}: {name}")
        model = ptd.EffectPrior(registry)
        model.fit(adata, holdout={"cell_type": [name]}, n_top_genes=n_top_genes)
        found, pred = held_out(
            model, adata, cells, names={name: condition}, perturbations=["stim"],
            contexts=[{"cell_type": name}],
        )  # fmt: skip
        rows.append(found[0] | {"spoilt": spoilt(model, adata, pred, context=name)})
    return {
        "data": "kang2018_small" if path is None else path.name,
        "held_out": "cell types, one at a time",
        "n_genes": n_top_genes,
        "rows": rows,
        "seconds": time.perf_counter() - began,
    }


def perturbations(options: argparse.Namespace) -> dict[str, Any]:
    """Folds of single perturbations of Norman 2019 held out."""
    study = PerturbationStudy(
        path=options.norman, annotation=options.annotation, perturbation_key="perturbation",
        control="control", n_folds=5, recipe=Recipe(n_top_genes=None), cache=Cache(HERE / "cache"),
    )  # fmt: skip
    rows, began = [], time.perf_counter()
    for fold in folds_of(list(study.conditions), n_folds=5)[: options.folds]:
        say(f"norman: {fold.label}")
        model = ptd.EffectPrior(study.registry)
        model.fit(study.adata, holdout=study.holdout(fold), n_top_genes=None)
        found, _ = held_out(
            model, study.adata, study.cells,
            names={name: study.conditions[name] for name in sorted(fold.scored)},
            perturbations=sorted(fold.scored), doses=[1.0] if study.registry.dose_key else None,
        )  # fmt: skip
        rows += found
    return {
        "data": options.norman.name,
        "held_out": f"single perturbations, {options.folds} of 5 folds",
        "n_genes": study.adata.n_vars,
        "rows": rows,
        "seconds": time.perf_counter() - began,
    }


def leukaemia(kang: Path, norman: Path) -> dict[str, Any]:
    """A line that no blood cell resembles, asked about as if it were a cell type."""
    blood, line = ad.read_h5ad(kang), ad.read_h5ad(norman)
    blood.obs["library_size"] = np.asarray(blood.X.sum(1), dtype=float).ravel()
    line = line[(line.obs["perturbation"] == "control").to_numpy()]
    genes = [name for name in blood.var_names if name in set(line.var_names)]
    model = ptd.EffectPrior.from_anndata(blood[:, genes], **KANG)
    model.fit(blood[:, genes].copy(), n_top_genes=None)
    counts = sp.csr_matrix(line[:, genes].layers["counts"])
    size = line.obs["ncounts"].to_numpy(float)
    foreign = ad.AnnData(
        X=counts,
        obs=pd.DataFrame(
            {"condition": "ctrl", "cell_type": "K562", "library_size": size}, index=line.obs_names
        ),
        var=pd.DataFrame(index=genes),
    )
    question = {"perturbations": ["stim"], "contexts": [{"cell_type": "K562"}]}
    pred = ptd.tl.predict(foreign, model, **question, n_cells=N_CELLS, seed=0)
    return {"n_genes": len(genes), **judged(pred, model, foreign)}


def averages(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coverage over conditions, by stratum and in all; counts of flags."""
    strata: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["by_stratum"].items():
            strata.setdefault(name, []).append(value)
    by_stratum = {name: float(np.mean(strata[name])) for name in sorted(strata, key=int)}
    outside = [name for name, value in by_stratum.items() if not LOW <= value <= HIGH]
    return {
        "covered": float(np.mean([row["covered"] for row in rows])),
        "covered_most_changed": float(np.mean([row["covered_most_changed"] for row in rows])),
        "by_stratum": by_stratum,
        "strata_outside": outside,
        "n": len(rows),
        "false_support": sum(not row["supported"] for row in rows),
        "false_collapse": sum(row["collapsed"] for row in rows),
        "false_in_training": {
            what: mean_of(row.get(f"{what}_false_alarms") for row in rows)[0]
            for what in ("context", "perturbation", "spread")
        },
        "fired": {
            kind: sum(fires(kind, row["spoilt"][kind]) for row in rows)
            for kind in SPOILT
            if all(kind in row.get("spoilt", {}) for row in rows)
        },
    }


def fires(kind: str, flags: Mapping[str, Any]) -> bool:
    """Whether the flag that should be up is."""
    wanted = "collapsed" if "cell" in kind else "supported"
    return bool(flags[wanted]) if wanted == "collapsed" else not flags[wanted]


def rates(alarms: Mapping[str, float | None]) -> str:
    """Shares by what was judged."""
    return ", ".join(f"{what} {x:.1%}" for what, x in alarms.items() if x is not None) or "n/a"


def stratum_name(number: str) -> list[str]:
    """Control level, and place among the sizes of predicted shifts."""
    sizes = ("smallest half", "50 to 80 %", "80 to 90 %", "90 to 97 %", "largest 3 %")
    level, size = divmod(int(number), N_SIZES)
    return [LEVELS[level], sizes[size]]


def report(result: Mapping[str, Any]) -> str:
    """What was asked, measured and concluded."""
    made = result["environment"]
    lines = [
        "# Coverage of intervals, and flags", "", "## What was asked", "",
        f"Do intervals for mean shifts at {LEVEL:.0%} contain {LOW:.0%} to {HIGH:.0%} of the true "
        "ones of held-out conditions, in each stratum of genes? Do the flags for questions far "
        "from training and for collapsed cells fire when they should, and only then?", "",
        "## How it was measured", "", " ".join(str(__doc__).split("\n\n")[-1].split()),
        f"True shifts are those of the measured cells, with their noise. {N_CELLS} predicted cells."
        f" The {MOST_CHANGED} genes that change most are chosen by the truth, which no interval "
        "promises anything about. Genes that are silent in control cells, and stay so in training, "
        "have intervals without width, which are counted apart. That conditions count alike in the "
        "quantile of a stratum was chosen on training conditions: each left out of the others' "
        "widths, strata of Kang 2018 then cover 0.878 to 0.902 of its errors on average, and 0.820 "
        "to 0.942 where genes are pooled; held-out types had no say.",
        "", "## What was measured", "",
    ]  # fmt: skip
    for one in result["studies"]:
        lines += study_lines(one)
    if "leukaemia" in result:
        found = result["leukaemia"]
        lines += [
            f"A leukaemia line (K562) asked about as a blood cell type, on {found['n_genes']} "
            f"genes that both files have: distance {found['context_distance']:.2f}, limit "
            f"{found['context_limit']:.2f}: {'not flagged' if found['supported'] else 'flagged'}.",
            "",
        ]  # fmt: skip
    lines += ["## What is concluded", "", *verdicts(result), "", "## Made with", ""]
    lines += [
        f"`{result['command']}`", "",
        f"Commit {made['commit'][:12]}; {made['cpu']}, {made['threads']} thread(s).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def study_lines(one: Mapping[str, Any]) -> list[str]:
    """Tables of one file."""
    means, rows = one["averages"], one["rows"]
    head = ["held out", "covered", "of most changed", "half-width", "supported", "collapsed",
            "distance (limit)", "spread (limit)"]  # fmt: skip
    body = [
        [
            row["held_out"], row["covered"], row["covered_most_changed"], row["half_width"],
            row["supported"], row["collapsed"], pair(row, "context"), pair(row, "spread"),
        ]
        for row in rows
    ]  # fmt: skip
    silent = float(np.mean([row["silent"] for row in rows]))
    right = [row["silent_right"] for row in rows if row["silent_right"] is not None]
    strata = [[*stratum_name(name), x] for name, x in means["by_stratum"].items()]
    return [
        f"### {one['data']}", "",
        f"{one['held_out'][0].upper()}{one['held_out'][1:]}; {one['n_genes']} genes; "
        f"{one['seconds']:.0f} s.", "",
        markdown(head, [*body, ["mean", means["covered"], means["covered_most_changed"],
                                *[""] * 5]]), "",
        *([f"Intervals without width: {silent:.1%} of all; the gene was silent indeed in "
           f"{float(np.mean(right)):.1%} of them.", ""] if silent > 0.001 and right else []),
        "Strata, means over held-out conditions:", "",
        markdown(["control level", "predicted shift", "covered"], strata), "",
    ]  # fmt: skip


def pair(row: Mapping[str, Any], what: str) -> str:
    """What was measured, and its limit."""
    value = row["spread" if what == "spread" else f"{what}_distance"]
    limit = row[f"{what}_limit"]
    return " ".join("n/a" if x is None else text for x, text in (
        (value, f"{value or 0:.2f}"), (limit, f"({limit or 0:.2f})"),
    ))  # fmt: skip


def verdicts(result: Mapping[str, Any]) -> Iterable[str]:
    """One line a question and file."""
    for one in result["studies"]:
        means = one["averages"]
        n = means["n"]
        outside = ", ".join(
            f"{' control level, shift '.join(stratum_name(x))} ({means['by_stratum'][x]:.3f})"
            for x in means["strata_outside"]
        )
        held = LOW <= means["covered"] <= HIGH
        yield (
            f"- {one['data']}: {means['covered']:.3f} covered on average, wanted {LOW} to {HIGH}: "
            f"{'reached' if held else '**not reached**'}; strata outside: {outside or 'none'}."
        )
        yield (
            f"- {one['data']}: false alarms: {means['false_support']} of {n} out of support, "
            f"{means['false_collapse']} of {n} collapsed. Training conditions beyond the limit "
            f"that the others give: {rates(means['false_in_training'])}."
        )
        for kind, fired in means["fired"].items():
            yield f"- {one['data']}: {kind}: flagged {fired} of {n}."
    if "leukaemia" in result:
        up = not result["leukaemia"]["supported"]
        yield f"- The leukaemia line was {'flagged' if up else '**not flagged**'}."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--kang", type=Path, help="Kang 2018 as h5ad, beside the shipped sample")
    add("--norman", type=Path, help="Norman 2019 as h5ad")
    add("--annotation", type=Path, help="gene sets for its perturbations")
    add("--folds", type=int, default=2, help="of five, of single perturbations")
    add("--n-top-genes", type=int, default=2000)
    add("--out", type=Path, default=HERE / "results" / "coverage.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    studies = [contexts(None, n_top_genes=min(options.n_top_genes, 1500))]
    if options.kang is not None:
        studies.append(contexts(options.kang, n_top_genes=options.n_top_genes))
    if options.norman is not None:
        studies.append(perturbations(options))
    for one in studies:
        one["averages"] = averages(one["rows"])
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.coverage", *shown(sys.argv[1:])]),
        "level": LEVEL, "studies": studies, "environment": environment(),
    }  # fmt: skip
    if options.kang is not None and options.norman is not None:
        result["leukaemia"] = leukaemia(options.kang, options.norman)
    write_json(options.out, result)
    where = options.out.with_suffix(".md")
    if options.out.parent.name == "results":
        where = HERE / "reports" / f"{options.out.stem}.md"
    where.write_text(report(result), encoding="utf-8")
    say(f"written: {options.out}, {where}")


if __name__ == "__main__":
    main()
