"""The commands: the same names as the API, checked before anything is read or written."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from perturbdiff._constants import VERSION
from perturbdiff._errors import ConfigError
from perturbdiff.cli._doctor import doctor
from perturbdiff.cli._files import DATASETS, check_out, known_dataset, read, read_wish, write
from perturbdiff.cli._options import Config, Overrides, Overwrite, Seed, Verbose
from perturbdiff.cli._profile import profile
from perturbdiff.cli._runs import fitted, sampling, sampling_of, settings_of, spelled, tune
from perturbdiff.cli._serve import serve
from perturbdiff.cli._show import (
    draw,
    draw_scores,
    plainly,
    say,
    scores_as_json,
    show_constraints,
    show_scores,
)
from perturbdiff.config._labels import read_context, read_labels

app = typer.Typer(
    name="perturbdiff",
    help=(
        "Predict what a perturbation does to single cells in contexts where nobody measured it.\n\n"
        "Start with `perturbdiff demo`. On your own file, `fit` learns from cells measured with "
        "and without perturbations, `predict` makes cells, and `score` compares them with measured "
        "ones, beside simple baselines. `doctor` says whether all that is needed is here.\n\n"
        "Ends with 0 where all went well, 1 where something is broken, 2 where the command or the "
        "data are to be mended, 130 where it was interrupted."
    ),
    no_args_is_help=True,
    add_completion=False,
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
    overrides: Overrides = None,
    verbose: Verbose = False,
) -> None:
    """Hold out one cell type of real data, fit, predict it, and score the prediction.

    Writes predicted.h5ad, scores.csv, response.png and embedding.png. Takes some minutes on two
    cores.
    """
    with plainly(verbose=verbose):
        run = settings_of("demo", overrides, {"data.holdout": read_labels(holdout), "seed": seed})
        if out.exists() and not out.is_dir():
            raise ConfigError("out", str(out), rule="is a file; name a folder")
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
        show_scores(pred)
        say(f"{out}/ holds predicted.h5ad, scores.csv, response.png and embedding.png.")


@app.command()
def fit(
    data: Annotated[
        str | None, typer.Argument(help="An .h5ad file, or the name of a data set.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the saved model.")] = Path("bundle"),
    config: Config = None,
    kind: Annotated[
        str | None, typer.Option(help="set_diffusion, or causal_baseline: gene after gene.")
    ] = None,
    perturbation_key: Annotated[
        str | None, typer.Option(help="Column of obs with the perturbation of each cell.")
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Label in it that means unperturbed; repeatable.")
    ] = None,
    covariate_keys: Annotated[
        list[str] | None, typer.Option(help="Column that defines the context; repeatable.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="What the numbers are: counts or log1p_cp10k.")
    ] = None,
    holdout: Annotated[
        list[str] | None, typer.Option(help="What to leave out, as cell_type=NK; repeatable.")
    ] = None,
    n_top_genes: Annotated[int | None, typer.Option(help="Variable genes to work on.")] = None,
    seed: Seed = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Where checkpoints are kept, to --resume from.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint that is there.")
    ] = False,
    include_controls: Annotated[
        int | None,
        typer.Option(help="Most control cells of each context to save with the model."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show all settings as YAML and do nothing.")
    ] = False,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Learn from cells measured with and without perturbations, and save the model.

    Example: perturbdiff fit cells.h5ad --perturbation-key condition --control ctrl
    --covariate-keys cell_type --scale counts --out bundle
    """
    with plainly(verbose=verbose, resumable=checkpoint_dir):
        chosen = {
            "kind": kind,
            "data.source": data,
            "data.perturbation_key": perturbation_key,
            "data.control": control,
            "data.covariate_keys": covariate_keys,
            "data.scale": scale,
            "data.holdout": read_labels(holdout),
            "data.n_top_genes": n_top_genes,
            "seed": seed,
        }
        run = settings_of(config, overrides, chosen)
        if print_config:
            say(spelled(run))
            return
        check_out(out, overwrite=overwrite)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume", resume, rule="needs --checkpoint-dir")
        adata = read(run.data.source)
        model = fitted(adata, run, {"checkpoint_dir": checkpoint_dir, "resume": resume})
        if overwrite and out.is_dir():
            import shutil

            shutil.rmtree(out)
        model.save(out, include_controls=include_controls)
        say(f"Saved to {out}/.")


