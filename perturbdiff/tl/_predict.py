"""Ask a model in scanpy's manner."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from anndata import AnnData

from perturbdiff._errors import ConfigError, UnknownKeyError
from perturbdiff.config import DecodeConfig, SampleConfig
from perturbdiff.tl._model import require_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from perturbdiff.guidance import Constraint
    from perturbdiff.model._constrained import Verify, Ways
    from perturbdiff.model._predictor import Predictor


def predict(  # noqa: PLR0913 - each is something that a question may name
    adata: AnnData | None,
    model: "Predictor",
    *,
    perturbations: Sequence[str],
    contexts: Sequence[Mapping[str, str]] | None = None,
    n_cells: int = 256,
    seed: int = 0,
    doses: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sample: SampleConfig | None = None,
    decode: DecodeConfig | None = None,
    decoding: str | None = None,
    missing_genes: Literal["refuse", "infer"] = "refuse",
    constraints: "Constraint | Verify | Sequence[Constraint | Verify] | None" = (),
    enforce: "Ways" = None,
) -> AnnData:
    """Predict the cells of every perturbation in every context.

    Parameters
    ----------
    adata
        File with control cells of the contexts. It is not changed; treated cells are not looked at.
        ``None`` where the model was saved with control cells of its own.
    model
        Fitted model.
    perturbations
        Labels; combinations in any order of their members.
    contexts
        Levels of the covariates, such as ``[{"cell_type": "NK"}]``; ``None`` for every context with
        control cells.
    n_cells
        Cells of each condition.
    seed
        Seed of all noise.
    doses, times
        Where the model was told of such columns, in their units: every perturbation at every dose
        and time, the members of a combination at the same dose.
    sample
        Sampler, steps, guidance of a model that samples.
    decode, decoding
        Of an autoregressive model: temperature, guesses and the like, and ``"raw"`` counts or
        ``"transport"``.
    missing_genes
        ``"refuse"`` a file that lacks genes of the model, or take the others and predict all
        (``"infer"``).
    constraints
        What the cells shall obey, one or several: :class:`~perturbdiff.AtLeast` and the like, or
        functions of ``(log1p, genes)`` that judge them; ``None`` is none.
    enforce
        ``"soft"``, ``"hard"``, ``"best_of"``, ``"branch"``, ``"particles"``, ``"depth_first"``,
        settings of these such as :class:`~perturbdiff.Soft`, or several together; ``None`` is
        hard, and the best of a few sets for what cannot be projected. An autoregressive model
        masks what is about one gene of one cell, and draws sets again for the rest.

    Returns
    -------
    New AnnData: ``X`` is log1p of counts per 10,000, ``layers["counts"]`` the counts, ``obs`` the
    labels, set numbers and library sizes, ``uns["perturbdiff"]`` provenance and the baselines'
    answers to the same question. With constraints, ``uns["perturbdiff"]`` also holds tables:
    ``constraints`` (one row each: required, reached without and with it, violation left, cost,
    energy distance to the unconstrained cells, whether training data support it),
    ``constraint_course`` and ``constraint_tree``.

    Raises
    ------
    UnknownLevelError, UnknownKeyError, LabelError
        When a perturbation, covariate or context is unknown, or has no control cells; when the
        model is of a kind that has no such setting.
    GeneError, ExpressionError, ScaleError
        When the file is not like the one that the model was fitted on.
    NotFittedError
        When the model has learnt nothing yet.
    ConfigError
        When ``adata`` is no AnnData, the model is none (the path of one, say), or a number of the
        question makes no sense.
    """
    require_model(model)
    # Only what was asked for: not every predictor samples.
    asked: dict[str, Any] = {
        "doses": doses, "times": times, "sample": sample, "decode": decode, "decoding": decoding,
    }  # fmt: skip
    if missing_genes not in ("refuse", "infer"):
        raise ConfigError("missing_genes", missing_genes, rule="must be 'refuse' or 'infer'")
    if missing_genes == "infer":
        asked["missing_genes"] = missing_genes
    unconstrained = constraints is None or (isinstance(constraints, Sequence) and not constraints)
    if not unconstrained or enforce is not None:
        asked |= {"constraints": constraints, "enforce": enforce}
    asked = {name: value for name, value in asked.items() if value is not None}
    answer: Callable[..., AnnData] = model.predict
    known = signature(answer).parameters
    for name in asked:
        if name not in known:
            kind = f"{type(model).__name__}.predict"
            raise UnknownKeyError(kind, name, known=list(known))
    return answer(
        adata,
        perturbations=perturbations,
        contexts=contexts,
        n_cells=n_cells,
        seed=seed,
        **asked,
    )
