"""The picture of scores: every method and condition at its value, the ceiling, what is missing."""

import anndata as ad
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from perturbdiff import pl
from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.pl._scores import STYLES


@pytest.fixture
def pred():
    rows = [
        ("set_diffusion", "generated", 0.9, 0.2, np.nan),
        ("set_diffusion", "generated", 0.7, 0.4, np.nan),
        ("mean_shift", "shifted", 0.5, 0.6, np.nan),
        ("mean_shift", "shifted", np.nan, 0.8, np.nan),
        ("additive", "shifted", np.nan, np.nan, np.nan),
        ("split_half_ceiling", "measured", 0.96, 0.02, np.nan),
        ("split_half_ceiling", "measured", 0.98, 0.04, np.nan),
    ]
    names = ["method", "cells", "pearson_shift", "energy_distance", "discrimination"]
    adata = ad.AnnData(np.zeros((1, 1), np.float32))
    adata.uns["score"] = pd.DataFrame(rows, columns=names)
    adata.uns["perturbdiff"] = {"scale": "log1p_cp10k"}
    return adata


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def points(panel, marker):
    return [
        (float(x), float(y))
        for line in panel.lines
        if line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def test_means_and_conditions_stand_at_their_values(pred):
    first, second = pl.scores(pred)  # discrimination is defined nowhere
    np.testing.assert_allclose(points(first, "D"), [(0.8, 0)])
    np.testing.assert_allclose(points(first, "o"), [(0.5, 1)])
    np.testing.assert_allclose(points(second, "o"), [(0.7, 1)])
    assert points(first, "|") == [(0.9, 0), (0.7, 0)]
    assert points(second, "|") == [(0.2, 0), (0.4, 0), (0.6, 1), (0.8, 1)]
    for panel, ceiling in ((first, 0.97), (second, 0.03)):
        (line,) = (line for line in panel.lines if line.get_label() == "ceiling")
        np.testing.assert_allclose(line.get_xdata(), ceiling)
        assert [text.get_text() for text in panel.texts] == ["n/a"]
        assert panel.texts[0].get_position()[1] == 2
        assert panel.texts[0].get_zorder() > line.get_zorder()  # the ceiling does not strike it out
        assert panel.texts[0].get_bbox_patch().get_facecolor() == panel.get_facecolor()
    told = [text.get_text() for text in first.get_legend().get_texts()]
    assert sorted(told) == ["baseline", "ceiling", "model", "one condition"]


def test_names_units_and_directions_are_on_the_panels(pred):
    first, second = pl.scores(pred)
    named = [text.get_text() for text in first.get_yticklabels()]
    assert named == ["set diffusion (model)", "mean shift, shifted", "additive, shifted"]
    assert "higher is better" in first.get_title()
    assert "lower is better" in second.get_title()
    assert second.get_xlabel() == "log1p counts per 10,000"
    assert first.get_ylim() == (2.5, -0.5)  # the model on top


def test_kinds_can_be_told_apart_in_grey():
    model, baseline = STYLES["generated"], STYLES["baseline"]
    light = [
        np.dot(to_rgba(style["color"])[:3], (0.299, 0.587, 0.114)) for style in STYLES.values()
    ]
    assert abs(light[0] - light[1]) > 0.1
    assert model["marker"] != baseline["marker"]


def test_metrics_are_chosen_and_panels_given(pred, tmp_path):
    given = Figure().subplots()
    assert pl.scores(pred, metrics="energy_distance", ax=given) == [given]
    assert plt.get_fignums() == []
    settings, keys = dict(mpl.rcParams), set(pred.uns)
    pl.scores(pred, save=tmp_path / "new" / "scores.png")
    assert (tmp_path / "new" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert (dict(mpl.rcParams), set(pred.uns)) == (settings, keys)


def test_what_cannot_be_drawn_is_refused(pred):
    with pytest.raises(UnknownKeyError, match="Did you mean 'score'"):
        pl.scores(pred, key="scores")
    with pytest.raises(UnknownKeyError, match="Did you mean 'pearson_shift'"):
        pl.scores(pred, metrics=["pearson"])
    with pytest.raises(ConfigError, match="of pearson_shift"):
        pl.scores(pred, metrics=[])
    with pytest.raises(ConfigError, match="2 panels, one for each metric"):
        pl.scores(pred, ax=Figure().subplots())
    bare = pred.copy()
    bare.uns["score"] = pred.uns["score"].assign(pearson_shift=np.nan, energy_distance=np.nan)
    with pytest.raises(ConfigError, match="a score that is defined"):
        pl.scores(bare)
    with pytest.raises(ConfigError, match="must end in one of"):
        pl.scores(pred, save="scores.xyz")
