"""Laws of codec, network and response: genes, cells and controls have no order, padding no effect.

Everything runs in float64 with random weights, so what is invisible is invisible to 1e-9. What is
permuted is permuted by hand, names and buffers together: nothing in between could put it right.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from perturbdiff._batch import Context
from perturbdiff._random import cell_keys, gene_lanes
from perturbdiff.config import NetworkConfig
from perturbdiff.diffusion import Preconditioned
from perturbdiff.guidance import ClassifierFreeGuidance, CountCalls, wrap
from perturbdiff.model._response import ResponseCells, solve_response
from perturbdiff.nn import ExpressionCodec, SetDenoiser

GENES, CELLS, CONTROLS, SETS = 12, 6, 5, 2
SHAPE = NetworkConfig(n_axes=4, n_response_axes=3, width=16, n_blocks=2, n_heads=2)
EXACT = {"rtol": 0, "atol": 1e-9}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module):
    """The same module in float64 with all weights random, those that start at zero too."""
    module = module.double().eval()
    with torch.no_grad():
        for i, weight in enumerate(module.parameters()):
            weight.copy_(0.3 * numbers(*weight.shape, seed=i))
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight[part.padding_idx] = 0  # training leaves it so
    return module.requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def denoiser():
    raw = SetDenoiser(SHAPE, n_perturbations=3, n_features=2, covariate_sizes=[2, 4])
    return Preconditioned(randomised(raw), 1.0).double()


@pytest.fixture(scope="module")
def context():
    return Context(
        partner=numbers(SETS, CELLS, SHAPE.n_axes, seed=1),
        has_partner=torch.tensor([True, False]),
        control=numbers(SETS, CONTROLS, SHAPE.n_axes, seed=2),
        control_mask=torch.tensor([[True] * CONTROLS, [True] * 3 + [False] * 2]),
        mask=torch.tensor([[True] * CELLS, [True] * 4 + [False] * 2]),
        shift=numbers(SETS, SHAPE.n_response_axes, seed=3),
        members=torch.tensor([[1, 3], [2, 0]]),
        features=numbers(SETS, 2, seed=4),
        covariates=torch.tensor([[1, 4], [0, 2]]),
        conditional=torch.tensor([True, True]),
    )


XT = numbers(SETS, CELLS, SHAPE.n_response_axes, seed=5)
SIGMA = torch.tensor([0.3, 4.0], dtype=torch.float64)


# Genes


@dataclass(frozen=True)
class Panel:
    """One set of cells with everything that is indexed by gene."""

    lanes: torch.Tensor
    control: torch.Tensor
    mean: torch.Tensor  # of control cells
    prior: torch.Tensor
    counts: torch.Tensor
    dispersion: torch.Tensor
    dependence: torch.Tensor
    cell_axes: torch.Tensor
    encoder: torch.Tensor
    decoder: torch.Tensor

    def permuted(self, order):
        by_row = {"cell_axes", "encoder", "decoder"}
        return Panel(
            **{
                f.name: value[order] if f.name in by_row else value[..., order]
                for f in fields(self)
                for value in [getattr(self, f.name)]
            }
        )


def panel():
    control = numbers(CONTROLS, GENES, seed=6).abs()
    return Panel(
        lanes=gene_lanes([f"G{i}" for i in range(GENES)]),
        control=control,
        mean=control.mean(0),
        prior=control.mean(0) + 0.4 * numbers(GENES, seed=7).abs(),
        counts=(3 * numbers(CELLS, GENES, seed=8).abs()).long(),
        dispersion=numbers(GENES, seed=9).abs(),
        dependence=numbers(GENES, seed=10).sigmoid(),
        cell_axes=numbers(GENES, SHAPE.n_axes, seed=11),
        encoder=numbers(GENES, SHAPE.n_response_axes, seed=12),
        decoder=numbers(GENES, SHAPE.n_response_axes, seed=13),
    )


def answer(codec, denoiser, known):
    """From genes through the network back to genes: deviations, expected values and counts."""
    control = codec.cells(known.control, known.mean)
    context = Context(
        partner=control[:1].expand(1, CELLS, -1),
        has_partner=torch.ones(1, dtype=torch.bool),
        control=control[None],
        control_mask=torch.ones(1, CONTROLS, dtype=torch.bool),
        mask=torch.ones(1, CELLS, dtype=torch.bool),
        shift=codec.to_latent(known.prior, known.mean)[None],
        members=torch.tensor([[1]]),
        features=torch.zeros(1, 2).double(),
        covariates=torch.tensor([[1, 1]]),
        conditional=torch.ones(1, dtype=torch.bool),
    )
    x0 = codec.to_latent(torch.log1p(known.counts.double()), known.mean)[None]
    x0_hat = denoiser(x0 + XT[:1], SIGMA[:1], context)[0]
    cells = ResponseCells.make(
        codec.deviation(x0_hat),
        known.counts,
        torch.full((CELLS,), 5000.0, dtype=torch.float64),
        keys=cell_keys(0, "law", 0, n_cells=CELLS),
        lanes=known.lanes,
    )
    plan = solve_response(
        cells, target=known.prior, dispersion=known.dispersion, dependence=known.dependence
    )
    return cells.deviation, plan.expected_log1p(cells), plan.draw(cells)


def holds_for_genes(make_codec, denoiser, order):
    known = panel()
    moved = known.permuted(order)
    for direct, found in zip(
        answer(make_codec(known), denoiser, known),
        answer(make_codec(moved), denoiser, moved),
        strict=True,
    ):
        torch.testing.assert_close(found, direct[:, order], **EXACT)


def codec_of(known, kind=ExpressionCodec):
    return kind(known.cell_axes, encoder=known.encoder, decoder=known.decoder)


@given(order=st.permutations(range(GENES)))
def test_genes_are_a_set(denoiser, order):
    holds_for_genes(codec_of, denoiser, order)


class OrderedCodec(ExpressionCodec):
    """Counts genes from the left: what must not pass."""

    def deviation(self, x0):
        place = torch.arange(len(self.decoder), dtype=x0.dtype)
        return super().deviation(x0) + 0.01 * place


class OrderedEncoder(ExpressionCodec):
    def to_latent(self, log1p, centre, *, present=None):
        place = torch.linspace(0.9, 1.1, log1p.shape[-1], dtype=log1p.dtype)
        return super().to_latent(log1p * place, centre, present=present)


@pytest.mark.parametrize("kind", [OrderedCodec, OrderedEncoder])
def test_the_law_of_genes_rejects_a_codec_that_knows_positions(denoiser, kind):
    order = list(reversed(range(GENES)))
    with pytest.raises(AssertionError, match="not close"):
        holds_for_genes(lambda known: codec_of(known, kind), denoiser, order)


def test_the_law_of_genes_rejects_noise_drawn_by_position(denoiser):
    known, order = panel(), list(reversed(range(GENES)))
    fixed = replace(known, lanes=torch.arange(GENES))
    moved = replace(fixed.permuted(order), lanes=torch.arange(GENES))
    codec, other = codec_of(fixed), codec_of(moved)
    counts, found = answer(codec, denoiser, fixed)[2], answer(other, denoiser, moved)[2]
    assert not torch.equal(found, counts[:, order])


# Cells and controls


def permuted_cells(context, order):
    return replace(context, partner=context.partner[:, order], mask=context.mask[:, order])


def holds_for_cells(denoise, context, order):
    found = denoise(XT[:, order], SIGMA, permuted_cells(context, order))
    real = context.mask[:, order]
    torch.testing.assert_close(found[real], denoise(XT, SIGMA, context)[:, order][real], **EXACT)


@given(order=st.permutations(range(CELLS)))
def test_cells_are_a_set(denoiser, context, order):
    holds_for_cells(denoiser, context, order)


class OrderedNetwork(nn.Module):
    """The network with places of cells added: what must not pass."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x_in, c_noise, context):
        place = torch.linspace(-1, 1, x_in.shape[1], dtype=x_in.dtype)
        return self.network(x_in + place[:, None], c_noise, context)


