"""Laws of decoding: a cell is the same from a cache, alone, in a batch, in a slot, guessed ahead.

The network is the real one, with random weights and in float64 where values are compared.
"""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from perturbdiff._batch import Context
from perturbdiff._errors import ConfigError
from perturbdiff._random import cell_keys, gene_lanes
from perturbdiff.autoregressive import (
    DrawnOrder,
    Engine,
    GeneOrder,
    Guessing,
    KnownOrder,
    Sampling,
    Speculative,
    decode,
)
from perturbdiff.autoregressive._order import possible_bins, possible_genes
from perturbdiff.config import DecoderConfig
from perturbdiff.nn import CausalDecoder, DraftDecoder, GeneInputs, KeyValueCache

G, V, AXES, RESPONSE, R, WIDTH, BLOCKS = 11, 8, 5, 4, 3, 16, 2
NAMES = [f"G{number}" for number in range(G)]
LANES = gene_lanes(NAMES)
WAYS = ("known", "drawn", "guessed")


def randomised(module):
    """Weights by a fixed generator, none of them zero, so that nothing is switched off."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        drawn = 0.4 * torch.randn(parameter.shape, generator=generator)
        parameter.data = ("norm.weight" in name) + drawn.to(parameter)
    return module


def network(order="vocabulary", dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = CausalDecoder(
        DecoderConfig(
            order=order, n_bins=V, n_axes=AXES, n_response_axes=RESPONSE, width=WIDTH,
            n_blocks=BLOCKS, n_heads=2, hidden=24, gene_width=6,
        ),
        axes=torch.randn(G, AXES, generator=generator),
        log_dispersion=torch.zeros(G),
        first_count=torch.tensor([0, 1, 2, 3, 4, 5, 8, 12]),
        last_count=30,
        n_perturbations=2,
        covariate_sizes=(2,),
    )  # fmt: skip
    return randomised(made).to(dtype).eval()


def inputs(n_cells, dtype=torch.float64, n_controls=R):
    """Context and genes of some cells, each its own set."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(n_cells, *shape, generator=generator, dtype=torch.float64).to(dtype)

    ones = torch.ones(n_cells, 1, dtype=torch.int64)
    context = Context(
        partner=draw(1, AXES),
        has_partner=torch.ones(n_cells, dtype=torch.bool),
        control=draw(R, AXES)[:, :n_controls],
        control_mask=torch.ones(n_cells, n_controls, dtype=torch.bool),
        mask=ones.bool(),
        shift=draw(RESPONSE),
        members=ones,
        features=draw(0),
        covariates=ones,
        conditional=torch.ones(n_cells, dtype=torch.bool),
    )
    values = {field.name: draw(G) for field in fields(GeneInputs)}
    return context, GeneInputs(**values)


def caches(model, n_cells, **options):
    with torch.inference_mode():
        dtype = model.axes.dtype
        return model.prefill(*inputs(n_cells, dtype), **options)


def decoding(way, *, dtype=torch.float64, lanes=LANES, **options):
    """A way of decoding with its own network."""
    model = network("descending" if way == "drawn" else "vocabulary", dtype).to(lanes.device)
    if way == "drawn":
        return DrawnOrder(model, GeneOrder.descending(G), lanes, **options)
    order = GeneOrder.random(NAMES, 3)
    if way == "known":
        return KnownOrder(model, order, lanes, **options)
    draft = randomised(DraftDecoder(WIDTH, V)).to(dtype)
    guessing = options.pop("guessing", Guessing(length=3))
    return Speculative(model, order, lanes, draft=draft, guessing=guessing, **options)


def keys_of(n_cells):
    return cell_keys(5, "T1 | A", 0, n_cells=n_cells)


def cells(way, n_cells, **options):
    made = decoding(way, **options)
    return decode(made, caches(made.network, n_cells), keys_of(n_cells))[0]


