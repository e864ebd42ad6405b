"""Orders of genes, and cells as sequences, by known answers."""

import pytest
import torch

from perturbdiff.autoregressive import GeneOrder, possible_bins, possible_genes

NAMES = [f"G{number}" for number in range(30)]
G, V = 4, 9
BINS = torch.tensor([[0, 3, 1, 3], [2, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]])


def test_a_random_order_belongs_to_names_and_seed():
    order = GeneOrder.random(NAMES, 0)
    assert sorted(order.genes.tolist()) == list(range(30))
    assert order.genes.tolist() != list(range(30))
    moved = NAMES[::-1]
    again = GeneOrder.random(moved, 0)
    assert [moved[g] for g in again.genes] == [NAMES[g] for g in order.genes]
    assert GeneOrder.random(NAMES, 1).genes.tolist() != order.genes.tolist()


def test_the_gene_that_tells_most_comes_first_and_what_it_told_counts_no_more():
    """Two genes of one axis and a weaker one of another: the second of a pair comes last."""
    loadings = torch.tensor([[0.9, 0.0], [1.0, 0.0], [0.0, 0.5]])
    order = GeneOrder.coexpression(loadings, torch.tensor([0.2, 0.2, 0.2]))
    # Gains: 0.81/0.2, 1/0.2, 0.25/0.2; with gene 1 said axis 1 keeps 1/6: 0.135/0.2 < 0.25/0.2.
    assert order.genes.tolist() == [1, 2, 0]


def test_a_known_order_says_every_gene():
    order = GeneOrder(name="random", genes=torch.tensor([2, 0, 3, 1]))
    said = order.sequences(BINS, V)
    assert said.gene.tolist() == [[2, 0, 3, 1]] * 4
    assert said.bin[0].tolist() == [1, 0, 3, 3]
    assert said.said_gene[0].tolist() == [G, 2, 0, 3]
    assert said.said_bin[0].tolist() == [V, 1, 0, 3]
    assert bool(said.mask.all())


def test_a_descending_order_is_that_of_each_cell_and_ends_with_a_stop():
    ties = torch.full((4, 4), 0.5)
    ties[0] = torch.tensor([0.1, 0.2, 0.3, 0.9])
    said = GeneOrder.descending(G).sequences(BINS, V, ties=ties)
    assert said.gene.tolist() == [
        [3, 1, 2, G, G], [0, G, G, G, G], [G, G, G, G, G], [3, 2, 1, 0, G],
    ]  # fmt: skip
    assert said.bin[0, :3].tolist() == [3, 3, 1]
    assert said.said_gene[0].tolist() == [G, 3, 1, 2, G]
    assert said.said_bin[0, :4].tolist() == [V, 3, 3, 1]
    assert said.mask.sum(1).tolist() == [4, 2, 1, 5]
    ties[0] = ties[0].flip(0)
    other = GeneOrder.descending(G).sequences(BINS, V, ties=ties)
    assert other.gene[0].tolist() == [1, 3, 2, G, G]


def test_cells_that_end_early_need_no_room_for_others():
    said = GeneOrder.descending(G).sequences(BINS[1:3], V, ties=torch.full((2, 4), 0.5))
    assert said.gene.tolist() == [[0, G], [G, G]]


def test_what_cannot_come_next_is_left_out():
    logits = possible_bins(torch.zeros(1, 2, V), torch.tensor([[V, 2]]))
    assert (logits[0] > -1).int().tolist() == [[0] + [1] * 8, [0, 1, 1] + [0] * 6]
    said = torch.tensor([[G, 3, 1]])
    logits = possible_genes(torch.zeros(1, 3, G + 1), said)
    assert (logits[0] > -1).int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 0, 1, 0, 1]]


@pytest.mark.parametrize("name", ["vocabulary", "descending"])
def test_orders_know_whether_they_draw(name):
    order = getattr(GeneOrder, name)(G)
    assert order.drawn is (name == "descending")
    assert order.genes.tolist() == [0, 1, 2, 3]
