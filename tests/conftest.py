"""Shapes and types are checked in tests; one thread, no display, the same examples each time."""

import os
import sys
from collections.abc import Callable, Sequence
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
    folder = shared / "cases" / "files"
    if not folder.is_dir():
        pytest.skip("no case files beside the checkout")
    return folder


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