# The cache


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=True), Sampling(top_p=0.7)])
def test_from_a_cache_as_from_the_beginning(sampling):
    made = decoding("known", sampling=sampling)
    found, n_calls = decode(made, caches(made.network, 4), keys_of(4))
    assert n_calls == G
    said_gene, said_bin = torch.full((4, G), G), torch.full((4, G), V)
    numbers = made.begin(caches(made.network, 4), keys_of(4)).uniform[:, 0]
    with torch.inference_mode():
        for place, gene in enumerate(made.order.tolist()):
            asked = made.order[: place + 1].expand(4, -1)
            hidden, cache = made.network(
                *inputs(4),
                said_gene=said_gene[:, : place + 1],
                said_bin=said_bin[:, : place + 1],
                next_gene=asked,
            )
            logits = made.network.bin_logits(hidden, asked, cache)[:, -1]
            own = sampling.choose(logits, numbers[:, gene])
            assert torch.equal(own, found[:, gene])
            if place + 1 < G:
                said_gene[:, place + 1], said_bin[:, place + 1] = gene, own


def test_drawn_genes_from_a_cache_as_from_the_beginning():
    sampling = Sampling(greedy=True)
    made = decoding("drawn", sampling=sampling)
    found = decode(made, caches(made.network, 4), keys_of(4))[0]
    for cell in range(4):
        said_gene, said_bin = torch.tensor([[G]]), torch.tensor([[V]])
        bins = torch.zeros(G, dtype=torch.int64)
        with torch.inference_mode():
            context, genes = inputs(4)
            rows = slice(cell, cell + 1)
            while said_gene.shape[1] <= G:
                hidden, cache = made.network(
                    context[rows], genes[rows], said_gene=said_gene, said_bin=said_bin
                )
                logits = made.network.gene_logits(hidden, cache)
                gene = int(possible_genes(logits, said_gene)[0, -1].argmax())
                if gene == G:
                    break
                asked = said_gene.clamp_max(G - 1)
                asked[0, -1] = gene
                logits = made.network.bin_logits(hidden, asked, cache)
                own = int(possible_bins(logits, said_bin)[0, -1].argmax())
                bins[gene] = own
                said_gene = torch.cat([said_gene, torch.tensor([[gene]])], 1)
                said_bin = torch.cat([said_bin, torch.tensor([[own]])], 1)
        assert torch.equal(bins, found[cell])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_is_what_the_formula_says_and_is_allocated_once(dtype):
    made = decoding("known", dtype=dtype)
    cache = caches(made.network, 3)
    each = {torch.float32: 4, torch.float64: 8}[dtype]
    assert cache.bytes == 2 * BLOCKS * 3 * ((R + 1) + G) * WIDTH * each
    assert cache.bytes == cache.keys.untyped_storage().nbytes() * 2
    small = caches(made.network, 3, room=False)
    assert small.bytes == 2 * BLOCKS * 3 * (R + 1) * WIDTH * each
    begun, place = made.begin(cache, keys_of(3)), cache.keys.data_ptr()
    with torch.inference_mode():
        for reach in range(1, G + 1):
            made.advance(begun, reach=reach)
    assert begun.cache.keys.data_ptr() == place


@pytest.mark.parametrize("way", WAYS)
def test_prefill_and_decode_may_run_in_two_pools(way):
    made = decoding(way)
    state = caches(made.network, 3, room=False).state()
    sent = save_tensors({name: value.contiguous() for name, value in state.items()})
    arrived = KeyValueCache.from_state(load_tensors(sent)).to("cpu").with_room(R + 1, G)
    found = decode(made, arrived, keys_of(3))[0]
    assert torch.equal(found, cells(way, 3))


def test_a_known_order_never_waits_for_the_device():
    lanes = torch.empty(G, dtype=torch.int64, device="meta")
    made = decoding("known", lanes=lanes)
    context, genes = inputs(3)
    with torch.inference_mode():
        cache = made.network.prefill(context.to("meta"), genes.to("meta"))
    found, n_calls = decode(made, cache, torch.empty(3, dtype=torch.int64, device="meta"))
    assert found.shape == (3, G)
    assert n_calls == G


# A cell depends on nothing else


