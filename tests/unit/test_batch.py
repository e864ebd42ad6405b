"""Sets can be picked, joined and repeated, whatever dataclass holds them."""

import dataclasses

import pytest
import torch

from perturbdiff._batch import Context, SetBatch


@pytest.fixture
def batch():
    n_sets, n_cells, latent = 3, 4, 2
    number = torch.arange(n_sets)
    context = Context(
        partner=number[:, None, None].expand(n_sets, n_cells, latent).double(),
        has_partner=number > 0,
        control=torch.zeros(n_sets, 5, latent).double(),
        control_mask=torch.ones(n_sets, 5, dtype=torch.bool),
        mask=torch.ones(n_sets, n_cells, dtype=torch.bool),
        shift=number[:, None].expand(n_sets, latent).double(),
        members=number[:, None],
        features=torch.zeros(n_sets, 0).double(),
        covariates=number[:, None].expand(n_sets, 2),
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )
    return SetBatch(
        x0=torch.arange(24.0).reshape(n_sets, n_cells, latent).double(), context=context
    )


def same(left, right):
    for field in dataclasses.fields(left):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if dataclasses.is_dataclass(ours):
            same(ours, theirs)
        elif ours is None:
            assert theirs is None
        else:
            assert torch.equal(ours, theirs), field.name


def test_joining_the_parts_gives_the_whole(batch):
    same(SetBatch.join([batch[:1], batch[1:]]), batch)
    same(SetBatch.join([batch[torch.tensor([2])], batch[:2]]), batch[torch.tensor([2, 0, 1])])


def test_a_mask_picks_sets(batch):
    same(batch[batch.context.has_partner], batch[1:])


def test_repeating_puts_copies_next_to_each_other(batch):
    copies = batch.repeat(2)
    assert copies.context.members[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    same(copies[::2], batch)
    same(copies[1::2], batch)


def test_moving_reaches_what_is_inside(batch):
    assert batch.to("meta").context.shift.device.type == "meta"


def test_the_null_condition_changes_nothing_else(batch):
    free = batch.context.unconditional()
    assert not bool(free.conditional.any())
    same(dataclasses.replace(free, conditional=batch.context.conditional), batch.context)
