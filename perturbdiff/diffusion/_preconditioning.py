"""Preconditioning: what makes a denoiser out of a raw network."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError


class Preconditioned(nn.Module):
    """A denoiser around a network: Karras et al. (2022), equation 7 and table 1.

    Parameters
    ----------
    network
        Called as ``network(x_in, c_noise, context)`` with inputs of unit variance
        ``[sets, cells, latent]`` and ``log(sigma) / 4`` of each set; its output has unit variance.
    sigma_data
        Standard deviation of clean values in model space, one number or one per latent axis.

    Raises
    ------
    ConfigError
        When ``sigma_data`` is not finite and above 0.
    """

    sigma_data: Tensor

    def __init__(self, network: nn.Module, sigma_data: float | Tensor) -> None:
        super().__init__()
        spread = torch.as_tensor(sigma_data, dtype=torch.get_default_dtype()).clone()
        if not bool((spread.isfinite() & (spread > 0)).all()):
            raise ConfigError("sigma_data", sigma_data, rule="must be finite and above 0")
        self.network = network
        self.register_buffer("sigma_data", spread)

    def forward(
        self,
        xt: Float[Tensor, "sets cells latent"],
        sigma: Float[Tensor, " sets"],
        context: Context,
    ) -> Float[Tensor, "sets cells latent"]:
        """Estimate the clean values, in the precision of ``xt`` whatever the network's is."""
        level = sigma[:, None, None]
        norm = (level**2 + self.sigma_data**2).sqrt()
        raw: Tensor = self.network(xt / norm, sigma.log() / 4, context).to(xt.dtype)
        return (self.sigma_data / norm) ** 2 * xt + (self.sigma_data * level / norm) * raw

    def target(
        self,
        x0: Float[Tensor, "sets cells latent"],
        xt: Float[Tensor, "sets cells latent"],
        sigma: Float[Tensor, " sets"],
    ) -> Float[Tensor, "sets cells latent"]:
        """What the network must answer for the denoiser to return ``x0``."""
        level = sigma[:, None, None]
        norm = (level**2 + self.sigma_data**2).sqrt()
        return (x0 - (self.sigma_data / norm) ** 2 * xt) * norm / (self.sigma_data * level)
