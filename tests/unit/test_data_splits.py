"""Splits: which cells are held out, that they cannot leak, and that order leaves no trace."""

import numpy as np
import pytest

from perturbdiff._errors import ConfigError, SplitError, UnknownKeyError, UnknownLevelError
from perturbdiff.data import Registry, check_leakage, encode, random_holdout, split


@pytest.fixture
def screen(toy):
    adata = toy(["ctrl", "A", "B", "A+B"], cell_types=["T", "NK", "DC"], n_each=3)
    registry = Registry.from_anndata(
        adata,
        perturbation_key="condition",
        control="ctrl",
        covariate_keys=["cell_type"],
        scale="counts",
    )
    return adata, registry, encode(adata, registry)


@pytest.mark.parametrize(
    ("holdout", "held"),
    [
        ({"cell_type": ["NK"]}, ["A and B in NK", "A in NK", "B in NK"]),
        ({"condition": ["A"]}, ["A in DC", "A in NK", "A in T"]),
        ({"condition": ["B+A"]}, ["A and B in DC", "A and B in NK", "A and B in T"]),
        ({"condition": ["A", "B"], "cell_type": ["T"]}, ["A in T", "B in T"]),
        (
            [{"condition": ["A"], "cell_type": "T"}, {"cell_type": ["DC"], "condition": "B"}],
            ["A in T", "B in DC"],
        ),
    ],
)
def test_what_is_held_out(screen, holdout, held):
    _, registry, cells = screen
    parts = split(cells, registry, holdout=holdout)
    assert sorted(str(c) for c in parts.conditions) == sorted(held)
    assert (parts.train ^ parts.test).all()
    assert parts.test.sum() == 3 * len(held)
    assert parts.train[cells.is_control].all()
    tested = cells.take(parts.test)
    assert set(tested.conditions()) == set(parts.conditions)
    check_leakage(cells.take(parts.train), parts)


def test_a_leak_is_found_by_condition_and_by_name(screen):
    adata, registry, cells = screen
    parts = split(cells, registry, holdout={"cell_type": ["NK"]})
    with pytest.raises(SplitError, match="3 held-out conditions are among the training cells"):
        check_leakage(cells, parts)
    relabelled = adata.copy()
    relabelled.obs["condition"] = "ctrl"
    with pytest.raises(SplitError, match="9 test cells are among the training cells: 'cell012'"):
        check_leakage(encode(relabelled, registry), parts)


@pytest.mark.parametrize(
    ("holdout", "error", "says"),
    [
        ({}, SplitError, "Nothing to hold out"),
        ([], SplitError, "holdout is empty"),
        ({}, SplitError, "holdout is empty"),
        ({"condition": ["ctrl"]}, SplitError, "'ctrl' is control"),
        ({"cell_type": ["T", "NK", "DC"]}, SplitError, "All 9 treated conditions"),
        ({"cell_type": ["NKK"]}, UnknownLevelError, "Did you mean 'NK'"),
        ({"condition": ["A+C"]}, UnknownLevelError, "Did you mean 'A"),
        ({"celltype": ["NK"]}, UnknownKeyError, "Did you mean 'cell_type'"),
    ],
)
def test_splits_that_make_no_sense_are_refused(screen, holdout, error, says):
    _, registry, cells = screen
    with pytest.raises(error, match=says):
        split(cells, registry, holdout=holdout)


def test_a_context_with_control_cells_only_cannot_be_held_out(screen):
    adata, registry, _ = screen
    lone = (adata.obs["condition"] != "ctrl") & (adata.obs["cell_type"] == "NK")
    cells = encode(adata[~lone], registry)
    with pytest.raises(SplitError, match=r"no treated cell matches {'cell_type': \['NK'\]}"):
        split(cells, registry, holdout={"cell_type": ["NK"]})


def test_the_hash_depends_on_content_and_not_on_order(screen):
    adata, registry, cells = screen
    one = split(cells, registry, holdout={"cell_type": ["NK"]})
    order = np.random.default_rng(0).permutation(adata.n_obs)
    shuffled = encode(adata[order], registry)
    assert split(shuffled, registry, holdout={"cell_type": ["NK"]}).hash == one.hash
    assert split(cells, registry, holdout={"cell_type": ["T"]}).hash != one.hash
    fewer = cells.take(np.arange(len(cells) - 1))
    assert split(fewer, registry, holdout={"cell_type": ["NK"]}).hash != one.hash


@pytest.mark.parametrize("kind", ["context", "perturbation"])
def test_a_random_holdout_is_the_same_for_the_same_seed(screen, kind):
    adata, registry, cells = screen
    order = np.random.default_rng(1).permutation(adata.n_obs)
    shuffled = encode(adata[order], registry)
    draws = [random_holdout(cells, registry, kind=kind, fraction=0.4, seed=s) for s in range(8)]
    again = [random_holdout(shuffled, registry, kind=kind, fraction=0.4, seed=s) for s in range(8)]
    assert draws == again
    assert len({str(draw) for draw in draws}) > 1
    for draw in draws:
        assert len(draw) == 1
        check = split(cells, registry, holdout=draw)
        assert len(check.conditions) == 3


def test_a_random_holdout_never_takes_all(screen):
    _, registry, cells = screen
    for fraction, number in ((0.01, 1), (0.99, 2)):
        draw = random_holdout(cells, registry, kind="context", fraction=fraction, seed=0)
        assert len(draw) == number
    pairs = random_holdout(cells, registry, kind="combination", fraction=0.5, seed=0)
    assert pairs == [{"condition": ["A+B"]}]


def test_a_random_holdout_needs_a_choice(screen):
    _, registry, cells = screen
    single = cells.take(np.flatnonzero([c.context == ("T",) for c in cells.distinct])[0:0])
    with pytest.raises(SplitError, match="0 of kind 'context'"):
        random_holdout(single, registry, kind="context", fraction=0.5, seed=0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        random_holdout(cells, registry, kind="context", fraction=1.0, seed=0)
    with pytest.raises(ConfigError, match="seed = -1: must be at least 0"):
        random_holdout(cells, registry, kind="context", fraction=0.5, seed=-1)
