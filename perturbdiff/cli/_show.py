"""What a command says and shows, and how it ends."""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbdiff._constants import CHOICE, LAST_CHECKPOINT, UNS_KEY
from perturbdiff._errors import PerturbDiffError
from perturbdiff._logging import logger

if TYPE_CHECKING:
    from anndata import AnnData

FAULT, USER_ERROR, INTERRUPTED = 1, 2, 130
"""How a command ends beside 0: something is broken, the request is to be mended, interrupted."""
PICTURES = ("response.png", "embedding.png", "scores.png")
"""What a score draws."""
_SHORT = {
    "pearson_shift": "Pearson ↑",
    "mae_shift": "MAE ↓",
    "energy_distance": "Energy ↓",
    "centred_energy_distance": "Centred ↓",
    "variance_explained": "Variance ↑",
    "de_overlap": "DE overlap ↑",
    "discrimination": "Discrim. ↑",
}


@contextmanager
def plainly(*, verbose: bool, resumable: Path | None = None) -> Iterator[None]:
    """One readable line for a mistake of the user's, 130 for an interruption."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    logging.basicConfig(format="%(levelname)s: %(message)s")
    level = logger.level
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    except (PerturbDiffError, FileNotFoundError, PermissionError) as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        typer.echo(f"Interrupted.{_way_on(resumable)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        logger.setLevel(level)


def _way_on(directory: Path | None) -> str:
    """How to go on after an interruption, where that is possible."""
    if directory is None:
        return ""
    if any(next(directory.rglob(name), None) for name in (LAST_CHECKPOINT, CHOICE)):
        return f" Go on with --checkpoint-dir {directory} --resume."
    return " No checkpoint was written yet: start again, without --resume."


def draw(
    pred: "AnnData", reference: "AnnData", folder: Path, *, gene_symbols: str | None = None
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from perturbdiff.pl import embedding, response

    beside: dict[str, Any] = {"reference": reference, "show": False}
    response(pred, gene_symbols=gene_symbols, save=folder / "response.png", **beside)
    embedding(pred, save=folder / "embedding.png", **beside)


def draw_scores(pred: "AnnData", folder: Path) -> None:
    from perturbdiff.pl import scores

    scores(pred, save=folder / "scores.png", show=False)


def mean_scores(pred: "AnnData") -> list[dict[str, Any]]:
    """Averages over conditions, one object a method; what is not defined is None."""
    from perturbdiff.tl import summarise_scores

    return _records(summarise_scores(pred).reset_index())


def described(pred: "AnnData") -> dict[str, Any]:
    """What a prediction is, where it comes from, and what became of its constraints."""
    notes = pred.uns[UNS_KEY]
    plain = {name: value for name, value in notes.items() if isinstance(value, str | int | float)}
    constraints = notes.get("constraints")
    return {
        "n_cells": pred.n_obs,
        "n_genes": pred.n_vars,
        "provenance": plain,
        "support": notes["support"],
        "constraints": [] if constraints is None else _records(constraints),
    }


def _records(table: Any) -> list[dict[str, Any]]:
    """Rows of a table, what is missing as None."""
    rows: list[dict[str, Any]] = table.astype(object).where(table.notna(), None).to_dict("records")
    return rows


def say_json(found: Mapping[str, Any]) -> None:
    """One JSON object; numbers and paths of every kind become plain ones."""
    say(json.dumps(_plain(found), indent=2, allow_nan=False, default=str))


def _plain(value: Any) -> Any:
    """Numbers without a value as None, arrays and tuples as lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def for_people() -> bool:
    """Whether somebody watches, so that bars are worth drawing."""
    return sys.stderr.isatty()


def tell(text: str) -> None:
    """What accompanies the answer and is no part of it."""
    typer.echo(text, err=True)


def show_scores(pred: "AnnData") -> None:
    """Averages over conditions as a table, with the reasons for what is missing."""
    from rich.console import Console
    from rich.table import Table

    from perturbdiff.tl import summarise_scores

    means = summarise_scores(pred)
    shown = [name for name in _SHORT if means[name].notna().any()]
    table = Table(title="Predicted against measured cells (↑ higher is better, ↓ lower)")
    table.add_column("method", no_wrap=True)
    table.add_column("cells", no_wrap=True)
    for name in shown:
        table.add_column(_SHORT[name], justify="right", no_wrap=True)
    for number, (method, cells) in enumerate(means.index):
        row = means.iloc[number]
        numbers = ["n/a" if math.isnan(row[name]) else f"{row[name]:.3f}" for name in shown]
        table.add_row(
            method,
            cells,
            *numbers,
            style="bold" if number == 0 else None,
            end_section=number in (0, len(means) - 2),
        )
    console = Console()
    console.width = max(console.width, 120)
    styled = console.is_terminal
    parts = ((part.text, part.style) for part in console.render(table))
    say("".join(style.render(text) if style and styled else text for text, style in parts))
    scores = pred.uns["score"]
    lacking = scores[scores["pearson_shift"].isna()].drop_duplicates("method")
    for method, reason in zip(lacking["method"], lacking["undefined"], strict=True):
        say(f"n/a {method}: {reason}")


def show_constraints(pred: "AnnData") -> None:
    """One line a constraint and condition: whether it holds, and what is left."""
    for row in pred.uns[UNS_KEY]["constraints"].to_dict("records"):
        left = "holds" if row["satisfied"] else f"is off by up to {row['violation']:.3g}"
        say(f"{row['constraint']}: {left} ({row['method']}), {row['condition']}")


def say(text: str) -> None:
    typer.echo(text)