@pytest.mark.parametrize("way", WAYS)
def test_batching_is_invisible(way):
    made = decoding(way)
    together = cells(way, 6)
    assert len(together.unique(dim=0)) > 1
    for rows in (slice(0, 2), torch.tensor([4]), torch.tensor([5, 1, 3])):
        apart = decode(made, caches(made.network, 6)[rows], keys_of(6)[rows])[0]
        assert torch.equal(apart, together[rows])


def test_lengths_of_slots_do_not_touch_each_other():
    model = network(dtype=torch.float32)
    cache = caches(model, 2)
    gene = torch.arange(G).expand(2, -1)
    said_gene = torch.cat([torch.full((2, 1), G), gene[:, :-1]], 1)
    said_bin = torch.cat([torch.full((2, 1), V), gene[:, :-1] % V], 1)
    with torch.inference_mode():
        whole, _ = model(*inputs(2, torch.float32), said_gene=said_gene, said_bin=said_bin,
                         next_gene=gene)  # fmt: skip
        for places in ([0, 0], [1, 0], [2, 0], [3, 1], [4, 2], [3, 3], [5, 3]):  # one goes back
            at = torch.tensor(places)[:, None]
            cache.length.copy_(at[:, 0])
            hidden, _ = model.decode(
                cache, said_gene.gather(1, at), said_bin.gather(1, at), next_gene=gene.gather(1, at)
            )
            expected = whole.gather(1, at[..., None].expand(-1, -1, WIDTH))
            torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)


# Genes that are drawn


def test_drawn_cells_fall_from_the_highest_bin_and_leave_the_rest_at_zero():
    made = decoding("drawn")
    begun, said, bins = made.begin(caches(made.network, 8), keys_of(8)), [], []
    with torch.inference_mode():
        for reach in range(1, G + 1):
            on = ~begun.done
            made.advance(begun, reach=reach)
            said.append(begun.said_gene[:, 0].clone())
            bins.append(torch.where(on & ~begun.done, begun.said_bin[:, 0], -1))
    falling = torch.stack(bins, 1)
    assert (falling.diff(dim=1) <= 0).all()
    n_said = (begun.bins > 0).sum(1)
    assert torch.equal(n_said, begun.position)
    assert begun.done.all()
    assert len(n_said.unique()) > 1  # they stop on their own


def test_cells_that_stop_early_end_the_call_early():
    made = decoding("drawn")
    made.network.choose.bias.data[-1] = 50.0  # stop at once
    found, n_calls = decode(made, caches(made.network, 2), keys_of(2))
    assert not found.any()
    assert n_calls == 1


def test_a_cell_may_say_every_gene():
    made = decoding("drawn")
    made.network.choose.bias.data[-1] = -50.0
    found, n_calls = decode(made, caches(made.network, 2), keys_of(2))
    assert (found > 0).all()
    assert n_calls == G


@pytest.mark.parametrize("way", ["known", "drawn"])
def test_permuting_the_vocabulary_permutes_the_cell(way):
    place = torch.randperm(G, generator=torch.Generator().manual_seed(4))
    expected = cells(way, 5)
    made = decoding(way, lanes=LANES[place])
    model = made.network
    for name in ("axes", "partner_slope", "log_dispersion"):
        getattr(model, name).data = getattr(model, name).data[place]
    model.table.data = torch.cat([model.table.data[:-1][place], model.table.data[-1:]])
    made.order = place.argsort()[made.order]  # the same genes in the same order
    context, genes = inputs(5)
    with torch.inference_mode():
        moved = GeneInputs(**{f.name: getattr(genes, f.name)[:, place] for f in fields(genes)})
        cache = model.prefill(context, moved)
    assert torch.equal(decode(made, cache, keys_of(5))[0], expected[:, place])


# Slots

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12), st.one_of(st.none(), st.integers(0, 20))),
    min_size=1,
    max_size=5,
)  # cells, step of arrival, steps from there to cancellation


