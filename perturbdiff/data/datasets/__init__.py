"""Data sets: real cells, obtained on demand or shipped with the package, and simulated ones."""

from perturbdiff.data.datasets._simulate import Simulation, Treatment, simulated
from perturbdiff.data.datasets._world import SimulationConfig

__all__ = ["Simulation", "SimulationConfig", "Treatment", "simulated"]
