"""Guessing ahead leaves the distribution of cells as it is: 100,000 cells of a small vocabulary.

The network is a toy whose answer depends on everything that was said, small enough to enumerate.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from perturbdiff._random import cell_keys, gene_lanes
from perturbdiff.autoregressive import (
    GeneOrder,
    Guessing,
    KnownOrder,
    Sampling,
    Speculative,
    decode,
)

G, V, WIDTH, N = 3, 3, 4, 100_000
LANES = gene_lanes(["A", "B", "C"])
ORDER = GeneOrder(name="random", genes=torch.tensor([2, 0, 1]))
KEYS = cell_keys(7, "toy", 0, n_cells=N)


@dataclass
class ToyCache:
    """What was said, and how much of it counts."""

    keys: torch.Tensor
    length: torch.Tensor

    @property
    def prefix(self):
        return torch.ones(len(self.keys), 0, dtype=torch.bool)

    def to(self, device):
        return ToyCache(self.keys.to(device), self.length.to(device))

    def __getitem__(self, index):
        return ToyCache(self.keys[index], self.length[index])

    def put(self, rows, other):
        self.keys[rows], self.length[rows] = other.keys, other.length

    def with_room(self, n_prefix, n_genes):
        assert (n_prefix, n_genes) == (0, G)
        return self

    @classmethod
    def empty(cls, n_cells):
        return cls(torch.zeros(n_cells, G, WIDTH).double(), torch.zeros(n_cells).long())


class Toy:
    """Hidden value: what was said at each place, added up."""

    n_genes, n_bins, width = G, V, WIDTH

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        shape = (G + 1, V + 1, WIDTH)
        self.said = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.head = torch.randn(G, WIDTH, V, generator=generator, dtype=torch.float64)

    def decode(self, cache, said_gene, said_bin, *, next_gene, progress=None, reach=None):
        assert next_gene is not None
        assert progress is None
        rows = torch.arange(len(said_gene))[:, None]
        place = cache.length[:, None] + torch.arange(said_gene.shape[1])
        assert reach is None or int(place.max()) < reach
        cache.keys[rows, place] = self.said[said_gene, said_bin]
        return cache.keys.cumsum(1)[rows, place].tanh(), cache

    def bin_logits(self, hidden, gene, cache):
        assert len(cache.keys) == len(hidden)
        return (hidden[..., None, :] @ self.head[gene])[..., 0, :]


class Guess:
    """A draft that knows nothing but the gene, and is often wrong."""

    width = WIDTH

    def __call__(self, hidden, said_bin, gene, *, cache):
        del hidden, said_bin, cache
        return (gene[..., None] - torch.arange(WIDTH).double()).sin()


def exact(sampling):
    """Probability of each of the 27 cells, in the order of :func:`counts`."""
    toy, share = Toy(), []
    gene = ORDER.genes[None]
    before = torch.cat([torch.tensor([[G]]), gene[:, :-1]], 1)
    for cell in product(range(V), repeat=G):
        bins = torch.tensor([cell])
        said = torch.cat([torch.tensor([[V]]), bins[:, ORDER.genes[:-1]]], 1)
        hidden, cache = toy.decode(ToyCache.empty(1), before, said, next_gene=gene)
        p = sampling.probabilities(toy.bin_logits(hidden, gene, cache))
        share.append(float(p.gather(2, bins[:, ORDER.genes][..., None]).prod()))
    return torch.tensor(share, dtype=torch.float64)


def counts(bins):
    """How often each cell was made."""
    return torch.bincount(bins @ torch.tensor([V**2, V, 1]), minlength=V**G)


def made(guessing, sampling):
    guessed = Speculative(
        Toy(), ORDER, LANES, draft=Guess(), guessing=guessing, sampling=sampling
    )  # fmt: skip
    return guessed, decode(guessed, ToyCache.empty(N), KEYS)


def plain(sampling, keys=KEYS):
    return decode(KnownOrder(Toy(), ORDER, LANES, sampling=sampling), ToyCache.empty(N), keys)[0]


def fits(observed, share):
    """p of a chi-square test against shares; what cannot be must not be."""
    possible = share > 0
    assert not observed[~possible].any()
    return chisquare(observed[possible].numpy(), N * share[possible].numpy()).pvalue


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_p=0.9)])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_the_distribution_is_that_of_direct_sampling(sampling, length, shared):
    _, (bins, n_calls) = made(Guessing(length=length, shared=shared), sampling)
    found = counts(bins)
    assert fits(found, exact(sampling)) > 0.01
    other = counts(plain(sampling, cell_keys(8, "toy", 0, n_cells=N)))
    seen = (found + other) > 0
    assert chi2_contingency(torch.stack([found, other])[:, seen].numpy()).pvalue > 0.01
    assert n_calls <= G


def test_the_same_test_finds_a_draft_that_is_believed():
    sampling, draft = Sampling(), Guess()
    toy = Toy()
    toy.decode = lambda cache, said_gene, said_bin, *, next_gene, reach=None: (
        draft(None, None, next_gene, cache=None),
        cache,
    )
    bins = decode(KnownOrder(toy, ORDER, LANES), ToyCache.empty(N), KEYS)[0]
    assert fits(counts(bins), exact(sampling)) < 1e-6


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=True)])
def test_shared_numbers_and_greedy_give_the_very_cells(sampling):
    _, (bins, _) = made(Guessing(length=2), sampling)
    assert torch.equal(bins, plain(sampling))


def test_rejected_guesses_make_other_cells_of_the_same_distribution():
    _, (bins, _) = made(Guessing(length=2, shared=False), Sampling())
    assert not torch.equal(bins, plain(Sampling()))


def test_guesses_are_kept_as_often_as_the_theorem_says():
    """A first guess stays with probability sum of min(p, q): Leviathan et al., theorem 3.5."""
    guessed = Speculative(
        Toy(), ORDER, LANES, draft=Guess(), guessing=Guessing(length=1, shared=False)
    )  # fmt: skip
    cells, first = guessed.begin(ToyCache.empty(N), KEYS), ORDER.genes[:1]
    guessed.advance(cells, reach=2)
    assert (cells.tried == 1).all()
    toy, gene = Toy(), first[None]
    hidden, cache = toy.decode(
        ToyCache.empty(1), torch.tensor([[G]]), torch.tensor([[V]]), next_gene=gene
    )
    p = toy.bin_logits(hidden, gene, cache).softmax(-1)
    q = toy.bin_logits(Guess()(None, None, gene, cache=None), gene, cache).softmax(-1)
    expected = float(torch.minimum(p, q).sum())
    assert 0.2 < expected < 0.9
    standard_error = (expected * (1 - expected) / N) ** 0.5
    assert abs(float(cells.kept.double().mean()) - expected) < 4 * standard_error
