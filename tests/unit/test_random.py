"""Randomness: known answers, independence of position and size, and statistics."""

import numpy as np
import pytest
import torch
from scipy import stats

from perturbdiff._random import (
    _mixed,
    _outputs,
    _unit,
    cell_keys,
    forked_keys,
    gene_lanes,
    normal,
    stream_key,
    uniform,
)

# A fixed seed makes each test below deterministic; a fair generator fails one seed in 10,000.
UNLIKELY = 1e-4

WORD = (1 << 64) - 1

PINNED_KEYS = [
    [8074077842598311774, 8171303832184995181],
    [-1357212606172044721, -9205338736693396899],
]
PINNED_NORMAL = [
    [[0.19655480381547538, -0.6626371371264104], [0.1151570020706901, -1.0413154627061263]],
    [[0.3478530933633459, 0.5434688307650546], [0.6558646380192451, -0.9706757460186941]],
]
PINNED_UNIFORM = [
    [0.3376820540051809, 0.8373443225136518],
    [0.1309667380389904, 0.16617393192463237],
]


def splitmix(state: int) -> int:
    """One output of SplitMix64 from a state already advanced, in Python's integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    return state ^ (state >> 31)


@pytest.fixture(scope="module")
def keys():
    return cell_keys(3, "stim|B", 0, n_cells=400)


@pytest.fixture(scope="module")
def lanes():
    return gene_lanes([f"GENE{number}" for number in range(1000)])


@pytest.fixture(scope="module")
def grid(keys, lanes):
    return uniform(keys, lanes).numpy()


def largest_correlation(left, right):
    """Greatest absolute correlation between columns, in standard errors, and its p-value."""
    left = (left - left.mean(0)) / left.std(0)
    right = (right - right.mean(0)) / right.std(0)
    z = np.abs((left * right).mean(0)) * np.sqrt(len(left))
    return 1 - (1 - 2 * stats.norm.sf(z.max())) ** len(z)


def test_outputs_are_those_published_for_splitmix64():
    found = [value & WORD for value in _outputs(torch.tensor(1234567), 5).tolist()]
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_mixing_equals_unbounded_integers_at_the_edges():
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 1 << 31, -(1 << 31)]
    found = _mixed(torch.tensor(edges)).tolist()
    assert [value & WORD for value in found] == [splitmix(edge & WORD) for edge in edges]


def test_normal_is_the_quantile_of_the_counter_worked_by_hand():
    key, step = 0x123456789ABCDEF, 7
    state = splitmix((key + step * 0xD1342543DE82EF95) & WORD)
    bits = [splitmix((state + lane * 0x9E3779B97F4A7C15) & WORD) for lane in (1, 2, 3)]
    expected = stats.norm.ppf([((value >> 12) + 0.5) / 2**52 for value in bits])
    found = normal(torch.tensor([key]), 3, step=step, dtype=torch.float64)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_draws_do_not_change_between_versions():
    keys = cell_keys(0, "stim|B cells", [0, 5], n_cells=2)
    assert keys.tolist() == PINNED_KEYS
    torch.testing.assert_close(
        normal(keys, 2, step=1, dtype=torch.float64),
        torch.tensor(PINNED_NORMAL, dtype=torch.float64),
        rtol=0,
        atol=1e-9,
    )
    torch.testing.assert_close(
        uniform(keys[0], gene_lanes(["ISG15", "β-actin"])),
        torch.tensor(PINNED_UNIFORM, dtype=torch.float64),
        rtol=0,
        atol=1e-15,
    )


def test_stream_keys_keep_their_parts_apart():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("1",), (1,), (), ("",), ("a,b",)]
    keys = [stream_key(seed, *part) for part in parts for seed in (0, 1, -1, 2**70)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert stream_key(np.int64(4), np.int32(2)) == stream_key(4, 2)


def test_stream_key_takes_integers_and_text_only():
    with pytest.raises(TypeError):
        stream_key(0.5)


def test_the_first_draws_are_the_same_however_many_are_asked_for(lanes):
    few = cell_keys(1, "a", 4, n_cells=3)
    many = cell_keys(1, "a", [9, 4], n_cells=64)
    assert torch.equal(few, many[1, :3])
    assert torch.equal(normal(few, 5), normal(many, 12)[1, :3, :5])
    assert torch.equal(uniform(few, lanes[:4]), uniform(many[1], lanes)[:3, :4])


def test_uniform_follows_the_gene_and_not_its_place(keys):
    names = ["A", "B", "C", "D"]
    order = [2, 0, 3, 1]
    there = uniform(keys, gene_lanes(names))
    assert torch.equal(uniform(keys, gene_lanes([names[at] for at in order])), there[:, order])
    assert torch.equal(uniform(keys[5:9], gene_lanes(["C"])), there[5:9, 2:3])


def test_steps_may_differ_between_sets():
    keys = cell_keys(1, "a", [0, 1], n_cells=4)
    mixed = normal(keys, 3, step=torch.tensor([[2], [9]]))
    assert torch.equal(mixed[0], normal(keys[0], 3, step=2))
    assert torch.equal(mixed[1], normal(keys[1], 3, step=9))


def test_drawing_leaves_the_global_generator_alone():
    torch_state = torch.get_rng_state()
    normal(cell_keys(0, "a", 0, n_cells=4), 4)
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_interval_is_open(dtype):
    ends = _unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]), dtype)
    assert ends.dtype == dtype
    assert bool((ends > 0).all() and (ends < 1).all())
    assert bool(torch.erfinv(2 * _unit(torch.tensor([0, -1]), torch.float64) - 1).isfinite().all())


def test_float32_normals_are_the_float64_ones_rounded(keys):
    assert torch.equal(normal(keys, 8), normal(keys, 8, dtype=torch.float64).float())


def test_uniform_numbers_are_uniform(grid):
    assert stats.kstest(grid.ravel(), "uniform").pvalue > UNLIKELY
    pairs, _, _ = np.histogram2d(grid[:, ::2].ravel(), grid[:, 1::2].ravel(), bins=24)
    assert stats.chisquare(pairs.ravel()).pvalue > UNLIKELY
    between_cells, _, _ = np.histogram2d(grid[::2].ravel(), grid[1::2].ravel(), bins=24)
    assert stats.chisquare(between_cells.ravel()).pvalue > UNLIKELY


def test_float32_uniform_numbers_are_uniform(keys, lanes):
    values = uniform(keys, lanes, dtype=torch.float32)
    assert stats.kstest(values.double().numpy().ravel(), "uniform").pvalue > UNLIKELY


def test_normal_numbers_are_normal(keys):
    values = normal(keys, 500, dtype=torch.float64).numpy().ravel()
    assert stats.kstest(values, "norm").pvalue > UNLIKELY
    tail = stats.binomtest(int((np.abs(values) > 3).sum()), values.size, 2 * stats.norm.sf(3))
    assert tail.pvalue > UNLIKELY


def test_every_bit_is_fair_and_every_bit_of_the_key_counts(keys):
    shifts = torch.arange(64)
    bits = (_outputs(keys, 200)[..., None] >> shifts) & 1
    ones = bits.sum((0, 1)).numpy()
    total = keys.numel() * 200
    p_value = 2 * stats.norm.sf(np.abs(ones - total / 2).max() / np.sqrt(total / 4))
    assert p_value * 64 > UNLIKELY
    flipped = _mixed(keys[:, None] ^ (torch.ones((), dtype=torch.int64) << shifts))
    changed = ((flipped ^ _mixed(keys.clone())[:, None])[..., None] >> shifts) & 1
    share = changed.double().mean(0)
    assert float((share - 0.5).abs().max()) < 5.5 * 0.5 / np.sqrt(len(keys))


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("neighbouring cells", lambda k, g: uniform(k[:-1], g).T, lambda k, g: uniform(k[1:], g).T),
        ("neighbouring genes", lambda k, g: uniform(k, g[:-1]), lambda k, g: uniform(k, g[1:])),
        ("steps", uniform, lambda k, g: uniform(k, g, step=1)),
        ("kinds of draw", uniform, lambda k, g: normal(k, len(g), dtype=torch.float64)),
        (
            "seeds",
            lambda k, g: uniform(cell_keys(0, "a", 0, n_cells=len(k)), g),
            lambda k, g: uniform(cell_keys(1, "a", 0, n_cells=len(k)), g),
        ),
        (
            "sets",
            lambda k, g: uniform(cell_keys(0, "a", 0, n_cells=len(k)), g),
            lambda k, g: uniform(cell_keys(0, "a", 1, n_cells=len(k)), g),
        ),
        (
            "conditions",
            lambda k, g: uniform(cell_keys(0, "a", 0, n_cells=len(k)), g),
            lambda k, g: uniform(cell_keys(0, "b", 0, n_cells=len(k)), g),
        ),
        (
            "axes",
            lambda k, g: normal(k, 999, dtype=torch.float64),
            lambda k, g: normal(k, 1000, dtype=torch.float64)[:, 1:],
        ),
        (
            "branches",
            lambda k, g: normal(k, 1000, dtype=torch.float64),
            lambda k, g: normal(forked_keys(k, 1), 1000, dtype=torch.float64),
        ),
    ],
)
def test_streams_are_uncorrelated(name, left, right, keys, lanes):
    assert largest_correlation(left(keys, lanes).numpy(), right(keys, lanes).numpy()) > UNLIKELY


def test_cells_and_genes_do_not_interact(grid):
    """Counters are sums of a cell's and a gene's hash, which the numbers must not show."""
    centred = (grid - 0.5) * np.sqrt(12)
    square = centred[:-1, :-1] * centred[1:, 1:] * centred[:-1, 1:] * centred[1:, :-1]
    assert 2 * stats.norm.sf(abs(square.mean()) * np.sqrt(square.size)) > UNLIKELY
    alternating = (grid[:-1, :-1] - grid[:-1, 1:] - grid[1:, :-1] + grid[1:, 1:])[::2, ::2] % 1
    assert stats.kstest(alternating.ravel(), "uniform").pvalue > UNLIKELY


def test_no_two_numbers_are_equal(grid):
    assert np.unique(grid).size == grid.size


def test_branch_0_is_the_trajectory_itself(keys):
    assert torch.equal(forked_keys(keys, 0), keys)
    branches = torch.stack([forked_keys(keys, branch) for branch in range(4)])
    assert branches.unique().numel() == branches.numel()
    assert torch.equal(forked_keys(keys.expand(4, -1), torch.arange(4)[:, None]), branches)
