"""The picture of cells on their way: what is drawn where, with which units."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, LabelError, UnknownKeyError


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    made = ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1", "P2"],
        contexts=[{"cell_type": "T1"}], n_cells=20, sample=ptd.SampleConfig(n_steps=3),
    )  # fmt: skip
    genes = list(made.var_names[:3])
    ptd.tl.trajectory(made, small_model, reference=simulated_cells, n_cells=7, genes=genes)
    return made


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def drawn(panel, words):
    """Points of the line whose label begins so."""
    (line,) = [one for one in panel.lines if str(one.get_label()).startswith(words)]
    return np.stack([line.get_xdata(), line.get_ydata()], axis=1)


def test_partners_steps_and_predicted_cells_stand_where_the_table_says(pred, simulated_cells):
    panels = ptd.pl.trajectory(pred, reference=simulated_cells)
    table = pred.uns["trajectory"]
    assert len(panels) == 2
    for panel, label in zip(panels, ("P1", "P2"), strict=True):
        assert panel.get_title() == f"{label}\nT1"
        assert panel.get_xlabel() == "principal axis 1 (log1p counts per 10,000)"
        assert "principal axis 2" in panel.get_ylabel()
        own = table[table["perturbation"] == label]
        shown = {"control partner": 0, "after step 1 (noise 10)": 1, "predicted": 4}
        for words, step in shown.items():
            wanted = own.loc[own["step"] == step, ["axis_1", "axis_2"]]
            np.testing.assert_allclose(drawn(panel, words), wanted)
        mean = own.groupby("step")[["axis_1", "axis_2"]].mean()
        np.testing.assert_allclose(drawn(panel, "mean"), mean)
        (real,) = [one for one in panel.collections if one.get_label() == "real treated"]
        assert len(real.get_offsets()) == 30
    # Measured cells lie along the axes that were kept, from the mean control cell.
    logs = ptd.pp.normalize(simulated_cells, copy=True)[:, pred.var_names]
    here = logs[logs.obs["cell_type"] == "T1"]
    treated, control = (
        here[here.obs["perturbation"] == label].X.toarray().astype(float).mean(0)
        for label in ("P1", "control")
    )
    (real,) = [one for one in panels[0].collections if one.get_label() == "real treated"]
    np.testing.assert_allclose(
        np.asarray(real.get_offsets()).mean(0),
        (treated - control) @ pred.varm["trajectory"],
        atol=1e-5,
    )


def test_later_steps_are_darker_in_grey(pred):
    (first, _) = ptd.pl.trajectory(pred)
    steps = [one for one in first.lines if one.get_markersize() == 3.5]
    light = [np.dot(mpl.colors.to_rgb(one.get_color()), (0.299, 0.587, 0.114)) for one in steps]
    assert len(light) == 3
    assert (np.diff(light) < -0.05).all()


def test_along_two_genes_into_given_panels_or_a_file(pred, simulated_cells, tmp_path):
    genes = list(pred.var_names[:2])
    given = np.array(Figure().subplots(1, 2))
    panels = ptd.pl.trajectory(pred, reference=simulated_cells, genes=genes, ax=given)
    assert panels == list(given)
    assert panels[0].get_xlabel() == f"{genes[0]} (log1p counts per 10,000)"
    named = simulated_cells.copy()
    named.var["symbol"] = [f"SYM{n}" for n in range(named.n_vars)]
    (shown, _) = ptd.pl.trajectory(pred, reference=named, genes=genes, gene_symbols="symbol")
    assert shown.get_xlabel() == f"{named.var.loc[genes[0], 'symbol']} (log1p counts per 10,000)"
    plt.close("all")
    own = pred.uns["trajectory"].query("perturbation == 'P2' and step == 4")
    np.testing.assert_allclose(drawn(panels[1], "predicted"), own[genes])
    ptd.pl.trajectory(pred, save=tmp_path / "way.png")
    assert (tmp_path / "way.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_what_cannot_be_drawn_is_refused(pred, simulated_cells):
    with pytest.raises(UnknownKeyError, match="Did you mean 'trajectory'"):
        ptd.pl.trajectory(pred, key="trajectories")
    with pytest.raises(ConfigError, match="two genes"):
        ptd.pl.trajectory(pred, genes=["a"])
    with pytest.raises(UnknownKeyError, match=r"asked for in tl\.trajectory"):
        ptd.pl.trajectory(pred, genes=list(pred.var_names[3:5]))
    with pytest.raises(ConfigError, match="2 panels, one for each condition"):
        ptd.pl.trajectory(pred, ax=Figure().subplots())
    gone = pred[pred.obs["perturbation"] == "P2"].copy()
    with pytest.raises(LabelError, match="any more"):
        ptd.pl.trajectory(gone, reference=simulated_cells)
    bare = pred.copy()
    del bare.varm["trajectory"]
    with pytest.raises(LabelError, match=r"varm\['trajectory'\]"):
        ptd.pl.trajectory(bare, reference=simulated_cells)
