"""The benchmark of decoding measures what it says."""

import pytest
import torch

import benchmarks.decoding
from benchmarks.decoding import LENGTHS, Subject, measured, recomputed, told
from perturbdiff._batch import Context
from perturbdiff._random import gene_lanes
from perturbdiff.autoregressive import GeneOrder
from perturbdiff.config import DecoderConfig
from perturbdiff.data._counts import CountBatch
from perturbdiff.nn import CausalDecoder, DraftDecoder

G, AXES, V, WIDTH, SETS, CELLS = 6, 3, 6, 8, 16, 4


def subject(order):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(SETS, *shape, generator=generator)

    ones = torch.ones(SETS, dtype=torch.bool)
    context = Context(
        partner=draw(CELLS, AXES),
        has_partner=ones,
        control=draw(2, AXES),
        control_mask=ones[:, None].expand(-1, 2),
        mask=ones[:, None].expand(-1, CELLS),
        shift=draw(2),
        members=ones[:, None].long(),
        features=draw(0),
        covariates=torch.zeros(SETS, 0, dtype=torch.int64),
        conditional=ones,
    )
    batch = CountBatch(
        counts=draw(CELLS, G).exp().long(),
        partner=draw(CELLS, G),
        log_size=draw(CELLS),
        level=draw(G),
        rise=draw(G),
        log_rate=draw(G),
        context=context,
    )
    decoder = CausalDecoder(
        DecoderConfig(
            order=order, n_bins=V, n_axes=AXES, n_response_axes=2, width=WIDTH, n_blocks=1,
            n_heads=2, hidden=8, gene_width=2,
        ),
        axes=torch.randn(G, AXES, generator=generator),
        log_dispersion=torch.zeros(G),
        first_count=torch.arange(V),
        last_count=9,
        n_perturbations=1,
    ).eval()  # fmt: skip
    named = GeneOrder.descending(G) if order == "descending" else GeneOrder.vocabulary(G)
    draft = None if named.drawn else DraftDecoder(WIDTH, V)
    lanes = gene_lanes([f"G{number}" for number in range(G)])
    return Subject(decoder=decoder, order=named, lanes=lanes, batch=batch, draft=draft)


@pytest.mark.parametrize("order", ["vocabulary", "descending"])
def test_every_figure_of_a_decoder_is_there(order, monkeypatch):
    monkeypatch.setattr(benchmarks.decoding, "SIZES", (1, 4, 8))
    found = measured(subject(order), repeats=1)
    assert [row["cells"] for row in found["by_size"]] == [1, 4, 8]
    for row in found["by_size"]:
        assert row["cache_bytes"] == row["cache_bytes_by_formula"]
        assert row["network_calls"] <= G
    assert found["slots"]["cells"] == 24
    if order == "descending":
        assert "speculative" not in found
        return
    made = {"cpu": "a processor", "threads": 1, "packages": {"torch": "2"}}
    settings = dict.fromkeys(("genes", "sets", "steps", "draft_steps"), 1)
    text = told({"made_with": made, "settings": settings, "decoders": [found]})
    first = [line.split("|")[1].strip() for line in text.split("\n") if line.startswith("| ")]
    assert first[:4] == ["cells", "1", "4", "8"]
    rows = found["speculative"]
    assert len(rows) == 2 * 2 * len(LENGTHS)
    for row in rows:
        assert row["the_very_cells"] or row["checked_by"] == "rejection"
        assert 0 < row["acceptance"] <= 1
        assert 1 <= row["genes_per_call"] <= row["draft_length"] + 1


def test_the_prefix_is_computed_anew_for_every_gene():
    made, lengths = subject("vocabulary"), []
    made.decoder.register_forward_hook(
        lambda _module, _args, kept, _out: lengths.append(kept["said_gene"].shape[1]),
        with_kwargs=True,
    )
    assert recomputed(made, 4, every=True) > 0
    assert lengths[1:] == list(range(1, G + 1))  # the first is to warm up


def test_cells_are_the_first_of_as_few_sets_as_hold_them():
    made = subject("vocabulary")
    for n_cells, shape in ((1, (1, 1)), (3, (1, 3)), (8, (2, 4))):
        assert made.cells(n_cells).counts.shape[:2] == shape
