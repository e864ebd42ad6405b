"""Cut the sample that ships with the package out of ``perturbdiff.datasets.kang2018``.

    python data/make_kang2018_small.py [--wheel PATH] [--output PATH]

Cells: up to 190 of each cell type and condition, all where there are fewer. Genes: the 700 with
the strongest response (largest absolute difference of mean log1p values, over the cell types with
at least 100 cells in both conditions), the markers of the annotation, and the most variable of
the others that at least 1 % of the cells express, 1,500 in all. ``obs["library_size"]`` keeps
each cell's counts over all measured genes.
"""

import argparse
from hashlib import sha256
from pathlib import Path

import numpy as np
import scanpy as sc
from anndata import AnnData

from perturbdiff.data.datasets import kang2018
from perturbdiff.data.datasets._annotate import MARKERS

N_GENES = 1500
N_RESPONDERS = 700
N_CELLS = 190
N_ENOUGH = 100
EXPRESSED = 0.01


def cut(adata: AnnData) -> AnnData:
    """The sample, its rows and genes in the order of the full data."""
    rows, genes = choose_cells(adata), choose_genes(adata)
    small = adata[rows, genes].copy()
    small.obs["cell_type"] = small.obs["cell_type"].cat.remove_unused_categories()
    return small


def choose_cells(adata: AnnData) -> np.ndarray:
    """Rows of at most ``N_CELLS`` cells of each type and condition."""
    rng = np.random.default_rng(0)
    groups = adata.obs.groupby(["cell_type", "condition"], observed=True).indices
    chosen = [rng.permutation(groups[key])[:N_CELLS] for key in sorted(groups)]
    return np.sort(np.concatenate(chosen))


def choose_genes(adata: AnnData) -> np.ndarray:
    """Columns of the strongest responders, the markers and the most variable other genes."""
    log = adata.copy()
    log.X = log.X.astype(np.float32)
    sc.pp.normalize_total(log, target_sum=1e4)
    sc.pp.log1p(log)
    sc.pp.highly_variable_genes(log, n_top_genes=N_GENES)
    response = np.zeros(log.n_vars)
    for _, cells in log.obs.groupby("cell_type", observed=True):
        parts = [
            log[names].X for _, names in cells.groupby("condition", observed=True).groups.items()
        ]
        if min(part.shape[0] for part in parts) >= N_ENOUGH:
            shift = np.asarray(parts[1].mean(0) - parts[0].mean(0)).ravel()
            response = np.maximum(response, np.abs(shift))
    markers = {name for m in MARKERS.values() for name in f"{m.present} {m.absent}".split()}
    chosen = set(log.var_names[np.argsort(-response)[:N_RESPONDERS]]) | markers
    expressed = log.var["dispersions_norm"][np.asarray((log.X > 0).mean(0)).ravel() >= EXPRESSED]
    for name in expressed.sort_values(ascending=False, kind="stable").index:
        if len(chosen) == N_GENES:
            break
        chosen.add(name)
    return np.flatnonzero(log.var_names.isin(chosen))


def main() -> None:
    """Write the file and print what goes into README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, default=None, help="the wheel, where it is there")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("kang2018_small.h5ad")
    )
    arguments = parser.parse_args()
    small = cut(kang2018(arguments.wheel))
    small.write_h5ad(arguments.output, compression="gzip", compression_opts=9)
    content = arguments.output.read_bytes()
    print(f"{small.n_obs} cells, {small.n_vars} genes, {len(content)} bytes")  # noqa: T201
    print(f"sha256 {sha256(content).hexdigest()}")  # noqa: T201


if __name__ == "__main__":
    main()
