"""From scores to a result and a report: what was asked, measured, concluded."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.environment import environment
from benchmarks.fits import Recipe, summary
from benchmarks.simple import ALL_CELLS, ONCE, TO_BEAT
from benchmarks.tables import SHORT, average, better, markdown, number, score_table
from perturbdiff.metrics import METRICS

MODEL, CEILING = "SetDiffusion", "ceiling (split halves)"
MODEL_ONCE, TO_BEAT_ONCE = "SetDiffusion, partners once", f"mixture_log_ratio, {ONCE}"
SIX = (
    "pearson_shift", "mae_shift", "energy_distance", "centred_energy_distance",
    "variance_explained", "de_overlap",
)  # fmt: skip
REFERENCE = dict(zip(SIX, (0.894, 0.031, 0.726, 0.062, 0.474, 0.485), strict=True))
SKETCH = dict(zip(SIX, (0.893, 0.031, 0.588, -0.01, 0.564, 0.515), strict=True))
AIM = dict(zip(SIX, (0.91, 0.029, 0.50, 0.00, 0.65, 0.56), strict=True))
AIM_DISCRIMINATION = 0.87
LONGEST_FIT, LONGEST_PREDICTION = 300.0, 5.0
ALL = tuple(METRICS)
SHOWN = (MODEL, TO_BEAT, "effect_prior, transported", CEILING)


def rows_of_types(
    simple: Mapping[str, Any], fits: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Values by type and method; the model's averaged over its seeds."""
    table: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, entry in simple.items():
        own = [fit["values"] for fit in fits if fit["held_out"] == name]
        rows = {MODEL: average(own)[0]} if own else {}
        if own:
            once = [fit["once"]["values"] for fit in fits if fit["held_out"] == name]
            rows[MODEL_ONCE] = average(once)[0]
        rows |= {method: row["values"] for method, row in entry["cells"].items()}
        table[name] = {**rows, CEILING: entry["ceiling"]["values"]}
    return table


def averaged(
    table: Mapping[str, Mapping[str, Mapping[str, float | None]]], names: Sequence[str]
) -> dict[str, Any]:
    """Mean over types of every method, with the numbers of types behind each."""
    methods = dict.fromkeys(method for name in names for method in table[name])
    out = {}
    for method in methods:
        parts = [table[name][method] for name in names if method in table[name]]
        out[method] = dict(zip(("values", "n"), average(parts), strict=True))
    return out


