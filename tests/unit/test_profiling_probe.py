"""Probes: phases add up, nothing is left behind, and predictions are the same."""

import time

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff.model import _causal_fitted, _fitted
from perturbdiff.profiling import PHASES, Probe, Profiled, Stage, watching


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", 64)
        patch.setattr(_causal_fitted, "PILOT_CELLS", 64)
        yield


@pytest.fixture(scope="module")
def small_sibling(simulated_cells):
    columns = {
        "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
        "embedding_key": "perturbation_features",
    }  # fmt: skip
    train = ptd.TrainConfig(
        max_steps=2, check_every=1, n_sets=2, set_size=2, n_controls=6, warmup_steps=1
    )
    return ptd.CausalBaseline.from_anndata(simulated_cells, **columns).fit(
        simulated_cells,
        holdout={"cell_type": ["T1"]},
        n_top_genes=20,
        network=ptd.DecoderConfig(
            n_axes=5, n_response_axes=4, width=16, n_heads=2, gene_width=4, draft_steps=2
        ),
        train=train,
        options=ptd.TrainerOptions(progress=False, accelerator="cpu"),
    )


@pytest.fixture(scope="module", params=["diffusion", "sibling"])
def model(request, small_model, small_sibling):
    return small_model if request.param == "diffusion" else small_sibling


def ask(model, adata, seed=0):
    context = [{"cell_type": "T1"}]
    return model.predict(adata, perturbations=["P1"], contexts=context, n_cells=32, seed=seed)


def probed(model, adata, probe, seed=0):
    model.probe_points().forget()
    with watching(probe, model.probe_points().stages):
        return probe.run(lambda: ask(model, adata, seed))


def test_phases_add_up_to_the_whole(model, simulated_cells):
    ask(model, simulated_cells)
    probe, clock = Probe(), []
    model.probe_points().forget()
    with watching(probe, model.probe_points().stages):
        clock.append(time.perf_counter())
        probe.run(lambda: ask(model, simulated_cells))
        clock.append(time.perf_counter())
    whole = clock[1] - clock[0]
    assert set(probe.phases) <= set(PHASES)
    assert len(probe.phases) == 5
    assert all(phase.seconds > 0 for phase in probe.phases.values())
    assert sum(phase.seconds for phase in probe.phases.values()) == pytest.approx(probe.seconds)
    assert probe.seconds == pytest.approx(whole, rel=0.05)


def test_a_probe_changes_no_cell_and_leaves_nothing_behind(model, simulated_cells):
    plain = ask(model, simulated_cells, seed=5)
    points = model.probe_points()
    before = [set(vars(stage.owner)) for stage in points.stages]
    with watching(Probe(), points.stages):
        assert [set(vars(stage.owner)) for stage in points.stages] != before
    assert [set(vars(stage.owner)) for stage in points.stages] == before
    watched = probed(model, simulated_cells, Probe(), seed=5)
    assert (plain.layers["counts"] != watched.layers["counts"]).nnz == 0
    assert plain.uns["perturbdiff"]["nfe"] == watched.uns["perturbdiff"]["nfe"]


def test_network_calls_are_those_of_the_provenance(model, simulated_cells):
    probe = Probe()
    pred = probed(model, simulated_cells, probe, seed=6)
    prefills = sum(span.name == "control encoding" for span in probe.spans)
    own = 0 if model.kind == "set_diffusion" else prefills
    assert probe.network_calls + own == pred.uns["perturbdiff"]["nfe"]


def test_counting_gives_each_phase_its_work(model, simulated_cells):
    probe = Probe()
    with probe.counts(model.probe_points().weights):
        probed(model, simulated_cells, probe, seed=7)
    network = "denoising steps" if model.kind == "set_diffusion" else "decode steps"
    work = probe.phases[network].work
    assert work.operations > 0
    assert work.weight_bytes > 0
    assert work.cache_bytes > 0
    assert probe.phases["control encoding"].work.operations > 0
    assert probe.phases[network].peak_bytes > 0


def test_the_innermost_phase_has_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Owner:
        def outer(self):
            now[0] += 1
            self.inner()

        def inner(self):
            now[0] += 10

        def whole(self):
            self.outer()
            now[0] += 100

    owner, probe = Owner(), Probe()
    stages = [
        Stage(owner=owner, name="outer", phase="a", then="c"),
        Stage(owner=owner, name="inner", phase="b", network=True),
    ]
    with watching(probe, stages):
        probe.run(owner.whole)
    seconds = {name: phase.seconds for name, phase in probe.phases.items()}
    assert seconds == {"condition encoding": 0, "a": 1, "b": 10, "c": 100}
    assert probe.seconds == 111
    assert (probe.phases["b"].network_calls, probe.phases["b"].outside_network) == (1, 0)
    spans = [(span.name, span.begin, span.seconds) for span in probe.spans]
    assert spans == [("inner", 1, 10), ("a", 0, 11), ("c", 11, 100)]


def test_what_fails_is_put_back():
    class Owner:
        def broken(self):
            raise ZeroDivisionError

    owner = Owner()
    with (
        pytest.raises(ZeroDivisionError),
        watching(Probe(), [Stage(owner=owner, name="broken", phase="a")]),
    ):
        owner.broken()
    assert not vars(owner)


def test_models_can_be_profiled(model):
    assert isinstance(model, Profiled)
    points = model.probe_points()
    assert points.kind == model.kind
    assert points.device == torch.device("cpu")
    assert points.dtype == "float32"
    assert points.n_parameters > 0
    assert np.isfinite(points.n_parameters)
