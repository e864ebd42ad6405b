"""The picture of intervals: genes that change most, their bars, and which leave out zero."""

from itertools import pairwise

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from perturbdiff import pl
from perturbdiff._errors import ConfigError, UnknownKeyError


@pytest.fixture
def pred():
    adata = ad.AnnData(np.zeros((1, 1), np.float32))
    table = pd.DataFrame({
        "condition": ["A"] * 3 + ["B"] * 3, "cell_type": "T", "gene": ["G0", "G1", "G2"] * 2,
        "shift": [0.1, -2.0, 1.0, 0.3, 0.2, 0.1],
    })  # fmt: skip
    adata.uns["uncertainty"] = table.assign(
        lower=table["shift"] - 1.5, upper=table["shift"] + 1.5, prior_error=1.5, set_error=0.0
    )
    return adata


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_dots_bars_and_what_leaves_out_zero(pred):
    first, second = pl.uncertainty(pred, n_genes=2)
    assert (first.get_title(), second.get_title()) == ("A\nT", "B\nT")
    assert [text.get_text() for text in first.get_yticklabels()] == ["G1", "G2"]
    dots = {line.get_label(): line for line in first.lines if line.get_marker() == "o"}
    assert dots["interval without zero"].get_xdata().tolist() == [-2.0]
    assert dots["zero within"].get_xdata().tolist() == [1.0]
    assert dots["zero within"].get_markerfacecolor() == "white"
    (bars,) = first.collections
    ends = [segment[:, 0].tolist() for segment in bars.get_segments()]
    assert ends == [[-3.5, -0.5], [-0.5, 2.5]]
    assert "log1p counts per 10,000" in first.get_xlabel()


def test_many_genes_make_a_taller_figure_whose_legend_covers_nothing(pred):
    few = pl.uncertainty(pred)[0].get_figure()
    table = pd.concat([pred.uns["uncertainty"].iloc[[0]]] * 150, ignore_index=True)
    pred.uns["uncertainty"] = table.assign(gene=[f"G{n}" for n in range(150)])
    (panel,) = pl.uncertainty(pred, n_genes=150)
    figure = panel.get_figure()
    figure.draw_without_rendering()
    assert figure.get_figheight() > 4 * few.get_figheight()
    boxes = [text.get_window_extent() for text in panel.get_yticklabels()]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert panel.get_legend() is None
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= panel.get_window_extent().y0


def test_genes_are_called_by_symbols_of_the_reference(pred):
    reference = ad.AnnData(np.zeros((1, 3), np.float32))
    reference.var_names = ["G0", "G1", "G2"]
    reference.var["symbol"] = ["ISG15", "IFI6", None]
    first, _ = pl.uncertainty(pred, reference=reference, gene_symbols="symbol")
    assert [text.get_text() for text in first.get_yticklabels()] == ["IFI6", "G2", "ISG15"]


def test_the_title_tells_what_is_far_from_what_cannot_be_told(pred):
    pred.uns["uncertainty"]["supported"] = False
    pred.uns["uncertainty"]["collapsed"] = False
    few = "too few contexts were learnt from to tell whether this one is like them"
    flags = pd.DataFrame({"condition": ["A", "B"], "cell_type": "T", "reason": [few, "far"]})
    for judged, ends in (
        (flags, ("too few contexts to tell whether it is in support", "do not rely on it")),
        (flags.assign(reason=f"{few}; far"), ("do not rely on it", "do not rely on it")),
        (None, ("do not rely on it", "do not rely on it")),
    ):
        pred.uns["uncertainty_flags"] = judged
        for panel, end in zip(pl.uncertainty(pred), ends, strict=True):
            assert panel.get_title().replace("\n", " ").endswith(end)


def test_panels_are_given_or_saved(pred, tmp_path):
    given = list(Figure().subplots(1, 2))
    assert pl.uncertainty(pred, ax=given) == given
    pl.uncertainty(pred, save=tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert list(pred.uns) == ["uncertainty"]


def test_what_cannot_be_drawn_is_refused(pred):
    with pytest.raises(UnknownKeyError, match="Did you mean 'uncertainty'"):
        pl.uncertainty(pred, key="uncertain")
    for n_genes, says in ((0, "at least 1"), (1000, "can be read: 200")):
        with pytest.raises(ConfigError, match=f"n_genes = {n_genes}: .*{says}"):
            pl.uncertainty(pred, n_genes=n_genes)
    with pytest.raises(UnknownKeyError, match=r"^No reference= was given, .* has no 'symbol'"):
        pl.uncertainty(pred, gene_symbols="symbol")
    with pytest.raises(ConfigError, match="2 panels, one for each condition"):
        pl.uncertainty(pred, ax=Figure().subplots())
    with pytest.raises(ConfigError, match="must end in one of"):
        pl.uncertainty(pred, save="bars.xyz")