def contexts_result(
    simple: Mapping[str, Any],
    fits: Sequence[Mapping[str, Any]],
    *,
    several: Sequence[str],
    command: str,
    recipe: Recipe,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that was measured about held-out contexts, with averages and verdicts."""
    table = rows_of_types(simple, fits)
    named = [name for name in several if name in table]
    alone = {
        method: average([entry["means"][method] for entry in simple.values()])[0]
        for method in next(iter(simple.values()))["means"]
    }
    reasons: dict[str, str] = {}
    for entry in simple.values():
        reasons |= entry["undefined"]
    averages = averaged(table, list(table))
    times = summary(fits) if fits else None
    return {
        "question": "How good are predicted cells of contexts whose perturbed cells nobody saw?",
        "command": command,
        "environment": environment(),
        "data": dict(data),
        "recipe": recipe.key(),
        "averages": averages,
        "averages_named": {"types": named, **(averaged(table, named) if named else {})},
        "means_alone": alone,
        "undefined_baselines": reasons,
        "verdicts": verdicts(averages, times),
        "times": times,
        "by_type": table,
        "types": {
            name: {k: v for k, v in entry.items() if k != "genes"} for name, entry in simple.items()
        },
        "fits": list(fits),
    }


def verdicts(averages: Mapping[str, Any], times: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was to be reached, what was, and whether that is enough."""
    bar = averages[TO_BEAT]["values"]
    whole = averages[f"mixture_log_ratio, {ALL_CELLS}"]["values"]
    found: dict[str, Any] = {"baseline_as_referenced": _as_referenced(whole)}
    if MODEL not in averages or times is None:
        return found
    own = averages[MODEL]["values"]
    above = {name: better(name, own[name], bar[name]) for name in SIX}
    once, bar_once = (averages[name]["values"] for name in (MODEL_ONCE, TO_BEAT_ONCE))
    above_once = {name: better(name, once[name], bar_once[name]) for name in SIX}
    above_whole = {name: better(name, once[name], whole[name]) for name in SIX}
    sketch = {name: better(name, own[name], SKETCH[name]) for name in SIX}
    sketch_once = {name: better(name, once[name], SKETCH[name]) for name in SIX}
    aim = {name: better(name, own[name], AIM[name]) for name in SIX}
    return found | {
        "above_baseline": above,
        "above_baseline_partners_once": above_once,
        "above_baseline_with_all_control_cells": above_whole,
        "above_sketch": sketch,
        "above_sketch_partners_once": sketch_once,
        "reaches_aim": aim,
        "discrimination_reaches_aim": own["discrimination"] >= AIM_DISCRIMINATION,
        "fit_in_time": times["seconds_fit_longest"] <= LONGEST_FIT,
        "prediction_in_time": times["seconds_predict_longest"] <= LONGEST_PREDICTION,
    }


def _as_referenced(values: Mapping[str, float | None]) -> dict[str, bool]:
    """Whether the baseline is within 0.01 (Pearson) and 10 % (energy) of the figures quoted."""
    pearson, energy = values["pearson_shift"], values["energy_distance"]
    return {
        "pearson_shift": pearson is not None and abs(pearson - REFERENCE["pearson_shift"]) <= 0.01,
        "energy_distance": energy is not None
        and abs(energy / REFERENCE["energy_distance"] - 1) <= 0.1,
    }


def _values(averages: Mapping[str, Any]) -> dict[str, Mapping[str, float | None]]:
    return {name: entry["values"] for name, entry in averages.items() if name != "types"}


def _gaps(averages: Mapping[str, Any]) -> list[str]:
    """Methods of which an average leaves types out."""
    most = max(max(entry["n"].values()) for name, entry in averages.items() if name != "types")
    gaps: dict[str, list[str]] = {}
    for name, entry in averages.items():
        if name == "types":
            continue
        less = {SHORT[metric]: n for metric, n in entry["n"].items() if n < most}
        if less:
            said = ", ".join(f"{metric} {n}" for metric, n in less.items())
            gaps.setdefault(f"defined for fewer than {most}: {said}", []).append(name)
    whole = len([name for name in averages if name != "types"])
    return [
        f"- {said} ({'all methods' if len(names) == whole else '; '.join(names)})"
        for said, names in gaps.items()
    ]


def made_with(result: Mapping[str, Any]) -> list[str]:
    found = result["environment"]
    dirty = " with uncommitted changes" if found["uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    lines = [
        "## Made with",
        "",
        f"`{result['command']}`",
        "",
        f"Commit {found['commit'][:12]}{dirty}; Python {found['python']}; {packages}.",
        f"{found['cpu']} ({found['n_cpus']} processors, {found['threads']} thread(s) of torch); "
        f"GPU: {found['gpu']}. Warm-up: none, the first fit and the first prediction count.",
    ]
    fits = result["fits"]
    fits = list(fits.values()) if isinstance(fits, dict) else fits
    if fits:
        commits = sorted({fit["made_with"]["commit"][:12] for fit in fits})
        threads = sorted({fit["made_with"]["threads"] for fit in fits})
        dirty_fits = sum(bool(fit["made_with"]["uncommitted_changes"]) for fit in fits)
        lines.append(
            f"Fits were made at commit(s) {', '.join(commits)} ({dirty_fits} of {len(fits)} with "
            f"uncommitted changes) on {', '.join(map(str, threads))} thread(s)."
        )
    return lines


def contexts_report(result: Mapping[str, Any]) -> str:
    """Report on held-out contexts."""
    data, averages = result["data"], result["averages"]
    n_types = len(result["by_type"])
    lines = [
        f"# Predicted cells of held-out contexts: {data['file']}",
        "",
        "## What was asked",
        "",
        result["question"],
        "",
        "## How it was measured",
        "",
        f"{data['cells']} cells by {data['genes']} genes (sha256 `{data['sha256'][:16]}`). Each of "
        f"{n_types} types is held out in turn: its perturbed cells are not seen by gene selection, "
        "axes, baselines or model; its control cells are. "
        f"{result['recipe']['n_top_genes']} variable genes are chosen from the training cells. "
        f"{result['recipe']['n_cells']} predicted cells are scored against all true cells; "
        "distances are taken in 30 principal axes of the training cells. The model's scores are "
        "averaged over its seeds, then over types; an average is over the types where a score is "
        "defined.",
        "",
        "A baseline's mean becomes cells in two ways: control cells shifted by the difference and "
        "clipped at zero (each control cell once), or control cells thinned or added to in "
        f"count space (`transported`; {result['recipe']['n_cells']} cells from the partners that "
        f"the model starts from; `{ALL_CELLS}`: each once). The one to beat is `{TO_BEAT}`. Types "
        f"with fewer than {result['recipe']['n_cells']} control cells lend some of them several "
        "times, which makes predicted cells cluster; `partners once` leaves the repeats out, for "
        "the model as for the baseline. Discrimination ranks the predicted shift of a type among "
        "the true shifts of all types by Pearson, all on the genes chosen for the held-out type "
        "(they differ a little between types); its ceiling ranks the shifts between one half of "
        "the treated and of the control cells of every type among those between the other halves.",
        "",
        "## What was measured",
        "",
        f"Mean over {n_types} types:",
        "",
        score_table(_values(averages), ALL, first="method"),
        "",
        *_gaps(averages),
        "",
    ]
    named = result["averages_named"]
    if len(named["types"]) not in (0, n_types):
        lines += [
            f"Mean over {', '.join(named['types'])}:",
            "",
            score_table(_values(named), ALL, first="method"),
            "",
        ]
    alone = ("pearson_shift", "mae_shift", "discrimination", "ranked_first")
    lines += [
        "Means alone, before they are made into cells:",
        "",
        score_table(result["means_alone"], alone, first="mean"),
        "",
    ]
    lines += [f"n/a: {name}: {why}." for name, why in result["undefined_baselines"].items()]
    lines += ["", "### By type", ""]
    for name, rows in result["by_type"].items():
        about = result["types"][name]
        lines += [
            f"{name}: {about['n_true']} true cells, {about['n_control']} control cells",
            "",
            score_table({k: rows[k] for k in SHOWN if k in rows}, ALL, first="method"),
            "",
        ]
    lines += [*_fits(result), "## What is concluded", "", *_conclusions(result), ""]
    return "\n".join([*lines, *made_with(result), ""])


def _fits(result: Mapping[str, Any]) -> list[str]:
    if not result["fits"]:
        return []
    header = ["held out", "seed", "fit, s", "512 cells, s", "steps", "dependence", "calls", "MB"]
    body = [
        [
            fit["held_out"], fit["seed"], fit["seconds_fit"], fit["seconds_predict"], fit["steps"],
            fit["dependence"], fit["nfe"], fit["peak_memory_mb"],
        ]
        for fit in result["fits"]
    ]  # fmt: skip
    return ["### Fits", "", markdown(header, body, digits=1), ""]


def _conclusions(result: Mapping[str, Any]) -> list[str]:
    found = result["verdicts"]
    whole = result["averages"][f"mixture_log_ratio, {ALL_CELLS}"]["values"]
    check = found["baseline_as_referenced"]
    lines = [
        f"- The baseline (all control cells) has Pearson {number(whole['pearson_shift'])} and "
        f"energy distance {number(whole['energy_distance'])}; figures quoted for it are "
        f"{REFERENCE['pearson_shift']} and {REFERENCE['energy_distance']}: "
        + ("they agree." if all(check.values()) else "**they do not agree**.")
    ]
    if len(result["by_type"]) < 13:
        lines.append("- Only some types were held out: averages are not those of the question.")
    if "above_baseline" not in found:
        return [*lines, "- No model was fitted."]
    methods = (MODEL, TO_BEAT, MODEL_ONCE, TO_BEAT_ONCE)
    own, bar, once, bar_once = (result["averages"][name]["values"] for name in methods)
    body = [
        [MODEL, *(own[name] for name in SIX)],
        ["baseline to beat", *(bar[name] for name in SIX)],
        ["above it", *found["above_baseline"].values()],
        [MODEL_ONCE, *(once[name] for name in SIX)],
        ["baseline, partners once", *(bar_once[name] for name in SIX)],
        ["above it, partners once", *found["above_baseline_partners_once"].values()],
        ["baseline, all control cells", *(whole[name] for name in SIX)],
        ["above it, partners once", *found["above_baseline_with_all_control_cells"].values()],
        ["sketch", *SKETCH.values()],
        ["above the sketch", *found["above_sketch"].values()],
        ["above it, partners once", *found["above_sketch_partners_once"].values()],
        ["aim", *AIM.values()],
        ["aim reached", *found["reaches_aim"].values()],
    ]
    header = ["", *(SHORT[name] for name in SIX)]
    times = result["times"]
    n_above, n_sketch = sum(found["above_baseline"].values()), sum(found["above_sketch"].values())
    lines += [
        f"- Above the baseline in {n_above} of 6 columns (wanted: 6); above the sketch in "
        f"{n_sketch} (wanted: at least 4); the aim is reached in "
        f"{sum(found['reaches_aim'].values())}.",
        f"- Discrimination {number(own['discrimination'])} (aim {AIM_DISCRIMINATION}), "
        f"{number(own['ranked_first'])} of types ranked first.",
        f"- The longest fit took {times['seconds_fit_longest']:.0f} s (wanted: at most "
        f"{LONGEST_FIT:.0f}), the longest prediction of {result['recipe']['n_cells']} cells "
        f"{times['seconds_predict_longest']:.1f} s (wanted: at most {LONGEST_PREDICTION:.0f}).",
        "",
        markdown(header, body),
    ]
    return lines


def perturbations_report(result: Mapping[str, Any]) -> str:
    """Report on held-out single perturbations and, as an anecdote, pairs."""
    data = result["data"]
    lines = [
        f"# Predicted cells of held-out perturbations: {data['file']}",
        "",
        "## What was asked",
        "",
        result["question"],
        "",
        "## How it was measured",
        "",
        f"{data['cells']} cells by {data['genes']} genes, one cell line, so answers that need "
        "another context are not defined. Singles are held out in folds, together with every pair "
        f"that has one of them; the model and the ridge know them by features made from "
        f"`{data['annotation']}` (leading directions of the gene by term matrix of all annotated "
        "genes). Counts are `layers['counts']`. Library sizes over all genes cannot be summed from "
        "this subset of genes: the depth that `X` was normalised by is recovered from `X` and the "
        f"counts of each cell (median {data['median_depth_over_ncounts']:.4f} of `obs['ncounts']`, "
        "which counts slightly more than was normalised by), so that `X` is reproduced exactly. "
        f"{result['recipe']['n_cells']} predicted cells are scored against about 100 true ones: "
        "differential expression has little power, effect sizes are what to look at. They start "
        "from fewer control cells, each lent several times, so that they cluster, which distances "
        "count against them; `partners once` leaves the repeats out, as shifted cells do. "
        "Discrimination ranks a predicted shift among the true shifts of all singles (for pairs: "
        "of all singles and pairs).",
        "",
    ]
    if data["without_annotation"]:
        lines += [f"Without annotation: {', '.join(data['without_annotation'])}.", ""]
    lines += ["| fold | scored | also hidden |", "|---|---|---|"]
    lines += [
        f"| {fold['label']} | {', '.join(fold['scored'])} | {', '.join(fold['hidden'])} |"
        for fold in result["folds"]
    ]
    titles = {
        "singles": "Singles, mean over all of them:",
        "pairs": "An anecdote: pairs of which both singles were measured, both held out at once:",
    }
    lines += ["", "## What was measured", ""]
    for group, title in titles.items():
        averages = result["averages"][group]
        if not averages:
            continue
        lines += [title, "", score_table(_values(averages), ALL, first="method", digits=4), ""]
        lines += [*_gaps(averages), ""]
        lines += [f"- n/a: {name}: {why}" for name, why in result["undefined"][group].items()]
        lines.append("")
    lines += ["### By perturbation", ""]
    shown = (MODEL, "mean_shift, transported", "additive, transported", "effect_prior, transported")
    for label, entries in result["simple"].items():
        for name, entry in entries.items():
            rows = {method: row["values"] for method, row in entry["cells"].items()}
            if label in result["fits"]:
                rows[MODEL] = result["fits"][label]["scores"][name]["values"]
            rows[CEILING] = entry["ceiling"]["values"]
            chosen = {method: rows[method] for method in (*shown, CEILING) if method in rows}
            lines += [
                f"{name} ({label})",
                "",
                score_table(chosen, ALL, first="method", digits=4),
                "",
            ]
    lines += ["## What is concluded", "", *_conclusions_perturbations(result), ""]
    return "\n".join([*lines, *made_with(result), ""])


def _conclusions_perturbations(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for group, bars in {
        "singles": ("mean_shift, shifted", "gene_ridge, shifted", "mean_shift, transported"),
        "pairs": ("additive, shifted", "additive, transported", "mean_shift, shifted"),
    }.items():
        averages = result["averages"][group]
        if MODEL not in averages:
            continue
        own = averages[MODEL]["values"]
        for bar in bars:
            if bar in averages:
                other = averages[bar]["values"]
                won = [SHORT[n] for n in SIX if better(n, own[n], other[n])]
                lines.append(
                    f"- {group}: better than `{bar}` in {len(won)} of 6 scores"
                    + (f" ({', '.join(won)})." if won else ".")
                )
    if times := result["times"]:
        lines.append(f"- The longest fit took {times['seconds_fit_longest']:.0f} s.")
    return lines or ["- No model was fitted."]
