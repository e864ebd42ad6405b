"""The picture of intervals: genes that change most, their bars, and which leave out zero."""

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
    with pytest.raises(ConfigError, match="n_genes"):
        pl.uncertainty(pred, n_genes=0)
    with pytest.raises(ConfigError, match="2 panels, one for each condition"):
        pl.uncertainty(pred, ax=Figure().subplots())
    with pytest.raises(ConfigError, match="must end in one of"):
        pl.uncertainty(pred, save="bars.xyz")
