"""Training: the Lightning task, and the loop that chooses how long to train."""

from perturbdiff.train._fit import choose_steps, train
from perturbdiff.train._task import SetDiffusionTask

__all__ = ["SetDiffusionTask", "choose_steps", "train"]
