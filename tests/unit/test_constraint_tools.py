"""Ranking by a wish, the picture, the score against measured cells, masks on logits."""

import matplotlib
import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.guidance import CellValues, CountMask, Masked, Reference
from perturbdiff.guidance._logits import judged, opened
from perturbdiff.model import _fitted

QUICK = ptd.SampleConfig(n_steps=3, set_size=16)
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def small_pilot(monkeypatch):
    monkeypatch.setattr(_fitted, "PILOT_CELLS", 64)


@pytest.fixture
def gene(small_model, simulated_cells):
    """A gene that is expressed well."""
    level = np.asarray(simulated_cells[:, list(small_model.registry.genes)].X.mean(0)).ravel()
    return small_model.registry.genes[int(level.argmax())]


@pytest.fixture
def pred(small_model, simulated_cells, gene):
    small_model.fitted.plans.clear()
    return ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1", "P2"], contexts=[{"cell_type": "T1"}],
        n_cells=32, sample=QUICK, constraints=[ptd.AtLeast(gene, 2.0), ptd.KnockDown(gene, 1.0)],
    )  # fmt: skip


def test_perturbations_are_ranked_by_a_wish(small_model, simulated_cells, gene):
    def rank(at_once, **settings):
        small_model.fitted.plans.clear()
        found = ptd.tl.rank_perturbations(
            simulated_cells, small_model, contexts=[{"cell_type": "T1"}], n_cells=32, sample=QUICK,
            target=[ptd.GeneSetShift([gene], 0.0, relation="at_least")], at_once=at_once, copy=True,
            **settings,
        )  # fmt: skip
        return found.uns["perturbation_ranking"]

    table = rank(1)
    assert table["rank"].tolist() == [1, 2]
    assert set(table["perturbation"]) == {"P1", "P2"}
    order = table.sort_values(["satisfied_sets", "energy"], ascending=[False, True])
    assert order.index.tolist() == [0, 1]
    together = rank(8)
    assert together["perturbation"].tolist() == table["perturbation"].tolist()
    np.testing.assert_allclose(together["energy"], table["energy"], atol=1e-6)
    assert "perturbation_ranking" not in simulated_cells.uns
    predicted = ptd.tl.predict(
        simulated_cells, small_model, perturbations=[str(table["perturbation"][0])],
        contexts=[{"cell_type": "T1"}], n_cells=32, sample=QUICK,
    )  # fmt: skip
    control = simulated_cells[
        (simulated_cells.obs["perturbation"] == "control")
        & (simulated_cells.obs["cell_type"] == "T1")
    ]
    size = control.obs["library_size"] if "library_size" in control.obs else control.X.sum(1)
    level = np.log1p(control[:, gene].X.toarray().ravel() / np.asarray(size).ravel() * 1e4).mean()
    assert table["satisfied"][0] == (predicted[:, gene].X.mean() >= level - 1e-6)
    with pytest.raises(ConfigError, match="at_once"):
        rank(0)
    with pytest.raises(ConfigError, match="target"):
        ptd.tl.rank_perturbations(simulated_cells, small_model, target=[])


def test_encoded_controls_are_used_for_all_perturbations(small_model, simulated_cells, gene):
    sampler = small_model.fitted.sampler
    small_model.fitted.plans.clear()
    sampler._memory.clear()
    ptd.tl.rank_perturbations(
        simulated_cells, small_model, contexts=[{"cell_type": "T1"}], n_cells=16, sample=QUICK,
        target=[ptd.AtLeast(gene, 1.0)], at_once=1, copy=True,
    )  # fmt: skip
    assert len(sampler._memory) == 1


