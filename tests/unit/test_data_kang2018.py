"""The shipped blood cells, their annotation, and the ways in which they can fail to be obtained."""

import zipfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData

from perturbdiff._errors import DownloadError
from perturbdiff.data.datasets import _wheel, kang2018, kang2018_small
from perturbdiff.data.datasets._annotate import MARKERS, annotate
from perturbdiff.data.datasets._wheel import Member, Wheel

DATA = Path(__file__).parents[2] / "data"
TYPES = {"B", "CD14 Mono", "CD16 Mono", "CD4 T", "CD8 T", "DC", "Eryth", "Mk", "NK", "pDC"}


@pytest.fixture(scope="module")
def small() -> AnnData:
    return kang2018_small()


def log1p_cp10k(adata: AnnData) -> pd.DataFrame:
    library = adata.obs["library_size"].to_numpy()[:, None]
    values = np.log1p(adata.X.toarray() / library * 1e4)
    return pd.DataFrame(values, index=adata.obs_names, columns=adata.var_names)


def test_shipped_file_is_the_one_described():
    content = (DATA / "kang2018_small.h5ad").read_bytes()
    assert len(content) <= 3_000_000
    described = (DATA / "README.md").read_text()
    assert sha256(content).hexdigest() in described
    assert f"{len(content):,}" in described
    assert "GSE96583" in described


def test_sample_holds_raw_counts_of_every_type_in_both_conditions(small):
    assert small.shape == (2999, 1500)
    assert sp.issparse(small.X)
    assert small.X.dtype == np.int32
    assert small.X.data.min() >= 1
    assert small.uns["perturbdiff"]["scale"] == "counts"
    assert small.obs_names.is_unique
    assert small.var_names.is_unique
    sizes = pd.crosstab(small.obs["cell_type"], small.obs["condition"])
    assert set(sizes.index) == TYPES
    assert list(sizes.columns) == ["ctrl", "stim"]
    assert sizes.to_numpy().min() >= 25


def test_library_size_counts_the_genes_that_were_cut_off(small):
    panel = np.asarray(small.X.sum(1)).ravel()
    library = small.obs["library_size"].to_numpy()
    assert (library > panel).all()
    assert library.min() > 500
    assert (panel / library).mean() == pytest.approx(0.63, abs=0.03)


def test_biology_of_the_sample(small):
    values = log1p_cp10k(small)
    stim = small.obs["condition"] == "stim"
    kind = small.obs["cell_type"]
    for gene in ("ISG15", "IFI6", "ISG20"):
        rise = values[gene][stim].groupby(kind, observed=True).mean()
        rise -= values[gene][~stim].groupby(kind, observed=True).mean()
        assert (rise > 0.5).all(), gene
    level = values.groupby(kind, observed=True).mean()
    told = {"CD79A": "B", "GNLY": "NK", "PPBP": "Mk", "HBB": "Eryth", "VMO1": "CD16 Mono"}
    for gene, best in (told | {"LILRA4": "pDC", "CD8A": "CD8 T", "FCER1A": "DC"}).items():
        assert level[gene].idxmax() == best, gene


def synthetic_blood() -> tuple[AnnData, np.ndarray]:
    """Cells of every type with its markers, and a strong interferon response in one condition."""
    rng = np.random.default_rng(0)
    markers = sorted({g for m in MARKERS.values() for g in f"{m.present} {m.absent}".split()})
    genes = [*markers, *(f"ISG{i}" for i in range(40)), *(f"OTHER{i}" for i in range(300))]
    kind = np.tile(np.repeat(list(MARKERS), 30), 2)
    condition = np.repeat(["ctrl", "stim"], len(kind) // 2)
    rate = pd.DataFrame(0.5, index=range(len(kind)), columns=genes)
    rate[markers] = 0.02
    for name, m in MARKERS.items():
        rate.loc[kind == name, m.present.split()] = 4.0
    rate.loc[condition == "stim", [f"ISG{i}" for i in range(40)]] = 10.0
    rate *= rng.lognormal(0.0, 0.3, (len(kind), 1))
    obs = pd.DataFrame({"condition": condition}, index=[f"c{i:04d}" for i in range(len(kind))])
    counts = sp.csr_matrix(rng.poisson(rate.to_numpy()).astype(np.int32))
    return AnnData(X=counts, obs=obs, var=pd.DataFrame(index=genes)), kind


def test_annotation_finds_every_type_whatever_interferon_does_and_in_any_order():
    adata, kind = synthetic_blood()
    before = adata.X.copy()
    found = annotate(adata, condition_key="condition")
    assert (found == kind).mean() > 0.99
    assert (before != adata.X).nnz == 0
    order = np.random.default_rng(1).permutation(adata.n_obs)
    again = annotate(adata[order].copy(), condition_key="condition")
    np.testing.assert_array_equal(again, found[order])


def test_no_marker_is_a_gene_that_interferon_switches_on_everywhere(small):
    values = log1p_cp10k(small)
    stim, kind = small.obs["condition"] == "stim", small.obs["cell_type"]
    rise = values[stim].groupby(kind, observed=True).mean()
    rise -= values[~stim].groupby(kind, observed=True).mean()
    typical = rise.median()
    present = {gene for m in MARKERS.values() for gene in m.present.split()}
    assert typical["ISG15"] > 2
    assert typical[sorted(present)].max() < 0.3


CONTENT = b"counts"
TOY = Wheel(
    requirement="toy-cells==1.0",
    filename="toy_cells-1.0-py3-none-any.whl",
    size=1000,
    members={"ctrl": Member(name="toy/ctrl.txt", size=6, checksum=sha256(CONTENT).hexdigest())},
)
COMMAND = "python -m pip download --no-deps toy-cells==1.0"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = "toy/ctrl.txt") -> Path:
    path = folder / TOY.filename
    about = "toy_cells-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: toy-cells\nVersion: 1.0\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def fetch(cache: Path | None = None, path: Path | None = None) -> dict[str, bytes]:
    return _wheel.members(TOY, path=path, cache=cache, progress=False)


