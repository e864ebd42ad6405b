"""Shapes and types are checked in tests; one thread, no display, the same examples each time."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

for _name, _value in {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}.items():
    os.environ.setdefault(_name, _value)

import numpy as np  # noqa: E402 - after the environment is set
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
import scipy.sparse as sp  # noqa: E402
import torch  # noqa: E402
from anndata import AnnData  # noqa: E402
from beartype import BeartypeConf, FrozenDict, beartype  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# The hook wants its checker by name. Self is beyond a checker of single methods.
_checker = ModuleType("checker_of_tests")
_checker.check = beartype(  # type: ignore[attr-defined]
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: Any}))
)
sys.modules[_checker.__name__] = _checker
if any(name.split(".")[0] == "perturbdiff" for name in sys.modules):
    msg = "perturbdiff was imported before its shapes could be checked"
    raise RuntimeError(msg)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
install_import_hook("perturbdiff", f"{_checker.__name__}.check")

import perturbdiff as ptd  # noqa: E402 - after the hook that checks it
from perturbdiff.data.datasets import simulated  # noqa: E402
from perturbdiff.data.datasets._world import SimulationConfig  # noqa: E402

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with data and cases that are not part of the project."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder of shared data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def case_files(shared: Path) -> Path:
    """Files written by other people's tools."""
    return shared / "cases" / "files"


@pytest.fixture(scope="session")
def toy() -> Callable[..., AnnData]:
    """Maker of small files of counts: every perturbation in every cell type, a few cells each."""

    def make(
        labels: Sequence[object] = ("ctrl", "A", "B"),
        *,
        cell_types: Sequence[str] = ("T", "NK"),
        n_each: int = 4,
        n_genes: int = 12,
        seed: int = 0,
    ) -> AnnData:
        rows = [(label, kind) for label in labels for kind in cell_types for _ in range(n_each)]
        rng = np.random.default_rng(seed)
        counts = rng.poisson(rng.gamma(0.8, 2.0, n_genes), (len(rows), n_genes))
        counts[:, 0] += 1
        obs = pd.DataFrame(
            {
                "condition": pd.Series([row[0] for row in rows], dtype=object),
                "cell_type": pd.Categorical([row[1] for row in rows]),
            }
        )
        obs.index = pd.Index([f"cell{number:03d}" for number in range(len(rows))], dtype=object)
        var = pd.DataFrame(
            index=pd.Index([f"G{number}" for number in range(n_genes)], dtype=object)
        )
        return AnnData(X=sp.csr_matrix(counts.astype(np.float32)), obs=obs, var=var)

    return make


@pytest.fixture(scope="session")
def simulated_cells() -> AnnData:
    """300 cells: two perturbations in three cell types, 40 genes, features of a third one."""
    config = SimulationConfig(
        n_genes=40, n_contexts=3, n_perturbations=2, n_unseen=1, n_pairs=0, n_cells=30,
        n_controls=40, doses=(), hours=(),
    )  # fmt: skip
    return simulated(config, seed=3).adata


@pytest.fixture(scope="session")
def small_fit() -> Callable[..., Any]:
    """Fit of a small network for a few steps, without the treated cells of type T1."""

    def fit(adata: AnnData, *, columns: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        usual = {
            "perturbation_key": "perturbation",
            "control": "control",
            "covariate_keys": ["cell_type"],
            "embedding_key": "perturbation_features",
        }
        settings: dict[str, Any] = {
            "holdout": {"cell_type": ["T1"]},
            "n_top_genes": 30,
            "network": ptd.NetworkConfig(
                n_axes=5, n_response_axes=4, width=16, n_blocks=2, n_heads=2
            ),
            "train": ptd.TrainConfig(
                max_steps=4, check_every=2, n_sets=32, set_size=6, n_controls=6, warmup_steps=2
            ),
            "options": ptd.TrainerOptions(progress=False, accelerator="cpu"),
        }
        return ptd.SetDiffusion.from_anndata(adata, **usual, **(columns or {})).fit(
            adata, **(settings | changes)
        )

    return fit


@pytest.fixture(scope="session")
def small_model(simulated_cells: AnnData, small_fit: Callable[..., Any]) -> Any:
    """Such a fit; do not change it."""
    return small_fit(simulated_cells)
