"""Training: the same run however it is cut, checkpoints that hold plain values, own trainers."""

import copy
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback

import perturbdiff as ptd
from perturbdiff._batch import SetBatch
from perturbdiff._errors import TrainingError
from perturbdiff.config import NetworkConfig, TrainConfig
from perturbdiff.data import SetDataModule
from perturbdiff.data._sets import Population
from perturbdiff.train import SetDiffusionTask, TrainerOptions, choose_steps, train, two_folds
from perturbdiff.train._fit import LAST

SHAPE = NetworkConfig(n_axes=3, n_response_axes=2, width=16, n_blocks=1, n_heads=2)
CONFIG = TrainConfig(
    max_steps=12, check_every=3, n_sets=4, set_size=8, n_controls=6, warmup_steps=4, patience=2
)
OPTIONS = TrainerOptions(progress=False, accelerator="cpu")
OWN_TRAINER = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_checkpointing": False, "enable_model_summary": False, "use_distributed_sampler": False,
}  # fmt: skip
lightnings_own = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec:", "ignore:.*does not have many workers:"
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def populations(count=4, scale=1.0):
    return [
        Population(
            name=f"p{i}",
            x0=scale * numbers(20 + i, 2, seed=i),
            partner=torch.arange(20 + i) % 15,
            control=numbers(15, 3, seed=10 + i),
            shift=numbers(2, seed=20 + i),
            members=torch.tensor([1 + i % 2]),
            features=torch.zeros(0),
            covariates=torch.tensor([1 + i // 2]),
        )
        for i in range(count)
    ]


def task(seed=0, config=CONFIG):
    return SetDiffusionTask(SHAPE, config, n_perturbations=2, covariate_sizes=[2], seed=seed)


def data(config=CONFIG, validation=(), cells=None):
    return SetDataModule(cells or populations(), validation, config=config, seed=0)


def weights(trained):
    return {name: value.clone() for name, value in trained.state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def uninterrupted():
    return weights(train(task(), data(), steps=12, options=OPTIONS))


def test_training_is_a_function_of_its_seed(uninterrupted):
    assert equal(weights(train(task(), data(), steps=12, options=OPTIONS)), uninterrupted)
    other = weights(train(task(seed=1), data(), steps=12, options=OPTIONS))
    assert not equal(other, uninterrupted)


class StopAt(Callback):
    """Raises in the middle of a run."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise self.error


def kept(path, **changes):
    return TrainerOptions(progress=False, accelerator="cpu", checkpoint_dir=path, **changes)


@pytest.mark.parametrize("step", [3, 7, 11])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(uninterrupted, tmp_path, step):
    """Averages, optimiser and schedule too; it goes on from the end of the last whole epoch."""
    with pytest.raises(RuntimeError, match="power"):
        train(
            task(), data(), steps=12, options=kept(tmp_path),
            callbacks=[StopAt(step, RuntimeError("power"))],
        )  # fmt: skip
    assert (tmp_path / LAST).exists() is (step > 3)
    resumed = train(task(), data(), steps=12, options=kept(tmp_path, resume=True))
    assert equal(weights(resumed), uninterrupted)
    state = torch.load(tmp_path / LAST, weights_only=True)
    assert state["global_step"] == state["optimizer_states"][0]["state"][0]["step"] == 12


def test_a_user_who_stops_it_gets_an_interruption_and_a_usable_checkpoint(uninterrupted, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(
            task(), data(), steps=12, options=kept(tmp_path),
            callbacks=[StopAt(7, KeyboardInterrupt())],
        )  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 6
    resumed = train(task(), data(), steps=12, options=kept(tmp_path, resume=True))
    assert equal(weights(resumed), uninterrupted)


def test_a_new_run_in_the_same_folder_replaces_the_checkpoint(tmp_path):
    train(task(), data(), steps=6, options=kept(tmp_path))
    train(task(), data(), steps=3, options=kept(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [LAST]
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 3


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (task(seed=1), "seed was 0 and is now 1"),
        (task(config=TrainConfig(n_sets=5, check_every=3)), r"train\.\w+ was"),
        (
            SetDiffusionTask(
                NetworkConfig(n_axes=3, n_response_axes=2, width=32, n_blocks=1, n_heads=2),
                CONFIG, n_perturbations=2, covariate_sizes=[2],
            ),
            r"network\.width was 16 and is now 32",
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path, other, named):
    train(task(), data(), steps=3, options=kept(tmp_path))
    with pytest.raises(TrainingError, match=f"belongs to another run: {named}"):
        train(other, data(other.config), steps=6, options=kept(tmp_path, resume=True))


def test_a_checkpoint_of_other_cells_is_refused(tmp_path):
    train(task(), data(), steps=3, options=kept(tmp_path))
    with pytest.raises(TrainingError, match="another run: data was"):
        train(
            task(), data(cells=populations(scale=2)), steps=6, options=kept(tmp_path, resume=True)
        )


def test_a_checkpoint_holds_plain_values_alone(tmp_path):
    """It opens in a process that never imported the package, and refuses to run anything."""
    train(task(), data(), steps=3, options=kept(tmp_path))
    script = (
        "import sys, torch\n"
        "state = torch.load(sys.argv[1], weights_only=True)\n"
        "assert 'perturbdiff' not in sys.modules\n"
        "assert state['global_step'] == 3 and state['perturbdiff']['seed'] == 0\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / LAST)], check=True)


class Hostile:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_checkpoint_is_refused(tmp_path):
    train(task(), data(), steps=3, options=kept(tmp_path))
    state = torch.load(tmp_path / LAST, weights_only=True)
    hostile = Hostile()
    hostile.path = tmp_path / "harm"
    torch.save(state | {"extra": hostile}, tmp_path / LAST)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        train(task(), data(), steps=6, options=kept(tmp_path, resume=True))
    assert not hostile.path.exists()


def test_training_that_diverges_says_so():
    wild = TrainConfig(**(vars(CONFIG) | {"learning_rate": 1e38, "warmup_steps": 0}))
    with pytest.raises(TrainingError, match="learning_rate"):
        train(task(config=wild), data(wild), steps=6, options=OPTIONS)


@pytest.mark.parametrize("n_sets", [1, 4])
def test_any_batch_size_trains(n_sets):
    config = TrainConfig(**(vars(CONFIG) | {"n_sets": n_sets}))
    before = weights(task(config=config))
    after = weights(train(task(config=config), data(config), steps=3, options=OPTIONS))
    assert all(value.isfinite().all() for value in after.values())
    assert not equal(before, after)


def test_training_leaves_no_random_state_behind():
    def moved():
        return np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002

    before = moved()
    train(task(), data(validation=populations(1)), steps=6, options=OPTIONS)
    for left, right in zip(before, moved(), strict=True):
        assert np.array_equal(left, right)


def test_fit_moves_no_random_state_and_no_number_of_threads(simulated_cells, tmp_path):
    """There nothing checks types, which draws numbers of Python's own generator."""
    simulated_cells.write_h5ad(tmp_path / "cells.h5ad")
    script = """
import random, sys
import anndata, numpy as np, torch
random.seed(1), np.random.seed(2), torch.manual_seed(3)
torch.set_num_threads(1)
def states():
    return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
            torch.get_num_threads())
before = states()
import perturbdiff as ptd
adata = anndata.read_h5ad(sys.argv[1])
model = ptd.SetDiffusion.from_anndata(adata, perturbation_key="perturbation", control="control",
                                      covariate_keys=["cell_type"])
model.fit(adata, n_top_genes=30, options=ptd.TrainerOptions(progress=False),
          network=ptd.NetworkConfig(n_axes=3, n_response_axes=2, width=8, n_blocks=1, n_heads=1),
          train=ptd.TrainConfig(max_steps=2, check_every=1, n_sets=2, set_size=4, n_controls=4))
assert states() == before
"""
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script, str(tmp_path / "cells.h5ad")],
        check=True,
        cwd=Path(__file__).parents[2],
    )


# The task


def test_first_weights_come_from_the_seed_and_from_nothing_else():
    torch.manual_seed(1)
    random.seed(1)
    first = weights(task())
    torch.manual_seed(2)
    assert equal(weights(task()), first)
    assert not equal(weights(task(seed=1)), first)


def test_averages_follow_by_their_formula():
    """After step t the average keeps min(decay, t / (t + 9)) of itself."""
    whole = task()
    trainer_data = data()
    batches = iter(trainer_data.train_dataloader())
    averages = copy.deepcopy(whole.averaged)

    class Follow(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            keep = min(CONFIG.ema_decay, trainer.global_step / (trainer.global_step + 9))
            for mean, now in zip(averages.parameters(), whole.denoiser.parameters(), strict=True):
                mean.data = keep * mean.data + (1 - keep) * now.data

    assert isinstance(next(batches), SetBatch)
    train(whole, trainer_data, steps=4, options=OPTIONS, callbacks=[Follow()])
    for mean, expected in zip(whole.averaged.parameters(), averages.parameters(), strict=True):
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)


def test_noise_of_a_step_is_its_own_and_that_of_validation_is_fixed():
    whole, batch = task(), next(iter(data().train_dataloader()))
    losses = [
        float(whole.loss(whole.averaged, batch, stream)["denoising"])
        for stream in ("train 0 0", "train 0 0", "train 1 0", "train 0 1")
    ]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_masked_cells_add_nothing_to_the_loss():
    whole, batch = task(), next(iter(data(cells=populations(1)).train_dataloader()))
    mask = batch.context.mask.clone()
    mask[:, 5:] = False
    context = copy.copy(batch.context)
    object.__setattr__(context, "mask", mask)
    x0 = batch.x0.clone()
    losses = []
    for junk in (0.0, 100.0):
        x0[:, 5:] = junk
        parts = whole.loss(whole.denoiser, SetBatch(x0=x0, context=context), "x")
        losses.append([float(part.detach()) for part in parts.values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_network_that_answers_zero_loses_the_unit_variance_of_its_target():
    """Preconditioned targets have unit variance where the data have: the first loss is near 1."""
    config = TrainConfig(**(vars(CONFIG) | {"n_sets": 64}))
    cells = populations(1)
    object.__setattr__(cells[0], "x0", numbers(4000, 2))
    object.__setattr__(cells[0], "partner", torch.arange(4000) % 15)
    batch = next(iter(data(config, cells=cells).train_dataloader()))
    whole = task(config=config)
    assert float(whole.loss(whole.averaged, batch, "x")["denoising"]) == pytest.approx(1, abs=0.15)


# A trainer of one's own


@lightnings_own
def test_own_trainers_give_the_same_weights(uninterrupted):
    whole = task()
    trainer = Trainer(max_steps=12, gradient_clip_val=1.0, limit_val_batches=0, **OWN_TRAINER)
    trainer.fit(whole, datamodule=data())
    assert equal(weights(whole), uninterrupted)


@lightnings_own
def test_own_trainers_validate(tmp_path):
    whole = ptd.train.SetDiffusionTask(
        SHAPE, CONFIG, n_perturbations=2, covariate_sizes=[2], seed=0
    )
    sets = ptd.data.SetDataModule(populations(), populations(1), config=CONFIG, seed=0)
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, **OWN_TRAINER)
    trainer.fit(whole, datamodule=sets)
    assert trainer.global_step == 6
    first = float(trainer.callback_metrics["val_loss"])
    trainer.validate(whole, datamodule=sets, verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(first, rel=1e-6)


# How long to train


def test_the_chosen_step_has_the_smallest_mean_loss(monkeypatch):
    curves = iter([[3.0, 1.0, 2.0, 2.5], [3.0, 2.0, 0.5]])

    def pretend(task, data, *, steps, options, callbacks=(), title=""):
        callbacks[0].values.extend(next(curves))

    monkeypatch.setattr("perturbdiff.train._fit.train", pretend)
    chosen = choose_steps([(task(), data())] * 2, config=CONFIG, options=OPTIONS)
    assert chosen == 3 * CONFIG.check_every  # means 3, 1.5, 1.25


def test_inner_folds_stop_by_patience(tmp_path):
    patient = TrainConfig(**(vars(CONFIG) | {"max_steps": 60, "learning_rate": 0.0}))
    folds = [(task(config=patient), data(patient, populations(1))) for _ in range(2)]
    assert choose_steps(folds, config=patient, options=kept(tmp_path)) == patient.check_every
    assert not list(tmp_path.iterdir())


def test_folds_hold_out_conditions_of_all_sizes_once():
    cells = populations(9)
    folds = two_folds(cells)
    held = [{p.name for p in out} for _, out in folds]
    assert not held[0] & held[1]
    for (kept_cells, _), out in zip(folds, held, strict=True):
        assert {p.name for p in kept_cells} | out == {p.name for p in cells}
        assert not {p.name for p in kept_cells} & out
        assert len(out) >= 2
    shuffled = two_folds(cells[::-1])
    assert [{p.name for p in out} for _, out in shuffled] == held


def test_few_conditions_train_for_fixed_steps_with_a_warning(small_fit, simulated_cells, caplog):
    """Two conditions: nothing can be held out to choose the number of steps."""
    rows = simulated_cells.obs["perturbation"] != "P2"
    with caplog.at_level("WARNING", logger="perturbdiff"):
        model = small_fit(simulated_cells[rows].copy())
    assert [r for r in caplog.records if "only 2 training conditions" in r.getMessage()]
    assert model.fitted.steps == 4


def test_one_condition_trains_and_says_that_its_prior_is_unchecked(
    small_fit, simulated_cells, caplog
):
    with caplog.at_level("WARNING", logger="perturbdiff"):
        model = small_fit(
            simulated_cells[simulated_cells.obs["perturbation"] != "P2"].copy(),
            holdout={"cell_type": ["T1", "T3"]},
        )
    assert [r for r in caplog.records if "cannot be checked" in r.getMessage()]
    pred = model.predict(simulated_cells, perturbations=["P1"], n_cells=8)
    assert pred.n_obs == 24


def test_a_type_with_control_cells_alone_is_kept_for_questions(small_fit, simulated_cells):
    """C05: nothing to train on there, and no crash."""
    keep = (simulated_cells.obs["cell_type"] != "T3") | (
        simulated_cells.obs["perturbation"] == "control"
    )
    model = small_fit(simulated_cells[keep].copy())
    pred = model.predict(
        simulated_cells, perturbations=["P1"], contexts=[{"cell_type": "T3"}], n_cells=8
    )
    assert pred.n_obs == 8
