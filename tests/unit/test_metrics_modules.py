"""The torchmetrics classes say what the functions say."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from perturbdiff import metrics
from perturbdiff._errors import MetricError, UnknownKeyError
from perturbdiff.metrics import METRICS

PAIRS = {
    "PearsonShift": "pearson_shift",
    "MAEShift": "mae_shift",
    "EnergyDistance": "energy_distance",
    "CentredEnergyDistance": "centred_energy_distance",
    "MMD": "mmd",
    "VarianceExplained": "variance_explained",
    "DEOverlap": "de_overlap",
    "DirectionMatch": "direction_match",
}
RESPONSE = np.where(np.arange(50) % 3 == 0, 4.0, 1.0)


def condition(seed):
    rng = np.random.default_rng(seed)
    counts = [rng.poisson(2 * RESPONSE**power, (40, 50)) for power in (0.8, 1.0, 0.0)]
    return [torch.from_numpy(np.log1p(side)).float() for side in counts]


@pytest.mark.parametrize(("name", "function"), PAIRS.items())
def test_a_class_gives_the_mean_of_its_function(name, function):
    metric = getattr(metrics, name)()
    n_arguments = 2 if METRICS[function].needs == "axes" else 3
    expected = []
    for seed in (0, 1):
        sides = condition(seed)[:n_arguments]
        metric.update(*sides)
        expected.append(getattr(metrics, function)(*(side.numpy() for side in sides)))
    assert metric.compute().item() == pytest.approx(np.mean(expected), abs=1e-6)
    assert metric.higher_is_better is METRICS[function].higher_is_better
    metric.reset()
    metric.update(*condition(0)[:n_arguments])
    assert metric.compute().item() == pytest.approx(expected[0], abs=1e-6)


def test_settings_reach_the_function():
    metric = metrics.EnergyDistance(unbiased=False)
    pred, true, _ = condition(0)
    metric.update(pred, true)
    expected = metrics.energy_distance(pred.numpy(), true.numpy(), unbiased=False)
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "function"), [*PAIRS.items(), ("DiscriminationScore", "discrimination")]
)
def test_settings_are_those_of_the_function_by_name(name, function):
    kind = getattr(metrics, name)
    named = inspect.signature(getattr(metrics, function)).parameters.values()
    own = [one.name for one in named if one.kind is one.KEYWORD_ONLY]
    assert list(inspect.signature(kind).parameters) == own
    with pytest.raises(UnknownKeyError, match=f"{name} has no 'seeds'"):
        kind(seeds=3)


def test_discrimination_over_updates_is_that_of_the_table():
    metric = metrics.DiscriminationScore(similarity="l1")
    sides = [condition(seed) for seed in range(5)]
    for pred, true, control in sides:
        metric.update(pred, true, control)
    shifts = [
        np.stack([metrics.mean_shift(one[i].numpy(), one[2].numpy()) for one in sides])
        for i in (0, 1)
    ]
    expected = metrics.discrimination(*shifts, similarity="l1").score
    assert 0 < expected < 1
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


def test_half_precision_and_gradients_are_accepted():
    pred, true, control = condition(0)
    metric = metrics.MAEShift()
    metric.update(pred.bfloat16().requires_grad_(), true, control)
    expected = metrics.mae_shift(
        *(side.numpy() for side in (pred.bfloat16().float(), true, control))
    )
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["MAEShift", "DiscriminationScore"])
def test_nothing_seen_is_refused(name):
    metric = getattr(metrics, name)()
    with (
        pytest.warns(UserWarning, match="before the ``update``"),
        pytest.raises(MetricError, match="has seen no condition"),
    ):
        metric.compute()


def test_scoring_arrays_loads_no_torch():
    code = (
        "import sys, numpy as np, perturbdiff.metrics as m;"
        "m.mae_shift(np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2)));"
        "assert not {'torch', 'torchmetrics', 'pandas', 'anndata'} & set(sys.modules);"
        "m.MAEShift; assert 'torchmetrics' in sys.modules"
    )
    root = str(Path(metrics.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Pearson'"):
        metrics.Pearson  # noqa: B018
