"""Drawing of sets: by number, without a tail, with padding that alters nothing."""

from itertools import chain, islice

import numpy as np
import pytest
import torch

from perturbdiff._errors import SplitError
from perturbdiff.config import TrainConfig
from perturbdiff.data import SetDataModule
from perturbdiff.data._sets import EpochSampler, Population, SetDataset

AXES, LATENT = 3, 2


def population(name, n_treated, n_controls=20, *, members=(1,)):
    """Cells that can be told apart: the first latent value of a cell is its number."""
    x0 = torch.arange(n_treated, dtype=torch.float32)[:, None].repeat(1, LATENT)
    control = torch.arange(n_controls, dtype=torch.float32)[:, None].repeat(1, AXES)
    return Population(
        name=name,
        x0=x0,
        partner=torch.arange(n_treated) % n_controls,
        control=control,
        shift=torch.ones(LATENT),
        members=torch.tensor(members),
        features=torch.zeros(0),
        covariates=torch.tensor([1]),
    )


def config(**changes):
    known = {"set_size": 8, "n_controls": 4, "n_sets": 4, "check_every": 2}
    return TrainConfig(**(known | {"drop_partner": 0, "drop_identity": 0} | changes))


def same(left, right):
    assert torch.equal(left.x0, right.x0)
    for name in ("partner", "control", "mask", "control_mask", "shift", "members", "covariates"):
        assert torch.equal(getattr(left.context, name), getattr(right.context, name)), name


def test_a_set_is_a_function_of_seed_and_number():
    cells = [population("a", 30), population("b", 9)]
    sets = SetDataset(cells, config(), seed=1)
    expected = [sets[number] for number in range(10)]
    again = SetDataset(cells, config(), seed=1)
    for number in reversed(range(10)):
        same(again[number], expected[number])
    other = SetDataset(cells, config(), seed=2)
    assert not all(torch.equal(other[n].x0, expected[n].x0) for n in range(10))


def test_cells_come_once_a_set_beside_their_partners():
    """50 treated cells on 20 control cells: partner of cell i is control cell i modulo 20."""
    sets = SetDataset([population("a", 50)], config(), seed=0)
    for number in range(20):
        batch = sets[number]
        cells = batch.x0[0, :, 0]
        assert batch.context.mask.all()
        assert len(set(cells.tolist())) == 8
        assert torch.equal(batch.context.partner[0, :, 0], cells % 20)
        assert len(set(batch.context.control[0, :, 0].tolist())) == 4


def test_small_populations_are_padded_and_the_padding_is_masked():
    batch = SetDataset([population("a", 5, 3)], config(), seed=0)[0]
    assert batch.context.mask.tolist() == [[True] * 5 + [False] * 3]
    assert batch.context.control_mask.tolist() == [[True] * 3 + [False]]
    assert sorted(batch.x0[0, :5, 0].tolist()) == [0, 1, 2, 3, 4]
    assert (batch.x0[0, 5:] == 0).all()


def test_there_is_no_tail():
    """70 cells in sets of 64: no cell is dropped for good, and what is left out changes (C03)."""
    sets = SetDataset([population("a", 70)], config(set_size=64), seed=0)
    members = [frozenset(sets[number].x0[0, :, 0].tolist()) for number in range(20)]
    assert all(len(cells) == 64 for cells in members)
    assert len(set(members)) == 20
    assert frozenset.union(*members) == set(range(70))


def test_populations_are_drawn_by_the_root_of_their_size():
    """900 and 100 cells: 3 to 1. Of 2,000 draws 1,500, with a standard deviation of 19."""
    sets = SetDataset([population("a", 900, members=(1,)), population("b", 100, members=(2,))],
                      config(), seed=0)  # fmt: skip
    first = sum(int(sets[number].context.members[0, 0]) == 1 for number in range(2000))
    assert abs(first - 1500) < 4 * 19.4


