"""Cell types of blood cells from markers, unmoved by what interferon does to the cells.

Each condition is clustered on its own, so that no cluster and no scale mixes treated with
untreated cells and a cluster is compared only with clusters of cells that were treated alike. The
markers are genes of lineage that interferon does not switch on in other lineages.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans

from perturbdiff._constants import DEPTH

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Markers:
    """Genes by which a cell type is told.

    Parameters
    ----------
    present
        Genes that the type expresses, separated by spaces.
    absent
        Genes of the types it is mistaken for most easily, which it does not express.
    """

    present: str
    absent: str


MARKERS: Final = {
    "B": Markers("CD79A MS4A1 CD19 BANK1", "CD3D CD3E CD3G CD2 TYROBP"),
    "CD14 Mono": Markers(
        "CD14 S100A8 S100A9 VCAN FCN1 FPR1", "FCGR3A VMO1 CD3D FCER1A HLA-DQA1 PKIB GPR183"
    ),
    "CD16 Mono": Markers("FCGR3A MS4A7 VMO1 MS4A4A CDKN1C", "CD14 S100A8 CD3D GNLY"),
    "CD4 T": Markers("CD3D CD3E CD3G CD2 IL7R LTB TRAT1", "CD8A CCL5 NKG7 TYROBP CD79A"),
    "CD8 T": Markers("CD3D CD3E CD8A CD8B CCL5 NKG7 GZMH CST7", "KLRF1 TYROBP CCR7 CD79A"),
    "DC": Markers(
        "FCER1A CLEC10A HLA-DQA1 HLA-DQB1 GPR183 PKIB LYZ CST3",
        "CD14 S100A8 VCAN FCGR3A MS4A1 CD79A TSPAN13",
    ),
    "Eryth": Markers("HBB HBA1 HBA2 ALAS2 HBM", ""),
    "Mk": Markers("PPBP PF4 GNG11 TUBB1 SDPR", "CD14 MS4A1"),
    "NK": Markers("GNLY NKG7 KLRD1 KLRF1 PRF1 GZMB CLIC3", "CD3D CD3E CD3G CD2 CD14"),
    "pDC": Markers("TSPAN13 LILRA4 CLEC4C IL3RA SERPINF1 PLD4 IGJ", "CD3D CST3 MS4A1"),
}
"""Types and their markers. ``CD8 T`` are the cytotoxic ones: at this depth naive CD8 cells cannot
be told from naive CD4 cells and count as ``CD4 T``."""

_N_AXES = 30
_N_CLUSTERS = (60, 80, 100)
_N_STARTS = 5
_CEILING = 0.98
_FLOOR = 0.05


def annotate(adata: "AnnData", *, condition_key: str) -> np.ndarray:
    """Cell types from ``MARKERS``, each condition for itself; the same cells give the same labels.

    Per condition: log1p of counts per 10,000, 2,000 variable genes, scaled, 30 principal axes,
    k-means into 60, 80 and 100 clusters from five fixed starts each. In every partition a
    marker's mean in a cluster is divided by its 98th percentile over the clusters (at most 1); a
    cluster's score for a type is the mean over present markers minus the mean over absent ones. A
    cell takes the type with the highest sum of its clusters' scores.

    Parameters
    ----------
    adata
        Raw counts with gene symbols as ``var_names``; not changed.
    condition_key
        Column of ``obs`` with the condition.

    Returns
    -------
    One cell type per cell.
    """
    types = np.array(list(MARKERS), dtype=object)
    label_N = np.empty(adata.n_obs, dtype=object)
    condition_N = adata.obs[condition_key].to_numpy()
    for condition in pd.unique(condition_N):
        rows = np.flatnonzero(condition_N == condition)
        rows = rows[np.argsort(adata.obs_names[rows])]  # the order of rows means nothing
        label_N[rows] = types[_scores(adata[rows]).argmax(1)]
    return label_N


def _scores(adata: "AnnData") -> np.ndarray:
    import scanpy as sc  # noqa: PLC0415, takes seconds to import and is needed only here

    log = adata.copy()
    log.X = log.X.astype(np.float32)
    sc.pp.normalize_total(log, target_sum=DEPTH)
    sc.pp.log1p(log)
    genes = sorted({g for m in MARKERS.values() for g in f"{m.present} {m.absent}".split()})
    level = pd.DataFrame(log[:, genes].X.toarray().astype(np.float64), columns=genes)
    sc.pp.highly_variable_genes(log, n_top_genes=2000)
    variable = log[:, log.var["highly_variable"].to_numpy()].copy()
    variable.X = variable.X.toarray()
    sc.pp.scale(variable, max_value=10)
    sc.pp.pca(variable, n_comps=_N_AXES, random_state=0)
    axes_NK = np.asarray(variable.obsm["X_pca"], dtype=np.float64)
    total_NT = np.zeros((adata.n_obs, len(MARKERS)))
    for n_clusters in _N_CLUSTERS:
        for start in range(_N_STARTS):
            cluster_N = KMeans(n_clusters, n_init=1, random_state=start).fit_predict(axes_NK)
            mean = level.groupby(cluster_N).mean()
            share = (mean / (mean.quantile(_CEILING) + _FLOOR)).clip(upper=1)
            total_NT += np.stack([_score(share, m) for m in MARKERS.values()], axis=1)[cluster_N]
    return total_NT


def _score(share: pd.DataFrame, markers: Markers) -> np.ndarray:
    score = share[markers.present.split()].mean(axis=1)
    if markers.absent:
        score -= share[markers.absent.split()].mean(axis=1)
    return score.to_numpy()
