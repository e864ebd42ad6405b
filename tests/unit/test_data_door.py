"""The door: numbers by hand, scales, library sizes, genes by name, and the way back."""

import logging

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import perturbdiff as ptd
from perturbdiff._errors import (
    ConfigError,
    ExpressionError,
    GeneError,
    GeneOverlapError,
    LabelError,
    ScaleError,
    UnknownKeyError,
    UnknownLevelError,
)
from perturbdiff.data import Registry, decode, encode
from perturbdiff.data._matrix import align_genes, read_matrix
from perturbdiff.data._rounding import rounding_of


def register(adata, **changes):
    names = {
        "perturbation_key": "condition",
        "control": "ctrl",
        "covariate_keys": ["cell_type"],
        "scale": "counts",
    }
    return Registry.from_anndata(adata, **(names | changes))


def decoded(cells, registry, **changes):
    keys = {"conditions": cells.distinct, "condition": cells.condition}
    return decode(cells.counts, cells.library_size, registry, **(keys | changes))


@pytest.fixture
def by_hand():
    counts = np.array([[3, 1, 0], [0, 0, 2], [10, 0, 0]])
    obs = pd.DataFrame({"condition": ["A", "ctrl", "ctrl"]}, index=["c", "b", "a"])
    return ad.AnnData(X=counts.astype(np.float32), obs=obs, var=pd.DataFrame(index=["x", "y", "z"]))


def test_values_by_hand(by_hand):
    cells = encode(by_hand, register(by_hand, covariate_keys=[]))
    assert cells.names == ("a", "b", "c")
    assert cells.rows.tolist() == [2, 1, 0]
    assert cells.counts.toarray().tolist() == [[10, 0, 0], [0, 0, 2], [3, 1, 0]]
    assert cells.library_size.tolist() == [10, 2, 4]
    expected = np.log1p([[1e4, 0, 0], [0, 0, 1e4], [7500, 2500, 0]]).astype(np.float32)
    assert (cells.log1p.toarray() == expected).all()
    assert cells.log1p.dtype == np.float32
    assert cells.counts.dtype == np.int32
    assert cells.is_control.tolist() == [True, True, False]
    assert cells.members == [(), (), ("A",)]


def test_selected_genes_keep_the_library_size_of_all(by_hand):
    registry = register(by_hand, covariate_keys=[]).with_genes(["z", "x"])
    cells = encode(by_hand, registry)
    assert cells.genes == ("z", "x")
    assert cells.counts.toarray().tolist() == [[0, 10], [2, 0], [0, 3]]
    assert cells.library_size.tolist() == [10, 2, 4]
    whole = encode(by_hand, register(by_hand, covariate_keys=[])).select(["z", "x"])
    assert (whole.log1p != cells.log1p).nnz == 0


def test_groups_of_cells(toy):
    cells = encode(toy(), register(toy()))
    assert [(str(c), rows.tolist()) for c, rows in cells.conditions().items()] == [
        ("A in NK", [12, 13, 14, 15]),
        ("A in T", [8, 9, 10, 11]),
        ("B in NK", [20, 21, 22, 23]),
        ("B in T", [16, 17, 18, 19]),
    ]
    assert {k: rows.tolist() for k, rows in cells.controls().items()} == {
        ("NK",): [4, 5, 6, 7],
        ("T",): [0, 1, 2, 3],
    }
    assert cells.contexts == (("NK",), ("T",))
    assert cells.context[[0, 4]].tolist() == [1, 0]
    part = cells.take(cells.is_control)
    assert len(part) == 8
    assert part.conditions() == {}
    assert part.names == cells.names[:8]


# Scales


def test_the_scale_must_be_declared(toy):
    expected = r"not declared. Pass scale='counts'.*adata\.X holds whole numbers"
    with pytest.raises(ScaleError, match=expected):
        register(toy(), scale=None)
    with pytest.raises(ScaleError, match=r"'count' is not known\. Did you mean 'counts'"):
        register(toy(), scale="count")


