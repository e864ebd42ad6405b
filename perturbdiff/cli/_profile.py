"""The command that profiles saved models."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perturbdiff._errors import ConfigError
from perturbdiff.cli._files import read
from perturbdiff.cli._options import (
    AsJson,
    ControlWords,
    Doses,
    Overrides,
    Overwrite,
    Times,
    Verbose,
    data_and_settings,
)
from perturbdiff.cli._runs import sampling, tune
from perturbdiff.cli._show import plainly, say, say_json
from perturbdiff.config._labels import read_context

if TYPE_CHECKING:
    from anndata import AnnData

_FILES = ("profile.json", "profile.md", "trace.json", "roofline.png")


def profile(
    bundle: Annotated[Path, typer.Argument(help="Folder of a saved model.")],
    words: ControlWords = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Folder of another saved model; repeatable.")
    ] = None,
    perturbations: Annotated[
        list[str] | None, typer.Option(help="What to ask; the first known one where left out.")
    ] = None,
    contexts: Annotated[
        list[str] | None,
        typer.Option(help="Context as cell_type=NK,donor=1; a middling one where left out."),
    ] = None,
    doses: Doses = None,
    times: Times = None,
    n_cells: Annotated[
        list[int] | None, typer.Option(help="Cells of a condition; repeatable. 1 and 256.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs for the clock.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("profile"),
    overrides: Overrides = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Split a prediction into phases: time, operations, bytes, and which limit binds.

    Writes profile.json, profile.md, roofline.png, and trace.json for ui.perfetto.dev.

    Example: perturbdiff profile bundle cells.h5ad --against other_bundle --n-cells 1 --n-cells 256
    """
    with plainly(verbose=verbose):
        data, changes = data_and_settings(words)
        settings = sampling([*(overrides or ()), *changes])
        _check_out(out, overwrite=overwrite)
        adata = None if data is None else read(data)
        tune()
        from perturbdiff.model import load
        from perturbdiff.profiling import compare, table, write

        models = _named([bundle, *(against or ())], load)
        question, numbers = _question(
            next(iter(models.values())),
            adata,
            perturbations,
            contexts,
            said={"doses": doses, "times": times},
        )
        report = compare(
            models, adata, **question, n_cells=n_cells or (1, 256),
            settings={
                name: {**_own(model, settings), **numbers} for name, model in models.items()
            },
            repeats=repeats,
        )  # fmt: skip
        write(report, out)
        import matplotlib as mpl

        mpl.use("Agg")
        from perturbdiff.pl import roofline

        roofline(report, save=out / "roofline.png", show=False)
        if as_json:
            files = {name: str(out / name) for name in _FILES}
            figures = {name: value for name, value in report.items() if name != "trace"}
            say_json({"files": files, "report": figures})
            return
        say(table(report))
        say(f"{out}/ holds {', '.join(_FILES[:-1])} and {_FILES[-1]}.")


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("out", str(out), rule="is a file; name a folder")
    if not overwrite and any((out / name).exists() for name in _FILES):
        raise ConfigError("out", str(out), rule="holds a report; name another, or --overwrite")


def _named(paths: list[Path], load: Any) -> dict[str, Any]:
    """Models by the names of their folders, or by their paths where two have one name."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    models = {name: load(path) for name, path in zip(names, paths, strict=True)}
    for name, model in models.items():
        if not hasattr(model, "probe_points"):
            rule = f"is a {model.kind}, which has no network to profile"
            raise ConfigError("bundle", name, rule=rule)
    return models


def _question(
    model: Any,
    adata: "AnnData | None",
    perturbations: list[str] | None,
    contexts: list[str] | None,
    *,
    said: Mapping[str, list[float] | None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked, filled up by what the model knows, and doses and times in its units."""
    from perturbdiff.model._quote_rest import own_controls, questions

    file = own_controls(model) if adata is None else adata
    labels, places, named = questions(model, file, missing_genes="refuse")
    numbers = {name: named[name] for name in said if name in named}
    numbers |= {name: values for name, values in said.items() if values is not None}
    asked = places[:1] if contexts is None else [read_context(text) for text in contexts]
    return {"perturbations": perturbations or labels[:1], "contexts": asked}, numbers


def _own(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that the model knows."""
    known = "sample" if model.kind == "set_diffusion" else "decode"
    return {name: value for name, value in settings.items() if name == known}
