"""Operations and bytes: both networks by hand, single operators by known answers."""

import pytest
import torch

import perturbdiff as ptd
from perturbdiff._batch import Context
from perturbdiff._random import cell_keys, gene_lanes
from perturbdiff.autoregressive import DrawnOrder, GeneOrder, KnownOrder, Speculative
from perturbdiff.diffusion import Preconditioned
from perturbdiff.nn import CausalDecoder, DraftDecoder, GeneInputs, SetDenoiser
from perturbdiff.profiling import Counting, DecoderShape, DenoiserShape, Work, counted

N_AXES, N_LATENT, N_FEATURES, N_CONTROLS = 7, 5, 3, 11
FLOAT = 4


def context(n_sets, set_size):
    return Context(
        partner=torch.randn(n_sets, set_size, N_AXES),
        has_partner=torch.ones(n_sets, dtype=torch.bool),
        control=torch.randn(n_sets, N_CONTROLS, N_AXES),
        control_mask=torch.ones(n_sets, N_CONTROLS, dtype=torch.bool),
        mask=torch.ones(n_sets, set_size, dtype=torch.bool),
        shift=torch.randn(n_sets, N_LATENT),
        members=torch.ones(n_sets, 1, dtype=torch.int64),
        features=torch.randn(n_sets, N_FEATURES),
        covariates=torch.ones(n_sets, 1, dtype=torch.int64),
        conditional=torch.ones(n_sets, dtype=torch.bool),
    )


@pytest.fixture(scope="module")
def denoiser():
    config = ptd.NetworkConfig(
        n_axes=N_AXES, n_response_axes=N_LATENT, width=24, n_blocks=3, n_heads=4, expansion=3
    )
    raw = SetDenoiser(config, n_perturbations=2, n_features=N_FEATURES, covariate_sizes=[2])
    shape = DenoiserShape(
        width=24, n_blocks=3, expansion=3, n_axes=N_AXES, n_latent=N_LATENT,
        n_controls=N_CONTROLS, n_features=N_FEATURES,
    )  # fmt: skip
    return Preconditioned(raw, 1.0).eval(), shape


@pytest.mark.parametrize(("n_sets", "set_size"), [(1, 1), (2, 9), (5, 40)])
def test_a_call_of_the_denoiser_is_what_a_hand_counts(denoiser, n_sets, set_size):
    network, shape = denoiser
    known = network.network.remember(context(n_sets, set_size))
    xt, sigma = torch.randn(n_sets, set_size, N_LATENT), torch.ones(n_sets)
    found = counted(lambda: network(xt, sigma, known)).total
    assert found.operations == pytest.approx(shape.denoise(n_sets, set_size), rel=0.01)


def test_control_cells_are_what_a_hand_counts(denoiser):
    network, shape = denoiser
    found = counted(lambda: network.network.remember(context(2, 4))).total
    assert found.operations == pytest.approx(shape.encode_controls(2), rel=0.01)


def test_weights_are_read_once_a_call(denoiser):
    network, _ = denoiser
    known, used = network.network.remember(context(3, 4)), []
    for name, parameter in network.named_parameters():
        beside = ("control_blocks", "control.", "no_control", "memory_norm", "embedding")
        if not any(part in name for part in beside):
            used.append((name, parameter))
    tables = [p for name, p in used if "perturbation" in name or "covariates" in name]
    null = network.network.conditioning.null
    total = sum(p.numel() for _, p in used) - sum(p.numel() for p in tables)
    xt, sigma = torch.randn(3, 4, N_LATENT), torch.ones(3)
    found = counted(lambda: network(xt, sigma, known), weights=network.parameters()).total
    assert found.weight_bytes == pytest.approx(FLOAT * total, abs=FLOAT * null.numel())


def test_heads_do_not_change_operations():
    query = torch.randn(2, 4, 6, 8)
    one, four = query.transpose(1, 2).reshape(2, 1, 6, 32), query
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [counted(lambda x=x: attend(x, x, x)).total.operations for x in (one, four)]
    assert found == [2 * 2 * 2 * 6 * 6 * 32] * 2


# The sibling

N_GENES, N_BINS = 30, 8


def sibling(order):
    config = ptd.DecoderConfig(
        n_axes=N_AXES, n_response_axes=N_LATENT, width=24, n_blocks=2, n_heads=4, hidden=20,
        control_expansion=2, gene_width=4, n_bins=N_BINS, order=order,
    )  # fmt: skip
    return CausalDecoder(
        config,
        axes=torch.randn(N_GENES, N_AXES),
        log_dispersion=torch.zeros(N_GENES),
        first_count=torch.arange(N_BINS),
        last_count=12,
        n_perturbations=2,
        n_features=N_FEATURES,
        covariate_sizes=[2],
    ).eval()


