"""Losses: known answers, masks, unbiasedness and gradients."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

from perturbdiff._random import cell_keys, normal
from perturbdiff.diffusion import denoising_loss, energy_distance_loss, sample_sigmas


def cells(name, n_sets, n_cells, width=3):
    keys = cell_keys(0, name, range(n_sets), n_cells=n_cells)
    return normal(keys, width, dtype=torch.float64)


def all_real(x):
    return torch.ones(x.shape[:2], dtype=torch.bool)


def test_sigmas_are_log_normal_and_keyed():
    keys = cell_keys(0, "training", 0, n_cells=4000)
    sigma = sample_sigmas(keys, step=3, log_mean=-0.5, log_std=0.7, dtype=torch.float64)
    assert stats.kstest(sigma.log().numpy(), "norm", args=(-0.5, 0.7)).pvalue > 1e-4
    assert torch.equal(
        sample_sigmas(keys[7:9], step=3, log_mean=-0.5, log_std=0.7, dtype=torch.float64),
        sigma[7:9],
    )
    assert not bool((sample_sigmas(keys, step=4) == sample_sigmas(keys, step=3)).any())


def test_a_perfect_denoiser_has_no_denoising_loss():
    x0 = cells("x", 3, 4)
    sigma = torch.tensor([1e-3, 1.0, 80.0], dtype=torch.float64)
    assert denoising_loss(x0, x0, sigma=sigma, sigma_data=0.5, mask=all_real(x0)).item() == 0.0


def test_denoising_loss_worked_by_hand():
    x0 = torch.zeros(2, 2, 2, dtype=torch.float64)
    x0_hat = torch.tensor([[[1.0, 3], [9, 9]], [[2, 0], [0, 0]]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True]])
    sigma = torch.tensor([1.0, 2.0], dtype=torch.float64)
    # Weights with sigma_data 2: (1 + 4) / 4 and (4 + 4) / 16; cell errors 5, 2 and 0.
    loss = denoising_loss(x0_hat, x0, sigma=sigma, sigma_data=2.0, mask=mask)
    assert loss.item() == pytest.approx((1.25 * 5 + 0.5 * 2 + 0) / 3, abs=1e-12)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_denoising_loss_does_not_depend_on_the_unit(scale):
    x0, x0_hat = cells("x", 2, 5), cells("y", 2, 5)
    sigma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    loss = denoising_loss(
        scale * x0_hat, scale * x0, sigma=scale * sigma, sigma_data=scale * 0.7, mask=all_real(x0)
    )
    reference = denoising_loss(x0_hat, x0, sigma=sigma, sigma_data=0.7, mask=all_real(x0))
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rubbish", [0.0, 1e30, math.inf, math.nan])
def test_padding_changes_neither_losses_nor_gradients(rubbish):
    x0, x0_hat = cells("x", 2, 5), cells("y", 2, 5).requires_grad_()
    sigma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    padding = torch.full((2, 3, 3), rubbish, dtype=torch.float64)
    wide, wide_hat = torch.cat([x0, padding], 1), torch.cat([x0_hat, padding], 1)
    mask = torch.cat([all_real(x0), torch.zeros(2, 3, dtype=torch.bool)], 1)

    def losses(hat, clean, real):
        yield denoising_loss(hat, clean, sigma=sigma, sigma_data=1.0, mask=real)
        for paired in (True, False):
            yield energy_distance_loss(hat, clean, real, paired=paired).sum()

    for padded, plain in zip(
        losses(wide_hat, wide, mask), losses(x0_hat, x0, all_real(x0)), strict=True
    ):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss, x0_hat)[0] for loss in (padded, plain)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_no_real_cell_gives_no_loss():
    x = cells("x", 2, 3)
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    sigma = torch.ones(2, dtype=torch.float64)
    assert denoising_loss(x + 1, x, sigma=sigma, sigma_data=1.0, mask=nobody).item() == 0.0
    assert energy_distance_loss(x + 1, x, nobody).tolist() == [0.0, 0.0]


def test_a_single_real_cell_has_no_energy_distance():
    x = cells("x", 1, 3)
    mask = torch.tensor([[False, True, False]])
    assert energy_distance_loss(x + 1, x, mask).tolist() == [0.0]
    assert energy_distance_loss(x + 1, x, mask, paired=False).tolist() == [0.0]


def test_energy_distance_equals_means_over_pairs_of_different_cells():
    x, y = cells("x", 1, 6), 2 * cells("y", 1, 6) + 0.5
    across, left, right = (cdist(a[0], b[0]) for a, b in ((x, y), (x, x), (y, y)))
    apart = ~np.eye(6, dtype=bool)
    within = left[apart].mean() + right[apart].mean()
    paired = energy_distance_loss(x, y, all_real(x)).item()
    independent = energy_distance_loss(x, y, all_real(x), paired=False).item()
    assert paired == pytest.approx(2 * across[apart].mean() - within, abs=1e-12)
    assert independent == pytest.approx(2 * across.mean() - within, abs=1e-12)


def test_energy_distance_worked_by_hand():
    # On a line: {0, 2} against {1, 5}, independent: 2 * 10/4 - 2 - 4.
    x = torch.tensor([[[0.0], [2.0]]], dtype=torch.float64)
    y = torch.tensor([[[1.0], [5.0]]], dtype=torch.float64)
    assert energy_distance_loss(x, y, all_real(x), paired=False).item() == pytest.approx(-1.0)
    # Own pairs left out: 2 * (|0 - 5| + |2 - 1|) / 2 - 2 - 4.
    assert energy_distance_loss(x, y, all_real(x)).item() == pytest.approx(0.0)


def test_energy_distance_ignores_the_order_of_cells():
    x, y = cells("x", 2, 7), cells("y", 2, 7)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    order, other = [3, 1, 6, 0, 2, 5, 4], [1, 2, 3, 4, 5, 6, 0]
    torch.testing.assert_close(
        energy_distance_loss(x[:, order], y[:, order], mask[:, order]),
        energy_distance_loss(x, y, mask),
        rtol=0,
        atol=1e-12,
    )
    torch.testing.assert_close(
        energy_distance_loss(x[:, order], y[:, other], all_real(x), paired=False),
        energy_distance_loss(x, y, all_real(x), paired=False),
        rtol=0,
        atol=1e-12,
    )


def test_a_perfect_denoiser_is_a_stationary_point_of_the_energy_distance():
    x = cells("x", 2, 6)
    x_hat = x.clone().requires_grad_()
    loss = energy_distance_loss(x_hat, x, all_real(x))
    assert loss.tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), x_hat)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("paired", [True, False])
def test_cells_at_the_same_place_have_finite_gradients(paired):
    x = torch.ones(1, 4, 3, dtype=torch.float64)
    x_hat = x.clone().requires_grad_()
    loss = energy_distance_loss(x_hat, x, all_real(x), paired=paired)
    (gradient,) = torch.autograd.grad(loss.sum(), x_hat)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_gradient_of_the_energy_distance_equals_finite_differences():
    x, y = cells("x", 2, 4).requires_grad_(), cells("y", 2, 4)
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    torch.autograd.gradcheck(lambda hat: energy_distance_loss(hat, y, mask), x)


@pytest.mark.parametrize("paired", [True, False])
def test_energy_distance_is_unbiased(paired):
    """No difference: zero on average, for independent sets of as few as three cells."""
    x, y = cells("x", 6000, 3), cells("y", 6000, 3)
    found = energy_distance_loss(x, y, all_real(x), paired=paired).numpy()
    assert stats.ttest_1samp(found, 0).pvalue > 1e-4
    # A biased estimate, which keeps a cell's distance to itself, would be seen.
    biased = found + cdist(x[0], y[0]).mean() / 3
    assert stats.ttest_1samp(biased, 0).pvalue < 1e-4
    assert (found < 0).any()


def test_energy_distance_is_unbiased_for_cells_denoised_from_their_own():
    """Cells that depend on their pair but follow the same law: zero on average."""
    x = cells("x", 6000, 3)
    own = 0.8 * x + 0.6 * cells("noise", 6000, 3)
    found = energy_distance_loss(own, x, all_real(x)).numpy()
    assert stats.ttest_1samp(found, 0).pvalue > 1e-4
    unpaired = energy_distance_loss(own, x, all_real(x), paired=False).numpy()
    assert stats.ttest_1samp(unpaired, 0).pvalue < 1e-4


def test_energy_distance_finds_a_lost_variance():
    x, y = cells("x", 1, 64), 0.5 * cells("y", 1, 64)
    assert energy_distance_loss(y, x, all_real(x)).item() > 0.1
