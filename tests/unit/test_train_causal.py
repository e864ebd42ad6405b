"""Learning from counts: batches by hand, what is masked, one loss for cells however they stand."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from perturbdiff._errors import TrainingError
from perturbdiff._random import gene_lanes
from perturbdiff.autoregressive import ExpressionBins, GeneOrder, count_loss
from perturbdiff.config import DecoderConfig, TrainConfig
from perturbdiff.data._counts import CountBatch, CountDataModule, CountPopulation
from perturbdiff.model._causal_lesson import context_dispersion, prior_log_rate
from perturbdiff.train import (
    CausalTask,
    TrainerOptions,
    _causal_task,
    choose_steps,
    train,
    two_folds,
)

G, A, K = 6, 3, 2
CONFIG = TrainConfig(
    max_steps=6, check_every=3, n_sets=4, set_size=4, n_controls=5, warmup_steps=2, drop_partner=0.5
)
OPTIONS = TrainerOptions(progress=False, accelerator="cpu")
BINS = ExpressionBins.fit(torch.tensor([1, 2, 5, 6, 9, 30]), 8)


def population(number, n_cells=10):
    draw = np.random.default_rng(number)
    values = torch.from_numpy(draw.normal(size=(n_cells + 8, A)).astype(np.float32))
    counts = draw.poisson(1.0, (n_cells + 8, G))
    size = torch.from_numpy(draw.uniform(1e3, 2e3, n_cells + 8))
    return CountPopulation(
        name=f"p{number}",
        x0=values[:n_cells, :K],
        partner=torch.arange(n_cells) % 8,
        control=values[n_cells:],
        shift=values[0, :K],
        members=torch.tensor([1]),
        features=torch.zeros(0),
        covariates=torch.tensor([1 + number % 2]),
        counts=sp.csr_array(counts[:n_cells]),
        library_size=size[:n_cells],
        control_counts=sp.csr_array(counts[n_cells:]),
        control_size=size[n_cells:],
        level=torch.rand(G),
        rise=torch.rand(G),
        log_rate=torch.full((G,), 1e-3).log(),
    )


@pytest.fixture(scope="module")
def populations():
    torch_state = torch.get_rng_state()
    cells = [population(number) for number in range(5)]
    torch.set_rng_state(torch_state)
    return cells


def task(order="vocabulary", seed=0, config=CONFIG, **changes):
    names = [f"G{number}" for number in range(G)]
    orders = {"vocabulary": GeneOrder.vocabulary(G), "descending": GeneOrder.descending(G)}
    network = DecoderConfig(
        order=order, n_axes=A, n_response_axes=K, width=8, n_heads=2, hidden=8, gene_width=3,
        n_bins=len(BINS), **changes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return CausalTask(
        network, config, bins=BINS, order=orders[order], seed=seed,
        gene_tensors={
            "axes": torch.randn(G, A, generator=generator),
            "log_dispersion": torch.zeros(G),
            "lanes": gene_lanes(names),
        },
        sizes={"n_perturbations": 1, "n_features": 0, "covariate_sizes": [2]},
    )  # fmt: skip


def batch_of(populations, config=CONFIG):
    return next(iter(CountDataModule(populations, config=config, seed=0).train_dataloader()))


# Batches


def test_a_batch_holds_counts_of_treated_cells_and_their_partners(populations):
    sets = CountDataModule(populations, config=CONFIG, seed=0).train
    own, rows, context = sets.drawn(7)
    batch = sets[7]
    assert batch.counts[0].tolist() == own.counts[rows].toarray().tolist()
    np.testing.assert_allclose(batch.log_size[0].exp(), own.library_size[rows], rtol=1e-6)
    partner = own.partner[rows].numpy()
    depth = own.control_size[partner].numpy()[:, None] / 1e4
    expected = np.log1p(own.control_counts[partner].toarray() / depth)
    np.testing.assert_allclose(batch.partner[0], expected, rtol=1e-6)
    torch.testing.assert_close(batch.context.partner, context.partner)
    torch.testing.assert_close(batch.log_rate[0], own.log_rate)


def test_small_populations_are_padded(populations):
    few = population(9, n_cells=3)  # in sets of 4
    batch = CountDataModule([few], config=CONFIG, seed=0).train[0]
    assert batch.context.mask.tolist() == [[True, True, True, False]]
    assert batch.counts[0, 3].tolist() == [0] * G
    assert bool(batch.partner.isfinite().all())


def test_other_counts_are_other_data(populations):
    first = CountDataModule(populations, config=CONFIG, seed=0)
    counts = populations[0].counts.copy()
    counts.data = counts.data + 1
    changed = [replace(populations[0], counts=counts), *populations[1:]]
    digests = {
        first.digest,
        CountDataModule(populations, config=CONFIG, seed=1).digest,
        CountDataModule(changed, config=CONFIG, seed=0).digest,
    }
    assert len(digests) == 3
    assert first.digest == CountDataModule(populations, config=CONFIG, seed=0).digest


# What the prior says of counts


def test_dispersion_and_rate_are_those_that_counts_were_drawn_from():
    """Negative binomials of known mean and over-dispersion, at libraries of several sizes."""
    draw = np.random.default_rng(0)
    size = draw.uniform(5e3, 2e4, 20_000)
    rate, dispersion = np.array([1e-4, 5e-4, 1e-3]), np.array([0.2, 1.0, 3.0])
    shape, mean = 1 / dispersion, size[:, None] * rate
    counts = draw.negative_binomial(shape, shape / (shape + mean))
    pooled = torch.full((3,), 1.5).log()
    change = context_dispersion(sp.csr_array(counts), size, pooled)
    np.testing.assert_allclose((pooled + change).exp(), dispersion, rtol=0.1)
    value = torch.from_numpy(np.log1p(counts / size[:, None] * 1e4).mean(0))
    found = prior_log_rate(torch.from_numpy(size), value, torch.from_numpy(dispersion).log())
    np.testing.assert_allclose(found.exp(), rate, rtol=0.1)
    few = context_dispersion(sp.csr_array(counts[:3] * 0), size[:3], pooled)
    np.testing.assert_allclose(few, 0, atol=1e-6)


# The loss


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
@pytest.mark.parametrize("likelihood", ["bins", "negative_binomial"])
def test_masked_cells_add_nothing(populations, order, likelihood):
    whole = task(order, likelihood=likelihood)
    batch = batch_of([population(9, n_cells=3)])
    losses = []
    for junk in (0, 7):
        counts = batch.counts.clone()
        counts[:, 3] = junk
        losses.append(float(whole.total_loss(whole.averaged, replace(batch, counts=counts), "x")))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 0


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
@pytest.mark.parametrize("likelihood", ["bins", "negative_binomial"])
def test_every_trained_weight_takes_part_in_the_loss(populations, order, likelihood):
    """Several devices would wait for a gradient that never comes."""
    whole = task(order, likelihood=likelihood)
    whole.total_loss(whole.decoder, batch_of(populations), "x").backward()
    idle = [
        name for name, weight in whole.decoder.named_parameters()
        if weight.requires_grad and weight.grad is None
    ]  # fmt: skip
    assert idle == []


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
def test_counts_are_learnt_under_what_decoding_draws_from(populations, order, monkeypatch):
    whole = task(order, likelihood="negative_binomial")
    decoder, seen = whole.decoder, {}
    for number, weight in enumerate(decoder.parameters()):  # as training would have moved it
        rng = torch.Generator().manual_seed(number)
        weight.data += 0.1 * torch.randn(weight.shape, generator=rng)

    def watched(name, call):
        def watching(*given, **named):
            seen[name] = given, call(*given, **named)
            return seen[name][1]

        return watching

    monkeypatch.setattr(_causal_task, "count_loss", watched("loss", count_loss))
    monkeypatch.setattr(decoder, "rates", watched("rates", decoder.rates))
    monkeypatch.setattr(decoder, "forward", watched("forward", decoder.forward))
    whole.total_loss(decoder, batch_of(populations), "x")
    (log_mean, log_dispersion, _), _ = seen["loss"]
    (_, gene, _), _ = seen["rates"]
    hidden, cache = seen["forward"][1]
    torch.testing.assert_close(
        decoder.log_mass(log_mean, log_dispersion), decoder.bin_logits(hidden, gene, cache)
    )


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
def test_likelihoods_lose_alike_where_a_bin_is_one_count_and_none_is_free(populations, order):
    """A gene that is drawn is there and no higher than the one before, under either."""
    losses, batch = [], batch_of(populations)
    batch = replace(batch, counts=batch.counts.clamp_max(4))
    for likelihood in ("bins", "negative_binomial"):
        whole = task(order, likelihood=likelihood, smoothing=0.0)
        for number, weight in enumerate(whole.decoder.parameters()):
            rng = torch.Generator().manual_seed(number)
            weight.data += 0.1 * torch.randn(weight.shape, generator=rng)
        whole.decoder.out.weight.data[2:] = 0
        whole.decoder.out.bias.data[2:] = 0
        losses.append(float(whole.total_loss(whole.decoder, batch, "x").detach()))
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)  # known orders: of all counts, not bins


def test_the_first_loss_is_that_of_the_prior(populations):
    """An untrained decoder says bins of the negative binomial that the prior states."""
    whole, batch = task(smoothing=0.0), batch_of(populations)
    log_mean = batch.log_rate[:, None] + batch.log_size[..., None]
    mass = whole.averaged.log_mass(log_mean, torch.zeros_like(log_mean)).log_softmax(-1)
    expected = -mass.gather(-1, BINS.encode(batch.counts)[..., None]).mean()
    found = whole.total_loss(whole.averaged, batch, "x")
    torch.testing.assert_close(found, expected)


def test_ties_are_drawn_anew_at_each_step_and_fixed_in_validation(populations):
    """An untrained decoder draws genes by how often they are there: ties do not matter yet."""
    whole, batch = task("descending"), batch_of(populations)
    with torch.no_grad():
        whole.averaged.choose.weight.normal_(generator=torch.Generator().manual_seed(0))
    losses = [
        float(whole.total_loss(whole.averaged, batch, stream))
        for stream in ("train 0 0", "train 0 0", "train 1 0")
    ]
    assert losses[0] == losses[1] != losses[2]


# Training


def weights(trained):
    return {name: value.clone() for name, value in trained.state_dict().items()}


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
def test_a_resumed_run_ends_with_the_same_weights(populations, tmp_path, order):
    def run(steps, **options):
        data = CountDataModule(populations, config=CONFIG, seed=0)
        own = TrainerOptions(progress=False, accelerator="cpu", **options)
        return weights(train(task(order), data, steps=steps, options=own))

    whole = run(6)
    run(3, checkpoint_dir=tmp_path)
    assert equal(run(6, checkpoint_dir=tmp_path, resume=True), whole)
    assert all(bool(value.isfinite().all()) for value in whole.values())
    data = CountDataModule(populations, config=CONFIG, seed=0)
    resume = TrainerOptions(progress=False, accelerator="cpu", checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(TrainingError, match="seed was 0 and is now 1"):
        train(task(order, seed=1), data, steps=6, options=resume)


def test_inner_folds_choose_steps_for_either_task(populations):
    folds = [
        (task(), CountDataModule(*part, config=CONFIG, seed=0)) for part in two_folds(populations)
    ]
    assert choose_steps(folds, config=CONFIG, options=OPTIONS) in (3, 6)


def test_training_lowers_the_loss(populations):
    config = replace(CONFIG, max_steps=40, check_every=40, learning_rate=1e-2)
    whole, batch = task(config=config), batch_of(populations)
    before = float(whole.total_loss(whole.averaged, batch, "x"))
    trained = train(
        whole, CountDataModule(populations, config=config, seed=0), steps=40, options=OPTIONS
    )
    assert float(trained.total_loss(trained.averaged, batch, "x")) < 0.95 * before
    assert isinstance(batch, CountBatch)
