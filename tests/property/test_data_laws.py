"""Laws of the door: storage, order of rows and order of genes are invisible; names come back."""

import hashlib
import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from perturbdiff._errors import LabelError, PerturbDiffError
from perturbdiff.data import (
    Registry,
    ask,
    canonical,
    check_leakage,
    decode,
    encode,
    label_of,
    random_holdout,
    split,
)
from perturbdiff.data._numbers import read_numbers

KEYS = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}


def same(one, two):
    """Whether two readings agree to the last bit."""
    return (
        one.names == two.names
        and one.genes == two.genes
        and one.distinct == two.distinct
        and np.array_equal(one.condition, two.condition)
        and np.array_equal(one.library_size, two.library_size)
        and all(
            np.array_equal(getattr(a, part), getattr(b, part))
            for a, b in ((one.counts, two.counts), (one.log1p, two.log1p))
            for part in ("data", "indices", "indptr")
        )
    )


# Storage


def unsorted(matrix):
    """The same matrix with indices in reverse, a duplicate and a stored zero."""
    rows = []
    for row in sp.csr_matrix(matrix):
        data, indices = row.data[::-1], row.indices[::-1]
        data, indices = np.append(data, data[:1] * 0), np.append(indices, indices[:1])
        rows.append((np.append(data, 0), np.append(indices, matrix.shape[1] - 1)))
    indptr = np.cumsum([0, *(len(data) for data, _ in rows)])
    data, indices = (np.concatenate(part) for part in zip(*rows, strict=True))
    return sp.csr_matrix((data.astype(np.float32), indices, indptr), shape=matrix.shape)


STORAGE = {
    "dense": lambda x: x.toarray(),
    "dense_fortran": lambda x: np.asfortranarray(x.toarray()),
    "csr_matrix": sp.csr_matrix,
    "csc_matrix": sp.csc_matrix,
    "csr_array": sp.csr_array,
    "csc_array": sp.csc_array,
    "unsorted": unsorted,
    "float64": lambda x: x.astype(np.float64),
    "int64": lambda x: x.astype(np.int64),
    "uint16_dense": lambda x: x.toarray().astype(np.uint16),
    "float16_dense": lambda x: x.toarray().astype(np.float16),
}


@pytest.mark.parametrize("where", ["X", "layer", "view", "backed", "backed_view"])
@pytest.mark.parametrize("form", STORAGE)
def test_storage_is_invisible(toy, tmp_path, form, where):
    adata = toy()
    registry = Registry.from_anndata(adata, scale="counts", **KEYS).with_genes(["G5", "G0", "G7"])
    expected = encode(adata, registry)
    matrix = STORAGE[form](adata.X)
    if where == "layer":
        adata.layers["umi"] = matrix
        adata.X = adata.X * np.float32(0.5)
        registry = Registry.from_anndata(adata, scale="counts", layer="umi", **KEYS)
        registry = registry.with_genes(["G5", "G0", "G7"])
    else:
        adata.X = matrix
    if "backed" in where:
        adata.write_h5ad(tmp_path / "cells.h5ad")
        adata = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    if "view" in where:
        adata = adata[np.arange(adata.n_obs)]
        assert adata.is_view
    read = encode(adata, registry)
    if "backed" in where:
        adata.file.close()
    assert same(read, expected)


LABEL_FORMS = {
    "category": lambda x: x.astype("category"),
    "unused": lambda x: x.astype(pd.CategoricalDtype(["zz", *sorted(set(x))])),
    "string": lambda x: x.astype("string"),
    "object": lambda x: x.astype(object),
}


@pytest.mark.parametrize("form", LABEL_FORMS)
def test_the_dtype_of_labels_is_invisible(toy, form):
    adata = toy()
    registry = Registry.from_anndata(adata, scale="counts", **KEYS)
    expected = encode(adata, registry)
    for key in adata.obs:
        adata.obs[key] = LABEL_FORMS[form](adata.obs[key].astype(object))
    assert Registry.from_anndata(adata, scale="counts", **KEYS) == registry
    assert same(encode(adata, registry), expected)


