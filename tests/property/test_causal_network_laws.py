"""Laws of the causal decoder in float64 with random weights: nothing later, and nobody else, leaks.

Genes are no set here: an order that somebody chose is part of the answer, and a test says so.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from perturbdiff._batch import Context
from perturbdiff.config import DecoderConfig
from perturbdiff.nn import CausalDecoder, GeneInputs

N, S, R, G, A = 3, 2, 5, 12, 4
B = N * S
FIRST = torch.tensor([0, 1, 2, 3, 4, 5, 8, 20])
V = len(FIRST)
EXACT = {"rtol": 0, "atol": 1e-9}


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def decoder(order="random", **changes):
    config = DecoderConfig(
        order=order, n_axes=A, n_response_axes=3, width=16, n_heads=2, hidden=12, gene_width=4,
        n_bins=V, **changes,
    )  # fmt: skip
    network = CausalDecoder(
        config, axes=numbers(G, A), log_dispersion=numbers(G, seed=1), first_count=FIRST,
        last_count=60, n_perturbations=2, n_features=2, covariate_sizes=[3],
    )  # fmt: skip
    network = network.double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in network.parameters():
            draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_(0.2 * draw)
        for table in network.conditioning.modules():
            if isinstance(table, torch.nn.Embedding):
                table.weight[table.padding_idx] = 0
    return network


@pytest.fixture(scope="module", params=["random", "descending"])
def network(request):
    return decoder(request.param)


@pytest.fixture
def context():
    return Context(
        partner=numbers(N, S, A, seed=2),
        has_partner=torch.tensor([True, False, True]),
        control=numbers(N, R, A, seed=3),
        control_mask=torch.arange(R)[None] < torch.tensor([R, 3, 0])[:, None],
        mask=torch.ones(N, S, dtype=torch.bool),
        shift=numbers(N, 3, seed=4),
        members=torch.tensor([[1, 0], [1, 2], [0, 0]]),
        features=numbers(N, 2, seed=5),
        covariates=torch.tensor([[1], [0], [3]]),
        conditional=torch.ones(N, dtype=torch.bool),
    )


@pytest.fixture
def genes():
    return GeneInputs(
        level=numbers(B, G, seed=6).abs(),
        shift=numbers(B, G, seed=7),
        partner=numbers(B, G, seed=8),
        log_mean=numbers(B, G, seed=9),
        dispersion=0.3 * numbers(B, G, seed=12),
    )


@pytest.fixture
def said():
    """What was said, each cell in its own order, and the genes asked."""
    generator = torch.Generator().manual_seed(10)
    asked = torch.stack([torch.randperm(G, generator=generator) for _ in range(B)])
    bins = torch.randint(0, V, (B, G), generator=generator)
    return {
        "said_gene": torch.cat([torch.full((B, 1), G), asked[:, :-1]], dim=1),
        "said_bin": torch.cat([torch.full((B, 1), V), bins[:, :-1]], dim=1),
        "next_gene": asked,
    }


def answers(network, context, genes, said):
    """Logits of bins, and of genes where they are drawn."""
    asked = said["next_gene"]
    inputs = said | ({"next_gene": None} if network.descending else {})
    with torch.no_grad():
        hidden, cache = network(context, genes, **inputs)
        bins = network.bin_logits(hidden, asked, cache)
        return (
            torch.cat([bins, network.gene_logits(hidden, cache)], -1)
            if network.descending
            else bins
        )


@pytest.mark.parametrize("steps", [[1] * G, [G], [3, 1, 5, 3]])
def test_whole_sequences_are_prefill_and_decode(network, context, genes, said, steps):
    expected = answers(network, context, genes, said)
    found, before = [], None
    with torch.no_grad():
        cache = network.prefill(context, genes)
        for part in torch.split(torch.arange(G), steps):
            own = {name: value[:, part] for name, value in said.items()}
            progress = None
            if network.descending:
                progress, before = network.progress_of(genes, own["said_gene"], before)
            hidden, cache = network.decode(
                cache, own["said_gene"], own["said_bin"], progress=progress,
                next_gene=None if network.descending else own["next_gene"],
            )  # fmt: skip
            logits = network.bin_logits(hidden, own["next_gene"], cache)
            if network.descending:
                logits = torch.cat([logits, network.gene_logits(hidden, cache)], -1)
            found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **EXACT)
    assert cache.length.tolist() == [G] * B


@pytest.mark.parametrize("place", [1, 5, G - 1])
def test_what_is_said_later_is_not_known(network, context, genes, said, place):
    """Everything said from a position on is changed: nothing before it moves, and all after it."""
    before = answers(network, context, genes, said)
    changed = {name: value.clone() for name, value in said.items()}
    changed["said_bin"][:, place:] = (changed["said_bin"][:, place:] + 1) % V
    after = answers(network, context, genes, changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], **EXACT)
    assert bool(((after - before)[:, place:].abs().amax(-1) > 1e-6).all())


def test_genes_that_are_asked_later_are_not_known(context, genes, said):
    network = decoder("random")
    before = answers(network, context, genes, said)
    changed = {name: value.clone() for name, value in said.items()}
    changed["next_gene"][:, 6:] = changed["next_gene"][:, 6:].flip(1)
    after = answers(network, context, genes, changed)
    torch.testing.assert_close(after[:, :6], before[:, :6], **EXACT)


def test_cells_know_nothing_of_each_other(network, context, genes, said):
    whole = answers(network, context, genes, said)
    for number in range(N):
        rows = slice(number * S, (number + 1) * S)
        alone = answers(
            network, context[slice(number, number + 1)], genes[rows],
            {name: value[rows] for name, value in said.items()},
        )  # fmt: skip
        torch.testing.assert_close(alone, whole[rows], **EXACT)


def test_padded_controls_and_members_are_invisible(network, context, genes, said):
    expected = answers(network, context, genes, said)
    more = replace(
        context,
        control=torch.cat([context.control, numbers(N, 2, A, seed=11)], dim=1),
        control_mask=torch.cat([context.control_mask, torch.zeros(N, 2, dtype=torch.bool)], dim=1),
        members=torch.cat([context.members, torch.zeros(N, 1, dtype=torch.int64)], dim=1),
    )
    torch.testing.assert_close(answers(network, more, genes, said), expected, **EXACT)


def test_control_cells_are_a_set(network, context, genes, said):
    order = torch.tensor([4, 2, 0, 3, 1])
    moved = replace(
        context, control=context.control[:, order], control_mask=context.control_mask[:, order]
    )
    torch.testing.assert_close(
        answers(network, moved, genes, said), answers(network, context, genes, said), **EXACT
    )


def test_partners_that_a_set_does_not_have_are_not_looked_at(network, context, genes, said):
    expected = answers(network, context, genes, said)
    partner = context.partner.clone()
    partner[1] = 100.0
    given = genes.partner * torch.tensor([1, 1, 0, 0, 1, 1.0])[:, None]
    torch.testing.assert_close(
        answers(network, replace(context, partner=partner), replace(genes, partner=given), said)[
            :2
        ],
        expected[:2],
        **EXACT,
    )
    with torch.no_grad():
        asked = network.prefill(replace(context, partner=partner), genes)
        plain = network.prefill(context, genes)
    torch.testing.assert_close(asked.modulation, plain.modulation, **EXACT)
    torch.testing.assert_close(asked.asked, plain.asked, **EXACT)


def test_the_order_is_part_of_the_answer(context, genes):
    """The probability of one and the same cell depends on the order in which it is said."""
    network = decoder("random")
    bins = torch.randint(0, V, (B, G), generator=torch.Generator().manual_seed(3))

    def log_probability(order):
        asked = order.expand(B, -1)
        own = bins.gather(1, asked)
        said = {
            "said_gene": torch.cat([torch.full((B, 1), G), asked[:, :-1]], dim=1),
            "said_bin": torch.cat([torch.full((B, 1), V), own[:, :-1]], dim=1),
            "next_gene": asked,
        }
        logits = answers(network, context, genes, said).log_softmax(-1)
        return logits.gather(-1, own[..., None]).sum((1, 2))

    forward = log_probability(torch.arange(G))
    backward = log_probability(torch.arange(G).flip(0))
    assert bool(((forward - backward).abs() > 1e-3).all())


def test_control_cells_reach_every_gene(network, context, genes, said):
    """The network is no function of the rest alone."""
    other = replace(context, control=context.control + 1)
    difference = answers(network, other, genes, said) - answers(network, context, genes, said)
    seen = context.control_mask.any(1).repeat_interleave(S)
    assert bool((difference[seen].abs().amax(-1) > 1e-6).all())
    torch.testing.assert_close(difference[~seen], torch.zeros_like(difference[~seen]), **EXACT)


# Counts


def test_bins_have_the_mass_of_a_negative_binomial():
    network = decoder()
    mean, dispersion = torch.tensor([0.05, 2.0, 15.0]).double(), torch.tensor([0.1, 0.5, 0.8])
    found = network.log_mass(mean.log(), dispersion.double().log()).exp()
    shape = 1 / dispersion.double()
    edge = [*FIRST.tolist(), 61]
    cdf = stats.nbinom(shape[:, None], (shape / (shape + mean))[:, None]).cdf
    below = cdf(np.array(edge[1:]) - 1) - cdf(np.array(edge[:-1]) - 1)
    np.testing.assert_allclose(found[:, :6], below[:, :6] + 1e-6, atol=1e-6)
    np.testing.assert_allclose(found[:, 6:], below[:, 6:], rtol=0.1, atol=1e-3)


def test_first_answers_are_the_priors(context, genes, said):
    """An untrained network says the negative binomial that it is told."""
    config = DecoderConfig(
        n_axes=A, n_response_axes=3, width=16, n_heads=2, hidden=12, gene_width=4, n_bins=V
    )
    log_dispersion = numbers(G, seed=1)
    network = CausalDecoder(
        config, axes=numbers(G, A), log_dispersion=log_dispersion, first_count=FIRST,
        last_count=60, n_perturbations=2, n_features=2, covariate_sizes=[3],
    ).double()  # fmt: skip
    asked = said["next_gene"]
    spread = (log_dispersion + genes.dispersion).gather(1, asked)
    expected = network.log_mass(genes.log_mean.gather(1, asked), spread)
    torch.testing.assert_close(answers(network, context, genes, said), expected, **EXACT)


def test_a_gene_is_there_as_often_as_its_negative_binomial_says(genes):
    network = decoder("descending")
    shape = (-network.log_dispersion - genes.dispersion).exp().detach().numpy()
    mean = genes.log_mean.exp().numpy()
    expected = 1 - stats.nbinom.pmf(0, shape, shape / (shape + mean))
    found = network.log_present(genes).exp().detach()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Cache


def test_slots_are_filled_anew_without_a_trace(network, context, genes, said):
    """A cell that takes another's place answers as if it had been alone."""
    inputs = {name: value[:1, :4] for name, value in said.items()}
    inputs["next_gene"] = None if network.descending else inputs["next_gene"]
    if network.descending:
        inputs["progress"] = network.progress_of(genes[:1], inputs["said_gene"])[0]
    with torch.no_grad():
        alone, _ = network.decode(network.prefill(context[:1], genes[:S])[:1], **inputs)
        cache = network.prefill(context, genes[torch.arange(B)])
        long = {k: None if v is None else v.expand(B, *v.shape[1:]) for k, v in inputs.items()}
        _, cache = network.decode(cache, **long)
        cache.put(torch.tensor([4]), network.prefill(context[:1], genes[:S], room=False)[:1])
        found, _ = network.decode(cache, **long)
    assert cache.length.tolist() == [4, 4, 4, 4, 0, 4]
    torch.testing.assert_close(found[4:5], alone, **EXACT)


def test_the_memory_formula(network, context, genes):
    cache = network.prefill(context, genes)
    blocks, width = network.config.n_blocks, network.config.width
    assert cache.bytes == 2 * blocks * B * (1 + R + G) * width * 8
