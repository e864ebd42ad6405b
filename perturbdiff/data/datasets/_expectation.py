"""Exact means of ``log1p`` values of counts whose log-rate is normal, by quadrature.

For a count ``y`` with rate ``L exp(eta)`` the mean of ``log(1 + c y)`` follows from its Laplace
transform, because ``log(1 + x) = int_0^inf (1 - exp(-t x)) exp(-t) / t dt``. A Poisson-gamma
count has the transform ``(1 + theta L exp(eta) (1 - exp(-t c))) ** (-1 / theta)``: no sum over
counts is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import CubicSpline

from perturbdiff._constants import DEPTH

_REACH = 8.0
"""Standard deviations of a normal variable that its quadrature covers."""


@dataclass(frozen=True, kw_only=True)
class CountNoise:
    """How counts scatter around their rate.

    Parameters
    ----------
    dispersion
        Poisson-gamma ``theta``: the variance is ``mean + theta mean ** 2``; 0 is Poisson.
    library_median
        Median library size, in counts.
    library_sd
        Standard deviation of the log library size.
    """

    dispersion: float
    library_median: float
    library_sd: float


def mean_log1p_curve(
    noise: CountNoise, *, step: float = 0.05
) -> Callable[[np.ndarray], np.ndarray]:
    """Mean of ``log1p(y / L * 10^4)`` as a function of the log-rate.

    Parameters
    ----------
    noise
        Distribution of counts and of library sizes ``L``.
    step
        Distance of the tabulated log-rates; the curve between them is a cubic spline.

    Returns
    -------
    A function of log-rates (natural log of the expected share of a cell's counts) of any shape,
    averaged over library sizes. Log-rates outside of [-28, 3] count as the nearer of the two.
    """
    eta_T = np.arange(-28.0, 3.0 + step, step)
    node_L, weight_L = np.polynomial.hermite_e.hermegauss(24)
    library_L = noise.library_median * np.exp(noise.library_sd * node_L)
    # Trapezoids in log t: the integrand falls doubly exponentially above and exponentially below.
    width = 0.1
    t_Q = np.exp(np.arange(-36.0, 4.5, width))
    kernel_Q = width * np.exp(-t_Q)
    value_T = np.zeros(len(eta_T))
    for library, weight in zip(library_L, weight_L / weight_L.sum(), strict=True):
        drop_TQ = np.exp(eta_T)[:, None] * library * -np.expm1(-t_Q * DEPTH / library)
        value_T += weight * (_one_minus_transform(drop_TQ, noise.dispersion) @ kernel_Q)
    curve = CubicSpline(eta_T, value_T)
    return lambda eta: np.asarray(curve(np.clip(eta, eta_T[0], eta_T[-1])))


def _one_minus_transform(drop: np.ndarray, dispersion: float) -> np.ndarray:
    exponent = np.log1p(dispersion * drop) / dispersion if dispersion > 0 else drop
    return np.asarray(-np.expm1(-exponent))


def normal_nodes(low: float, high: float, *, n: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the standard normal between two bounds; weights add up to its mass."""
    low, high = max(low, -_REACH), min(high, _REACH)
    node, weight = np.polynomial.legendre.leggauss(n)
    node = (high + low) / 2 + (high - low) / 2 * node
    return node, weight * (high - low) / 2 * np.exp(-(node**2) / 2) / np.sqrt(2 * np.pi)
