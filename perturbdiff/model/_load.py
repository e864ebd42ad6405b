"""Opening a saved model, whatever kind it is."""

from pathlib import Path
from typing import TypeAlias

import torch

from perturbdiff._errors import BundleError, listed
from perturbdiff.model._baselines import BaselinePredictor
from perturbdiff.model._bundle import read_bundle
from perturbdiff.model._causal_baseline import CausalBaseline
from perturbdiff.model._set_diffusion import SetDiffusion

Saved: TypeAlias = "SetDiffusion | CausalBaseline | BaselinePredictor"
_BASELINES: list[type[BaselinePredictor]] = BaselinePredictor.__subclasses__()
_KINDS: dict[str, type[SetDiffusion] | type[CausalBaseline] | type[BaselinePredictor]] = {
    SetDiffusion.kind: SetDiffusion,
    CausalBaseline.kind: CausalBaseline,
    **{baseline.kind: baseline for baseline in _BASELINES},
}


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Saved:
    """Open a model that was saved.

    Parameters
    ----------
    path
        Folder that ``save`` wrote.
    device
        Where the network shall be.

    Returns
    -------
    A model that predicts exactly what the saved one did on the same kind of machine.

    Raises
    ------
    BundleError
        When the folder is missing, damaged, or newer than this version of the package.
    """
    if not isinstance(path, str | Path):
        raise BundleError(f"{path!r} is no path of a bundle, which is a folder that save() wrote.")  # noqa: EM102
    path = Path(path)
    parts = read_bundle(path)
    if parts.kind not in _KINDS:
        msg = f"The bundle {path} holds a {parts.kind!r}; known kinds: {listed(_KINDS)}."
        raise BundleError(msg)
    try:
        model = _KINDS[parts.kind].from_parts(parts)
        model._take_reservoir(parts)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        msg = f"The bundle {path} lacks what a {parts.kind} is made of: {error}. Save it anew."
        raise BundleError(msg) from error
    return model.to(device)
