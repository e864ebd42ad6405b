"""Diffusion: schedules, preconditioning, samplers and losses. Knows tensors only."""

from perturbdiff.diffusion._compiled import Compiled
from perturbdiff.diffusion._loss import denoising_loss, energy_distance_loss, sample_sigmas
from perturbdiff.diffusion._preconditioning import Preconditioned
from perturbdiff.diffusion._samplers import (
    SAMPLERS,
    Hook,
    Step,
    dpmpp_2m_step,
    euler_step,
    heun_step,
    network_calls,
    sample,
    stochastic_step,
)
from perturbdiff.diffusion._schedule import karras_schedule
from perturbdiff.diffusion._state import State

__all__ = [
    "SAMPLERS",
    "Compiled",
    "Hook",
    "Preconditioned",
    "State",
    "Step",
    "denoising_loss",
    "dpmpp_2m_step",
    "energy_distance_loss",
    "euler_step",
    "heun_step",
    "karras_schedule",
    "network_calls",
    "sample",
    "sample_sigmas",
    "stochastic_step",
]