# Order


@given(seed=st.integers(0, 10**6))
def test_the_order_of_rows_is_invisible(toy, seed):
    adata = toy(["ctrl", "A", "B+A"], seed=seed % 7)
    adata.uns["features"] = pd.DataFrame({"x": [1.0, 2.0]}, index=["A", "B"])
    order = np.random.default_rng(seed).permutation(adata.n_obs)
    shuffled = adata[order].copy()
    options = {"scale": "counts", "embedding_key": "features", **KEYS}
    registry = Registry.from_anndata(adata, **options)
    assert Registry.from_anndata(shuffled, **options) == registry
    cells = encode(adata, registry)
    moved = encode(shuffled, registry)
    assert same(moved, cells)
    assert (order[moved.rows] == cells.rows).all()
    question = ask(adata, registry, perturbations=["A"], n_cells=3)
    again = ask(shuffled, registry, perturbations=["A"], n_cells=3)
    assert again.conditions == question.conditions
    assert same(again.controls, question.controls)


@given(seed=st.integers(0, 10**6))
def test_the_order_of_genes_is_invisible(toy, seed):
    adata = toy(seed=seed % 7)
    order = np.random.default_rng(seed).permutation(adata.n_vars)
    shuffled = adata[:, order].copy()
    registry = Registry.from_anndata(adata, scale="counts", **KEYS)
    assert same(encode(shuffled, registry), encode(adata, registry))
    other = Registry.from_anndata(shuffled, scale="counts", **KEYS)
    moved = encode(shuffled, other)
    assert moved.genes == tuple(adata.var_names[order])
    assert same(moved.select(adata.var_names), encode(adata, registry))
    chosen = [adata.var_names[column] for column in order[:4]]
    assert same(
        encode(shuffled, other.with_genes(chosen)), encode(adata, registry.with_genes(chosen))
    )


# Names

NAME = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12
)
MEMBER = NAME.map(str.strip).filter(lambda name: name and name != "ctrl")


@given(members=st.lists(MEMBER, min_size=1, max_size=4), seed=st.integers(0, 99))
@example(members=["(+/-)-ibuprofen", "CTLA4/PD1"], seed=0)
@settings(max_examples=200)
def test_a_label_reads_as_its_members_in_any_order(members, seed):
    try:
        label = label_of(members)
    except LabelError:
        assume(False)
    expected = tuple(sorted(set(members)))
    assert canonical(label, control="ctrl") == expected
    order = np.random.default_rng(seed).permutation(len(members))
    shuffled = "&".join([members[place] for place in order])
    if not any("&" in member for member in members):
        assume(all(not set(member) & set("([{}])") for member in members))
        assert canonical(shuffled + "&ctrl", separator="&", control="ctrl") == expected


@given(label=st.text(st.sampled_from("AB+ ([])-"), max_size=10).filter(str.strip))
@settings(max_examples=300)
def test_the_canonical_form_is_its_own_canonical_form(label):
    try:
        members = canonical(label, control="ctrl")
    except LabelError:
        assume(False)
    assert canonical(label_of(members, control="ctrl"), control="ctrl") == members


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cells")


@given(
    perturbations=st.lists(MEMBER, min_size=1, max_size=3, unique=True),
    contexts=st.lists(NAME.filter(str.strip), min_size=1, max_size=3, unique=True),
    genes=st.lists(MEMBER, min_size=2, max_size=5, unique=True),
)
@example(
    perturbations=["(+/-)-ibuprofen", "CTLA4/PD1"], contexts=["..", "HepG2/C3A"], genes=["/", "a"]
)
def test_names_survive_the_way_out_and_back(folder, toy, perturbations, contexts, genes):
    adata = toy(["ctrl", *perturbations], cell_types=contexts, n_each=1, n_genes=len(genes))
    adata.var_names = genes
    try:
        registry = Registry.from_anndata(adata, scale="counts", **KEYS)
    except LabelError:
        assume(False)
    cells = encode(adata, registry)
    pred = decode(
        cells.counts,
        cells.library_size,
        registry,
        conditions=cells.distinct,
        condition=cells.condition,
        provenance={"conditions": [c.name for c in cells.distinct]},
    )
    pred.write_h5ad(folder / "cells.h5ad")
    back = ad.read_h5ad(folder / "cells.h5ad")
    again = encode(back, registry)
    assert again.distinct == cells.distinct
    assert again.genes == tuple(genes)
    assert np.array_equal(again.condition, cells.condition)
    assert (again.log1p != cells.log1p).nnz == 0
    assert Registry.from_json(json.loads(json.dumps(registry.to_json()))) == registry


