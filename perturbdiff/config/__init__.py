"""Settings: frozen dataclasses that check themselves, and their YAML spelling."""

from perturbdiff.config._settings import NetworkConfig, SampleConfig, TrainConfig

__all__ = ["NetworkConfig", "SampleConfig", "TrainConfig"]
