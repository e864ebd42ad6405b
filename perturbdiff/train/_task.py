"""Lightning task of the set diffusion model.

B sets, S cells, K latent axes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from perturbdiff._batch import SetBatch
from perturbdiff._random import cell_keys, normal
from perturbdiff.config import NetworkConfig, TrainConfig
from perturbdiff.diffusion import (
    Preconditioned,
    denoising_loss,
    energy_distance_loss,
    sample_sigmas,
)
from perturbdiff.nn import SetDenoiser
from perturbdiff.train._averaged import AveragedTask
from perturbdiff.train._seeding import seeded

_LOG_MEAN = -0.5
_LOG_STD = 1.2


def run_settings(network: NetworkConfig, config: TrainConfig, *, seed: int) -> dict[str, Any]:
    """Settings that make a run the run it is, by name."""
    return {
        **{f"network.{name}": value for name, value in asdict(network).items()},
        **{f"train.{name}": value for name, value in asdict(config).items()},
        "seed": seed,
    }


class SetDiffusionTask(AveragedTask):
    """Denoiser, its averaged weights, loss and optimiser; noise belongs to the step, not the state.

    Parameters
    ----------
    network
        Shape of the denoiser.
    config
        Loss and optimiser.
    n_perturbations, n_features, covariate_sizes
        Vocabulary sizes.
    seed
        Seed of the first weights and of all noise.
    """

    averaged: Preconditioned

    def __init__(
        self,
        network: NetworkConfig,
        config: TrainConfig | None = None,
        *,
        n_perturbations: int,
        n_features: int = 0,
        covariate_sizes: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        config = config or TrainConfig()
        settings = {
            **run_settings(network, config, seed=seed),
            "n_perturbations": n_perturbations,
            "n_features": n_features,
            "covariate_sizes": list(covariate_sizes),
        }
        super().__init__(config, seed=seed, settings=settings)
        with seeded(seed):
            raw = SetDenoiser(
                network,
                n_perturbations=n_perturbations,
                n_features=n_features,
                covariate_sizes=covariate_sizes,
            )
        self.denoiser = Preconditioned(raw, 1.0)
        # Nothing reads what the last one writes; several devices would wait for its gradient.
        raw.control_blocks[-1].requires_grad_(requires_grad=False)
        self.averaged = self.average()

    @property
    def learner(self) -> Preconditioned:
        """The denoiser."""
        return self.denoiser

    def loss(self, denoiser: Preconditioned, batch: SetBatch, stream: str) -> dict[str, Tensor]:
        """Denoising error and distribution term of a batch, with noise named by ``stream``."""
        x0, context = batch.x0, batch.context
        n_sets, n_cells, width = x0.shape
        keys = cell_keys(self.seed, stream, range(n_sets), n_cells=n_cells, device=x0.device)
        sigma = sample_sigmas(keys[:, 0], step=1, log_mean=_LOG_MEAN, log_std=_LOG_STD)
        xt = x0 + sigma[:, None, None] * normal(keys, width)
        x0_hat = denoiser(xt, sigma, context)
        denoising = denoising_loss(
            x0_hat, x0, sigma=sigma, sigma_data=denoiser.sigma_data, mask=context.mask
        )
        distribution = energy_distance_loss(x0_hat, x0, context.mask).mean()
        return {"denoising": denoising, "distribution": distribution}

    def total_loss(self, network: nn.Module, batch: SetBatch, stream: str) -> Tensor:
        """Denoising error plus weighted distribution term."""
        assert isinstance(network, Preconditioned)
        parts = self.loss(network, batch, stream)
        return parts["denoising"] + self.config.distribution_weight * parts["distribution"]
