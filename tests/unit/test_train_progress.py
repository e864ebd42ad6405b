"""Bars: one a run, in steps, and none where none is wanted."""

import re

import pytest

import perturbdiff as ptd


def last_lines(text):
    """What each bar says at its end."""
    return [line.split("\r")[-1] for line in text.split("\n") if line.strip()]


def test_every_run_has_one_bar_that_ends_at_its_steps(small_fit, simulated_cells, capfd):
    train = ptd.TrainConfig(max_steps=6, check_every=3, n_sets=2, set_size=8, n_controls=8)
    options = ptd.TrainerOptions(progress=True, accelerator="cpu")
    model = small_fit(simulated_cells, train=train, options=options)
    bars = last_lines(capfd.readouterr().err)
    titles = [bar.split(":")[0] for bar in bars]
    assert titles == ["inner fold 1 of 2", "inner fold 2 of 2", "training"]
    assert all(re.search(r"loss=\d+\.\d{3}", bar) for bar in bars)
    assert all("held out=" in bar for bar in bars[:2])
    assert f"{model.fitted.steps}/{model.fitted.steps}" in bars[2]


def test_no_bar_where_none_is_wanted(small_fit, simulated_cells, capfd):
    small_fit(simulated_cells)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_bar_is_closed_when_training_fails(small_fit, simulated_cells, capfd):
    train = ptd.TrainConfig(
        max_steps=6, check_every=3, n_sets=2, set_size=8, n_controls=8, learning_rate=1e30
    )
    options = ptd.TrainerOptions(progress=True, accelerator="cpu")
    with pytest.raises(RuntimeError):
        small_fit(simulated_cells, train=train, options=options)
    assert capfd.readouterr().err.endswith("\n")
