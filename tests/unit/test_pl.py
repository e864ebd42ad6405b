"""Pictures: what they show, in which units and colours, and what they leave alone."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.data import Condition
from perturbdiff.pl._embedding import STYLES
from perturbdiff.pl._labels import name_points
from perturbdiff.pl._panels import check_save
from perturbdiff.pl._symbols import gene_labels
from perturbdiff.pl._titles import name_lines, set_title


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    return ptd.tl.predict(
        simulated_cells,
        small_model,
        perturbations=["P1", "P2"],
        contexts=[{"cell_type": "T1"}],
        n_cells=30,
    )


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


PLOTS = (ptd.pl.response, ptd.pl.embedding)


@pytest.mark.parametrize("plot", PLOTS)
def test_one_panel_for_each_condition_with_units_on_its_axes(plot, pred, simulated_cells):
    panels = plot(pred, reference=simulated_cells)
    assert len(panels) == 2
    for panel, name in zip(panels, ("P1\nT1", "P2\nT1"), strict=True):
        assert name in panel.get_title()
        assert "log1p counts per 10,000" in panel.get_xlabel()
        assert "log1p counts per 10,000" in panel.get_ylabel()


def test_the_only_baseline_of_a_prediction_needs_no_name(simulated_cells):
    columns = {"perturbation_key": "perturbation", "control": "control", "scale": "counts"}
    columns["covariate_keys"] = ["cell_type"]
    ask = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 30}
    for kind in (ptd.MeanShift, ptd.EffectPrior):
        model = kind.from_anndata(simulated_cells, **columns).fit(
            simulated_cells, holdout={"cell_type": ["T1"]}
        )
        simple = model.predict(simulated_cells, **ask)
        (panel,) = ptd.pl.embedding(simple, reference=simulated_cells)
        assert "shifted control" in panel.get_legend_handles_labels()[1]
    with pytest.raises(UnknownKeyError, match="no 'mean_shift'"):
        ptd.pl.embedding(simple, reference=simulated_cells, baseline="mean_shift")


@pytest.mark.parametrize("plot", PLOTS)
def test_a_saved_picture_is_closed_and_nothing_else_changes(plot, pred, simulated_cells, tmp_path):
    settings = dict(mpl.rcParams)
    ours, theirs = set(pred.uns), set(simulated_cells.uns)
    plot(pred, reference=simulated_cells, save=tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == settings
    assert (set(pred.uns), set(simulated_cells.uns)) == (ours, theirs)


@pytest.mark.parametrize("plot", PLOTS)
def test_given_panels_are_drawn_into(plot, pred, simulated_cells):
    given = list(Figure().subplots(1, 2))
    assert plot(pred, reference=simulated_cells, ax=given) == given
    assert plt.get_fignums() == []
    with pytest.raises(ConfigError, match="2 panels, one for each condition"):
        plot(pred, reference=simulated_cells, ax=given[0])


def test_response_shows_the_shifts_and_names_the_genes_that_change_most(pred, simulated_cells):
    panel = ptd.pl.response(pred, reference=simulated_cells, n_genes=4)[0]
    scored = ptd.tl.score(pred, reference=simulated_cells, copy=True).uns["score"]
    first = scored.iloc[0]
    assert first["perturbation"] == "P1"
    assert (
        f"Pearson {first['pearson_shift']:.3f}, MAE {first['mae_shift']:.3f}" in panel.get_title()
    )
    dots = np.asarray(panel.collections[0].get_offsets())
    assert len(dots) == pred.n_vars
    top = np.argsort(-np.abs(dots).max(1))[:4]
    named = {text.get_text() for text in panel.texts}
    assert named == {pred.var_names[number] for number in top}
    # The error of the dots is that of the table.
    error = np.abs(dots[:, 1] - dots[:, 0]).mean()
    assert error == pytest.approx(first["mae_shift"], abs=1e-6)


def colours(panel):
    """Colour of each kind of cells in a panel."""
    return {
        shown.get_label(): tuple(shown.get_facecolor()[0][:3])
        for shown in panel.collections
        if shown.get_label() in STYLES
    }


def test_genes_are_called_by_a_column_of_symbols(pred, simulated_cells):
    cells = simulated_cells.copy()
    cells.var["symbol"] = [f"SYM{n}" for n in range(cells.n_vars)]
    (panel, _) = ptd.pl.response(pred, reference=cells, n_genes=4, gene_symbols="symbol")
    plain = ptd.pl.response(pred, reference=cells, n_genes=4)[0]
    symbol = dict(zip(cells.var_names, cells.var["symbol"], strict=True))
    assert [t.get_text() for t in panel.texts] == [symbol[t.get_text()] for t in plain.texts]
    cells.var["symbol"] = [None, "", np.nan, *cells.var["symbol"][3:]]
    told = gene_labels("symbol", None, cells)
    assert not set(cells.var_names[:3]) & set(told)
    with pytest.raises(UnknownKeyError, match="Did you mean 'symbol'"):
        ptd.pl.response(pred, reference=cells, gene_symbols="symbols")


def test_as_many_genes_are_named_as_can_be_read(pred, simulated_cells):
    for n_genes, says in ((-5, "at least 0"), (101, "can be read: 100")):
        with pytest.raises(ConfigError, match=says):
            ptd.pl.response(pred, reference=simulated_cells, n_genes=n_genes)
    assert not ptd.pl.response(pred, reference=simulated_cells, n_genes=0)[0].texts


def test_cells_can_be_seen_on_a_dark_panel(pred, simulated_cells):
    with plt.style.context("dark_background"):
        panel = ptd.pl.embedding(pred, reference=simulated_cells)[0]
    light = {k: np.dot(c, (0.299, 0.587, 0.114)) for k, c in colours(panel).items()}
    assert min(light.values()) > 0.3
    assert np.diff(np.sort([*light.values()])).min() > 0.01
    assert light["real treated"] > 0.9


def test_colours_belong_to_the_kind_of_cells(pred, simulated_cells):
    whole = ptd.pl.embedding(pred, reference=simulated_cells)
    wanted = {name: to_rgba(style["color"])[:3] for name, style in STYLES.items()}
    assert colours(whole[0]) == colours(whole[1]) == wanted
    part = pred[pred.obs["perturbation"] == "P2"].copy()
    # A baseline without an answer: the other colours stay where they were.
    (panel,) = ptd.pl.embedding(part, reference=simulated_cells, baseline="additive")
    assert colours(panel) == {k: v for k, v in wanted.items() if k != "shifted control"}


def test_kinds_can_be_told_apart_in_grey():
    lightness = [np.dot(to_rgba(s["color"])[:3], (0.299, 0.587, 0.114)) for s in STYLES.values()]
    assert np.diff(np.sort(lightness)).min() > 0.05


def test_embedding_spreads_real_cells_along_its_first_axis(pred, simulated_cells):
    panel = ptd.pl.embedding(pred, reference=simulated_cells)[0]
    shown = {item.get_label(): np.asarray(item.get_offsets()) for item in panel.collections}
    real = np.concatenate([shown["real control"], shown["real treated"]])
    np.testing.assert_allclose(real.mean(0), 0, atol=1e-9)
    assert real[:, 0].var() >= real[:, 1].var()
    assert np.cov(real.T)[0, 1] == pytest.approx(0, abs=1e-9)
    with pytest.raises(UnknownKeyError, match="effect_prior"):
        ptd.pl.embedding(pred, reference=simulated_cells, baseline="effect_prio")


def test_long_names_stay_over_their_own_panel():
    figure = Figure(figsize=(8, 4))
    panels = list(figure.subplots(1, 2))
    labels = {
        "drug": "Interferon-beta 1a (100 U/ml, 6 h) + Interleukin-6 receptor antibody",
        "cell": "CD56-dim natural killer cell", "donor": "SLE_patient_1015",
    }  # fmt: skip
    for panel in panels:
        set_title(panel, [*name_lines(labels), "Pearson 0.904, MAE 0.105"])
        figure.draw_without_rendering()
        assert panel.title.get_window_extent().width <= 1.1 * panel.get_window_extent().width
        words = panel.get_title().replace("\n", " ")
        assert words == ", ".join([*labels.values()]).replace(", CD", " CD") + (
            " Pearson 0.904, MAE 0.105"
        )
    set_title(panels[0], ["x" * 3000, "T cells"])
    assert panels[0].get_title().endswith("…\nT cells")
    assert panels[0].title.get_fontsize() < panels[1].title.get_fontsize()
    set_title(panels[0], ["A$B$"])  # no formula
    assert not panels[0].title.get_parse_math()


def test_a_condition_has_one_name():
    labels = {"drug": "A+B", "cell": "T", "donor": 1015, "dose": "0.1+10", "hours": np.nan}
    assert name_lines(labels) == ["A+B", "T, donor 1015, dose 0.1+10"]
    assert name_lines({"drug": "A", "dose": 0.5, "hours": 6.0}) == ["A", "dose 0.5, hours 6"]
    assert name_lines({"drug": "A", "dose": "", "hours": None}) == ["A"]
    whole = Condition(("A", "B"), ("T", "1015"), (0.1, 10.0), 6.0)
    assert Condition.named(whole.name) == whole
    assert Condition.named(Condition(("A",)).name) == Condition(("A",))


def test_a_file_has_a_name():
    for save in (True, 3):
        with pytest.raises(ConfigError, match="must be the name of a file"):
            check_save(save)


def test_names_do_not_cover_each_other():
    figure = Figure(figsize=(4, 4))
    panel = figure.subplots()
    points = np.random.default_rng(0).normal(0, 0.03, (8, 2))
    panel.set(xlim=(-1, 1), ylim=(-1, 1))
    name_points(panel, points, [f"GENE{n}" for n in range(8)], others=points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in panel.texts]  # without the lines
    assert len(boxes) == 8
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
