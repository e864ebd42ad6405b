"""Settings that are fine one by one, together and at their ends."""

import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ExpressionError
from perturbdiff.autoregressive import DrawnOrder
from perturbdiff.model import _causal_fitted, _fitted

COLUMNS = {
    "perturbation_key": "perturbation",
    "control": "control",
    "covariate_keys": ["cell_type"],
    "embedding_key": "perturbation_features",
}
SHAPE = {"n_axes": 3, "n_response_axes": 2, "width": 8, "n_blocks": 1, "n_heads": 2}
TRAIN = {"max_steps": 2, "check_every": 2, "n_sets": 2, "set_size": 3, "n_controls": 4}
CONTEXTS = [{"cell_type": "T1"}]
FEW_STEPS = ptd.SampleConfig(n_steps=2, set_size=5)


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    """Fewer pilot cells than usual, since they are most of the work here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 64)
        patch.setattr(_causal_fitted, "PILOT_CELLS", 64)
        yield


def sibling(adata, *, train=None, n_top_genes=12, **network):
    shape = {"draft_steps": 0, "n_bins": 8, "gene_width": 4, **SHAPE} | network
    return ptd.CausalBaseline.from_anndata(adata, **COLUMNS).fit(
        adata,
        holdout={"cell_type": ["T1"]},
        n_top_genes=n_top_genes,
        network=ptd.DecoderConfig(**shape),
        train=ptd.TrainConfig(**(TRAIN | (train or {}))),
        options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )


def ask(model, adata, **settings):
    settings = {"perturbations": ["P1", "P2"], "contexts": CONTEXTS, "n_cells": 20} | settings
    return model.predict(adata, **settings)


@pytest.mark.parametrize("temperature", [1e3, 1e30])
def test_hot_cells_that_draw_their_genes_stay_possible(simulated_cells, temperature):
    """A gene that is said is there, so none is said twice and no cell is said longer than it is."""
    model = sibling(simulated_cells, order="descending")
    bins = []
    advance = DrawnOrder.advance

    def watched(way, cells, *, reach):
        advance(way, cells, reach=reach)
        bins.append(int((cells.bins > 0).sum(1).ne(cells.position).sum()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrawnOrder, "advance", watched)
        ask(model, simulated_cells, decode=ptd.DecodeConfig(temperature=temperature))
    assert bins == [0] * len(bins)
    assert bins


def test_cells_that_are_no_numbers_are_refused(simulated_cells, small_fit):
    model = small_fit(simulated_cells)
    model.fitted.denoiser.network.out.bias.data.fill_(float("inf"))
    with pytest.raises(ExpressionError, match=r"no finite numbers.*train\.learning_rate"):
        ask(model, simulated_cells, sample=FEW_STEPS)


def test_levels_that_no_number_tells_apart_are_refused():
    with pytest.raises(ConfigError, match=r"sample\.rho = 0.*must be above 0"):
        ptd.SampleConfig(rho=0.0)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_guidance_wants_a_null_condition_that_was_trained(simulated_cells, small_fit, scale):
    train = ptd.TrainConfig(**TRAIN, drop_condition=0.0)
    model = small_fit(simulated_cells, train=train)
    sample = ptd.SampleConfig(n_steps=2, set_size=5, guidance_scale=scale)
    for constraints in ((), ptd.AtLeast(model.registry.genes[0], 0.1)):
        with pytest.raises(ConfigError, match=r"guidance_scale = .*train\.drop_condition above 0"):
            ask(model, simulated_cells, sample=sample, constraints=constraints)
    assert ask(model, simulated_cells, sample=FEW_STEPS).n_obs == 40


@pytest.mark.parametrize("name", ["drop_condition", "drop_partner", "drop_identity"])
def test_what_predictions_tell_the_network_is_not_always_dropped(name):
    assert getattr(ptd.TrainConfig(**{name: 0.99}), name) == 0.99
    with pytest.raises(ConfigError, match=rf"train\.{name} = 1.*: must be below 1"):
        ptd.TrainConfig(**{name: 1.0})


@pytest.mark.parametrize("way", ["best_of", "branch", "particles", "depth_first"])
def test_a_search_may_judge_library_sizes_alone(small_model, simulated_cells, way):
    """No gene is looked at then."""
    pred = ask(
        small_model, simulated_cells, sample=FEW_STEPS, enforce=way,
        constraints=ptd.LibrarySize(at_most=1500),
    )  # fmt: skip
    found = pred.uns["perturbdiff"]["constraints"]
    assert (found["reached"] < found["reached_before"]).all()


def differing(left, right):
    return (left.layers["counts"] != right.layers["counts"]).nnz / left.X.size


@pytest.mark.parametrize("n_genes", [2, 5, 8, 12])
def test_as_many_genes_are_chosen_as_were_asked_for(simulated_cells, n_genes):
    """Of few genes many tie; which of them are taken does not depend on where they stand."""
    chosen = [
        ptd.MeanShift.from_anndata(file, **COLUMNS).fit(file, n_top_genes=n_genes).registry.genes
        for file in (simulated_cells, simulated_cells[:, ::-1].copy())
    ]
    assert [len(genes) for genes in chosen] == [n_genes] * 2
    assert set(chosen[0]) == set(chosen[1])


@pytest.mark.parametrize("n_genes", [2, 3])
def test_a_draft_guesses_farther_than_there_are_genes(simulated_cells, n_genes):
    model = sibling(simulated_cells, n_top_genes=n_genes, draft_steps=20)
    plain, guessed = (
        ask(model, simulated_cells, decode=ptd.DecodeConfig(draft_length=length))
        for length in (0, 8)
    )
    assert differing(plain, guessed) <= 1e-5