def test_the_run_is_drawn(pred, gene, tmp_path):
    panels = ptd.pl.constraints(pred, save=tmp_path / "run.png")
    assert [panel.get_title() for panel in panels] == ["P1\nT1", "P2\nT1"]
    assert (tmp_path / "run.png").stat().st_size > 0
    ends = [line.get_ydata()[-1] for line in panels[0].get_lines()]
    assert ends[-1] in {0.0, 0.5, 1.0}
    (legend,) = panels[0].get_figure().legends
    labels = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    assert labels[0].startswith(f"{gene} >= 2")
    # Every constraint has a line, or the legend says why not; dots stand beside the steps.
    report, course = (pred.uns["perturbdiff"][f"constraint{s}"] for s in ("s", "_course"))
    asked, followed = set(report["constraint"]), set(course["constraint"])
    lined = {name for name in asked if any(label == name for label in labels)}
    assert lined == followed & asked
    assert {f"{name} (no line: not judged at single steps)" for name in asked - lined} <= {*labels}
    assert {"without constraints", "cells that are returned"} <= {*labels}
    steps = set(course["step"])
    for line in panels[0].get_lines():
        if line.get_marker() == "o":
            assert not steps.intersection(line.get_xdata())
    names = [text.get_text() for text in panels[0].get_xticklabels()]
    assert (names[0], names[-1]) == ("without", "returned")
    assert names[-2] == str(max(steps))
    del pred.uns["perturbdiff"]["constraints"]
    with pytest.raises(UnknownKeyError, match="constraints"):
        ptd.pl.constraints(pred)


def test_reports_call_conditions_what_people_call_them(pred, simulated_cells, small_model, caplog):
    entries = pred.uns["perturbdiff"]
    for table in (entries["constraints"], entries["constraint_course"]):
        assert set(table["condition"]) == {"P1 in T1", "P2 in T1"}
        keys = dict(zip(table["condition"], table["condition_key"], strict=True))
        assert keys == {f"{p} in T1": f'[["{p}"], ["T1"]]' for p in ("P1", "P2")}
    with caplog.at_level("WARNING", logger="perturbdiff"):
        ptd.tl.predict(
            simulated_cells, small_model, perturbations=["P1"], contexts=[{"cell_type": "T1"}],
            n_cells=16, sample=QUICK, constraints=[lambda log1p, genes: 1.0],
        )  # fmt: skip
    assert "not satisfied in P1 in T1 after" in caplog.text


def test_reports_of_earlier_versions_are_still_read(pred, simulated_cells):
    new = ptd.tl.score_constraints(pred, reference=simulated_cells, copy=True)
    old = pred.copy()
    for name in ("constraints", "constraint_course", "constraint_tree"):
        table = old.uns["perturbdiff"][name]
        old.uns["perturbdiff"][name] = table.assign(condition=table["condition_key"]).drop(
            columns="condition_key"
        )
    titles = [panel.get_title() for panel in ptd.pl.constraints(old, show=False)]
    assert titles == ["P1\nT1", "P2\nT1"]
    ptd.tl.score_constraints(old, reference=simulated_cells)
    distances = [
        one.uns["perturbdiff"]["constraints"]["energy_distance_to_truth"] for one in (old, new)
    ]
    np.testing.assert_array_equal(*distances)
    part = pred[pred.obs["perturbation"] == "P2"].copy()
    ptd.tl.score_constraints(part, reference=simulated_cells)
    table = part.uns["perturbdiff"]["constraints"]
    gone = table["condition"] == "P1 in T1"
    assert (table["energy_distance_to_truth"].isna() == gone).all()


def test_cost_against_measured_cells(pred, simulated_cells):
    table = pred.uns["perturbdiff"]["constraints"]
    assert table["energy_distance_to_truth"].isna().all()
    scored = ptd.tl.score_constraints(pred, reference=simulated_cells, copy=True)
    found = scored.uns["perturbdiff"]["constraints"]["energy_distance_to_truth"]
    assert np.isfinite(found).all()
    assert found.nunique() == 2  # one a condition
    assert pred.uns["perturbdiff"]["constraints"]["energy_distance_to_truth"].isna().all()
    del pred.uns["perturbdiff"]["constraints"]
    with pytest.raises(UnknownKeyError):
        ptd.tl.score_constraints(pred, reference=simulated_cells)


@pytest.fixture
def reference():
    one = torch.ones(3, dtype=torch.float64)
    return Reference(
        genes=("A", "B", "C"), control_log1p=one, control_depth=one, library_size=1e4 * one
    )