@given(value=st.floats(0, 1e12, allow_nan=False), unit=st.sampled_from(["", "h", "uM", "mg/kg"]))
def test_a_number_is_the_same_however_it_is_written(value, unit):
    written = [f"{value!r}{unit}", f" {value:.17g} {unit}", f"{value:.16e}{unit}"]
    column = read_numbers(pd.DataFrame({"dose": written}), "dose")
    assert column.entries == ((value,),)
    assert column.unit == unit


# Splits


@given(
    kind=st.sampled_from(["context", "perturbation", "combination"]),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 999),
)
def test_no_cell_of_a_held_out_condition_reaches_training(toy, kind, fraction, seed):
    adata = toy(["ctrl", "A", "B", "A+B", "C+A"], cell_types=["T", "NK", "DC"], n_each=2)
    registry = Registry.from_anndata(adata, scale="counts", **KEYS)
    cells = encode(adata, registry)
    holdout = random_holdout(cells, registry, kind=kind, fraction=fraction, seed=seed)
    parts = split(cells, registry, holdout=holdout)
    train = cells.take(parts.train)
    check_leakage(train, parts)
    assert not set(train.conditions()) & set(parts.conditions)
    assert not parts.test_names & set(train.names)
    assert len(train) + parts.test.sum() == len(cells)
    assert set(train.controls()) == set(cells.controls())
    assert train.conditions()


# The caller's object


def fingerprint(adata):
    """Everything that a caller could see of an AnnData, to the last bit."""
    digest = hashlib.sha256()
    for matrix in (adata.X, *adata.layers.values(), *adata.obsm.values()):
        parts = (matrix.data, matrix.indices, matrix.indptr) if sp.issparse(matrix) else (matrix,)
        for part in parts:
            digest.update(
                f"{part.dtype} {part.shape}".encode() + np.ascontiguousarray(part).tobytes()
            )
    for table in (adata.obs, adata.var):
        digest.update(f"{table.dtypes.to_dict()} {table.to_json()}".encode())
    digest.update(repr(adata).encode() + repr(adata.uns).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("form", STORAGE)
def test_the_callers_object_is_never_changed(toy, form):
    adata = toy(["ctrl", "A", "nan"])
    adata.X = STORAGE[form](adata.X)
    adata.layers["other"] = adata.X.copy()
    adata.obsm["features"] = np.ones((adata.n_obs, 2))
    adata.obs["dose"] = ["1"] * adata.n_obs
    before = fingerprint(adata)
    registry = Registry.from_anndata(
        adata, scale="counts", dose_key="dose", embedding_key="features", **KEYS
    )
    cells = encode(adata, registry)
    ask(adata, registry, perturbations=["A"], doses=[1.0], n_cells=2)
    split(cells, registry, holdout={"cell_type": ["NK"]})
    for options in ({"scale": "log1p_cp10k"}, {"scale": None}, {"control": "none"}):
        with pytest.raises(PerturbDiffError):
            Registry.from_anndata(adata, **({"scale": "counts"} | KEYS | options))
    for matrix in (cells.counts, cells.log1p):
        matrix.data[:] = 0
        matrix.indices[:] = 0
        matrix.indptr[:] = 0
    assert fingerprint(adata) == before