def test_the_law_of_cells_rejects_a_network_that_knows_places(denoiser, context):
    ordered = Preconditioned(OrderedNetwork(denoiser.network), 1.0).double()
    with pytest.raises(AssertionError, match="not close"):
        holds_for_cells(ordered, context, list(reversed(range(CELLS))))


@given(order=st.permutations(range(CONTROLS)))
def test_control_cells_are_a_set(denoiser, context, order):
    moved = replace(
        context, control=context.control[:, order], control_mask=context.control_mask[:, order]
    )
    torch.testing.assert_close(denoiser(XT, SIGMA, moved), denoiser(XT, SIGMA, context), **EXACT)


@given(order=st.permutations(range(2)))
def test_members_of_a_combination_are_a_set(denoiser, context, order):
    moved = replace(context, members=context.members[:, order])
    torch.testing.assert_close(denoiser(XT, SIGMA, moved), denoiser(XT, SIGMA, context), **EXACT)


# Padding


@given(n_cells=st.integers(0, 3), n_controls=st.integers(0, 3), junk=st.floats(-50, 50))
def test_padding_is_invisible(denoiser, context, n_cells, n_controls, junk):
    def more(cells, count, value):
        return nn.functional.pad(cells, (0, 0, 0, count), value=value)

    padded = replace(
        context,
        partner=more(context.partner, n_cells, junk),
        mask=nn.functional.pad(context.mask, (0, n_cells)),
        control=more(context.control, n_controls, junk),
        control_mask=nn.functional.pad(context.control_mask, (0, n_controls)),
        members=nn.functional.pad(context.members, (0, 1)),
    )
    found = denoiser(more(XT, n_cells, junk), SIGMA, padded)[:, :CELLS]
    direct = denoiser(XT, SIGMA, context)
    torch.testing.assert_close(found[context.mask], direct[context.mask], **EXACT)


