"""What can be profiled: any predictor that names the parts of itself that a probe goes around."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from perturbdiff.profiling._probe import Stage
from perturbdiff.profiling._quote import Quote


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as a probe sees it.

    Parameters
    ----------
    kind
        Of the model.
    device, dtype
        Where the network runs, and in which numbers.
    stages
        Callables whose running means a phase.
    weights
        Parameters and buffers.
    n_parameters
        Trained numbers of the network.
    forget
        Throws away what was kept of earlier predictions, so that the next does everything again;
        stages are to be asked for anew.
    """

    kind: str
    device: torch.device
    dtype: str
    stages: Sequence[Stage]
    weights: Sequence[Tensor]
    n_parameters: int
    forget: Callable[[], None]


@runtime_checkable
class Profiled(Protocol):
    """A predictor that can be profiled."""

    def predict(
        self, adata: Any = None, *, perturbations: Sequence[str], n_cells: int = 256, seed: int = 0
    ) -> Any:
        """Predicted cells."""
        ...

    def probe_points(self) -> Subject:
        """Where a probe goes."""
        ...

    def quote(self, adata: Any = None, *, n_cells: int = 256, n_conditions: int = 1) -> Quote:
        """What a prediction will cost."""
        ...
