"""A whole run in one place: which data, which network, how to train, how to sample."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff._typing import ModelKind
from perturbdiff.config._checks import seed_number, whole_number
from perturbdiff.config._serve import ServeConfig
from perturbdiff.config._settings import (
    DecodeConfig,
    DecoderConfig,
    NetworkConfig,
    SampleConfig,
    TrainConfig,
)
from perturbdiff.config._yaml import from_mapping, read_yaml, with_overrides


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Cells to learn from, and what their columns mean.

    Parameters
    ----------
    source
        Path of an ``.h5ad`` file, or the name of a data set of ``ptd.datasets``.
    perturbation_key, control, covariate_keys, scale, layer, separator, library_size_key
        As in ``SetDiffusion.from_anndata``.
    dose_key, time_key, embedding_key
        Likewise.
    holdout
        Labels to leave out of training, by column.
    n_top_genes
        Highly variable genes to work on, chosen from training cells; none for all.
    """

    source: str = ""
    perturbation_key: str = ""
    control: tuple[str, ...] = ()
    covariate_keys: tuple[str, ...] = ()
    scale: str | None = None
    layer: str | None = None
    separator: str | None = "+"
    library_size_key: str | None = None
    dose_key: str | None = None
    time_key: str | None = None
    embedding_key: str | None = None
    holdout: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    n_top_genes: int | None = 2000

    @property
    def columns(self) -> dict[str, Any]:
        """What ``from_anndata`` wants to know.

        Raises
        ------
        ConfigError
            When the perturbation column or the control label is not named.
        """
        needed = {"perturbation_key": "--perturbation-key", "control": "--control"}
        for name, option in needed.items():
            if not getattr(self, name):
                rule = f"must be named, in a file of settings or with {option}"
                field_name = f"data.{name}"
                raise ConfigError(field_name, getattr(self, name), rule=rule)
        names = (
            "perturbation_key", "control", "covariate_keys", "scale", "layer", "separator",
            "library_size_key", "dose_key", "time_key", "embedding_key",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One of each kind of settings, and a seed.

    Parameters
    ----------
    kind
        Which of the siblings.
    data, train
        Data and training.
    model, sample
        Network and sampling of a set diffusion model.
    decoder, decode
        The same of the autoregressive sibling.
    serve
        How the saved model is served.
    n_cells
        Cells to predict of each condition.
    seed
        Seed of training and of sampling.
    """

    kind: ModelKind = "set_diffusion"
    data: DataConfig = field(default_factory=DataConfig)
    model: NetworkConfig = field(default_factory=NetworkConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    n_cells: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("n_cells", self.n_cells, least=1)
        seed_number(self.seed)


PARTS: dict[str, type] = {
    "data": DataConfig,
    "model": NetworkConfig,
    "train": TrainConfig,
    "sample": SampleConfig,
    "decoder": DecoderConfig,
    "decode": DecodeConfig,
    "serve": ServeConfig,
}
"""Sections of a run, and the settings that each holds."""
RUN_FILE = "run.yaml"
"""Settings of the run that a saved model came from, in its folder."""
_SOURCE = re.compile(r"^\s*data\.path\s*=")
_KINDS = get_args(ModelKind)
_PLAIN = ("n_cells", "seed")


def shipped_configs() -> Path:
    """Folder of the settings that ship with the package."""
    with resources.as_file(resources.files("perturbdiff") / "config" / "files") as shipped:
        # In a checkout they lie beside the package.
        return shipped if shipped.is_dir() else Path(__file__).parents[2] / "configs"


def load_run(source: str | Path | None, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Settings of a run, from a file or from one that ships with the package.

    Each of the sections ``data``, ``train``, ``model`` and ``sample``, ``decoder``, ``decode`` and
    ``serve`` is written out in the file, or is the name of a file in the folder of that name beside
    the file's own, or of a shipped one. ``data.path`` is another name of ``data.source``. What is
    not said of the training of a ``causal_baseline`` is as in ``configs/train/causal.yaml``.

    Parameters
    ----------
    source
        Path of a YAML file, the folder of a model that the command line saved, the name of a
        shipped run (such as ``demo``), or ``None`` for defaults.
    overrides
        Texts such as ``train.max_steps=400``.

    Returns
    -------
    Checked settings.

    Raises
    ------
    UnknownKeyError, ConfigError
        When a name, file or value is wrong.
    """
    path = None if source is None else run_path(source)
    settings = {} if path is None else read_yaml(path)
    folders = [] if path is None else [path.parent, path.parent.parent]
    settings = _with_source(_with_parts(settings, folders))
    named = [_SOURCE.sub("data.source=", text) for text in overrides]
    settings = _with_parts(with_overrides(settings, named), folders)
    for name in settings:
        if name not in (known := ["kind", *PARTS, *_PLAIN]):
            raise UnknownKeyError("The run", name, known=known)
    kind = settings.get("kind", _KINDS[0])
    if kind not in _KINDS:
        raise ConfigError("kind", kind, rule=f"must be one of {', '.join(_KINDS)}")
    if kind == "causal_baseline":
        usual = read_yaml(shipped_configs() / "train" / "causal.yaml")
        settings["train"] = {**usual, **(settings.get("train") or {})}
    parts: dict[str, Any] = {
        part: from_mapping(kind, settings[part] or {}, where=part)
        for part, kind in PARTS.items()
        if part in settings
    }
    plain: dict[str, Any] = {
        name: whole_number(name, settings[name]) for name in _PLAIN if name in settings
    }
    return RunConfig(kind=kind, **parts, **plain)


def run_path(source: str | Path) -> Path:
    """File of a run, by its path, the folder of a saved model, or the name of a shipped one.

    Raises
    ------
    UnknownKeyError
        When there is no shipped run of this name.
    """
    path = Path(source)
    if (path / RUN_FILE).is_file():
        return path / RUN_FILE
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    folder = shipped_configs() / "runs"
    if not (named := folder / f"{source}.yaml").is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        where = "The folder of shipped runs"
        raise UnknownKeyError(where, str(source), known=known)
    return named


def _with_source(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the cells called ``source``, whichever of its two names they have."""
    data = settings.get("data")
    if not isinstance(data, Mapping) or "path" not in data:
        return settings
    if "source" in data:
        raise ConfigError("data.path", data["path"], rule="says the same as data.source; name one")
    rest = {name: value for name, value in data.items() if name != "path"}
    return {**settings, "data": {**rest, "source": data["path"]}}


def _with_parts(settings: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The settings with the parts that are given by name read from their files."""
    named = {
        part: name for part, name in settings.items() if part in PARTS and isinstance(name, str)
    }
    return {
        **settings,
        **{part: read_yaml(_part_path(part, name, folders)) for part, name in named.items()},
    }


def _part_path(part: str, name: str, folders: Sequence[Path]) -> Path:
    """File of a part: beside the run's own, else a shipped one."""
    places = [folder / part for folder in (*folders, shipped_configs())]
    for place in places:
        if (path := place / f"{name}.yaml").is_file():
            return path
    known = sorted({file.stem for place in places for file in place.glob("*.yaml")})
    where = f"The settings of kind {part!r}"
    raise UnknownKeyError(where, name, known=known)
