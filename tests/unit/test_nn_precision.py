"""Lower precision: exact sums of whole numbers, errors of the size of rounding, saved as it is."""

import numpy as np
import pytest
import torch
from torch import nn

import perturbdiff as ptd
from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff.config import NetworkConfig
from perturbdiff.nn import SetDenoiser, require_precision
from perturbdiff.nn._precision import (
    Float8Linear,
    Int8Linear,
    filled,
    scaled_product,
    with_linear_layers,
)

BOTH = pytest.mark.parametrize("kind", [Int8Linear, Float8Linear])
SHAPE = NetworkConfig(n_axes=4, n_response_axes=3, width=64, n_blocks=2, n_heads=2)
ASKED = {"perturbations": ["P1", "P3"], "contexts": [{"cell_type": "T1"}], "n_cells": 40, "seed": 5}


def layer(n_inputs=24, n_outputs=16, *, bias=True):
    made = nn.Linear(n_inputs, n_outputs, bias=bias)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return made.requires_grad_(requires_grad=False)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_whole_numbers_are_multiplied_exactly():
    """By hand: weights and inputs that are whole already, with 127 in each row."""
    linear = nn.Linear(8, 8, bias=True).requires_grad_(requires_grad=False)
    linear.weight.copy_(torch.arange(64).reshape(8, 8) - 32.0)
    linear.weight[:, 0] = 127.0
    linear.bias.copy_(torch.arange(8.0))
    x = torch.tensor([[127.0, 3, -5, 0, 1, 2, -127, 60], [1.0, 2, 3, 4, 5, 6, 7, 127]])
    assert torch.equal(Int8Linear.of(linear)(x), linear(x))


@pytest.mark.parametrize("n_inputs", [1, 2, 3])
def test_few_inputs_are_multiplied_exactly_too(n_inputs):
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-127, 128, (n, n_inputs), generator=generator).to(torch.int8) for n in (9, 24)
    )
    assert torch.equal(Int8Linear.product(left, right).long(), left.long() @ right.long().T)


def test_numbers_that_float8_holds_are_multiplied_exactly():
    """By hand: 448 in each row, powers of two and small whole numbers else."""
    linear = nn.Linear(4, 2, bias=True).requires_grad_(requires_grad=False)
    linear.weight.copy_(torch.tensor([[448.0, 1, -2, 0.5], [3, -448, 0, 7]]))
    linear.bias.copy_(torch.tensor([1.0, -1]))
    x = torch.tensor([[448.0, 2, 4, 8], [1, 0, -448, 2]])
    assert Float8Linear.of(linear)(x).tolist() == [
        [200704 + 2 - 8 + 4 + 1, 1344 - 896 + 56 - 1],
        [448 + 896 + 1 + 1, 3 + 14 - 1],
    ]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_float8_is_off_by_at_most_a_sixteenth(scale):
    """Three bits of mantissa: a weight and an input are each off by 1/16 of themselves at most."""
    linear, x = layer(bias=False), scale * rows(50, 24)
    error = (Float8Linear.of(linear)(x) - linear(x)).abs()
    most = (2 / 16 + 1 / 256) * x.abs() @ linear.weight.abs().T
    assert (error <= most * 1.02).all()
    assert error.max() > 0


@pytest.mark.parametrize(("kind", "multiply"), [
    (Int8Linear, torch._int_mm), (Float8Linear, scaled_product),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 5, 3), (17, 16, 16), (33, 40, 7), (64, 32, 48)])
def test_products_in_the_sizes_of_a_gpu_are_the_same(kind, multiply, shape):
    """Every size that the device is asked for is one that it knows, and no number changes."""
    n_rows, n_inputs, n_outputs = shape
    small = kind.of(layer(n_inputs, n_outputs))
    whole, sizes = kind.rounded(20 * rows(n_rows, n_inputs)), []

    def watched(left, right):
        sizes.extend([*left.shape, *right.shape])
        return multiply(left, right)

    found = filled(watched, whole, small.weight)
    torch.testing.assert_close(found, kind.product(whole, small.weight), rtol=1e-6, atol=1e-2)
    assert all(size % 16 == 0 for size in sizes)
    assert sizes[0] >= 32


@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_float8_is_for_gpus_that_multiply_it(monkeypatch, capability, known):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    require_precision("float8", torch.device("cpu"))
    require_precision("int8", torch.device("cuda"))
    if known:
        require_precision("float8", torch.device("cuda"))
    else:
        with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9.* has 8\.0"):
            require_precision("float8", torch.device("cuda"))


@pytest.mark.parametrize("bias", [True, False])
def test_the_error_is_within_half_a_step_of_weights_and_inputs(bias):
    linear, x = layer(bias=bias), rows(50, 24)
    step_w = linear.weight.abs().amax(1) / 127
    step_x = x.abs().amax(1, keepdim=True) / 127
    most = (
        step_w / 2 * x.abs().sum(1, keepdim=True)
        + step_x / 2 * linear.weight.abs().sum(1)
        + 24 * step_w * step_x / 4
    )
    error = (Int8Linear.of(linear)(x) - linear(x)).abs()
    assert (error <= most + 1e-5).all()
    assert error.max() > 0


