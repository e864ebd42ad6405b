"""The way of some cells from their control partners over the denoising steps to counts.

N cells, G genes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
from anndata import AnnData
from jaxtyping import Float
from torch import Tensor

from perturbdiff.config import SampleConfig
from perturbdiff.data import Condition, label_of
from perturbdiff.diffusion import State
from perturbdiff.model._fitted import Drawn, Fitted, Recipe
from perturbdiff.model._questions import Controls
from perturbdiff.model._response import ResponsePlan
from perturbdiff.model._set_diffusion import SetDiffusion


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """Cells of one condition on their way; ``guesses`` are the denoiser's after each step."""

    condition: Condition
    fitted: Fitted
    recipe: Recipe
    plan: ResponsePlan
    guesses: list[Float[Tensor, "sets cells latent"]]
    sigma: list[float]  # noise level that each guess was made at
    drawn: Drawn

    @property
    def controls(self) -> Controls:
        """Control cells of the context."""
        return self.recipe.controls

    @property
    def partners(self) -> sp.csr_array:
        """Log1p values of the control partner of each cell."""
        rows = self.recipe.task.partners[: self.drawn[0].shape[0]]
        return sp.csr_array(self.controls.cells.log1p[rows.numpy()])

    def expected(self, step: int) -> Float[np.ndarray, "cells genes"]:
        """Expected log1p values, were the guess of this step the last one."""
        cells = self.fitted.cells(self.recipe, self.guesses[step])
        return self.plan.expected_log1p(cells).numpy()[: self.drawn[0].shape[0]]


def walks(
    model: SetDiffusion,
    adata: AnnData,
    conditions: Sequence[Condition],
    *,
    n_cells: Sequence[int],
    config: SampleConfig,
    seed: int,
) -> Iterator[Walk]:
    """Generate the first cells of each condition again, and keep what each step made of them.

    Populations that the model still knows are not solved again; otherwise their pilot is made anew.

    Parameters
    ----------
    model
        Fitted model.
    adata
        File with the control cells.
    conditions, n_cells
        What to follow, and how many cells of each.
    config, seed
        How they were sampled.

    Yields
    ------
    One walk a condition, so that the steps of few cells are ever in memory.
    """
    registry, fitted = model.registry, model.fitted
    question = model._ask(
        adata,
        list(dict.fromkeys(label_of(c.members, separator=registry.separator) for c in conditions)),
        contexts=[dict(zip(registry.covariate_keys, c.context, strict=True)) for c in conditions]
        if registry.covariate_keys
        else None,
        n_cells=max(n_cells),
        doses=sorted({c.doses[0] for c in conditions if c.doses}) or None,
        times=sorted({c.time for c in conditions if c.time is not None}) or None,
    )
    pairs = model._with_controls_of(replace(question, conditions=tuple(conditions)))
    for (condition, controls), number in zip(pairs, n_cells, strict=True):
        yield _walk(fitted, condition, controls, n_cells=number, config=config, seed=seed)


def _walk(
    fitted: Fitted,
    condition: Condition,
    controls: Controls,
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> Walk:
    target = fitted.target(condition, controls)
    (drawn,), _ = fitted.respond(
        [condition], [controls], [target], n_cells=n_cells, config=config, seed=seed
    )
    n_sets = -(-n_cells // config.set_size)
    task = fitted.task(condition, controls, target, n_cells=n_sets * config.set_size, seed=seed)
    guesses: list[Tensor] = []
    levels: list[Tensor] = []

    def keep(state: State, _: Tensor) -> None:
        guesses.append(state.history)
        levels.append(state.history_sigma[0])

    fitted.sampler.sample([task], [range(n_sets)], config, seed=seed, hook=keep)
    known = fitted.plans.get(fitted.plan_name(task, config, seed=seed))
    assert known is not None  # it was just answered from
    return Walk(
        condition=condition,
        fitted=fitted,
        recipe=Recipe(task=task, controls=controls, target=target, config=config, seed=seed),
        plan=known[1],
        guesses=guesses,
        sigma=[float(level) for level in levels],
        drawn=drawn,
    )
