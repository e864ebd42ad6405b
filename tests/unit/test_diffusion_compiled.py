"""Compiled calls: the same answers, few sizes, one compilation for copies of the same weights."""

import copy
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import perturbdiff as ptd
from perturbdiff._batch import Context
from perturbdiff._errors import NotFittedError
from perturbdiff.config import NetworkConfig
from perturbdiff.diffusion import Compiled, Preconditioned
from perturbdiff.diffusion._compiled import fixed_size
from perturbdiff.model import _quote_diffusion
from perturbdiff.nn import SetDenoiser
from perturbdiff.profiling import counted

SHAPE = NetworkConfig(n_axes=4, n_response_axes=3, width=32, n_blocks=2, n_heads=2)
ASKED = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 40, "seed": 5}


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def denoiser():
    return denoiser_of(SHAPE)


def denoiser_of(shape):
    torch.manual_seed(0)
    network = SetDenoiser(shape, n_perturbations=2).requires_grad_(requires_grad=False)
    for number, weight in enumerate(network.parameters()):
        if not weight.any():  # as training would have moved it
            weight.copy_(0.1 * rows(*weight.shape, seed=number))
    return Preconditioned(network, torch.tensor([0.5, 1.0, 2.0])).eval()


def question(n_sets, *, n_cells=6):
    context = Context(
        partner=rows(n_sets, n_cells, SHAPE.n_axes, seed=1),
        has_partner=torch.arange(n_sets) % 2 == 0,
        control=rows(n_sets, 5, SHAPE.n_axes, seed=2),
        control_mask=torch.ones(n_sets, 5, dtype=torch.bool),
        mask=torch.arange(n_cells).expand(n_sets, -1) < n_cells - 1,
        shift=rows(n_sets, SHAPE.n_response_axes, seed=3),
        members=torch.ones(n_sets, 1, dtype=torch.int64),
        features=torch.zeros(n_sets, 0),
        covariates=torch.zeros(n_sets, 0, dtype=torch.int64),
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )
    return rows(n_sets, n_cells, 3, seed=4), 1 + torch.arange(n_sets) / 2, context


@pytest.fixture
def compilations(monkeypatch):
    """What would be compiled, with its settings, and the numbers of sets that it is called with."""
    found = []

    def compile_(function, **settings):
        sizes = []
        found.append((settings, sizes))

        def call(xt, sigma, context):
            sizes.append(len(xt))
            return function(xt, sigma, context)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    return found


def test_sizes_by_hand():
    sizes = [fixed_size(n) for n in range(1, 18)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]


def test_sizes_are_few_and_little_is_filled():
    sizes = [fixed_size(n) for n in range(1, 1025)]
    assert len(set(sizes)) == 20
    assert all(a <= b for a, b in pairwise(sizes))
    assert all(n <= size < 1.5 * n for n, size in enumerate(sizes, start=1))
    assert all(fixed_size(size) == size for size in set(sizes))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("n_sets", [1, 2, 3, 5, 7, 16])
def test_answers_are_those_of_the_denoiser(denoiser, compilations, graphs, n_sets):
    ours = Compiled(denoiser, graphs=graphs).eval()
    asked = question(n_sets)
    torch.testing.assert_close(ours(*asked), denoiser(*asked), atol=1e-6, rtol=1e-6)
    ((settings, sizes),) = compilations
    assert sizes == [fixed_size(n_sets) if graphs else n_sets]
    assert settings["mode"] == ("reduce-overhead" if graphs else "default")


def test_a_recorded_answer_is_not_written_over(denoiser, compilations):
    """A graph gives its answers in the same place each time."""
    ours, place = Compiled(denoiser, graphs=True), torch.zeros(4, 6, 3)
    ours._calls[True] = lambda xt, sigma, context: place.copy_(denoiser(xt, sigma, context))
    xt, sigma, context = question(4)
    first = ours(xt, sigma, context)
    kept = first.clone()
    assert not torch.equal(ours(xt + 1, sigma, context), kept)
    assert torch.equal(first, kept)


def test_graphs_are_for_the_device_that_has_them(denoiser, compilations):
    Compiled(denoiser)(*question(5))
    assert [(how["mode"], sizes) for how, sizes in compilations] == [("default", [5])]


