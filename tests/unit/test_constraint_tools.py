"""Ranking by a wish, the picture, the score against measured cells, masks on logits."""

import matplotlib
import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.guidance import CellValues, CountMask, Reference, best_draw
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
    assert len(panels) == 2
    assert (tmp_path / "run.png").stat().st_size > 0
    labels = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert labels[0].startswith(f"{gene} >= 2")
    ends = [line.get_ydata()[-1] for line in panels[0].get_lines()]
    assert ends[-1] in {0.0, 0.5, 1.0}
    del pred.uns["perturbdiff"]["constraints"]
    with pytest.raises(UnknownKeyError, match="constraints"):
        ptd.pl.constraints(pred)


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


def test_the_first_draw_that_obeys_is_taken(reference):
    bound = ptd.AtLeast("A", 1.0, per="population").bind(reference)

    def cells(level):
        return CellValues(
            log1p=torch.full((4, 3), level, dtype=torch.float64),
            library_size=torch.full((4,), 1e4, dtype=torch.float64),
            number=torch.arange(4),
        )

    number, energy = best_draw([bound], [cells(x) for x in (0.5, 1.2, 3.0)])
    assert number == 1
    assert energy.tolist() == [0.5, 0.0, 0.0]
    assert best_draw([bound], [cells(x) for x in (0.2, 0.9, 0.5)])[0] == 1
