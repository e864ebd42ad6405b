"""pp.normalize: exact values, a declared scale, storage kept, nothing else touched."""

import logging

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from perturbdiff import pp
from perturbdiff._errors import ConfigError, ExpressionError, ScaleError
from perturbdiff.data import Registry, encode


def test_values_by_hand_and_what_is_written():
    adata = ad.AnnData(X=np.array([[3, 1], [0, 2]], np.float32))
    assert pp.normalize(adata) is None
    expected = np.log1p([[7500, 2500], [0, 1e4]]).astype(np.float32)
    np.testing.assert_array_equal(adata.X, expected)
    assert adata.obs["library_size"].tolist() == [4, 2]
    assert adata.uns["perturbdiff"] == {"scale": "log1p_cp10k"}


def test_a_copy_leaves_the_original_alone(toy):
    adata = toy()
    before = adata.X.toarray()
    new = pp.normalize(adata, copy=True)
    assert (adata.X.toarray() == before).all()
    assert list(adata.obs) == ["condition", "cell_type"]
    assert "perturbdiff" not in adata.uns
    assert new.uns["perturbdiff"]["scale"] == "log1p_cp10k"


FORMS = {
    "dense": lambda x: x.toarray(),
    "csr_matrix": sp.csr_matrix,
    "csc_matrix": sp.csc_matrix,
    "csr_array": sp.csr_array,
    "csc_array": sp.csc_array,
}


@pytest.mark.parametrize("form", FORMS)
def test_storage_is_kept(toy, form):
    expected = pp.normalize(toy(), copy=True).X.toarray()
    adata = toy()
    adata.X = FORMS[form](adata.X)
    kind = type(adata.X)
    pp.normalize(adata)
    assert type(adata.X) is kind
    values = adata.X if form == "dense" else adata.X.toarray()
    assert values.dtype == np.float32
    assert (values == expected).all()


def test_a_normalised_file_needs_no_scale_and_gives_the_same_cells(toy):
    adata = toy()
    keys = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}
    counts = encode(adata, Registry.from_anndata(adata, scale="counts", **keys))
    pp.normalize(adata)
    registry = Registry.from_anndata(adata, **keys)
    assert registry.scale == "log1p_cp10k"
    cells = encode(adata, registry)
    assert (cells.log1p != counts.log1p).nnz == 0
    assert (cells.counts != counts.counts).nnz == 0


def test_counts_from_a_layer_over_a_named_library_size(toy):
    adata = toy()
    adata.layers["umi"] = adata.X.copy()
    adata.X = adata.X * np.float32(0.1)
    adata.obs["depth"] = 2000
    pp.normalize(adata, layer="umi", library_size_key="depth")
    expected = np.log1p(adata.layers["umi"].toarray().astype(float) / 2000 * 1e4).astype(np.float32)
    assert (adata.X.toarray() == expected).all()
    assert set(adata.obs["library_size"]) == {2000.0}


def test_twice_is_refused(toy):
    adata = toy()
    pp.normalize(adata)
    before = adata.X.toarray()
    with pytest.raises(ScaleError, match=r"already.*nothing to normalise.*layer='counts'"):
        pp.normalize(adata)
    assert (adata.X.toarray() == before).all()


def test_what_is_no_counts_is_refused_and_nothing_is_written(toy):
    adata = toy()
    adata.X = adata.X * np.float32(0.5)
    with pytest.raises(ExpressionError, match="fractions"):
        pp.normalize(adata)
    assert "library_size" not in adata.obs
    assert "perturbdiff" not in adata.uns


def test_empty_cells_stay_zero_and_are_counted(toy, caplog):
    adata = toy()
    adata.X = adata.X.toarray()
    adata.X[2] = 0
    with caplog.at_level(logging.WARNING, "perturbdiff"):
        pp.normalize(adata)
    assert "1 of 24 cells have no counts" in caplog.text
    assert adata.X[2].sum() == 0
    assert np.isfinite(adata.X).all()


def test_a_backed_file_is_not_written_to(toy, tmp_path):
    toy().write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    with pytest.raises(ConfigError, match="backed"):
        pp.normalize(backed)
    new = pp.normalize(backed, copy=True)
    backed.file.close()
    assert (new.X.toarray() == pp.normalize(toy(), copy=True).X.toarray()).all()
