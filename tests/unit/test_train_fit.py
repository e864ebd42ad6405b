"""Training: the same run however it is cut, checkpoints that hold plain values, own trainers."""

import copy
import functools
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback

import perturbdiff as ptd
from perturbdiff._batch import SetBatch
from perturbdiff._constants import CHOICE
from perturbdiff._errors import ConfigError, TrainingError
from perturbdiff.config import NetworkConfig, TrainConfig
from perturbdiff.data import SetDataModule
from perturbdiff.data._sets import Population
from perturbdiff.train import SetDiffusionTask, TrainerOptions, choose_steps, train, two_folds
from perturbdiff.train._fit import LAST, _KeepLast

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
    with pytest.raises(
        TrainingError, match=r"last\.ckpt is damaged, or was not written by fit"
    ) as caught:
        train(task(), data(), steps=6, options=kept(tmp_path, resume=True))
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
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
    assert [whole.global_step for whole, _ in folds] == [9, 9]  # the first look, and two in vain


def test_inner_folds_go_on_where_they_were_interrupted(tmp_path):
    """Looks and weights of a resumed fold are those of an uninterrupted one, none taken twice."""

    def folds():
        return [(task(config=CONFIG), data(CONFIG, populations(1))) for _ in range(2)]

    whole = folds()
    chosen = choose_steps(whole, config=CONFIG, options=kept(tmp_path / "whole"))
    cut = folds()
    stop = StopAt(7, KeyboardInterrupt())
    cut[1][0].configure_callbacks = lambda: [stop]
    with pytest.raises(KeyboardInterrupt):
        choose_steps(cut, config=CONFIG, options=kept(tmp_path / "cut"))
    resumed = folds()
    steps = []
    for fold, _ in resumed:
        fold.on_train_batch_start = lambda batch, number, fold=fold: steps.append(fold.global_step)
    assert (
        choose_steps(resumed, config=CONFIG, options=kept(tmp_path / "cut", resume=True)) == chosen
    )
    for (one, _), (two, _) in zip(whole, resumed, strict=True):
        assert equal(weights(one), weights(two))
    assert steps == list(range(6, whole[1][0].global_step))
    for fold in ("fold_1", "fold_2"):
        looks = [
            torch.load(tmp_path / run / fold / LAST, weights_only=True)["callbacks"]["_Looks"]
            for run in ("whole", "cut")
        ]
        assert len(looks[0]["values"]) >= 3
        assert looks[0] == looks[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"patience": 1}, r"train\.patience was 2 and is now 1"), ({"n_sets": 5}, r"train\.n_sets")],
)
def test_inner_folds_of_another_run_are_refused_before_the_first_is_trained(
    tmp_path, change, named
):
    first = [(task(), data(validation=populations(1))) for _ in range(2)]
    choose_steps(first, config=CONFIG, options=kept(tmp_path))
    (tmp_path / "fold_1" / LAST).unlink()
    other = TrainConfig(**(vars(CONFIG) | change))
    folds = [(task(config=other), data(other, populations(1))) for _ in range(2)]
    with pytest.raises(TrainingError, match=named):
        choose_steps(folds, config=other, options=kept(tmp_path, resume=True))
    assert not (tmp_path / "fold_1" / LAST).exists()


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path):
    train(task(), data(), steps=6, options=kept(tmp_path))
    with pytest.raises(TrainingError, match="at step 6, beyond the 3 steps"):
        train(task(), data(), steps=3, options=kept(tmp_path, resume=True))


