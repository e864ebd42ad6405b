"""Options that several commands share."""

from typing import Annotated

import typer

Seed = Annotated[int | None, typer.Option(help="Seed of all randomness; 0 unless the config says.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is being done.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting by its name, such as train.max_steps=400; repeatable."),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="YAML file with the sections data, train, model and sample (or decoder and decode), "
        "or the name of a shipped run: demo, laptop, gpu, kang2018."
    ),
]
