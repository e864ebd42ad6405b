"""Data sets: real cells, obtained on demand or shipped with the package, and simulated ones."""

from perturbdiff.data.datasets._kang import kang2018, kang2018_small
from perturbdiff.data.datasets._simulate import Simulation, Treatment, simulated
from perturbdiff.data.datasets._world import SimulationConfig

__all__ = [
    "Simulation",
    "SimulationConfig",
    "Treatment",
    "kang2018",
    "kang2018_small",
    "simulated",
]
