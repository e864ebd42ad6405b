"""Rows of scores, their averages, and tables of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perturbdiff.metrics import METRICS

Values = Mapping[str, float | None]
SHORT = {
    "pearson_shift": "Pearson",
    "mae_shift": "MAE",
    "energy_distance": "energy",
    "centred_energy_distance": "centred energy",
    "mmd": "MMD",
    "variance_explained": "variance",
    "de_overlap": "DE overlap",
    "direction_match": "direction",
    "discrimination": "discrimination",
    "ranked_first": "ranked first",
}


def plain(value: float) -> float | None:
    """A number that JSON knows; None where there is none."""
    return None if math.isnan(value) else float(value)


def mean_of(values: Iterable[float | None]) -> tuple[float | None, int]:
    """Mean of what is defined, and how many that are."""
    known = [value for value in values if value is not None]
    return (sum(known) / len(known) if known else None), len(known)


def average(rows: Sequence[Values]) -> tuple[dict[str, float | None], dict[str, int]]:
    """Mean of every metric over the rows where it is defined, and the number of those."""
    names = dict.fromkeys(name for row in rows for name in row)
    means = {name: mean_of(row.get(name) for row in rows) for name in names}
    return {k: mean for k, (mean, _) in means.items()}, {k: n for k, (_, n) in means.items()}


def better(metric: str, value: float | None, than: float | None) -> bool | None:
    """Whether a score is strictly better than another; None where either is missing."""
    if value is None or than is None:
        return None
    return value > than if METRICS[metric].higher_is_better else value < than


def number(value: Any, digits: int = 3) -> str:
    """A value as tables show it."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.{digits}f}"
        return "0." + "0" * digits if text == "-0." + "0" * digits else text
    return str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]], *, digits: int = 3) -> str:
    """A table with aligned columns."""
    cells = [[number(value, digits).replace("|", "\\|") for value in row] for row in rows]
    table = [list(header), *cells]
    width = [max(len(line[i]) for line in table) for i in range(len(header))]

    def line(parts: Sequence[str]) -> str:
        first = parts[0].ljust(width[0])
        rest = [part.rjust(size) for part, size in zip(parts[1:], width[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join(
        ["-" * (width[0] + 2), *("-" * (size + 1) + ":" for size in width[1:])]
    ) + "|"  # fmt: skip
    return "\n".join([line(table[0]), rule, *map(line, cells)])


def score_table(
    rows: Mapping[str, Values], metrics: Sequence[str], *, first: str = "", digits: int = 3
) -> str:
    """Methods by metrics, with the direction in which a score is better."""
    header = [first]
    for name in metrics:
        arrow = "↑" if METRICS[name].higher_is_better else "↓"
        header.append(f"{SHORT[name]} {arrow}")
    body = [[method, *(values.get(name) for name in metrics)] for method, values in rows.items()]
    return markdown(header, body, digits=digits)
