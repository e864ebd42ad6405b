"""A Lightning user's own trainer, end to end on simulated cells."""

import numpy as np
import pytest
import torch
from lightning import Trainer

import perturbdiff as ptd
from perturbdiff._errors import NotFittedError, TrainingError
from perturbdiff.data.datasets import SimulationConfig

COLUMNS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
}
SMALL = SimulationConfig(
    n_contexts=3, n_genes=60, n_perturbations=2, n_unseen=0, n_pairs=0, doses=(), hours=(),
    n_donors=1, n_cells=30, n_controls=30,
)  # fmt: skip
NETWORK = ptd.NetworkConfig(n_axes=5, n_response_axes=4, width=16, n_blocks=1, n_heads=2)
TRAIN = ptd.TrainConfig(max_steps=6, check_every=10, n_sets=2, set_size=8, n_controls=8)


def trainer(steps: int) -> Trainer:
    return Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def new_model(adata) -> ptd.SetDiffusion:
    return ptd.SetDiffusion.from_anndata(adata, **COLUMNS, scale="counts")


@pytest.fixture(scope="module")
def adata():
    return ptd.datasets.simulated(SMALL, seed=0).adata


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
@pytest.mark.filterwarnings("ignore:Total length of .list.")  # nothing to validate on
def test_adopted_weights_are_those_that_the_trainer_made(adata):
    model = new_model(adata)
    task, data = model.prepare_training(
        adata, holdout={"cell_type": ["T3"]}, n_top_genes=None, network=NETWORK, train=TRAIN
    )
    trainer(6).fit(task, datamodule=data)
    made = {name: weight.clone() for name, weight in task.averaged.state_dict().items()}
    model.adopt(task)
    kept = model.fitted.denoiser.state_dict()
    assert model.fitted.steps == 6
    assert all(torch.equal(kept[name], weight) for name, weight in made.items())
    pred = model.predict(
        adata, perturbations=["P1"], contexts=[{"cell_type": "T3"}], n_cells=12, seed=0
    )
    assert pred.shape == (12, 60)
    assert np.isfinite(pred.X.data).all()


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        (ptd.SetDiffusion, NETWORK),
        *(
            (ptd.CausalBaseline, ptd.DecoderConfig(width=16, n_heads=2, **change))
            for change in (
                {"order": "vocabulary"},
                {"order": "descending"},
                {"likelihood": "negative_binomial"},
                {"order": "descending", "likelihood": "negative_binomial"},
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "") or getattr(value, "order", "sets"),
)
def test_every_weight_that_is_trained_gets_a_gradient(adata, kind, network):
    # Lightning's DDP waits for each of them, and ends with an error when one never comes.
    model = kind.from_anndata(adata, **COLUMNS, scale="counts")
    task, data = model.prepare_training(adata, n_top_genes=None, network=network, train=TRAIN)
    batch = next(iter(data.train_dataloader()))
    task.total_loss(task.learner, batch, "train 0 0").backward()
    trained = {name: w for name, w in task.named_parameters() if w.requires_grad}
    assert trained
    assert [name for name, weight in trained.items() if weight.grad is None] == []


def test_nothing_is_adopted_before_it_was_prepared(adata):
    model = new_model(adata)
    other = new_model(adata)
    task, _ = other.prepare_training(adata, n_top_genes=None, network=NETWORK, train=TRAIN)
    with pytest.raises(NotFittedError, match="prepare_training"):
        model.adopt(task)


def test_a_task_of_another_shape_is_refused(adata):
    model, other = new_model(adata), new_model(adata)
    wide = ptd.NetworkConfig(n_axes=5, n_response_axes=4, width=32, n_blocks=1, n_heads=2)
    model.prepare_training(adata, n_top_genes=None, network=NETWORK, train=TRAIN)
    task, _ = other.prepare_training(adata, n_top_genes=None, network=wide, train=TRAIN)
    with pytest.raises(TrainingError, match="not prepared for this model"):
        model.adopt(task)


def test_fewer_steps_than_a_look_is_a_fit_all_the_same(adata):
    options = ptd.TrainerOptions(progress=False, accelerator="cpu")
    model = new_model(adata).fit(
        adata, n_top_genes=None, network=NETWORK, train=TRAIN, options=options
    )
    assert model.fitted.steps == 6