def test_a_declaration_in_the_file_is_enough_and_must_not_be_contradicted(toy):
    adata = toy()
    adata.uns["perturbdiff"] = {"scale": "counts"}
    assert register(adata, scale=None).scale == "counts"
    with pytest.raises(ScaleError, match="declares 'counts'"):
        register(adata, scale="log1p_cp10k")


@pytest.mark.parametrize("dense", [True, False])
def test_fractions_are_no_counts(toy, dense):
    adata = toy()
    adata.layers["umi"] = adata.X.copy()
    adata.X = (adata.X * 0.5).toarray() if dense else adata.X * 0.5
    expected = r"declared as counts but holds fractions such as \d*\.5.*layer='umi'"
    with pytest.raises(ExpressionError, match=expected):
        register(adata)


def test_whole_numbers_are_no_logarithms(toy):
    with pytest.raises(ScaleError, match="holds only whole numbers"):
        register(toy(), scale="log1p_cp10k")


def test_other_logarithms_are_refused(toy):
    adata = toy()
    cells = encode(adata, register(adata))
    adata.X = cells.log1p
    adata.uns["log1p"] = {"base": 2}
    with pytest.raises(ScaleError, match="base 2"):
        register(adata, scale="log1p_cp10k")
    adata.uns["log1p"] = {"base": None}
    assert register(adata, scale="log1p_cp10k").scale == "log1p_cp10k"
    adata.X = cells.log1p * np.float32(3)
    with pytest.raises(ScaleError, match="more than log1p of counts per 10,000"):
        register(adata, scale="log1p_cp10k")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_values_that_cannot_be_are_refused_when_read_too(toy, bad):
    adata = toy()
    registry = register(adata)
    adata.X.data[5] = bad
    with pytest.raises(ExpressionError, match=r"NaN or infinite|negative values"):
        encode(adata, registry)


def test_expression_must_be_numbers(toy):
    adata = toy()
    adata.layers["text"] = np.full(adata.shape, "a", dtype=object)
    with pytest.raises(ExpressionError, match="not numbers"):
        register(adata, layer="text")


# Library sizes


def test_a_named_column_or_library_size_is_the_denominator(toy):
    adata = toy()
    adata.obs["depth"] = 1000.0
    cells = encode(adata, register(adata, library_size_key="depth"))
    assert set(cells.library_size) == {1000.0}
    value = cells.counts.toarray()[0, 0] * 10
    assert cells.log1p.toarray()[0, 0] == np.float32(np.log1p(value))
    adata.obs["library_size"] = 500
    assert set(encode(adata, register(adata)).library_size) == {500.0}
    with pytest.raises(UnknownKeyError, match=r"'dept'\. Did you mean 'depth'"):
        register(adata, library_size_key="dept")


def test_a_column_that_is_no_library_size_is_refused(toy):
    adata = toy()
    registry = register(adata)
    adata.obs["library_size"] = 2.0
    with pytest.raises(ExpressionError, match="is no library size"):
        encode(adata, registry)
    adata.obs["library_size"] = [np.nan] + [1e3] * (adata.n_obs - 1)
    with pytest.raises(ExpressionError, match=r"1 are not \(cell 'cell000'\)"):
        encode(adata, registry)


def test_a_subset_of_genes_without_library_sizes_is_refused(toy):
    adata = toy()
    registry = register(adata).with_genes(["G0", "G1"])
    with pytest.raises(ScaleError, match="2 of the 12 genes measured in training"):
        encode(adata[:, ["G0", "G1"]], registry)
    flagged = adata.copy()
    flagged.var["highly_variable"] = True
    with pytest.raises(ScaleError, match="flagged highly_variable"):
        encode(flagged, register(flagged))
    small = adata.copy()
    small.raw = adata
    small = small[:, :5].copy()
    with pytest.raises(ScaleError, match=r"adata\.raw has 12 genes, adata 5"):
        encode(small, register(small))