@pytest.fixture
def no_process(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        msg = "a process was started"
        raise AssertionError(msg)

    monkeypatch.setattr(_wheel.subprocess, "Popen", refuse)


@pytest.mark.usefixtures("no_process")
def test_a_given_or_cached_wheel_needs_no_download(tmp_path):
    path = write_wheel(tmp_path)
    assert fetch(path=path, cache=tmp_path / "elsewhere") == {"ctrl": CONTENT}
    assert not (tmp_path / "elsewhere").exists()
    assert fetch(cache=tmp_path) == {"ctrl": CONTENT}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"content": b"COUNTS"}, "wrong size or checksum"),
        ({"content": b"counts and more"}, "wrong size or checksum"),
        ({"member": "toy/other.txt"}, "cannot be read"),
        (None, "cannot be read"),
        ("damaged", "cannot be read"),
    ],
)
def test_a_wrong_wheel_is_refused_with_the_command_to_run(tmp_path, change, says):
    path = tmp_path / TOY.filename
    if change == "damaged":
        path.write_bytes(b"half of a wheel")
    elif change is not None:
        write_wheel(tmp_path, **change)
    with pytest.raises(DownloadError, match=says) as caught:
        fetch(path=path)
    assert COMMAND in str(caught.value)


def test_without_pip_the_command_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(_wheel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadError, match="no pip") as caught:
        fetch(cache=tmp_path)
    assert COMMAND in str(caught.value)
    assert list(tmp_path.iterdir()) == []


needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed")


@needs_pip
def test_pip_brings_the_wheel_once_and_a_damaged_copy_again(tmp_path, monkeypatch, caplog):
    offer, cache = tmp_path / "offer", tmp_path / "cache"
    offer.mkdir()
    write_wheel(offer)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offer))
    assert fetch(cache=cache) == {"ctrl": CONTENT}
    assert [path.name for path in cache.iterdir()] == [TOY.filename]
    (cache / TOY.filename).write_bytes(b"half of a wheel")
    assert fetch(cache=cache) == {"ctrl": CONTENT}
    assert "fetched again" in caplog.text
    assert fetch(path=cache / TOY.filename) == {"ctrl": CONTENT}


@needs_pip
def test_where_pip_finds_nothing_its_reason_and_the_command_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match="No matching distribution") as caught:
        fetch(cache=tmp_path)
    assert COMMAND in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def full() -> AnnData:
    try:
        return kang2018(progress=False)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.mark.network
def test_full_data_are_the_published_counts(full):
    assert full.shape == (13_999, 14_053)
    assert full.X.dtype == np.int32
    assert full.obs["condition"].value_counts().to_dict() == {"stim": 7451, "ctrl": 6548}
    assert set(full.obs["cell_type"]) == TYPES
    np.testing.assert_array_equal(full.obs["library_size"], np.asarray(full.X.sum(1)).ravel())


@pytest.mark.network
def test_sample_is_a_cut_of_the_full_data(full, small):
    assert (full[small.obs_names, small.var_names].X != small.X).nnz == 0
    expected = full.obs.loc[small.obs_names, ["condition", "library_size"]]
    pd.testing.assert_frame_equal(expected, small.obs[["condition", "library_size"]])
    agree = full.obs.loc[small.obs_names, "cell_type"].astype(str) == small.obs["cell_type"].astype(
        str
    )
    assert agree.mean() > 0.98


@pytest.mark.network
def test_annotation_agrees_with_other_peoples_labels(full, shared):
    import anndata  # noqa: PLC0415

    theirs = anndata.read_h5ad(shared / "data" / "kang2018.h5ad", backed="r").obs["cell_type"]
    fine = {"B Activated": "B", "CD4 Memory T": "CD4 T", "CD4 Naive T": "CD4 T"}
    merged = theirs.astype(str).replace(fine | {"T activated": "CD4 T"})
    agree = merged.loc[full.obs_names] == full.obs["cell_type"].astype(str)
    assert agree.mean() >= 0.95
    assert agree.groupby(merged).mean().min() > 0.6
