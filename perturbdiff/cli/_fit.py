"""The command that fits a model."""

import time
from pathlib import Path
from typing import Annotated

import typer

from perturbdiff._errors import ConfigError
from perturbdiff.cli._completion import data_or_settings, kinds
from perturbdiff.cli._files import check_out, read
from perturbdiff.cli._options import (
    AsJson,
    Config,
    Overrides,
    Overwrite,
    Seed,
    Verbose,
    data_and_settings,
)
from perturbdiff.cli._runs import (
    carried_over,
    fitted,
    in_short,
    keep_settings,
    plain_settings,
    settings_of,
    spelled,
)
from perturbdiff.cli._show import plainly, say, say_json, tell
from perturbdiff.config._labels import read_labels


def fit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA|SETTING=VALUE",
            help="An .h5ad file, or the name of a data set; and settings by their names, such as "
            "train.max_steps=400.",
            autocompletion=data_or_settings,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the saved model.")] = Path("bundle"),
    config: Config = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="set_diffusion, or causal_baseline: gene after gene.", autocompletion=kinds
        ),
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
    layer: Annotated[
        str | None, typer.Option(help="Layer that holds the numbers; X where left out.")
    ] = None,
    library_size_key: Annotated[
        str | None,
        typer.Option(help="Column with each cell's counts over all measured genes."),
    ] = None,
    dose_key: Annotated[str | None, typer.Option(help="Column with the dose.")] = None,
    time_key: Annotated[str | None, typer.Option(help="Column with the time.")] = None,
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
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Learn from cells measured with and without perturbations, and save the model.

    Settings are shown before anything is read, and are saved with the model, as run.yaml.

    Example: perturbdiff fit cells.h5ad --perturbation-key condition --control ctrl
    --covariate-keys cell_type --scale counts --out bundle

    Example: perturbdiff fit --config laptop train.max_steps=400

    A shipped run also says columns, library sizes and holdout, of its own cells: with a file of
    yours, name them too.
    """
    with plainly(verbose=verbose, resumable=checkpoint_dir):
        data, changes = data_and_settings(words)
        chosen = {
            "kind": kind,
            "data.source": data,
            "data.perturbation_key": perturbation_key,
            "data.control": control,
            "data.covariate_keys": covariate_keys,
            "data.scale": scale,
            "data.layer": layer,
            "data.library_size_key": library_size_key,
            "data.dose_key": dose_key,
            "data.time_key": time_key,
            "data.holdout": read_labels(holdout),
            "data.n_top_genes": n_top_genes,
            "seed": seed,
        }
        said = [*(overrides or ()), *changes]
        run = settings_of(config, said, chosen)
        if print_config:
            say(spelled(run))
            return
        began = time.perf_counter()
        check_out(out, overwrite=overwrite)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume", resume, rule="needs --checkpoint-dir")
        tell(in_short(run))
        named = {name for name, value in chosen.items() if value is not None}
        named |= {text.partition("=")[0].strip() for text in said}
        if kept := carried_over(config, run, named):
            tell(kept)
        adata = read(run.data.source)
        model = fitted(adata, run, {"checkpoint_dir": checkpoint_dir, "resume": resume})
        if overwrite and out.is_dir():
            import shutil

            shutil.rmtree(out)
        model.save(out, include_controls=include_controls)
        keep_settings(run, out)
        if not as_json:
            say(f"Saved to {out}/.")
            return
        say_json({
            "bundle": str(out), "kind": model.kind, "checksum": model.checksum,
            "steps": model.fitted.steps, "seconds": round(time.perf_counter() - began, 1),
            "settings": plain_settings(run),
        })  # fmt: skip
