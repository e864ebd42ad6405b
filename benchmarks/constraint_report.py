"""The report on constraints, and its picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.constraint_tasks import SEARCHES, STEERED
from benchmarks.tables import markdown

CURVE = ("1", "2", "4", "8", "16")
LEAST = 0.02  # distance below which a ratio says nothing
SELDOM = 0.15  # of the sibling's draws
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b")


def _offered(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: way for name, way in row["ways"].items() if "refused" not in way}


def _ratio(row: Mapping[str, Any], way: Mapping[str, Any]) -> float | None:
    """Distance to the conditional truth in units of that without constraints."""
    free, found = row["unconstrained"], way["energy_distance"]
    return found / free if free is not None and found is not None and free > LEAST else None


def verdicts(one: Mapping[str, Any]) -> list[str]:
    """What was set out to be reached in one question, and whether it was."""
    return [*_hard(one), *_steered(one), *_rare(one), *_observed(one)]


def _hard(one: Mapping[str, Any]) -> Iterator[str]:
    hard = [way["satisfied"] for row in one["tasks"] if (way := _offered(row).get("hard"))]
    said = "reached" if all(hard) else "missed"
    yield f"- Hard, 100 % at the tolerances: {sum(hard)} of {len(hard)} tasks. **{said}**"


def _steered(one: Mapping[str, Any]) -> Iterator[str]:
    tenth = [row for row in one["tasks"] if row["rate"] == 0.1 and not row["per_cell"]]
    for name in (*STEERED, *SEARCHES):
        tried = [(row, way) for row in tenth if (way := _offered(row).get(name))]
        share = float(np.mean([way["satisfied_sets"] for _, way in tried]))
        least = min(way["satisfied_sets"] for _, way in tried)
        ratios = [ratio for row, way in tried if (ratio := _ratio(row, way)) is not None]
        worst = max(ratios) if ratios else float("nan")
        reached = share >= 0.95 and not worst > 1.5
        said = "reached" if reached else "missed"
        if reached and least < 0.95:
            said = "reached on average"
        yield (
            f"- {name}, 10 % tasks: {share:.0%} of sets ({least:.0%} at the least of "
            f"{len(tried)} tasks), at most {worst:.2f} x the unconstrained distance. **{said}**"
        )


def _rare(one: Mapping[str, Any]) -> Iterator[str]:
    """Against the most draws of the sibling, up to 16, of which one obeys in 15 % or fewer."""
    for row in one["tasks"]:
        if row["rate"] != 0.01 or row["per_cell"]:
            continue
        curve = row["sibling"]["curve"]
        few = [n for n in CURVE if curve[n] <= SELDOM + 1e-9]
        if not few:
            yield (
                f"- {row['task']}: one draw of the sibling obeys in {curve['1']:.0%}, so it is "
                "not rare for it. **does not apply**"
            )
            continue
        n, each = few[-1], one["sibling_seconds_per_set"]
        able = {
            name: way
            for name, way in _offered(row).items()
            if name != "hard" and way["seconds_per_set"] <= int(n) * each
        }
        name = max(able, key=lambda way: (able[way]["satisfied_sets"], -able[way]["cost"]))
        best, other = able[name], curve[n]
        yield (
            f"- {row['task']}: sibling's best of {n} {other:.0%} in {int(n) * each:.1f} s a set; "
            f"{name} {best['satisfied_sets']:.0%} in {best['seconds_per_set']:.2f} s. "
            f"**{'reached' if best['satisfied_sets'] >= max(5 * other, 1e-9) else 'missed'}**"
        )


def _observed(one: Mapping[str, Any]) -> Iterator[str]:
    for name, title in (("mae_of_cells", "cells"), ("mae_of_means", "means")):
        mae = one["observed"][name]
        gain = 1 - mae["observed"] / min(mae["without"], mae["ridge"])
        said = "missed" if gain <= 0 else "reached" if gain >= 0.01 else "reached, by less than 1 %"
        yield (
            f"- Other half of the genes, MAE of {title}: {mae['observed']:.4f} with half observed, "
            f"{mae['without']:.4f} without, {mae['ridge']:.4f} by ridge. "
            f"**{said}**"
        )


def report_of(result: Mapping[str, Any], *, about: str) -> str:
    """The report."""
    parts = ["# Constraints", "", about.split("\n\n", 2)[-1].strip(), ""]
    for one in result["questions"]:
        made = (
            f"Made by `{one['command']}`, {_made_with(one)}; {one['n_sets']} sets a way, "
            f"thresholds from {one['n_free_sets']} sets, {one['n_sibling_sets']} of the sibling."
        )
        parts += [f"## Read: {_name(one)}", "", made, "", *verdicts(one), ""]
    parts += [
        "Ratios are over tasks whose unconstrained distance is above "
        f"{LEAST}. A function has no gradient and no projection, so soft and hard refuse it. "
        "Of N draws the sibling takes the first that obeys; the chance of one is exact over all "
        "choices of N from its unconstrained sets. What is said of every cell it meets by masking. "
        "Thresholds are those that SetDiffusion's own sets reach: the sibling, decoded raw, has "
        "means of its own, and the rates of its sets (best of 1) differ: where they are far from "
        "1 %, that tells of its means and not of how it is steered. Hard promises the mean of all "
        "cells that are returned, not that of every set, so its share of sets is lower.",
        "",
    ]
    for one in result["questions"]:
        parts += _costs(one)
        for value, title in (
            ("satisfied_sets", "share of sets that obey"),
            ("energy_distance", "energy distance to the conditional truth"),
        ):
            parts += _table(one, value, title)
        parts += [*_curves(one), *_half(one)]
    return "\n".join(parts)


def _made_with(one: Mapping[str, Any]) -> str:
    made = one["made_with"]
    return f"commit {made['commit'][:7]}, {made['cpu']}, threads: {made['threads']}"


def _name(one: Mapping[str, Any]) -> str:
    return f"{one['name']}, {', '.join(one['context'].values())} held out"


def _costs(one: Mapping[str, Any]) -> list[str]:
    """Calls and seconds of each way, over the tasks that it was offered."""
    rows = [
        ["unconstrained", "1.0", str(one["calls_per_trajectory"]), f"{one['seconds_per_set']:.3f}"]
    ]
    for name in one["tasks"][0]["ways"]:
        tried = [way for row in one["tasks"] if (way := _offered(row).get(name))]
        mean = {
            key: float(np.mean([way[key] for way in tried]))
            for key in ("cost", "calls_per_set", "seconds_per_set")
        }
        rows.append(
            [name, f"{mean['cost']:.1f}", f"{mean['calls_per_set']:.0f}",
             f"{mean['seconds_per_set']:.3f}"]
        )  # fmt: skip
    each = one["sibling_seconds_per_set"]
    calls = one["sibling_calls_per_set"]
    rows += [
        [f"sibling, best of {n}", n, f"{int(n) * calls:.0f}", f"{int(n) * each:.3f}"] for n in CURVE
    ]
    header = ["way", "trajectories a set", "network calls a set", "seconds a set"]
    most = max(
        way["sibling_draws_in_that_time"] for row in one["tasks"] for way in _offered(row).values()
    )
    said = (
        "Seconds are of whole predictions, control cells to counts, on a machine that did other "
        f"work too. In the time of the slowest way the sibling draws {most} set(s) for each; its "
        "calls are of batches of 256 cells, those of diffusion of single sets."
    )
    return [f"## {one['name']}: cost", "", markdown(header, rows), "", said, ""]


def _table(one: Mapping[str, Any], value: str, title: str) -> list[str]:
    names, table = list(one["tasks"][0]["ways"]), []
    for row in one["tasks"]:
        first = {
            "satisfied_sets": row["curve"]["1"],
            "energy_distance": row["unconstrained"],
        }[value]
        cells = [_cell(row["ways"][name], value) for name in names]
        other, mask = row["sibling"], row["sibling"]["masking"]
        sibling = {
            "satisfied_sets": other["curve"]["16"],
            "energy_distance": other["best_of_distance"],
        }[value]
        masked = "cannot" if mask is None else _cell(mask, value)
        table.append(
            [row["task"], _number(row["true_rate"], 3), _number(first), *cells, _number(sibling),
             masked]
        )  # fmt: skip
    header = ["task", "true rate", "unconstrained", *names, "sibling, best of 16"]
    return [f"## {one['name']}: {title}", "", markdown([*header, "sibling, masking"], table), ""]


def _curves(one: Mapping[str, Any]) -> list[str]:
    """Best of N of both siblings, without steering."""
    table = []
    for row in one["tasks"]:
        if not row["per_cell"]:
            for who, own in (("SetDiffusion", row), ("sibling", row["sibling"])):
                table.append([row["task"], who, *(f"{own['curve'][n]:.2f}" for n in CURVE)])
    title = f"## {one['name']}: best of N without steering"
    return [title, "", markdown(["task", "model", *CURVE], table), ""]


def _half(one: Mapping[str, Any]) -> list[str]:
    seen = one["observed"]
    table = [
        [name, f"{seen['mae_of_means'][name]:.4f}", f"{seen['mae_of_cells'][name]:.4f}"]
        for name in seen["mae_of_means"]
    ]
    header = ["other half predicted by", "MAE of means", "MAE of cells"]
    return [f"## {one['name']}: half of the genes observed", "", markdown(header, table), ""]


def _cell(way: Mapping[str, Any], value: str) -> str:
    return "refused" if "refused" in way else _number(way[value])


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def picture(result: Mapping[str, Any], path: Path) -> None:
    """Satisfaction against seconds on the rare tasks, and against distance on all."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    n = len(result["questions"])
    figure = Figure(figsize=(5.4 * n, 8.2), layout="constrained")
    panels = figure.subplots(2, n, squeeze=False)
    for place, one in enumerate(result["questions"]):
        names = list(one["tasks"][0]["ways"])
        for number, name in enumerate(names):
            colour, mark = _COLOURS[number % len(_COLOURS)], "osD^"[number // len(_COLOURS)]
            _points(panels[0, place], one, name, colour=colour, mark=mark)
            _ratios(panels[1, place], one, name, colour=colour, mark=mark)
        rare = [row for row in one["tasks"] if row["rate"] == 0.01 and not row["per_cell"]]
        seconds = [int(k) * one["sibling_seconds_per_set"] for k in CURVE]
        reached = [np.mean([row["sibling"]["curve"][k] for row in rare]) for k in CURVE]
        panels[0, place].plot(seconds, reached, "k--", lw=1.2, label="sibling, best of 1 to 16")
        panels[0, place].set(xscale="log", xlabel="seconds a set", ylim=(-0.05, 1.05))
        panels[0, place].set(ylabel="share of sets that obey", title=f"{one['name']}: 1 % tasks")
        panels[1, place].axvline(1, color="0.7", lw=0.8)
        panels[1, place].set(xlabel="distance to the conditional truth / unconstrained distance")
        panels[1, place].set(
            ylabel="share of sets that obey", ylim=(-0.05, 1.05), title=f"{one['name']}: 10 % tasks"
        )
    lines, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _points(panel: Any, one: Mapping[str, Any], name: str, *, colour: str, mark: str) -> None:
    """The mean over the rare tasks of one way."""
    tried = [
        way
        for row in one["tasks"]
        if row["rate"] == 0.01 and not row["per_cell"] and (way := _offered(row).get(name))
    ]
    seconds = np.mean([way["seconds_per_set"] for way in tried])
    share = np.mean([way["satisfied_sets"] for way in tried])
    panel.plot([seconds], [share], mark, color=colour, ms=6, label=name)


def _ratios(panel: Any, one: Mapping[str, Any], name: str, *, colour: str, mark: str) -> None:
    points = [
        (ratio, way["satisfied_sets"])
        for row in one["tasks"]
        if row["rate"] == 0.1
        and not row["per_cell"]
        and (way := _offered(row).get(name))
        and (ratio := _ratio(row, way)) is not None
    ]
    if points:
        x, y = np.array(points).T
        panel.plot(x, y, mark, color=colour, ms=5, alpha=0.8)
