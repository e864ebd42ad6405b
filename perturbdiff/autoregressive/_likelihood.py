"""What is lost when a gene's bin or count is said to be likely or not.

V bins.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SINGLE = 5  # bins that hold one count each


def smoothed_targets(n_bins: int, smoothing: float) -> Float[Tensor, "bins bins"]:
    """Row b: the distribution that a cell in bin b is taken for.

    A wide bin lends ``smoothing`` of its mass to its neighbours, the nearer the more (half of what
    the one before got at each bin). Bins of single counts are sharp: to lend zeros to ones would
    fill silent genes with counts.

    Parameters
    ----------
    n_bins
        V.
    smoothing
        Share that is lent.

    Returns
    -------
    Rows that sum to one.
    """
    number = torch.arange(n_bins)
    wide = number >= _SINGLE
    kernel = 0.5 ** (number[:, None] - number).abs().double()
    kernel = (kernel * wide * wide[:, None]).fill_diagonal_(0)
    lent = smoothing * kernel / kernel.sum(1, keepdim=True).clamp_min(1e-12)
    out: Tensor = (lent + torch.diag(1 - lent.sum(1))).float()
    return out


def bin_loss(
    logits: Float[Tensor, "*entries bins"],
    bins: Int[Tensor, "*entries"],
    targets: Float[Tensor, "bins bins"],
) -> Float[Tensor, "*entries"]:
    """Cross-entropy of bins against smoothed targets, from :func:`smoothed_targets`."""
    out: Tensor = -(targets[bins] * logits.log_softmax(-1)).sum(-1)
    return out


def count_loss(
    log_mean: Float[Tensor, "*entries"],
    log_dispersion: Float[Tensor, "*entries"],
    counts: Int[Tensor, "*entries"],
) -> Float[Tensor, "*entries"]:
    """Negative log-likelihood of counts under a negative binomial.

    Variance = mean + dispersion · mean².
    """
    shape, y = (-log_dispersion).exp(), counts.to(log_mean)
    rest = torch.log1p(log_mean.exp() / shape)
    ways = torch.lgamma(shape + y) - torch.lgamma(shape) - torch.lgamma(y + 1)
    return -(ways + y * (log_mean + log_dispersion - rest) - shape * rest)
