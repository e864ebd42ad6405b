"""A draft learns to guess its decoder, which stays as it is."""

import copy

import pytest
import torch

from perturbdiff._batch import Context
from perturbdiff.autoregressive import ExpressionBins, GeneOrder
from perturbdiff.config import DecoderConfig
from perturbdiff.data._counts import CountBatch
from perturbdiff.nn import CausalDecoder
from perturbdiff.train._causal_task import gene_inputs
from perturbdiff.train._draft import fit_draft, guess_loss

G, AXES, RESPONSE, WIDTH = 9, 4, 3, 16
NAMES = [f"G{number}" for number in range(G)]
BINS = ExpressionBins.fit(torch.arange(1, 40), 8)
ORDER = GeneOrder.random(NAMES, 1)


@pytest.fixture(scope="module")
def decoder():
    generator = torch.Generator().manual_seed(0)
    made = CausalDecoder(
        DecoderConfig(
            n_bins=len(BINS), n_axes=AXES, n_response_axes=RESPONSE, width=WIDTH, n_blocks=1,
            n_heads=2, hidden=16, gene_width=4,
        ),
        axes=torch.randn(G, AXES, generator=generator),
        log_dispersion=torch.zeros(G),
        first_count=BINS.first_count,
        last_count=BINS.last_count,
        n_perturbations=1,
    )  # fmt: skip
    for parameter in made.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def batch(number, n_sets=3, n_cells=5):
    generator = torch.Generator().manual_seed(number)

    def draw(*shape):
        return torch.randn(n_sets, *shape, generator=generator)

    ones = torch.ones(n_sets, dtype=torch.bool)
    context = Context(
        partner=draw(n_cells, AXES),
        has_partner=ones,
        control=draw(2, AXES),
        control_mask=ones[:, None].expand(-1, 2),
        mask=ones[:, None].expand(-1, n_cells),
        shift=draw(RESPONSE),
        members=ones[:, None].long(),
        features=draw(0),
        covariates=torch.zeros(n_sets, 0, dtype=torch.int64),
        conditional=ones,
    )
    return CountBatch(
        counts=draw(n_cells, G).exp().long(),
        partner=draw(n_cells, G),
        log_size=draw(n_cells),
        level=draw(G),
        rise=draw(G),
        log_rate=draw(G),
        context=context,
    )


def loss(decoder, draft, cells, *, ahead=2):
    counts = cells.counts.flatten(0, 1)
    said = ORDER.sequences(BINS.encode(counts), len(BINS))
    hidden, cache = decoder(
        cells.context,
        gene_inputs(cells),
        said_gene=said.said_gene,
        said_bin=said.said_bin,
        next_gene=said.gene,
    )
    return guess_loss(decoder, draft, said, hidden=hidden, cache=cache, ahead=ahead), hidden, cache


def fitted(decoder, n_steps, seed=0):
    batches = (batch(number) for number in range(n_steps))
    return fit_draft(decoder, batches, bins=BINS, order=ORDER, seed=seed, n_steps=n_steps)


def test_a_draft_learns_and_its_decoder_does_not(decoder):
    before = copy.deepcopy(decoder.state_dict())
    draft = fitted(decoder, 60)
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in decoder.parameters())
    assert all(parameter.grad is None for parameter in decoder.parameters())
    with torch.no_grad():
        untrained = fitted(decoder, 0)
        found = [loss(decoder, one, batch(1000))[0].mean() for one in (draft, untrained)]
    assert found[0] < 0.9 * found[1]


def test_the_seed_makes_the_draft(decoder):
    state = torch.get_rng_state()
    one, same, other = (fitted(decoder, 3, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_the_share_of_guesses_that_are_thrown_away(decoder):
    draft = fitted(decoder, 3).requires_grad_(requires_grad=False)
    cells = batch(7)
    found, hidden, cache = loss(decoder, draft, cells, ahead=2)
    gene = ORDER.genes.expand(len(found), -1)
    bins = BINS.encode(cells.counts.flatten(0, 1)).gather(1, gene)
    place = 5  # guessed from what was said at place 3
    guess = draft(hidden[:, 3:4], bins[:, 3:4], gene[:, place : place + 1], cache=cache)
    p = decoder.bin_logits(hidden[:, place : place + 1], gene[:, place : place + 1], cache)
    q = decoder.bin_logits(guess, gene[:, place : place + 1], cache)
    stays = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)[:, 0]
    torch.testing.assert_close(found[:, place], 1 - stays)
    nothing = torch.zeros(len(found), 1, WIDTH)
    guess = draft(nothing, torch.full((len(found), 1), len(BINS)), gene[:, 1:2], cache=cache)
    p = decoder.bin_logits(hidden[:, 1:2], gene[:, 1:2], cache)
    q = decoder.bin_logits(guess, gene[:, 1:2], cache)
    stays = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)[:, 0]
    torch.testing.assert_close(found[:, 1], 1 - stays)