@BOTH
def test_rows_know_nothing_of_each_other(kind):
    small, x = kind.of(layer()), rows(5, 24)
    louder = torch.cat([x, 1000 * rows(3, 24, seed=2)])
    assert torch.equal(small(louder)[:5], small(x))
    assert torch.equal(small(x.reshape(5, 1, 24))[:, 0], small(x))


@BOTH
def test_a_row_of_zeros_gives_the_bias(kind):
    linear = layer()
    assert torch.equal(kind.of(linear)(torch.zeros(2, 24)), linear.bias.expand(2, -1))


@BOTH
def test_the_gradient_is_that_of_the_rounded_weights(kind):
    small = kind.of(layer())
    x = rows(4, 24).requires_grad_()
    small(x).sum().backward()
    expected = (small.weight.float() * small.scale[:, None]).sum(0).expand(4, -1)
    assert torch.allclose(x.grad, expected, atol=1e-5)


def test_all_linear_layers_are_changed_and_nothing_else():
    network = nn.Sequential(layer(), nn.GELU(), nn.Sequential(layer(16, 8), nn.LayerNorm(8)))
    with_linear_layers(network, Int8Linear.of)
    kinds = [type(part).__name__ for part in network.modules()]
    expected = ["Sequential", "Int8Linear", "GELU", "Sequential", "Int8Linear", "LayerNorm"]
    assert kinds == expected


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "float8"])
def test_saved_in_lower_precision_is_the_same(small_model, simulated_cells, tmp_path, precision):
    lower = small_model.in_precision(precision)
    pred = lower.predict(simulated_cells, **ASKED)
    assert pred.uns["perturbdiff"]["precision"] == precision
    lower.save(tmp_path / "lower")
    again = ptd.load(tmp_path / "lower")
    found = again.predict(simulated_cells, **ASKED)
    assert np.array_equal(pred.layers["counts"].toarray(), found.layers["counts"].toarray())
    kinds = {tensor.dtype for tensor in again.fitted.denoiser.state_dict().values()}
    assert (torch.int8 in kinds) == (precision == "int8")
    assert (torch.float8_e4m3fn in kinds) == (precision == "float8")
    assert torch.bfloat16 in kinds
    small_model.save(tmp_path / "whole")
    size = [(tmp_path / name / "arrays.safetensors").stat().st_size for name in ("lower", "whole")]
    assert size[0] < size[1]


@pytest.mark.parametrize(
    ("precision", "most"), [("bfloat16", 0.02), ("int8", 0.05), ("float8", 0.1)]
)
def test_lower_precision_hardly_moves_what_the_network_says(precision, most):
    torch.manual_seed(0)
    network = SetDenoiser(SHAPE, n_perturbations=2).eval().requires_grad_(requires_grad=False)
    for number, weight in enumerate(network.parameters()):
        if not weight.any():  # as training would have moved it
            weight.copy_(0.02 * rows(*weight.shape, seed=number))
    context = Context(
        partner=rows(2, 6, SHAPE.n_axes, seed=1),
        has_partner=torch.tensor([True, False]),
        control=rows(2, 5, SHAPE.n_axes, seed=2),
        control_mask=torch.ones(2, 5, dtype=torch.bool),
        mask=torch.ones(2, 6, dtype=torch.bool),
        shift=rows(2, SHAPE.n_response_axes, seed=3),
        members=torch.ones(2, 1, dtype=torch.int64),
        features=torch.zeros(2, 0),
        covariates=torch.zeros(2, 0, dtype=torch.int64),
        conditional=torch.ones(2, dtype=torch.bool),
    )
    question = rows(2, 6, SHAPE.n_response_axes, seed=4), torch.zeros(2), context
    ours, theirs = network(*question), network.lowered(precision)(*question)
    assert 0 < (ours - theirs.float()).norm() / ours.norm() < most
    assert torch.equal(network.lowered("float32")(*question), ours)


def test_float32_is_a_copy_to_the_bit(small_model, simulated_cells):
    cells = simulated_cells
    copied = small_model.in_precision("float32")
    ours, theirs = (model.predict(cells, **ASKED).X.toarray() for model in (small_model, copied))
    assert np.array_equal(ours, theirs)
    ours = small_model.fitted.denoiser.network.out.weight
    assert copied.fitted.denoiser.network.out.weight is not ours


def test_other_precisions_are_refused(small_model):
    with pytest.raises(ConfigError, match="one of float32, bfloat16, int8, float8"):
        small_model.in_precision("float16")
    with pytest.raises(ConfigError, match="begin with the one in float32"):
        small_model.in_precision("int8").in_precision("bfloat16")
