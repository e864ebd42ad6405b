"""From options to settings, and from settings to a fitted model."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbdiff._errors import ConfigError
from perturbdiff.cli._files import DATASETS
from perturbdiff.cli._show import for_people
from perturbdiff.config import load_run
from perturbdiff.config._runs import RUN_FILE

if TYPE_CHECKING:
    from anndata import AnnData

    from perturbdiff.config import RunConfig
    from perturbdiff.model import CausalBaseline, SetDiffusion

_ABOUT_CELLS = ("perturbation_key", "control", "covariate_keys", "library_size_key", "holdout")
_SECTIONS = {"set_diffusion": ("model", "sample"), "causal_baseline": ("decoder", "decode")}


def _section(text: str) -> str:
    return text.partition("=")[0].split(".")[0].strip()


def settings_of(
    config: str | None, overrides: Sequence[str] | None, chosen: Mapping[str, Any]
) -> "RunConfig":
    """The settings, with flags over overrides over the file."""
    flags = [f"{name}={json.dumps(value)}" for name, value in chosen.items() if value is not None]
    run = load_run(config, overrides=[*(overrides or ()), *flags])
    for kind, sections in _SECTIONS.items():
        for text in overrides or ():
            if kind != run.kind and _section(text) in sections:
                own = " and ".join(_SECTIONS[run.kind])
                rule = f"is about a {kind}; the settings of a {run.kind} are {own}"
                raise ConfigError("setting", text, rule=rule)
    return run


def carried_over(config: str | None, run: "RunConfig", named: Collection[str]) -> str:
    """What a run about a shipped data set still says of it where other cells are named.

    ``named`` are the settings that were named beside it.
    """
    usual = None if config is None else load_run(config).data
    if usual is None or usual.source not in DATASETS or run.data.source == usual.source:
        return ""
    held = {
        name: getattr(run.data, name)
        for name in _ABOUT_CELLS
        if getattr(run.data, name) and f"data.{name}" not in named
    }
    said = ", ".join(f"{name} {json.dumps(value)}" for name, value in held.items())
    return said and (
        f"Still as in {config}, whose cells are {usual.source}: {said}. "
        "Name those of your own file if they differ."
    )


def plain_settings(run: "RunConfig") -> dict[str, Any]:
    """The settings as plain values, without those of the other kind."""
    others = {
        section
        for kind, sections in _SECTIONS.items()
        if kind != run.kind
        for section in sections
    }  # fmt: skip
    plain = json.loads(json.dumps(asdict(run)))  # tuples become lists
    return {name: value for name, value in plain.items() if name not in others}


def spelled(run: "RunConfig") -> str:
    """The settings as a YAML file that says the same run."""
    import yaml

    return yaml.safe_dump(plain_settings(run), sort_keys=False, allow_unicode=True).rstrip()


def in_short(run: "RunConfig") -> str:
    """The same YAML with a line a section, to begin a run with."""
    import yaml

    shown = {name: value for name, value in plain_settings(run).items() if name != "serve"}
    form: dict[str, Any] = {"default_flow_style": True, "width": 10_000, "sort_keys": False}
    lines = [yaml.safe_dump({name: value}, **form).strip() for name, value in shown.items()]
    return "\n".join(line.removeprefix("{").removesuffix("}") for line in lines)


def keep_settings(run: "RunConfig", bundle: Path) -> None:
    """Put the settings beside the model that was made with them; of the cells, only their name."""
    source = Path(run.data.source).name
    kept = replace(run, data=replace(run.data, source=source))
    text = f"# perturbdiff fit --config {bundle.name} data.path=...\n{spelled(kept)}\n"
    (bundle / RUN_FILE).write_text(text, encoding="utf-8")


def sampling(overrides: Sequence[str] | None) -> dict[str, Any]:
    """What was set of sampling; any other would be without effect where nothing is learnt."""
    named = {_section(text): text for text in overrides or ()}
    for section, text in named.items():
        if section not in ("sample", "decode"):
            rule = "only settings of sample or decode have a say here, such as sample.n_steps=10"
            raise ConfigError("setting", text, rule=rule)
    run = load_run(None, overrides=[*(overrides or ())])
    return {section: getattr(run, section) for section in named}


def sampling_of(run: "RunConfig") -> dict[str, Any]:
    """How the model of a run makes cells."""
    return {"sample": run.sample} if run.kind == "set_diffusion" else {"decode": run.decode}


def fitted(
    adata: "AnnData", run: "RunConfig", options: Mapping[str, Any]
) -> "SetDiffusion | CausalBaseline":
    from perturbdiff.model import CausalBaseline, SetDiffusion
    from perturbdiff.train import TrainerOptions

    tune()
    shared: dict[str, Any] = {
        "holdout": run.data.holdout or None,
        "n_top_genes": run.data.n_top_genes,
        "seed": run.seed,
        "train": run.train,
        "options": TrainerOptions(progress=for_people(), **options),
    }
    columns = run.data.columns
    if run.kind == "causal_baseline":
        sibling = CausalBaseline.from_anndata(adata, **columns)
        return sibling.fit(adata, network=run.decoder, **shared)
    return SetDiffusion.from_anndata(adata, **columns).fit(adata, network=run.model, **shared)


def tune() -> None:
    """TF32 products on a GPU, for our own process only: on a CPU small networks lose by less."""
    import torch

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
