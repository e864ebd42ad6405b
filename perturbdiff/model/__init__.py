"""Models: what a user fits, asks and saves."""

from perturbdiff.model._set_diffusion import SetDiffusion

__all__ = ["SetDiffusion"]