def test_conditions_are_dropped_in_their_share():
    """Of 1,000 sets: partners 10 %, condition 20 %, identity 30 %, independently."""
    cells = [population("a", 30, members=(1, 2))]
    shares = config(drop_partner=0.1, drop_condition=0.2, drop_identity=0.3)
    sets = SetDataset(cells, shares, seed=0)
    contexts = [sets[number].context for number in range(1000)]
    dropped = {
        0.1: [not bool(c.has_partner) for c in contexts],
        0.2: [not bool(c.conditional) for c in contexts],
        0.3: [int(c.members.sum()) == 0 for c in contexts],
    }
    for share, found in dropped.items():
        assert abs(np.mean(found) - share) < 4 * (share * (1 - share) / 1000) ** 0.5
    for context in contexts:
        known = int(context.members.sum()) > 0
        assert context.covariates.tolist() == [[1 if known else 0]]


def test_the_shift_is_seen_with_noise_of_its_own_size():
    sets = SetDataset([population("a", 30)], config(shift_noise=0.5), seed=0)
    noise = torch.cat([sets[number].context.shift for number in range(1000)]) - 1
    assert noise.std() == pytest.approx(0.5, abs=0.03)
    exact = SetDataset([population("a", 30)], config(shift_noise=0), seed=0)
    assert torch.equal(exact[0].context.shift, torch.ones(1, LATENT))


def test_combinations_of_different_size_join():
    sets = SetDataset(
        [population("a", 30, members=(1,)), population("b", 30, members=(2, 3))], config(), seed=0
    )
    joined = type(sets[0]).join([sets[number] for number in range(6)])
    assert joined.context.members.shape == (6, 2)


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(SplitError, match="every condition is held out"):
        SetDataset([], config(), seed=0)


# Epochs


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_share_an_epoch_without_overlap(world_size):
    def numbers(epoch):
        found = []
        for rank in range(world_size):
            sampler = EpochSampler(12, rank=rank, world_size=world_size)
            sampler.set_epoch(epoch)
            found.append(list(sampler))
            assert len(found[-1]) == len(sampler) == 12 // world_size
        return found

    first, second = numbers(0), numbers(1)
    assert sorted(chain(*first)) == list(range(12))
    assert sorted(chain(*second)) == list(range(12, 24))


def test_an_epoch_that_does_not_divide_gives_every_process_as_many():
    lengths = {len(list(EpochSampler(13, rank=r, world_size=3))) for r in range(3)}
    assert lengths == {4}


def module(n_train=1, n_validation=0, **changes):
    cells = [population(f"p{i}", 30) for i in range(n_train + n_validation)]
    return SetDataModule(cells[:n_train], cells[n_train:], config=config(**changes), seed=0)


@pytest.mark.parametrize("n_sets", [1, 4, 127])
def test_every_batch_is_full_whatever_the_batch_size(n_sets):
    """No last batch of one item (C01): an epoch is a whole number of batches."""
    data = module(n_sets=n_sets, check_every=3)
    sizes = [len(batch.x0) for batch in data.train_dataloader()]
    assert sizes == [n_sets] * 3


def test_validation_sets_are_the_same_at_every_look_and_not_those_of_training():
    data = module(1, 1, n_sets=127)
    looks = [list(data.val_dataloader()) for _ in range(2)]
    assert [len(batch.x0) for batch in looks[0]] == [127, 1]  # a last batch of one is no trouble
    for left, right in zip(*looks, strict=True):
        same(left, right)
    first = next(iter(data.train_dataloader()))
    assert not torch.equal(first.x0[:1], looks[0][0].x0[:1])
    assert module().val_dataloader() == []


def test_loaders_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(islice(iter(module().train_dataloader()), 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_among_several_takes_its_own_sets():
    """Step 5 of two processes with 4 sets each, two batches a step: 80 sets were before."""

    class Rank:
        global_rank, world_size, global_step, accumulate_grad_batches = 1, 2, 5, 2

    alone, second = module(), module()
    second.trainer = Rank()
    assert list(second.train_dataloader().sampler) == list(range(81, 96, 2))
    assert list(alone.train_dataloader().sampler) == list(range(8))