@app.command()
def predict(
    model: Annotated[Path, typer.Option(help="Folder of a saved model.")],
    perturbations: Annotated[
        list[str], typer.Option(help="Perturbation, or combination such as A+B; repeatable.")
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            help="File with control cells, or name of a data set; left out where the model was "
            "saved with control cells."
        ),
    ] = None,
    contexts: Annotated[
        list[str] | None,
        typer.Option(help="Context as cell_type=NK,donor=1; repeatable. All where left out."),
    ] = None,
    n_cells: Annotated[int, typer.Option(help="Cells of each condition.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of all noise.")] = 0,
    doses: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
    times: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
    decoding: Annotated[
        str | None,
        typer.Option(help="Of a causal_baseline: raw counts as it says them, or transport."),
    ] = None,
    constraints: Annotated[
        Path | None,
        typer.Option(
            help='JSON file of what must hold: a list such as [{"kind": "at_least", "gene": '
            '"ISG15", "value": 2}], or {"constraints": [...], "enforce": "soft"}.'
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the predicted cells.")] = Path(
        "predicted.h5ad"
    ),
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Predict the cells of every perturbation in every context.

    Example: perturbdiff predict cells.h5ad --model bundle --perturbations stim --contexts
    cell_type=NK --out predicted.h5ad
    """
    with plainly(verbose=verbose):
        settings = sampling(overrides)
        check_out(out, overwrite=overwrite)
        asked = None if contexts is None else [read_context(text) for text in contexts]
        if decoding is not None:
            settings["decoding"] = decoding
        if constraints is not None:
            settings |= read_wish(constraints)
        adata = None if data is None else read(data)
        tune()
        from perturbdiff.model import load
        from perturbdiff.tl import predict as predict_cells

        pred = predict_cells(
            adata, load(model), perturbations=perturbations, contexts=asked, n_cells=n_cells,
            seed=seed, doses=doses, times=times, **settings,
        )  # fmt: skip
        write(pred, out)
        say(f"{pred.n_obs} cells of {pred.n_vars} genes are in {out}.")
        if settings.get("constraints"):
            show_constraints(pred)


@app.command()
def score(
    pred: Annotated[Path, typer.Argument(help="File of predicted cells.")],
    reference: Annotated[str, typer.Option(help="File with the measured cells, or data set.")],
    out: Annotated[Path, typer.Option(help="Table of scores.")] = Path("scores.csv"),
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for response.png, embedding.png and scores.png.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of subsampling.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Show the means over conditions as JSON.")
    ] = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Compare predicted with measured cells, beside every baseline and the replicate ceiling.

    Example: perturbdiff score predicted.h5ad --reference cells.h5ad --out scores.csv
    """
    with plainly(verbose=verbose):
        check_out(out, overwrite=overwrite)
        guess, truth = read(str(pred)), read(reference)
        from perturbdiff.tl import score as score_cells

        score_cells(guess, reference=truth, seed=seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        guess.uns["score"].to_csv(out, index=False)
        if pictures is not None:
            draw(guess, truth, pictures)
            draw_scores(guess, pictures)
        if as_json:
            say(scores_as_json(guess))
            return
        show_scores(guess)
        say(f"One row per method and condition is in {out}.")


@app.command()
def datasets(
    name: Annotated[str | None, typer.Argument(help="Data set to write.")] = None,
    out: Annotated[Path | None, typer.Option(help="File; NAME.h5ad where left out.")] = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """List the data sets, or write one to a file."""
    with plainly(verbose=verbose):
        if name is None:
            for known, words in DATASETS.items():
                say(f"{known:16s} {words}")
            return
        known_dataset(name)
        out = out or Path(f"{name}.h5ad")
        check_out(out, overwrite=overwrite)
        write(read(name), out)
        say(f"Written to {out}.")


app.command()(doctor)
app.command()(profile)
app.command()(serve)


def main() -> None:
    """Run the command line."""
    app()