def shape_of(decoder, *, draws):
    return DecoderShape(
        width=24, n_blocks=2, hidden=20, control_expansion=2, n_axes=N_AXES, n_latent=N_LATENT,
        n_controls=N_CONTROLS, n_genes=N_GENES, gene_width=4, n_bins=N_BINS,
        n_nodes=len(decoder.node), n_features=N_FEATURES, draws_genes=draws,
    )  # fmt: skip


def prefilled(decoder, n_sets, set_size):
    n_cells = n_sets * set_size
    values = {name: torch.zeros(n_cells, N_GENES) for name in ("level", "shift", "partner")}
    genes = GeneInputs(log_mean=torch.zeros(n_cells, N_GENES), **values)
    return decoder.prefill(context(n_sets, set_size), genes)


def advanced(decoding, cache, n_cells, reach):
    cells = decoding.begin(cache, cell_keys(0, "counted", 0, n_cells=n_cells))
    cells.position.fill_(reach - decoding.stride)
    return lambda: decoding.advance(cells, reach=reach)


LANES = gene_lanes([f"G{number}" for number in range(N_GENES)])


@pytest.mark.parametrize(("n_sets", "set_size"), [(1, 1), (2, 6)])
def test_prefill_is_what_a_hand_counts(n_sets, set_size):
    decoder = sibling("vocabulary")
    found = counted(lambda: prefilled(decoder, n_sets, set_size)).total
    wanted = shape_of(decoder, draws=False).prefill(n_sets, set_size)
    assert found.operations == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(("n_cells", "reach"), [(1, 1), (4, 12), (3, 30)])
@pytest.mark.parametrize("order", ["vocabulary", "descending"])
def test_a_step_of_the_sibling_is_what_a_hand_counts(order, n_cells, reach):
    decoder, draws = sibling(order), order == "descending"
    way, kind = (DrawnOrder, GeneOrder.descending) if draws else (KnownOrder, GeneOrder.vocabulary)
    decoding = way(decoder, kind(N_GENES), LANES)
    cache = prefilled(decoder, 1, n_cells)
    found = counted(advanced(decoding, cache, n_cells, reach)).total
    wanted = shape_of(decoder, draws=draws).step(n_cells, reach=reach)
    assert found.operations == pytest.approx(wanted, rel=0.01)


def test_a_guessed_step_is_the_networks_and_the_drafts():
    decoder, n_cells, reach = sibling("vocabulary"), 3, 20
    decoding = Speculative(
        decoder, GeneOrder.vocabulary(N_GENES), LANES, draft=DraftDecoder(24, N_BINS)
    )
    cache = prefilled(decoder, 1, n_cells)
    found = counted(advanced(decoding, cache, n_cells, reach)).total
    shape, guesses = shape_of(decoder, draws=False), decoding.stride - 1
    own = shape.step(n_cells, n_positions=decoding.stride, reach=reach)
    head = 2 * n_cells * guesses * (24 * (2 + N_BINS) + len(decoder.node) * N_BINS)
    draft = 2 * n_cells * (24 * 24 + 2 * guesses * 24 * 24)
    assert found.operations == pytest.approx(own + head + draft, rel=0.01)


# Bytes and memory


def test_bytes_of_single_operators():
    x, weight = torch.ones(4, 3), torch.ones(3, 5)
    assert counted(lambda: x @ weight, weights=[weight]).total == Work(
        operations=2 * 4 * 3 * 5, weight_bytes=15 * FLOAT, activation_bytes=(12 + 20) * FLOAT
    )
    assert counted(lambda: x + x).total == Work(activation_bytes=2 * 12 * FLOAT)  # x once
    assert counted(lambda: x[1:].T.reshape(9)).total.bytes == 2 * 9 * FLOAT  # one copy
    assert counted(lambda: x.t()[1:].unsqueeze(0)).total == Work()
    assert counted(lambda: x[:1].expand(100, 3) + 1).total.bytes == (3 + 300) * FLOAT
    table, rows = torch.ones(1000, 2), torch.tensor([0, 5])
    found = counted(lambda: torch.nn.functional.embedding(rows, table)).total
    assert found.bytes == 2 * 4 * FLOAT + 2 * 8  # rows that are looked up, and which


def test_a_cache_is_told_apart():
    cache = torch.ones(8)
    with Counting({"cache_bytes": [cache]}) as counting:
        cache * 2
    assert counting.total == Work(cache_bytes=32, activation_bytes=32)


def test_memory_is_what_lives_at_once():
    def chain():
        x = torch.ones(1000)
        y = x + 1
        del x
        return y + 1

    assert counted(chain).peak_bytes == 2 * 1000 * FLOAT
    assert counted(lambda: [torch.ones(1000) for _ in range(3)]).peak_bytes == 3 * 1000 * FLOAT


def test_work_adds_up_and_has_an_intensity():
    one = Work(operations=6, weight_bytes=1, activation_bytes=2)
    assert (one + 2 * one) == one * 3
    assert one.intensity == 2
    assert Work().intensity is None
    assert Work.from_json(one.to_json()) == one