@given(junk=st.floats(-50, 50))
def test_masked_cells_and_controls_are_not_looked_at(denoiser, context, junk):
    direct = denoiser(XT, SIGMA, context)
    cells, controls = ~context.mask[:, :, None], ~context.control_mask[:, :, None]
    changed = replace(
        context,
        partner=torch.where(cells, junk, context.partner),
        control=torch.where(controls, junk, context.control),
    )
    found = denoiser(torch.where(cells, junk, XT), SIGMA, changed)
    torch.testing.assert_close(found[context.mask], direct[context.mask], **EXACT)


def test_a_context_without_a_single_control_cell_has_an_answer(denoiser, context):
    none = replace(context, control_mask=torch.zeros_like(context.control_mask))
    assert denoiser(XT, SIGMA, none).isfinite().all()


# Batching, memory and guidance


@given(order=st.permutations(range(SETS)))
def test_sets_do_not_see_each_other(denoiser, context, order):
    order = torch.tensor(order)
    together = denoiser(XT, SIGMA, context)
    found = denoiser(XT[order], SIGMA[order], context[order])
    torch.testing.assert_close(found, together[order], **EXACT)
    alone = torch.cat(
        [denoiser(XT[i : i + 1], SIGMA[i : i + 1], context[i : i + 1]) for i in range(SETS)]
    )
    torch.testing.assert_close(alone, together, **EXACT)


def test_encoded_controls_are_a_memory_and_depend_on_controls_alone(denoiser, context):
    remembered = denoiser.network.remember(context)
    assert torch.equal(denoiser(XT, SIGMA, remembered), denoiser(XT, SIGMA, context))
    other = replace(
        context,
        partner=context.partner + 1,
        shift=context.shift + 1,
        members=torch.zeros_like(context.members),
        covariates=torch.zeros_like(context.covariates),
        features=context.features + 1,
    )
    assert torch.equal(denoiser.network.remember(other).memory, remembered.memory)


def test_every_part_of_the_context_matters(denoiser, context):
    context = replace(context, has_partner=torch.ones(SETS, dtype=torch.bool))
    direct = denoiser(XT, SIGMA, context)
    changes = {
        "partner": context.partner + 1,
        "has_partner": ~context.has_partner,
        "control": context.control + 1,
        "shift": context.shift * torch.tensor([2.0, -1.0]).double()[:, None],
        "members": torch.tensor([[2, 3], [1, 0]]),
        "features": context.features + 1,
        "covariates": torch.tensor([[2, 4], [1, 2]]),
        "conditional": ~context.conditional,
    }
    for name, value in changes.items():
        changed = denoiser(XT, SIGMA, replace(context, **{name: value}))
        assert (changed - direct).abs().amax((1, 2)).min() > 1e-6, name


def test_without_a_partner_its_values_are_not_looked_at(denoiser, context):
    none = replace(context, has_partner=torch.zeros_like(context.has_partner))
    moved = replace(none, partner=none.partner + 5)
    assert torch.equal(denoiser(XT, SIGMA, none), denoiser(XT, SIGMA, moved))


def test_the_null_condition_hides_what_is_asked(denoiser, context):
    free = context.unconditional()
    other = replace(
        free,
        shift=free.shift + 1,
        members=torch.zeros_like(free.members),
        features=free.features - 1,
        covariates=torch.zeros_like(free.covariates),
    )
    assert torch.equal(denoiser(XT, SIGMA, free), denoiser(XT, SIGMA, other))


@pytest.mark.parametrize(("scale", "calls"), [(1.0, 1), (0.0, 1), (2.0, 2)])
def test_guidance_costs_what_it_says_and_off_is_free(denoiser, context, scale, calls):
    count = CountCalls()
    guided = wrap(denoiser, count, ClassifierFreeGuidance(scale))
    found = guided(XT, SIGMA, context)
    conditional = denoiser(XT, SIGMA, context)
    free = denoiser(XT, SIGMA, context.unconditional())
    assert count.nfe == calls
    if scale in (0.0, 1.0):
        assert torch.equal(found, conditional if scale else free)
    torch.testing.assert_close(found, free + scale * (conditional - free), **EXACT)