def served(made, arrivals, *, n_slots, n_prefix=R + 2):
    """Cells by request and place, as a busy engine made them."""
    engine = Engine(made, n_slots=n_slots, n_prefix=n_prefix)
    found, numbers, bounds, first = {}, {}, [], 0
    for count, *_ in arrivals:
        bounds.append(slice(first, first + count))
        first += count
    cache, keys = caches(made.network, max(first, 1), room=False), keys_of(max(first, 1))
    step = 0
    while step < 40 or not engine.idle:
        for which, (_, arrival, stop) in enumerate(arrivals):
            if arrival == step:
                numbers[which] = engine.submit(cache[bounds[which]], keys[bounds[which]])
            if stop is not None and arrival + stop == step:
                engine.cancel(numbers[which])
        for one in engine.step():
            assert (one.request, one.cell) not in found
            found[one.request, one.cell] = one.bins
        step += 1
    return found, numbers, bounds, engine


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(arrivals=ARRIVALS, n_slots=st.integers(1, 4))
def test_slots_are_invisible(way, arrivals, n_slots):
    made = decoding(way)
    found, numbers, bounds, _ = served(made, arrivals, n_slots=n_slots)
    n_cells = max(sum(count for count, *_ in arrivals), 1)
    cache, keys = caches(made.network, n_cells), keys_of(n_cells)
    alone = [decode(made, cache[row], keys[row])[0][0] for row in torch.arange(n_cells)[:, None]]
    for which, (count, _, stop) in enumerate(arrivals):
        for cell in range(count):
            own = found.get((numbers[which], cell))
            assert own is not None or stop is not None
            if own is not None:
                assert torch.equal(own, alone[bounds[which].start + cell])
    assert len(found) <= n_cells


def test_guessed_and_rejected_cells_are_the_same_in_any_slot():
    made = decoding("guessed", guessing=Guessing(length=2, shared=False))
    found, *_ = served(made, [(3, 0, None), (2, 1, None)], n_slots=2)
    together = decode(made, caches(made.network, 5), keys_of(5))[0]
    assert torch.equal(torch.stack([found[key] for key in sorted(found)]), together)


def test_a_slot_is_free_at_the_next_gene_after_a_cancellation():
    made = decoding("known")
    _, _, _, engine = served(made, [(1, 0, 3), (1, 0, None)], n_slots=1)
    assert engine.n_calls == 3 + G
    assert engine.idle


def test_a_small_request_does_not_wait_for_the_last_cell_of_a_large_one():
    made = decoding("known")
    engine = Engine(made, n_slots=2, n_prefix=R + 1)
    cache, keys = caches(made.network, 9, room=False), keys_of(9)
    large, small = engine.submit(cache[:8], keys[:8]), engine.submit(cache[8:], keys[8:])
    done = []
    while not engine.idle:
        done += [one.request for one in engine.step()]
    assert done.count(large) == 8
    assert done.index(small) < 2


def test_requests_with_fewer_control_cells_share_the_slots():
    made = decoding("known")
    with torch.inference_mode():
        few = made.network.prefill(*inputs(2, n_controls=1))
        alone = decode(made, made.network.prefill(*inputs(2, n_controls=1)), keys_of(2))[0]
    engine = Engine(made, n_slots=3, n_prefix=R + 1)
    engine.submit(caches(made.network, 1), keys_of(1))
    request = engine.submit(few, keys_of(2))
    found = {}
    while not engine.idle:
        found |= {one.cell: one.bins for one in engine.step() if one.request == request}
    assert torch.equal(torch.stack([found[0], found[1]]), alone)


def test_an_engine_refuses_what_it_has_no_room_for():
    made = decoding("known")
    with pytest.raises(ConfigError, match=r"engine\.n_slots = 0"):
        Engine(made, n_slots=0, n_prefix=R + 1)
    with pytest.raises(ConfigError, match=r"engine\.n_prefix = 2: a request needs 4"):
        Engine(made, n_slots=1, n_prefix=2).submit(caches(made.network, 1), keys_of(1))


# Guessing ahead


