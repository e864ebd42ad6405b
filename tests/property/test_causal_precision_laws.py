"""Laws of the autoregressive sibling in lower precision: what stays exact, and what comes close."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.nn import functional

import perturbdiff as ptd
from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff._random import cell_keys, gene_lanes
from perturbdiff.autoregressive import (
    DrawnOrder,
    Engine,
    GeneOrder,
    Guessing,
    KnownOrder,
    Speculative,
    decode,
)
from perturbdiff.model import _causal_fitted, _fitted
from perturbdiff.model._quote_causal import DecoderCost, _task
from perturbdiff.model._quote_points import decoder_shape
from perturbdiff.nn import (
    CausalDecoder,
    DraftDecoder,
    GeneInputs,
    KeyValueCache,
    _causal_block,
)
from perturbdiff.nn._causal_block import looked_back
from perturbdiff.profiling import Probe, watching

LOWER = ("bfloat16", "int8")
COLUMNS = {
    "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
    "embedding_key": "perturbation_features",
}  # fmt: skip
B, R, G, A, WIDTH = 4, 5, 12, 4, 32
FIRST = torch.tensor([0, 1, 2, 3, 4, 5, 8, 20])
V = len(FIRST)
LANES = gene_lanes([f"G{number}" for number in range(G)])
PILOT = 64
PLAIN = ptd.DecodeConfig(draft_length=0)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(module):
    """Weights as training may leave them; none needs a gradient."""
    for number, weight in enumerate(module.requires_grad_(requires_grad=False).parameters()):
        weight.add_(0.1 * numbers(*weight.shape, seed=number))
    return module.eval()


def decoder(order="random"):
    config = ptd.DecoderConfig(
        order=order, n_axes=A, n_response_axes=3, width=WIDTH, n_heads=2, hidden=24, gene_width=4,
        n_bins=V,
    )  # fmt: skip
    made = CausalDecoder(
        config, axes=numbers(G, A), log_dispersion=numbers(G, seed=1), first_count=FIRST,
        last_count=60, n_perturbations=2,
    )  # fmt: skip
    return moved(made)


def inputs():
    """Cells that are sets of their own."""
    true = torch.ones(B, 1, dtype=torch.bool)
    context = Context(
        partner=numbers(B, 1, A, seed=2),
        has_partner=true[:, 0],
        control=numbers(B, R, A, seed=3),
        control_mask=true.expand(-1, R),
        mask=true,
        shift=numbers(B, 3, seed=4),
        members=torch.ones(B, 1, dtype=torch.int64),
        features=torch.zeros(B, 0),
        covariates=torch.zeros(B, 0, dtype=torch.int64),
        conditional=true[:, 0],
    )
    values = {f.name: numbers(B, G, seed=5 + i) for i, f in enumerate(fields(GeneInputs))}
    return context, GeneInputs(**values)


def said():
    generator = torch.Generator().manual_seed(10)
    asked = torch.stack([torch.randperm(G, generator=generator) for _ in range(B)])
    bins = torch.randint(0, V, (B, G), generator=generator)
    return {
        "said_gene": torch.cat([torch.full((B, 1), G), asked[:, :-1]], dim=1),
        "said_bin": torch.cat([torch.full((B, 1), V), bins[:, :-1]], dim=1),
        "next_gene": asked,
    }


def logits(network, *, one_by_one):
    """Of whole sequences at once, or one gene after another."""
    (context, genes), words = inputs(), said()
    if not one_by_one:
        hidden, cache = network(context, genes, **words)
        return network.bin_logits(hidden, words["next_gene"], cache)
    cache, found = network.prefill(context, genes), []
    for place in range(G):
        own = {name: value[:, place : place + 1] for name, value in words.items()}
        hidden, cache = network.decode(cache, **own)
        found.append(network.bin_logits(hidden, own["next_gene"], cache))
    return torch.cat(found, dim=1)


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


# Attention over what is kept in bfloat16


def kept(n_cells=7, places=40, positions=3):
    query, keys, values = (
        numbers(n_cells, 2, n, 16, seed=n).bfloat16() for n in (positions, places, places + 1)
    )
    visible = numbers(n_cells, 1, positions, places, seed=1) > 0
    return query, keys, values[:, :, :places], visible


@pytest.mark.parametrize("widened", [1, 10_000, 1 << 30])
def test_looking_back_is_attention_of_the_numbers_that_are_kept(monkeypatch, widened):
    """However many cells are widened at a time, and the last time fewer."""
    monkeypatch.setattr(_causal_block, "_WIDENED", widened)
    query, keys, values, visible = kept()
    found = looked_back(query, keys, values, visible=visible)
    wide = [x.float() for x in (query, keys, values)]
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=visible)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_cells_that_are_widened_together_do_not_touch_each_other():
    query, keys, values, visible = kept()
    whole = looked_back(query, keys, values, visible=visible)
    alone = looked_back(query[2:3], keys[2:3], values[2:3], visible=visible[2:3])
    assert torch.equal(alone, whole[2:3])


# The network


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.01), ("int8", 0.1)])
def test_lower_precision_hardly_moves_what_the_network_says(precision, most, one_by_one):
    network = decoder()
    whole = logits(network, one_by_one=one_by_one)
    lower = logits(network.lowered(precision), one_by_one=one_by_one)
    assert 0 < error(lower, whole) < most


@pytest.mark.parametrize("precision", LOWER)
def test_one_by_one_as_all_at_once_to_the_precision_of_the_network(precision):
    network = decoder().lowered(precision)
    step, whole = (logits(network, one_by_one=way) for way in (True, False))
    assert error(step, whole) < 0.005


@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize("order", ["random", "descending"])
def test_what_choices_hang_on_stays_in_float32(precision, order):
    network = decoder(order).lowered(precision)
    context, genes = inputs()
    cache, words = network.prefill(context, genes), said()
    for name in ("keys", "values", "asked"):
        assert getattr(cache, name).dtype == torch.bfloat16
    progress = network.progress_of(genes, words["said_gene"])[0] if network.descending else None
    asked = None if network.descending else words["next_gene"]
    hidden, _ = network.decode(
        cache, words["said_gene"], words["said_bin"], next_gene=asked, progress=progress
    )
    found = [cache.modulation, cache.expected, hidden]
    found += [network.bin_logits(hidden, words["next_gene"], cache)]
    found += [network.gene_logits(hidden, cache)] if network.descending else []
    assert {x.dtype for x in found} == {torch.float32}
    whole = decoder(order).prefill(context, genes)
    assert cache.bytes * 2 == whole.bytes


@pytest.mark.parametrize("precision", ["float32", *LOWER])
def test_sums_over_what_was_said_are_exact(precision):
    """In bfloat16 there is no number between 256 and 258."""
    network = decoder("descending").lowered(precision)
    made = DrawnOrder(network, GeneOrder.descending(G), LANES)
    cells = made.begin(network.prefill(*inputs()), cell_keys(1, "A", 0, n_cells=B))
    assert cells.tally.dtype == torch.float32
    draft = DraftDecoder(WIDTH, V).lowered(precision)
    guessing = Speculative(
        decoder().lowered(precision), GeneOrder.vocabulary(G), LANES, draft=draft,
        guessing=Guessing(length=2),
    )  # fmt: skip
    assert guessing.begin(cells.cache, cells.keys).hidden.dtype == torch.float32


@pytest.mark.parametrize("precision", LOWER)
def test_prefill_and_decode_may_run_in_two_pools(precision):
    """What travels is half as large, and cells in slots of an engine are what they are alone."""
    network = decoder().lowered(precision)
    made = KnownOrder(network, GeneOrder.random([f"G{number}" for number in range(G)], 3), LANES)
    keys = cell_keys(1, "A", 0, n_cells=B)
    alone = decode(made, network.prefill(*inputs()), keys)[0]
    sent = network.prefill(*inputs(), room=False)
    arrived = KeyValueCache.from_state(load_tensors(save_tensors(sent.state())))
    assert arrived.keys.dtype == torch.bfloat16
    engine = Engine(made, n_slots=3, n_prefix=R + 1)
    engine.submit(arrived, keys)
    found = {}
    while not engine.idle:
        found |= {one.cell: one.bins for one in engine.step()}
    assert torch.equal(torch.stack([found[cell] for cell in range(B)]), alone)


@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.01), ("int8", 0.01)])
def test_a_draft_in_lower_precision_guesses_nearly_the_same(precision, most):
    draft, network = moved(DraftDecoder(WIDTH, V)), decoder()
    whole, lower = (one.prefill(*inputs()) for one in (network, network.lowered(precision)))
    given = numbers(B, 1, WIDTH), torch.full((B, 1), 2), said()["next_gene"]
    ours = draft.lowered(precision)(*given, cache=lower)
    theirs = draft(*given, cache=whole)
    assert ours.dtype == torch.float32
    assert 0 < error(ours, theirs) < most


def test_float32_is_a_copy_to_the_bit():
    network = decoder()
    copied = network.lowered("float32")
    assert torch.equal(logits(copied, one_by_one=True), logits(network, one_by_one=True))
    assert copied.out.weight is not network.out.weight


# The model


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    with pytest.MonkeyPatch.context() as patch:
        for module in (_fitted, _causal_fitted):
            patch.setattr(module, "PILOT_CELLS", PILOT)
        yield


@pytest.fixture(scope="module")
def model(simulated_cells):
    network = ptd.DecoderConfig(
        n_axes=5, n_response_axes=4, width=16, n_heads=2, gene_width=4, draft_steps=20
    )
    train = ptd.TrainConfig(
        max_steps=6, check_every=3, n_sets=4, set_size=4, n_controls=6, warmup_steps=2
    )
    made = ptd.CausalBaseline.from_anndata(simulated_cells, **COLUMNS)
    return made.fit(
        simulated_cells, holdout={"cell_type": ["T1"]}, n_top_genes=30, network=network,
        train=train, options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )  # fmt: skip


@pytest.fixture(scope="module", params=LOWER)
def lower(request, model):
    return model.in_precision(request.param)


def cells(model, adata, **changes):
    question = {
        "perturbations": ["P1", "P3"], "contexts": [{"cell_type": "T1"}], "n_cells": 40, "seed": 5,
    }  # fmt: skip
    return model.predict(adata, **(question | changes))


def counts(pred):
    return pred.layers["counts"].toarray()


@pytest.mark.parametrize("decoding", ["raw", "transport"])
def test_guesses_change_no_cell_but_for_ties_of_rounding(lower, simulated_cells, decoding):
    """Guessing looks at several genes of a cell in one product; plain decoding at one.

    Both are the same lowered network, so cells are equal to its precision: a count may differ
    where its uniform number falls within rounding of the edge between two bins, and none does here.
    """
    plain = cells(lower, simulated_cells, decoding=decoding, decode=PLAIN)
    guessed = cells(
        lower, simulated_cells, decoding=decoding, decode=ptd.DecodeConfig(draft_length=6)
    )
    assert np.array_equal(counts(plain), counts(guessed))
    assert guessed.uns["perturbdiff"]["nfe"] <= plain.uns["perturbdiff"]["nfe"]


def test_what_else_is_asked_is_invisible_to_the_precision_of_the_network(lower, simulated_cells):
    together = cells(lower, simulated_cells, decode=PLAIN)
    alone = cells(lower, simulated_cells, decode=PLAIN, perturbations=["P3"], n_cells=7)
    assert np.array_equal(counts(together)[40:47], counts(alone))


def test_saved_in_lower_precision_is_the_same(lower, model, simulated_cells, tmp_path):
    precision = lower.fitted.precision
    pred = cells(lower, simulated_cells)
    assert pred.uns["perturbdiff"]["precision"] == precision
    assert lower.checksum != model.checksum
    lower.save(tmp_path / "lower")
    again = ptd.load(tmp_path / "lower")
    assert again.checksum == lower.checksum
    assert again.fitted.precision == precision
    assert np.array_equal(counts(pred), counts(cells(again, simulated_cells)))
    kinds = {tensor.dtype for tensor in again.fitted.decoder.state_dict().values()}
    assert (torch.int8 in kinds) == (precision == "int8")
    assert torch.bfloat16 in kinds
    model.save(tmp_path / "whole")
    size = [(tmp_path / name / "arrays.safetensors").stat().st_size for name in ("lower", "whole")]
    assert size[0] < size[1]
    assert ptd.load(tmp_path / "whole").checksum == model.checksum


def test_counts_are_about_as_many(lower, model, simulated_cells):
    ours, theirs = (counts(cells(one, simulated_cells)) for one in (lower, model))
    assert (ours != theirs).mean() < 0.05
    assert ours.mean() == pytest.approx(theirs.mean(), rel=0.02)


def test_masks_hold_in_lower_precision(lower, simulated_cells):
    gene = lower.registry.genes[0]
    rule = ptd.AtLeast(gene, 3, scale="counts")
    pred = cells(lower, simulated_cells, constraints=rule, enforce="hard")
    assert (pred[:, gene].layers["counts"].toarray() >= 3).all()


def test_other_precisions_are_refused(model, lower):
    for name in ("float16", "float8"):
        with pytest.raises(ConfigError, match=r"one of float32, bfloat16, int8 for an auto"):
            model.in_precision(name)
    with pytest.raises(ConfigError, match="begin with the one in float32"):
        lower.in_precision("bfloat16")
    assert model.in_precision("float32").checksum == model.checksum


def test_a_probe_counts_half_the_bytes_of_the_cache(lower, model, simulated_cells):
    found = []
    for one in (model, lower):
        points, probe = one.probe_points(), Probe()
        assert points.dtype == one.fitted.precision
        with watching(probe, points.stages), probe.counts(points.weights):
            probe.run(lambda one=one: cells(one, simulated_cells, n_cells=6, decode=PLAIN))
        found.append(probe.phases["decode steps"].work)
    assert found[0].cache_bytes == pytest.approx(2 * found[1].cache_bytes, rel=0.01)
    assert found[0].operations == pytest.approx(found[1].operations, rel=0.01)
    assert found[0].weight_bytes > found[1].weight_bytes


def test_a_quote_knows_the_bytes_of_the_cache(lower, model, simulated_cells):
    task = _task(model, simulated_cells, missing_genes="refuse")
    sizes = []
    for one in (model, lower):
        cache = one.fitted.sampler.prefilled([(task, [0])], 3)
        cost = object.__new__(DecoderCost)
        cost.fitted, cost.shape = one.fitted, decoder_shape(one.fitted)
        assert cost.cache_bytes(3) == cache.bytes
        sizes.append(cache.bytes)
    assert sizes[0] == 2 * sizes[1]
