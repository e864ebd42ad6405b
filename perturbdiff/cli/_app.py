"""The commands: the same names as the API, checked before anything is read or written."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from perturbdiff._constants import VERSION
from perturbdiff._errors import ConfigError
from perturbdiff.cli._completion import data_sets, settings
from perturbdiff.cli._doctor import doctor
from perturbdiff.cli._files import (
    DATASETS,
    check_cells_out,
    check_pictures,
    check_table_out,
    known_dataset,
    read,
    write,
)
from perturbdiff.cli._fit import fit
from perturbdiff.cli._group import OneLineGroup
from perturbdiff.cli._options import (
    AsJson,
    Overrides,
    Overwrite,
    Seed,
    Verbose,
    data_and_settings,
)
from perturbdiff.cli._predict import predict
from perturbdiff.cli._profile import profile
from perturbdiff.cli._runs import fitted, in_short, sampling_of, settings_of
from perturbdiff.cli._serve import serve
from perturbdiff.cli._show import (
    PICTURES,
    draw,
    draw_scores,
    mean_scores,
    plainly,
    say,
    say_json,
    show_scores,
    tell,
)
from perturbdiff.config._labels import read_labels

app = typer.Typer(
    name="perturbdiff",
    cls=OneLineGroup,
    help=(
        "Predict what a perturbation does to single cells in contexts where nobody measured it.\n\n"
        "Start with `perturbdiff demo`. On your own file, `fit` learns from cells measured with "
        "and without perturbations, `predict` makes cells, and `score` compares them with measured "
        "ones, beside simple baselines. `doctor` says whether all that is needed is here.\n\n"
        "Ends with 0 where all went well, 1 where something is broken, 2 where the command or the "
        "data are to be mended, 130 where it was interrupted. Answers are on standard output, with "
        "`--json` as one object; everything else is on standard error."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        say(VERSION)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for cells, scores and pictures.")] = Path(
        "demo"
    ),
    holdout: Annotated[
        list[str] | None, typer.Option(help="What to predict unseen, as cell_type=NK; repeatable.")
    ] = None,
    seed: Seed = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE",
            help="Settings by their names, such as train.max_steps=100.",
            autocompletion=settings,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Hold out one cell type of real data, fit, predict it, and score the prediction.

    Writes predicted.h5ad, scores.csv, response.png and embedding.png. Takes some minutes on two
    cores.
    """
    with plainly(verbose=verbose):
        data, named = data_and_settings(changes)
        if data is not None:
            raise ConfigError("arguments", data, rule="must be settings: the demo has its own data")
        chosen = {"data.holdout": read_labels(holdout), "seed": seed}
        run = settings_of("demo", [*(overrides or ()), *named], chosen)
        if out.exists() and not out.is_dir():
            raise ConfigError("out", str(out), rule="is a file; name a folder")
        tell(in_short(run))
        adata = read(run.data.source)
        model = fitted(adata, run, {})
        from perturbdiff.tl import predict as predict_cells
        from perturbdiff.tl import score as score_cells

        held = [
            [(key, label) for label in labels]
            for key, labels in run.data.holdout.items()
            if key in run.data.covariate_keys
        ]
        pred = predict_cells(
            adata,
            model,
            perturbations=model.registry.perturbations.levels,
            contexts=[dict(context) for context in product(*held)],
            n_cells=run.n_cells,
            seed=run.seed,
            **sampling_of(run),
        )
        score_cells(pred, reference=adata, seed=run.seed)
        write(pred, out / "predicted.h5ad")
        pred.uns["score"].to_csv(out / "scores.csv", index=False)
        draw(pred, adata, out)
        if as_json:
            say_json({"out": str(out), "scores": mean_scores(pred)})
            return
        show_scores(pred)
        say(f"{out}/ holds predicted.h5ad, scores.csv, response.png and embedding.png.")


app.command()(fit)
app.command()(predict)


@app.command()
def score(
    pred: Annotated[Path, typer.Argument(help="File of predicted cells.")],
    reference: Annotated[
        str,
        typer.Option(help="File with the measured cells, or data set.", autocompletion=data_sets),
    ],
    out: Annotated[Path, typer.Option(help="Table of scores.")] = Path("scores.csv"),
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for response.png, embedding.png and scores.png.")
    ] = None,
    gene_symbols: Annotated[
        str | None,
        typer.Option(help="Column of var with what the pictures are to call genes."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of subsampling.")] = 0,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Compare predicted with measured cells, beside every baseline and the replicate ceiling.

    Example: perturbdiff score predicted.h5ad --reference cells.h5ad --out scores.csv
    """
    with plainly(verbose=verbose):
        check_table_out(out, overwrite=overwrite)
        if pictures is not None:
            check_pictures(pictures, PICTURES, overwrite=overwrite)
        elif gene_symbols is not None:
            rule = "says what pictures call genes, so it needs --pictures FOLDER"
            raise ConfigError("gene_symbols", gene_symbols, rule=rule)
        guess, truth = read(str(pred)), read(reference)
        from perturbdiff.pl._symbols import gene_labels
        from perturbdiff.tl import score as score_cells

        gene_labels(gene_symbols, truth, guess)  # refused before the work
        score_cells(guess, reference=truth, seed=seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        guess.uns["score"].to_csv(out, index=False)
        if pictures is not None:
            draw(guess, truth, pictures, gene_symbols=gene_symbols)
            draw_scores(guess, pictures)
        if as_json:
            say_json({"out": str(out), "scores": mean_scores(guess)})
            return
        show_scores(guess)
        say(f"One row per method and condition is in {out}.")


@app.command()
def datasets(
    name: Annotated[
        str | None, typer.Argument(help="Data set to write.", autocompletion=data_sets)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File; NAME.h5ad where left out.")] = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """List the data sets, or write one to a file."""
    with plainly(verbose=verbose):
        if name is None and as_json:
            listed = [{"name": known, "description": words} for known, words in DATASETS.items()]
            say_json({"datasets": listed})
            return
        if name is None:
            for known, words in DATASETS.items():
                say(f"{known:16s} {words}")
            return
        known_dataset(name)
        out = out or Path(f"{name}.h5ad")
        check_cells_out(out, overwrite=overwrite)
        adata = read(name)
        write(adata, out)
        if as_json:
            found = {"name": name, "n_cells": adata.n_obs, "n_genes": adata.n_vars}
            say_json({"out": str(out), **found})
            return
        say(f"Written to {out}.")


app.command()(doctor)
app.command()(profile)
app.command()(serve)


def main() -> None:
    """Run the command line."""
    app(prog_name="perturbdiff")