def test_log_values_have_counts_only_with_library_sizes(toy):
    adata = toy()
    counts = encode(adata, register(adata))
    adata.X = counts.log1p
    without = encode(adata, register(adata, scale="log1p_cp10k"))
    assert without.counts is None
    assert without.library_size is None
    adata.obs["library_size"] = counts.library_size
    cells = encode(adata, register(adata, scale="log1p_cp10k"))
    assert (cells.counts != counts.counts).nnz == 0
    assert (cells.log1p != counts.log1p).nnz == 0


@pytest.mark.parametrize("named", [None, "library_size"])
def test_log_values_must_fit_the_library_sizes(toy, named):
    adata = ptd.pp.normalize(toy(), copy=True)
    registry = register(adata, scale="log1p_cp10k", library_size_key=named)
    for change in ("sizes of other cells", "logged twice"):
        wrong = adata.copy()
        if change == "logged twice":
            wrong.X = np.log1p(adata.X)
        else:
            wrong.obs["library_size"] = adata.obs["library_size"].to_numpy()[::-1]
        with pytest.raises(ScaleError, match=r"do not fit obs\['library_size'\].*logged twice"):
            encode(wrong, registry)
        found = ptd.pp.check(
            wrong,
            perturbation_key="condition",
            control="ctrl",
            covariate_keys=["cell_type"],
            scale="log1p_cp10k",
            library_size_key=named,
        )
        (fault,) = found[found["level"] == "fault"].to_dict("records")
        assert fault["about"] == "library size"
        assert "do not fit obs['library_size']" in fault["found"]


ROUNDED = {
    "to 2 decimals": lambda values: values.round(2),
    "to 3 decimals": lambda values: values.round(3),
    "to 4 decimals": lambda values: values.round(4),
    r"to half precision \(float16\)": lambda values: values.astype(np.float16),
}


@pytest.fixture
def deep(toy):
    """Log values of cells with many counts, which rounding harms most, as a dense array."""
    adata = toy(n_each=40)
    factor = np.random.default_rng(0).integers(1, 200, adata.shape)
    adata.X = np.asarray(adata.X.toarray() * factor, np.float32)
    adata.layers["raw"] = adata.X.copy()
    return ptd.pp.normalize(adata, copy=True)


@pytest.mark.parametrize("how", ROUNDED)
def test_log_values_that_were_rounded_are_told_so(deep, how):
    exact = deep.X
    assert encode(deep, register(deep, scale="log1p_cp10k")).counts is not None
    deep.X = ROUNDED[how](exact)
    said = f"rounded {how} after the logarithm.*give the logarithms as they were.*layer='raw' holds"
    for wide in (deep.X, deep.X.astype(np.float32)):  # float16 read and written as float32
        deep.X = wide
        with pytest.raises(ScaleError, match=said):
            encode(deep, register(deep, scale="log1p_cp10k"))


@pytest.mark.parametrize("how", ROUNDED)
@pytest.mark.parametrize("also", ["sizes of other cells", "logged twice"])
def test_rounding_is_not_named_where_it_explains_nothing(deep, how, also):
    values = deep.X
    if also == "logged twice":
        values = np.log1p(values)
    else:
        deep.obs["library_size"] = deep.obs["library_size"].to_numpy()[::-1]
    deep.X = ROUNDED[how](values).astype(np.float32)
    with pytest.raises(ScaleError, match=r"logged twice or scaled") as caught:
        encode(deep, register(deep, scale="log1p_cp10k"))
    assert "rounded" not in str(caught.value)


def test_few_values_tell_no_habit():
    assert rounding_of(np.full(9, 0.5)) is None
    assert rounding_of(np.linspace(0.1, 5, 50, dtype=np.float32) ** 1.1) is None
    assert rounding_of(np.full(10, 0.3)).how == "to 1 decimal"
    many = np.random.default_rng(0).uniform(0.1, 9, 1000).round(5).astype(np.float32)
    assert rounding_of(many).how == "to 5 decimals"


# Genes by name


def test_extra_genes_are_ignored_with_one_count(toy, caplog):
    adata = toy()
    registry = register(adata[:, :11].copy())
    with caplog.at_level(logging.INFO, "perturbdiff"):
        cells = encode(adata, registry)
    assert caplog.text.count("ignored 1 genes") == 1
    assert cells.genes == tuple(adata.var_names[:11])
    totals = np.asarray(adata.X.sum(axis=1)).ravel()
    assert cells.library_size.tolist() == totals.tolist()