def test_compiled_once_and_shared_with_shallow_copies_alone(denoiser, compilations):
    ours = Compiled(denoiser)
    for n_sets in (1, 3, 3):
        ours(*question(n_sets))
    assert len(compilations) == 1
    twin = copy.copy(ours)
    assert twin.network is ours.network
    twin(*question(2))
    assert len(compilations) == 1
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        other.network.out.bias.add_(1.0)
        asked = question(2)
        assert not torch.equal(other(*asked), ours(*asked))
    assert len(compilations) == 3


def test_functions_that_are_compiled_have_their_own_code(denoiser, monkeypatch):
    codes = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: codes.append(f.__code__) or f)
    for _ in range(2):
        Compiled(denoiser)(*question(2))
    assert codes[0] is not codes[1]


def test_gradients_are_those_of_the_denoiser(denoiser, compilations):
    xt, sigma, context = question(3)
    found = []
    for one in (denoiser, Compiled(denoiser)):
        here = xt.clone().requires_grad_()
        one(here, sigma, context).square().sum().backward()
        found.append(here.grad)
    assert torch.equal(*found)
    assert not compilations


def test_what_is_counted_is_not_compiled(denoiser, compilations):
    ours, asked = Compiled(denoiser), question(3)
    found, plain = (counted(lambda one=one: one(*asked)).total for one in (ours, denoiser))
    assert found == plain
    assert not compilations
    ours(*asked)
    assert len(compilations) == 1


def test_a_compiled_model_predicts_the_same_cells(small_model, simulated_cells, compilations):
    ours = small_model.compiled()
    plain, pred = (model.predict(simulated_cells, **ASKED) for model in (small_model, ours))
    assert (plain.layers["counts"] != pred.layers["counts"]).nnz == 0
    assert pred.uns["perturbdiff"]["compiled"]
    assert not plain.uns["perturbdiff"]["compiled"]
    assert len(compilations) == 1
    assert ours.checksum == small_model.checksum


def test_a_compiled_model_is_quoted_by_its_own_times(small_model, compilations, monkeypatch):
    kept = {}
    monkeypatch.setattr(_quote_diffusion, "read_cache", kept.get)
    monkeypatch.setattr(_quote_diffusion, "write_cache", kept.__setitem__)
    for model in (small_model, small_model.compiled()):
        _quote_diffusion.DenoiserCost(model.fitted, 8)
    assert len(kept) == 2
    assert len(compilations) == 1


def test_a_compiled_model_has_its_own_weights(small_model, tmp_path):
    ours = small_model.compiled()
    weights = [model.fitted.denoiser.network.out.weight for model in (small_model, ours)]
    assert torch.equal(*weights)
    assert weights[0].data_ptr() != weights[1].data_ptr()
    assert not small_model.fitted.compiled
    ours.save(tmp_path / "bundle")
    assert not ptd.load(tmp_path / "bundle").fitted.compiled


def test_lower_precision_stays_compiled(small_model):
    lower = small_model.compiled().in_precision("bfloat16")
    assert lower.fitted.compiled
    assert lower.fitted.precision == "bfloat16"


def test_nothing_to_compile_before_a_fit(small_model):
    with pytest.raises(NotFittedError):
        ptd.SetDiffusion(small_model.registry).compiled()


SCRIPT = """
import pickle, sys, torch
from torch._dynamo.utils import counters
from perturbdiff.diffusion import Compiled
from perturbdiff.profiling import counted
plain, questions = pickle.load(sys.stdin.buffer)
ours = Compiled(plain).eval()
with torch.inference_mode():
    counted(lambda: ours(*questions[0]))  # is compiled all the same afterwards
    for asked in questions:
        torch.testing.assert_close(ours(*asked), plain(*asked), atol=1e-5, rtol=1e-5)
print(sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="kernels are built with a C++ compiler")
def test_what_torch_compiles_is_whole_and_serves_every_size():
    """Compiled in earnest: no break in the graph, and one graph for two sets and for more."""
    one_block = denoiser_of(replace(SHAPE, n_blocks=1))
    sent = pickle.dumps((one_block, [question(n) for n in (2, 3, 7)]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], input=sent, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.split() == [b"0", b"1"]
