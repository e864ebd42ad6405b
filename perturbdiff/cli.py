"""Command line: the same names as the API, checked before anything is read or written."""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perturbdiff._constants import VERSION
from perturbdiff._errors import ConfigError, PerturbDiffError, UnknownKeyError
from perturbdiff._logging import logger
from perturbdiff.config import load_run
from perturbdiff.config._labels import read_context, read_labels

if TYPE_CHECKING:
    from anndata import AnnData

    from perturbdiff.config import RunConfig
    from perturbdiff.model import SetDiffusion

DATASETS = {
    "kang2018_small": "2,999 blood cells, 1,500 genes, with and without interferon-beta; shipped",
    "kang2018": "13,999 blood cells, 14,053 genes, the whole of it; obtained once, through pip",
}
USER_ERROR, INTERRUPTED = 2, 130
_SHORT = {
    "pearson_shift": "Pearson ↑",
    "mae_shift": "MAE ↓",
    "energy_distance": "Energy ↓",
    "centred_energy_distance": "Centred ↓",
    "variance_explained": "Variance ↑",
    "de_overlap": "DE overlap ↑",
    "discrimination": "Discrim. ↑",
}

app = typer.Typer(
    name="perturbdiff",
    help=(
        "Predict what a perturbation does to single cells in contexts where nobody measured it.\n\n"
        "Start with `perturbdiff demo`. On your own file, `fit` learns from cells measured with "
        "and without perturbations, `predict` makes cells, and `score` compares them with measured "
        "ones, beside simple baselines."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Seed = Annotated[int | None, typer.Option(help="Of all randomness; 0 unless the config says.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is being done.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting by its name, such as train.max_steps=400; repeatable."),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="YAML file with the sections data, model, train and sample, or the name of a shipped "
        "run: demo, kang2018."
    ),
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        _say(VERSION)


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
    with _plainly(verbose=verbose):
        run = _run("demo", overrides, {"data.holdout": read_labels(holdout), "seed": seed})
        if out.exists() and not out.is_dir():
            raise ConfigError("out", str(out), rule="is a file; name a folder")
        adata = _read(run.data.source)
        model = _fit(adata, run, {})
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
            sample=run.sample,
        )
        score_cells(pred, reference=adata, seed=run.seed)
        _write(pred, out / "predicted.h5ad")
        pred.uns["score"].to_csv(out / "scores.csv", index=False)
        _draw(pred, adata, out)
        _show_scores(pred)
        _say(f"{out}/ holds predicted.h5ad, scores.csv, response.png and embedding.png.")


@app.command()
def fit(
    data: Annotated[
        str | None, typer.Argument(help="An .h5ad file, or the name of a data set.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the saved model.")] = Path("bundle"),
    config: Config = None,
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
        Path | None, typer.Option(help="Where the last checkpoint is kept.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint that is there.")
    ] = False,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Learn from cells measured with and without perturbations, and save the model.

    Example: perturbdiff fit cells.h5ad --perturbation-key condition --control ctrl
    --covariate-keys cell_type --scale counts --out bundle
    """
    with _plainly(verbose=verbose, resumable=checkpoint_dir):
        chosen = {
            "data.source": data,
            "data.perturbation_key": perturbation_key,
            "data.control": control,
            "data.covariate_keys": covariate_keys,
            "data.scale": scale,
            "data.holdout": read_labels(holdout),
            "data.n_top_genes": n_top_genes,
            "seed": seed,
        }
        run = _run(config, overrides, chosen)
        _check_out(out, overwrite=overwrite)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume", resume, rule="needs --checkpoint-dir")
        adata = _read(run.data.source)
        model = _fit(adata, run, {"checkpoint_dir": checkpoint_dir, "resume": resume})
        if overwrite and out.is_dir():
            import shutil

            shutil.rmtree(out)
        model.save(out)
        _say(f"Saved to {out}/.")


@app.command()
def predict(
    data: Annotated[str, typer.Argument(help="File with control cells, or name of a data set.")],
    model: Annotated[Path, typer.Option(help="Folder of a saved model.")],
    perturbations: Annotated[
        list[str], typer.Option(help="Perturbation, or combination such as A+B; repeatable.")
    ],
    contexts: Annotated[
        list[str] | None,
        typer.Option(help="Context as cell_type=NK,donor=1; repeatable. All where left out."),
    ] = None,
    n_cells: Annotated[int, typer.Option(help="Cells of each condition.")] = 256,
    seed: Annotated[int, typer.Option(help="Of all noise.")] = 0,
    doses: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
    times: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
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
    with _plainly(verbose=verbose):
        run = _run(None, overrides, {})
        _check_out(out, overwrite=overwrite)
        asked = None if contexts is None else [read_context(text) for text in contexts]
        adata = _read(data)
        _tune()
        from perturbdiff.model import load
        from perturbdiff.tl import predict as predict_cells

        pred = predict_cells(
            adata, load(model), perturbations=perturbations, contexts=asked, n_cells=n_cells,
            seed=seed, doses=doses, times=times, sample=run.sample,
        )  # fmt: skip
        _write(pred, out)
        _say(f"{pred.n_obs} cells of {pred.n_vars} genes are in {out}.")


@app.command()
def score(
    pred: Annotated[Path, typer.Argument(help="File of predicted cells.")],
    reference: Annotated[str, typer.Option(help="File with the measured cells, or data set.")],
    out: Annotated[Path, typer.Option(help="Table of scores.")] = Path("scores.csv"),
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for response.png and embedding.png.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of subsampling.")] = 0,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Compare predicted with measured cells, beside every baseline and the replicate ceiling.

    Example: perturbdiff score predicted.h5ad --reference cells.h5ad --out scores.csv
    """
    with _plainly(verbose=verbose):
        _check_out(out, overwrite=overwrite)
        guess, truth = _read(str(pred)), _read(reference)
        from perturbdiff.tl import score as score_cells

        score_cells(guess, reference=truth, seed=seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        guess.uns["score"].to_csv(out, index=False)
        if pictures is not None:
            _draw(guess, truth, pictures)
        _show_scores(guess)
        _say(f"One row per method and condition is in {out}.")


@app.command()
def datasets(
    name: Annotated[str | None, typer.Argument(help="Data set to write.")] = None,
    out: Annotated[Path | None, typer.Option(help="File; NAME.h5ad where left out.")] = None,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """List the data sets, or write one to a file."""
    with _plainly(verbose=verbose):
        if name is None:
            for known, words in DATASETS.items():
                _say(f"{known:16s} {words}")
            return
        _known_dataset(name)
        out = out or Path(f"{name}.h5ad")
        _check_out(out, overwrite=overwrite)
        _write(_read(name), out)
        _say(f"Written to {out}.")


@contextmanager
def _plainly(*, verbose: bool, resumable: Path | None = None) -> Iterator[None]:
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
        hint = f" Go on with --checkpoint-dir {resumable} --resume." if resumable else ""
        typer.echo(f"Interrupted.{hint}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        logger.setLevel(level)


def _run(
    config: str | None, overrides: Sequence[str] | None, chosen: Mapping[str, Any]
) -> "RunConfig":
    """The settings, with flags over overrides over the file."""
    flags = [f"{name}={json.dumps(value)}" for name, value in chosen.items() if value is not None]
    return load_run(config, overrides=[*(overrides or ()), *flags])


def _fit(adata: "AnnData", run: "RunConfig", options: Mapping[str, Any]) -> "SetDiffusion":
    from perturbdiff.model import SetDiffusion
    from perturbdiff.train import TrainerOptions

    _tune()
    return SetDiffusion.from_anndata(adata, **run.data.columns).fit(
        adata,
        holdout=run.data.holdout or None,
        n_top_genes=run.data.n_top_genes,
        seed=run.seed,
        network=run.model,
        train=run.train,
        options=TrainerOptions(progress=sys.stderr.isatty() or sys.stdout.isatty(), **options),
    )


def _tune() -> None:
    """Faster float32 products, for our own process only."""
    import torch

    torch.set_float32_matmul_precision("medium")


def _read(source: str) -> "AnnData":
    """A file, or a data set by its name."""
    import anndata

    if source in DATASETS:
        from perturbdiff.data import datasets as shipped

        adata: AnnData = getattr(shipped, source)()
        return adata
    path = Path(source)
    if not source or not path.is_file():
        if path.suffix or os.sep in source:
            raise ConfigError("file", source, rule="is not there")
        _known_dataset(source)
    try:
        return anndata.read_h5ad(path)
    except OSError as error:
        raise ConfigError("file", source, rule="cannot be read as .h5ad") from error


def _known_dataset(name: str) -> None:
    if name not in DATASETS:
        where = "The list of data sets"
        raise UnknownKeyError(where, name, known=list(DATASETS))


def _write(adata: "AnnData", path: Path) -> None:
    """The whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        adata.write_h5ad(part, compression="gzip")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _draw(pred: "AnnData", reference: "AnnData", folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from perturbdiff.pl import embedding, response

    for plot in (response, embedding):
        plot(pred, reference=reference, save=folder / f"{plot.__name__}.png", show=False)


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigError("out", str(out), rule="is there already; name another, or --overwrite")
    if out.is_dir() and not (out / "manifest.json").is_file():
        raise ConfigError("out", str(out), rule="is a folder but no saved model; name another")


def _show_scores(pred: "AnnData") -> None:
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
    _say("".join(style.render(text) if style and styled else text for text, style in parts))
    scores = pred.uns["score"]
    lacking = scores[scores["pearson_shift"].isna()].drop_duplicates("method")
    for method, reason in zip(lacking["method"], lacking["undefined"], strict=True):
        _say(f"n/a {method}: {reason}")


def _say(text: str) -> None:
    typer.echo(text)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