def test_missing_genes_are_refused_by_name_or_inferred(toy):
    adata = toy()
    adata.obs["library_size"] = np.asarray(adata.X.sum(axis=1)).ravel()
    registry = register(adata).with_genes(["G3", "G1", "G2"])
    part = adata[:, ["G1", "G3", "G5"]]
    with pytest.raises(GeneError, match=r"1 of 3 genes of the model are not in the file: 'G2'"):
        encode(part, registry)
    cells = encode(part, registry, missing_genes="infer")
    assert cells.genes == ("G3", "G1")
    assert (cells.log1p != encode(adata, registry).select(["G3", "G1"]).log1p).nnz == 0


def test_no_gene_in_common_has_its_own_error(toy):
    adata = toy()
    registry = register(adata)
    adata.var_names = [f"ENSG{n}" for n in range(adata.n_vars)]
    with pytest.raises(GeneOverlapError, match=r"None of the 12 genes.*'ENSG0'"):
        encode(adata, registry, missing_genes="infer")


# Labels


def test_unknown_labels_are_refused_by_name(toy):
    registry = register(toy(["ctrl", "KLF1"]))
    with pytest.raises(UnknownLevelError, match=r"'KLF2'\. Did you mean 'KLF1'"):
        encode(toy(["ctrl", "KLF2"]), registry)
    other = toy(["ctrl", "KLF1"], cell_types=["T", "N"])
    with pytest.raises(UnknownLevelError, match=r"obs\['cell_type'\].*'N'. "):
        encode(other, registry)
    assert encode(other, registry, new_contexts="infer").contexts == (("N",), ("T",))


def test_doses_and_members_must_match(toy):
    adata = toy(["ctrl", "A+B", "A+ctrl"], cell_types=["T"], n_each=2)
    adata.obs["dose"] = ["0", "0", "1+2", "3", "5+0", "5"]
    cells = encode(adata, register(adata, dose_key="dose"))
    assert [(c.members, c.doses) for c in cells.conditions()] == [
        (("A",), (5.0,)),
        (("A", "B"), (1.0, 2.0)),
        (("A", "B"), (3.0, 3.0)),
    ]
    adata.obs["dose"] = ["0", "0", "1+2+3", "3", "5", "5"]
    with pytest.raises(LabelError, match=r"than 'A\+B' has members \(cell 'cell002'\)"):
        register(adata, dose_key="dose")


# The way back


def test_a_prediction_declares_its_scale_and_keeps_its_counts(toy, tmp_path):
    adata = toy(["ctrl", "A", "B+A"])
    registry = register(adata).with_genes(["G4", "G0", "G2"])
    cells = encode(adata, registry)
    sets = np.arange(len(cells)) // 4
    pred = decoded(cells, registry, sets=sets, provenance={"seed": 1, "guidance": ["a", "b"]})
    pred.write_h5ad(tmp_path / "pred.h5ad")
    back = ad.read_h5ad(tmp_path / "pred.h5ad")
    exact = np.log1p(cells.counts.toarray() / cells.library_size[:, None] * 1e4)
    assert (back.X.toarray() == exact.astype(np.float32)).all()
    assert back.X.dtype == np.float32
    assert (back.layers["counts"] != cells.counts).nnz == 0
    assert back.var_names.tolist() == ["G4", "G0", "G2"]
    assert back.obs["condition"].unique().tolist() == ["ctrl", "A", "A+B"]
    assert back.obs["set"].tolist() == sets.tolist()
    assert back.obs["library_size"].tolist() == cells.library_size.tolist()
    assert back.uns["perturbdiff"]["scale"] == "log1p_cp10k"
    assert back.uns["perturbdiff"]["guidance"].tolist() == ["a", "b"]
    again = encode(back, registry)
    assert again.distinct == cells.distinct
    assert (again.counts != cells.counts).nnz == 0
    assert (again.log1p != cells.log1p).nnz == 0


