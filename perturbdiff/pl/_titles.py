"""What pictures call a condition, in lines that a panel has room for."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from perturbdiff.data import Condition, label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perturbdiff.data import Registry

_SIZES: Final = (10.0, 8.5, 7.5)  # points
_MOST_LINES: Final = 5  # of the whole title, while letters can still be made smaller
_LONGEST: Final = 3  # lines of one part


def name_lines(labels: Mapping[str, object]) -> list[str]:
    """Perturbation, then context, dose and time, as obs has them; numbers with their column.

    Parameters
    ----------
    labels
        Labels by column, the perturbation first.
    """
    (_, perturbation), *rest = labels.items()
    known = [_said(column, label) for column, label in rest]
    return [str(perturbation), *([", ".join(filter(None, known))] if any(known) else [])]


def labels_of(condition: Condition, registry: "Registry") -> dict[str, object]:
    """Labels of a condition by the names that their columns have in ``obs``."""
    label = label_of(condition.members, separator=registry.separator)
    labels: dict[str, object] = {registry.perturbation_key: label}
    labels |= dict(zip(registry.covariate_keys, condition.context, strict=True))
    labels[registry.dose_key or "dose"] = "+".join(f"{dose:g}" for dose in condition.doses)
    labels[registry.time_key or "time"] = condition.time
    return labels


def set_title(panel: "Axes", lines: Sequence[str]) -> None:
    """Write lines over a panel, wrapped to its width, in smaller letters where they are many."""
    for size in _SIZES:
        wrapped = [_wrap(line, size=size, room=_points(panel)) for line in lines]
        if sum(map(len, wrapped)) <= min(_MOST_LINES, len(lines) + 2):
            break
    shown = [line for part in wrapped for line in _cut(part)]
    panel.set_title("\n".join(shown), fontsize=size, parse_math=False)


def _said(column: str, label: object) -> str:
    """A label; one that is a number means little without its column."""
    text = f"{label:g}" if isinstance(label, float) else str(label)
    if text in ("", "nan", "None"):
        return ""
    try:
        [float(part) for part in text.split("+")]
    except ValueError:
        return text
    return f"{column} {text}"


def _points(panel: "Axes") -> float:
    """Width of a panel."""
    figure = panel.get_figure(root=True)
    assert figure is not None  # a panel belongs to one
    return float(panel.get_window_extent().width * 72 / figure.dpi)


def _wrap(line: str, *, size: float, room: float) -> list[str]:
    from matplotlib.textpath import TextPath  # noqa: PLC0415 - slow to import

    width = float(TextPath((0, 0), line.replace("$", "S"), size=size).get_extents().width)
    if width <= room or len(line) < 2:
        return [line]
    return textwrap.wrap(line, width=max(int(0.95 * room / width * len(line)), 4))


def _cut(lines: list[str]) -> list[str]:
    if len(lines) <= _LONGEST:
        return lines
    return [*lines[: _LONGEST - 1], f"{lines[_LONGEST - 1][:-1]}…"]