def test_masks_leave_the_bins_that_hold_allowed_counts(reference):
    wishes = [
        ptd.AtLeast("A", 2, scale="counts"),
        ptd.AtMost("B", float(np.log1p(3.0))),  # 3 counts per 10,000
        ptd.AtLeast("C", 1.0, per="population"),
    ]
    bounds = [wish.bind(reference) for wish in wishes]
    size = torch.tensor([1e4, 5e4], dtype=torch.float64)
    mask = CountMask.of(bounds, size, n_genes=3)
    first = torch.tensor([0, 1, 2, 5, 10])  # bins 0, 1, 2-4, 5-9, 10-

    def allowed(gene):
        rows = torch.arange(2)
        logits = mask(torch.zeros(2, 5), torch.full((2,), gene), cell=rows, first_count=first)
        return logits.isfinite().int().tolist()

    assert allowed(0) == [[0, 0, 1, 1, 1]] * 2
    assert allowed(1) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]  # at most 3, and at most 15
    assert allowed(2) == [[1, 1, 1, 1, 1]] * 2
    assert [bound.text for bound in mask.rest] == ["C >= 1 log1p per population"]
    drawn = torch.tensor([[1, 4, 0], [7, 14, 0]])
    assert mask.clamped(drawn).tolist() == [[2, 3, 0], [7, 14, 0]]


def test_a_mask_around_a_network_renormalises_what_is_left(reference):
    class Even:
        n_genes, n_bins = 3, 4

        def decode(self, cache, said_gene, said_bin, **asked):
            return torch.zeros(2, 2, 5), (cache, said_gene is said_bin, asked)

        def bin_logits(self, hidden, gene, cache):
            return torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(*gene.shape, -1)

    mask = CountMask.of(
        [ptd.AtLeast("B", 1, scale="counts").bind(reference)], 1e4 * torch.ones(2), n_genes=3
    )
    masked = Masked(network=Even(), mask=mask, first_count=torch.arange(4))
    gene = torch.tensor([[0, 1], [1, 2]])
    share = masked.bin_logits(torch.zeros(2, 2, 5), gene, None).softmax(-1)
    free, left = [0.1, 0.2, 0.3, 0.4], [0, 2 / 9, 3 / 9, 4 / 9]
    torch.testing.assert_close(share, torch.tensor([[free, left], [left, free]]))
    assert (masked.n_genes, masked.n_bins) == (3, 4)
    _, (cache, same, asked) = masked.decode("cache", gene, gene, next_gene=gene, reach=2)
    assert (cache, same, asked["reach"], asked["progress"]) == ("cache", True, 2, None)
    assert asked["next_gene"] is gene
    assert not mask.idle


def test_sets_are_judged_by_all_of_their_bounds(reference):
    bounds = [
        ptd.AtLeast("A", 1.0, per="population").bind(reference),
        ptd.AtMost("B", 2.0).bind(reference),
    ]
    level = torch.tensor([0.5, 1.2, 3.0], dtype=torch.float64)
    cells = CellValues(
        log1p=level[:, None, None].expand(3, 4, 3),
        library_size=torch.full((3, 4), 1e4, dtype=torch.float64),
        number=torch.arange(4).expand(3, 4),
    )
    energy, obeys = judged(bounds, cells)
    assert energy.tolist() == [0.5, 0.0, 1.0]
    assert obeys.tolist() == [False, True, False]


def test_alternatives_stay_whole_where_everything_is_opened(reference):
    either = ptd.Any([ptd.AtLeast("A", 1.0), ptd.AtLeast("B", 1.0)])
    wish = ptd.All([either, ptd.Not(ptd.AtLeast("C", 2.0)), ptd.AtMost("B", 1.0)])
    parts = opened([wish.bind(reference)])
    assert [part.text for part in parts] == [
        either.describe(), "not (C >= 2 log1p per cell)", "B <= 1 log1p per cell",
    ]  # fmt: skip
    mask = CountMask.of([wish.bind(reference)], 1e4 * torch.ones(1), n_genes=3)
    assert [bound.text for bound in mask.rest] == [either.describe()]
