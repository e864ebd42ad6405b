"""Models of the true shape to time: fitted priors and axes, networks with their first weights.

What a network says does not change what a call of it costs, so nothing is trained. Where genes are
guessed ahead, the share of guesses that stay would depend on training: guesses are left out here
(see ``benchmarks/decoding.py``).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import torch
from anndata import AnnData

import perturbdiff as ptd
from perturbdiff.data.datasets import simulated
from perturbdiff.data.datasets._world import SimulationConfig

GENES = (500, 1000, 2000)
KANG = {"perturbation_key": "condition", "control": "ctrl", "covariate_keys": ["cell_type"]}
MADE = {"perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"]}
HELD_OUT = {"kang": {"cell_type": ["NK"]}, "made": {"cell_type": ["T1"]}}
WORLD = SimulationConfig(
    n_genes=2000, n_contexts=6, n_perturbations=6, n_unseen=0, n_pairs=0, n_cells=150,
    n_controls=250, doses=(), hours=(),
)  # fmt: skip


class Models:
    """Models by kind, genes and shape of the network, made when they are first asked for.

    Parameters
    ----------
    data
        File of Kang 2018; ``None`` for simulated cells.
    device
        Where networks run.
    """

    def __init__(self, data: Path | None, device: str) -> None:
        self.device = device
        self.source = "made" if data is None else "kang"
        self.adata = simulated(WORLD, seed=0).adata if data is None else ad.read_h5ad(data)
        self.columns = MADE if data is None else KANG
        self._made: dict[str, Any] = {}

    @property
    def question(self) -> dict[str, Any]:
        """One condition that the models did not see."""
        if self.source == "kang":
            return {"perturbations": ["stim"], "contexts": [{"cell_type": "NK"}]}
        return {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}]}

    def contexts(self, count: int) -> list[dict[str, str]]:
        """Some contexts with control cells, the held-out one first."""
        first = self.question["contexts"][0]["cell_type"]
        key = self.columns["control"]
        is_control = self.adata.obs[self.columns["perturbation_key"]] == key
        sizes = self.adata.obs.loc[is_control, "cell_type"].astype(str).value_counts()
        return [{"cell_type": n} for n in [first, *(x for x in sizes.index if x != first)][:count]]

    def diffusion(self, n_genes: int, **shape: int) -> Any:
        """A set diffusion model."""
        return self._get("SetDiffusion", n_genes, ptd.NetworkConfig(**shape))

    def sibling(self, n_genes: int, **shape: Any) -> Any:
        """The autoregressive model with as many parameters, in an order that is known."""
        return self._get("CausalBaseline", n_genes, ptd.DecoderConfig(draft_steps=0, **shape))

    def file(self, model: Any) -> AnnData:
        """Control cells on the genes of a model, library sizes beside them."""
        return model._reservoir

    def _get(self, kind: str, n_genes: int, network: Any) -> Any:
        name = f"{kind} {n_genes} {network}"
        if name not in self._made:
            self._made[name] = self._new(kind, n_genes, network).to(self.device)
            if kind == "SetDiffusion":  # guidance is refused where this was never trained
                self._made[name].fitted.denoiser.network.conditioning.null.data.fill_(1e-3)
        return self._made[name]

    def _new(self, kind: str, n_genes: int, network: Any) -> Any:
        same = self._like(kind, n_genes)
        if same is not None:
            return same(network)
        model = getattr(ptd, kind).from_anndata(self.adata, **self.columns, scale="counts")
        task, _ = model.prepare_training(
            self.adata, holdout=HELD_OUT[self.source], n_top_genes=n_genes, network=network
        )
        return with_controls(model.adopt(task))

    def _like(self, kind: str, n_genes: int) -> Any:
        """How to make another network beside priors that were fitted already, where they were."""
        for name, model in self._made.items():
            if kind == "SetDiffusion" and name.startswith(f"{kind} {n_genes} "):
                return lambda network: with_network(model, network)
        return None


def with_network(model: Any, network: Any) -> Any:
    """The same model with a network of another shape, at its first weights."""
    from perturbdiff.model._learning import new_task  # noqa: PLC0415 - not for every section

    fitted = model.fitted
    network = replace(
        network,
        n_axes=fitted.codec.cell_axes.shape[1],
        n_response_axes=fitted.codec.encoder.shape[1],
    )
    other = type(model)(model.registry)
    denoiser = new_task(fitted.vocabulary, network, ptd.TrainConfig(), seed=0).averaged.eval()
    other._fitted = replace(fitted, network=network, denoiser=denoiser)
    other._controls, other._reservoir = model._controls, model._reservoir
    return other


def with_controls(model: Any, n_each: int = 512) -> Any:
    """The model as one that was saved with some control cells of each context."""
    from perturbdiff.model._quote_rest import own_controls  # noqa: PLC0415

    assert n_each == 512  # as many as quotes take where no file is given
    model._reservoir = own_controls(model)
    return model


def plain_decoding(set_size: int = 32) -> dict[str, Any]:
    """One gene a call."""
    return {"decode": ptd.DecodeConfig(draft_length=0, set_size=set_size)}


def synchronised(device: str) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


Section = Mapping[str, Any]