def test_a_prediction_of_a_log_model_has_no_counts(toy):
    adata = toy()
    adata.X = encode(adata, register(adata)).log1p
    registry = register(adata, scale="log1p_cp10k")
    cells = encode(adata, registry)
    pred = decode(cells.log1p, None, registry, conditions=cells.distinct, condition=cells.condition)
    assert list(pred.layers) == []
    assert (encode(pred, registry).log1p != cells.log1p).nnz == 0


@pytest.mark.parametrize("layer", ["counts", "umi"])
def test_a_prediction_holds_the_layer_that_its_model_reads(toy, layer):
    adata = toy()
    adata.layers[layer] = adata.X.copy()
    adata.X = adata.X * np.float32(0.3)
    registry = register(adata, layer=layer)
    cells = encode(adata, registry)
    pred = decoded(cells, registry)
    assert (encode(pred, registry).counts != cells.counts).nnz == 0
    assert sorted(pred.layers) == sorted({"counts", layer})


def test_times_and_doses_come_back_with_their_units(toy, tmp_path):
    adata = toy(["ctrl", "A", "A+B"], cell_types=["T"], n_each=2)
    adata.obs["dose"] = [None, None, "1uM", "0.5 uM", "1uM+2uM", "3uM"]
    adata.obs["hour"] = [0, 0, 6, 24, 6, 6]
    registry = register(adata, dose_key="dose", time_key="hour")
    assert (registry.dose_unit, registry.time_unit) == ("uM", "")
    cells = encode(adata, registry)
    decoded(cells, registry).write_h5ad(tmp_path / "pred.h5ad")
    back = ad.read_h5ad(tmp_path / "pred.h5ad")
    assert encode(back, registry).distinct == cells.distinct
    assert {c.time for c in cells.conditions()} == {6.0, 24.0}


def test_a_prediction_of_the_wrong_shape_is_refused(toy):
    registry, cells = register(toy()), encode(toy(), register(toy()))
    with pytest.raises(ConfigError, match="one column for 12 genes"):
        decode(
            cells.counts[:, :3],
            cells.library_size,
            registry,
            conditions=cells.distinct,
            condition=cells.condition,
        )
    with pytest.raises(ConfigError, match=r"provenance\.a = <object.*must be a scalar"):
        decoded(cells, registry, provenance={"a": object()})


def test_a_cell_without_counts_is_zero_and_one_with_counts_has_a_library(toy):
    """The law of X where its denominator is zero."""
    adata = toy()
    adata.X = adata.X.toarray()
    adata.X[3] = 0
    registry = register(adata)
    cells = encode(adata, registry)
    pred = decoded(cells, registry)
    assert pred.obs["library_size"].iloc[3] == 0
    assert pred.X[3].nnz == 0
    assert np.isfinite(pred.X.data).all()
    cells.library_size[0] = 0
    with pytest.raises(ConfigError, match=r"library_size = 0\.0: must be above 0 wherever"):
        decoded(cells, registry)


def test_wide_indices_are_not_narrowed(toy):
    adata = toy()
    wide = sp.csr_array(adata.X)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    adata.layers["wide"] = wide
    read = read_matrix(adata, "wide", rows=np.array([3, 1]))
    assert (read.indices.dtype, read.indptr.dtype) == (np.int64, np.int64)
    cells = encode(adata, register(adata, layer="wide"))
    assert cells.counts.indices.dtype == np.int64
    assert cells.log1p.indptr.dtype == np.int64


def test_counts_beyond_32_bits_stay_exact(toy):
    adata = toy()
    adata.X = adata.X.toarray().astype(np.int64)
    adata.X[0, 0] = 2**40 + 1
    assert encode(adata, register(adata)).counts.toarray()[0, 0] == 2**40 + 1


def test_a_misspelt_way_with_missing_genes_is_refused():
    with pytest.raises(ConfigError, match="'refuse' or 'infer'"):
        align_genes(("A", "B"), ("A", "C"), missing="ignore")
