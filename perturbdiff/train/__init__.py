"""Training: the Lightning task, and the loop that chooses how long to train."""

from perturbdiff.train._causal_task import CausalTask
from perturbdiff.train._fit import TrainerOptions, choose_steps, train, two_folds
from perturbdiff.train._task import SetDiffusionTask

__all__ = ["CausalTask", "SetDiffusionTask", "TrainerOptions", "choose_steps", "train", "two_folds"]