@pytest.mark.parametrize("length", [1, 2, 5, G - 1, G + 3])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(greedy=True), Sampling(temperature=2.0, top_p=0.8)]
)
def test_guessing_with_shared_numbers_changes_nothing(length, sampling):
    expected = cells("known", 6, sampling=sampling)
    found = cells("guessed", 6, sampling=sampling, guessing=Guessing(length=length))
    assert torch.equal(found, expected)


def test_greedy_cells_are_the_same_however_guesses_are_checked():
    greedy = Sampling(greedy=True)
    expected = cells("known", 6, sampling=greedy)
    found = cells("guessed", 6, sampling=greedy, guessing=Guessing(length=4, shared=False))
    assert torch.equal(found, expected)


def test_a_draft_that_is_right_saves_calls_and_one_that_is_wrong_only_saves_none():
    made = decoding("guessed", sampling=Sampling(greedy=True))
    n_calls = {}
    for name, push in (("right", 100.0), ("wrong", -100.0)):
        with torch.no_grad():
            made.network.out.weight.zero_()
            made.network.out.bias.zero_()[2 + 3] = 100.0  # bin 3, always
        guess, plain = made.draft, made.network.bin_logits
        made.draft = _Marked(guess, push)
        made.network.bin_logits = _Turned(plain)
        found, n_calls[name] = decode(made, caches(made.network, 2), keys_of(2))
        assert (found == 3).all()
        made.draft, made.network.bin_logits = guess, plain
    assert n_calls == {"right": -(-G // 4), "wrong": G}


class _Marked:
    """A draft whose hidden values carry a mark."""

    def __init__(self, draft, push):
        self.width, self.draft, self.push = draft.width, draft, push

    def __call__(self, hidden, said_bin, gene, *, cache):
        return torch.full_like(self.draft(hidden, said_bin, gene, cache=cache), self.push)


class _Turned:
    """A head that says another bin where the mark is negative."""

    def __init__(self, plain):
        self.plain = plain

    def __call__(self, hidden, gene, cache):
        logits = self.plain(hidden, gene, cache)
        return torch.where((hidden == -100.0).all(-1, keepdim=True), logits.roll(1, -1), logits)


def test_drawn_genes_cannot_be_guessed_and_lengths_start_at_one():
    with pytest.raises(ConfigError, match=r"guessing\.length = 0"):
        Guessing(length=0)
    with pytest.raises(ConfigError, match="cannot be guessed ahead"):
        Speculative(network(), GeneOrder.descending(G), LANES, draft=DraftDecoder(WIDTH, V))


def test_an_untrained_draft_takes_the_last_hidden_value_for_the_next():
    model, draft = network(), DraftDecoder(WIDTH, V).double()
    hidden = torch.randn(
        2, 1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    gene = torch.tensor([[1, 4, 2], [0, 3, 10]])
    guess = draft(hidden, torch.zeros(2, 1, dtype=torch.int64), gene, cache=caches(model, 2))
    torch.testing.assert_close(guess, hidden.expand(-1, 3, -1))
    trained = randomised(draft)
    with torch.inference_mode():
        joint = trained(hidden, torch.zeros(2, 1, dtype=torch.int64), gene, cache=caches(model, 2))
        alone = trained(hidden, torch.zeros(2, 1, dtype=torch.int64), gene[:, 1:2],
                        cache=caches(model, 2))  # fmt: skip
    torch.testing.assert_close(joint[:, 1:2], alone)
    assert not torch.allclose(joint, hidden.expand(-1, 3, -1))


def test_slots_remember_nothing_of_the_cell_before():
    made = decoding("guessed")
    cache, keys = caches(made.network, 2), keys_of(2)
    begun = made.begin(cache, keys)
    fresh = replace(begun, cache=caches(made.network, 2))
    with torch.inference_mode():
        made.advance(begun, reach=made.stride)
        begun.put(torch.arange(2), made.begin(caches(made.network, 2, room=False), keys.clone()))
    for field in fields(fresh):
        if field.name != "cache":
            new = made.begin(caches(made.network, 2), keys)
            assert torch.equal(getattr(begun, field.name), getattr(new, field.name))
