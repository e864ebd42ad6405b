"""Settings: frozen dataclasses that check themselves, and their YAML spelling."""

from perturbdiff.config._runs import DataConfig, RunConfig, load_run
from perturbdiff.config._serve import ServeConfig
from perturbdiff.config._settings import (
    DecodeConfig,
    DecoderConfig,
    NetworkConfig,
    SampleConfig,
    TrainConfig,
)

__all__ = [
    "DataConfig",
    "DecodeConfig",
    "DecoderConfig",
    "NetworkConfig",
    "RunConfig",
    "SampleConfig",
    "ServeConfig",
    "TrainConfig",
    "load_run",
]
