"""Schedules have exactly the intervals asked for and end in 0."""

import math

import pytest
import torch

from perturbdiff._errors import ConfigError
from perturbdiff.diffusion import karras_schedule


@pytest.mark.parametrize("n_steps", [1, 2, 3, 7, 53, 999, 1000, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_are_exactly_n_intervals_and_every_level_is_lower(n_steps, dtype):
    schedule = karras_schedule(n_steps, 0.002, 80.0, dtype=dtype)
    assert schedule.shape == (n_steps + 1,)
    assert schedule.dtype == dtype
    assert bool((schedule.diff() < 0).all())
    assert float(schedule[0]) == pytest.approx(80.0, rel=1e-6)
    assert float(schedule[-1]) == 0.0
    if n_steps > 1:
        assert float(schedule[-2]) == pytest.approx(0.002, rel=1e-5)


def test_rho_2_worked_by_hand():
    # Square roots run evenly from 4 to 1 in three steps.
    schedule = karras_schedule(4, 1.0, 16.0, rho=2.0, dtype=torch.float64)
    torch.testing.assert_close(schedule, torch.tensor([16.0, 9, 4, 1, 0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("n_steps", 0),
        ("n_steps", -3),
        ("sigma_min", 0.0),
        ("sigma_min", math.nan),
        ("sigma_max", 0.1),
        ("sigma_max", math.inf),
        ("rho", 0.0),
        ("rho", 1e-3),
        ("rho", 1e18),
    ],
)
def test_numbers_outside_their_range_are_refused_by_name(setting, value):
    settings = {"n_steps": 5, "sigma_min": 0.1, "sigma_max": 10.0, "rho": 7.0} | {setting: value}
    steps = settings.pop("n_steps"), settings.pop("sigma_min"), settings.pop("sigma_max")
    with pytest.raises(ConfigError, match=setting):
        karras_schedule(*steps, **settings)
