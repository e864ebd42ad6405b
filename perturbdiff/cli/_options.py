"""Options that several commands share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from perturbdiff._errors import ConfigError
from perturbdiff.cli._completion import data_or_sampling, runs, settings

Seed = Annotated[int | None, typer.Option(help="Seed of all randomness; 0 unless the config says.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is being done.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="For machines: one JSON object, and nothing else.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting by its name, such as train.max_steps=400; repeatable.",
        autocompletion=settings,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="YAML file with the sections data, train, model, sample and serve (or decoder and "
        "decode), folder of a model that was saved here, or the name of a shipped run: demo, "
        "laptop, gpu, kang2018.",
        autocompletion=runs,
    ),
]
ControlWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA|SETTING=VALUE",
        help="File with control cells, or name of a data set, left out where the model was saved "
        "with control cells; and settings, such as sample.n_steps=10.",
        autocompletion=data_or_sampling,
    ),
]
Doses = Annotated[
    list[float] | None,
    typer.Option(
        help="Dose, in the unit of the training data: every perturbation is asked at every dose. "
        "For a model with a dose_key; repeatable."
    ),
]
Times = Annotated[
    list[float] | None,
    typer.Option(
        help="Time, in the unit of the training data: every perturbation is asked at every time. "
        "For a model with a time_key; repeatable."
    ),
]
_SETTING = re.compile(r"[a-z]\w*(\.\w+)*\s*=")


def data_and_settings(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """What was said without an option: cells, and settings such as ``train.max_steps=50``.

    A word with such a beginning is a setting, unless it is the name of a file.

    Raises
    ------
    ConfigError
        When more than one word is no setting.
    """
    changes = [w for w in words or () if _SETTING.match(w) and not Path(w).exists()]
    named = [word for word in words or () if word not in changes]
    if len(named) > 1:
        rule = "name one file or data set; settings look like train.max_steps=50"
        raise ConfigError("arguments", named, rule=rule)
    return (named[0] if named else None), changes
