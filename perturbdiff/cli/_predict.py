"""The command that predicts cells."""

from pathlib import Path
from typing import Annotated

import typer

from perturbdiff.cli._files import check_cells_out, read, read_wish, write
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
from perturbdiff.cli._show import described, plainly, say, say_json, show_constraints
from perturbdiff.config._labels import read_context


def predict(
    model: Annotated[Path, typer.Option(help="Folder of a saved model.")],
    perturbations: Annotated[
        list[str], typer.Option(help="Perturbation, or combination such as A+B; repeatable.")
    ],
    words: ControlWords = None,
    contexts: Annotated[
        list[str] | None,
        typer.Option(help="Context as cell_type=NK,donor=1; repeatable. All where left out."),
    ] = None,
    n_cells: Annotated[int, typer.Option(help="Cells of each condition.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of all noise.")] = 0,
    doses: Doses = None,
    times: Times = None,
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
    out: Annotated[Path, typer.Option(help="Predicted cells, .h5ad or .zarr.")] = Path(
        "predicted.h5ad"
    ),
    overrides: Overrides = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
) -> None:
    """Predict the cells of every perturbation in every context.

    Example: perturbdiff predict cells.h5ad --model bundle --perturbations stim --contexts
    cell_type=NK --out predicted.h5ad
    """
    with plainly(verbose=verbose):
        data, changes = data_and_settings(words)
        settings = sampling([*(overrides or ()), *changes])
        check_cells_out(out, overwrite=overwrite)
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
        if as_json:
            say_json({"out": str(out), **described(pred)})
            return
        say(f"{pred.n_obs} cells of {pred.n_vars} genes are in {out}.")
        if settings.get("constraints"):
            show_constraints(pred)