def flipped(content):
    """One bit of a weight changed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        largest = max(archive.infolist(), key=lambda one: one.file_size)
        place = content.index(archive.read(largest)) + largest.file_size // 2
    return content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :]


@pytest.mark.parametrize(
    "harm", [lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"no zip", flipped]
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, harm):
    train(task(), data(), steps=3, options=kept(tmp_path))
    last = tmp_path / LAST
    last.write_bytes(harm(last.read_bytes()))
    with pytest.raises(TrainingError, match=r"last\.ckpt is damaged"):
        train(task(), data(), steps=6, options=kept(tmp_path, resume=True))


# A whole fit that is interrupted and goes on


def interrupt_after(monkeypatch, count):
    """Ctrl-C after so many checkpoints; gives the list of the checkpoints written."""
    written, keep = [], _KeepLast.on_train_epoch_end

    def save(self, trainer, pl_module):
        keep(self, trainer, pl_module)
        written.append(f"{self.path.parent.name} {trainer.global_step}")
        if len(written) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(_KeepLast, "on_train_epoch_end", save)
    return written


@pytest.fixture(scope="module")
def every_checkpoint(small_model, small_fit, simulated_cells, tmp_path_factory):
    """Names of the checkpoints of a fit that nobody interrupts."""
    place = tmp_path_factory.mktemp("whole") / "kept"
    with pytest.MonkeyPatch.context() as patch:
        written = interrupt_after(patch, None)
        model = small_fit(simulated_cells, options=kept(place))
    assert model.checksum == small_model.checksum
    assert sorted(path.name for path in place.iterdir()) == [CHOICE, LAST]
    return written


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_resumed_fit_repeats_nothing_and_ends_as_an_uninterrupted_one(
    small_model, small_fit, simulated_cells, every_checkpoint, share, tmp_path, monkeypatch
):
    """Interrupted in the first fold, in the second, in the final run."""
    count = 1 + round(share * (len(every_checkpoint) - 1))
    with monkeypatch.context() as patch:
        before = interrupt_after(patch, count)
        with pytest.raises(KeyboardInterrupt):
            small_fit(simulated_cells, options=kept(tmp_path / "kept"))
    after = interrupt_after(monkeypatch, None)
    model = small_fit(simulated_cells, options=kept(tmp_path / "kept", resume=True))
    assert model.checksum == small_model.checksum
    # The checkpoint that is gone on from is written again, since its epoch ends anew.
    names = list(dict.fromkeys(before + after))
    assert names == every_checkpoint
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [CHOICE, LAST]


def test_to_resume_from_nothing_is_refused_before_anything_is_read(
    small_fit, simulated_cells, tmp_path
):
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path} to go on from"):
        small_fit(simulated_cells, n_top_genes=-5, options=kept(tmp_path, resume=True))
    with pytest.raises(ConfigError, match="resume = True: needs a checkpoint_dir"):
        TrainerOptions(resume=True)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_gone_on_from_are_refused_before_anything_is_read(
    small_fit, simulated_cells, tmp_path
):
    fit = functools.partial(small_fit, simulated_cells, options=kept(tmp_path, resume=True))
    small_fit(simulated_cells, options=kept(tmp_path))
    with pytest.raises(TrainingError, match="belongs to another run: seed was 0 and is now 1"):
        fit(seed=1, n_top_genes=-5)
    with pytest.raises(TrainingError, match="belongs to another run: data was"):
        fit(n_top_genes=29)
    choice = (tmp_path / CHOICE).read_text()
    for harm in (
        "",
        "[]",
        choice.replace('"steps"', '"step"'),
        choice.replace('"seed": 0', '"seed": 1'),
    ):
        (tmp_path / CHOICE).write_text(harm)
        with pytest.raises(
            TrainingError, match=r"choice\.json (is damaged|belongs to another run)"
        ):
            fit(n_top_genes=-5)
    (tmp_path / CHOICE).write_text(choice)
    (tmp_path / LAST).write_bytes(b"half")
    with pytest.raises(TrainingError, match=r"last\.ckpt is damaged"):
        fit(n_top_genes=-5)


def test_a_final_run_on_other_cells_is_refused_before_any_fold_is_trained(
    small_fit, simulated_cells, tmp_path, monkeypatch
):
    small_fit(simulated_cells, options=kept(tmp_path))
    (tmp_path / CHOICE).unlink()
    written = interrupt_after(monkeypatch, None)
    with pytest.raises(TrainingError, match=r"last\.ckpt belongs to another run: data was"):
        small_fit(simulated_cells, n_top_genes=29, options=kept(tmp_path, resume=True))
    assert not written


def test_other_limits_choose_anew(small_fit, simulated_cells, tmp_path):
    """More steps than before: what the folds said no longer holds, the checkpoint does."""
    usual = {"check_every": 2, "n_sets": 32, "set_size": 6, "n_controls": 6, "warmup_steps": 2}
    options = kept(tmp_path)
    small_fit(simulated_cells, train=TrainConfig(max_steps=2, **usual), options=options)
    more = TrainConfig(max_steps=4, **usual)
    resumed = small_fit(simulated_cells, train=more, options=kept(tmp_path, resume=True))
    assert resumed.checksum == small_fit(simulated_cells, train=more).checksum


def test_a_fit_that_does_not_resume_leaves_nothing_of_an_older_one(
    small_fit, simulated_cells, tmp_path, monkeypatch
):
    (tmp_path / "mine.txt").write_text("kept")
    small_fit(simulated_cells, options=kept(tmp_path))
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        small_fit(simulated_cells, seed=1, options=kept(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fold_1", "mine.txt"]


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
