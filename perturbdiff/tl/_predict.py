"""Ask a model in scanpy's manner."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from anndata import AnnData

from perturbdiff.config import SampleConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from perturbdiff.model._predictor import Predictor


def predict(  # noqa: PLR0913 - each is something that a question may name
    adata: AnnData,
    model: "Predictor",
    *,
    perturbations: Sequence[str],
    contexts: Sequence[Mapping[str, str]] | None = None,
    n_cells: int = 256,
    seed: int = 0,
    doses: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
    sample: SampleConfig | None = None,
    missing_genes: Literal["refuse", "infer"] = "refuse",
) -> AnnData:
    """Predict the cells of every perturbation in every context.

    Parameters
    ----------
    adata
        File with control cells of the contexts. It is not changed; treated cells are not looked at.
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
        Of all noise.
    doses, times
        Where the model was told of such columns, in their units.
    sample
        Sampler, steps, guidance.
    missing_genes
        ``"refuse"`` a file that lacks genes of the model, or take the others and predict all
        (``"infer"``).

    Returns
    -------
    New AnnData: ``X`` is log1p of counts per 10,000, ``layers["counts"]`` the counts, ``obs`` the
    labels, set numbers and library sizes, ``uns["perturbdiff"]`` provenance and the baselines'
    answers to the same question.

    Raises
    ------
    UnknownLevelError, UnknownKeyError, LabelError
        When a perturbation, covariate or context is unknown, or has no control cells.
    GeneError, ExpressionError, ScaleError
        When the file is not like the one that the model was fitted on.
    NotFittedError
        When the model has learnt nothing yet.
    """
    # Only what was asked for: baselines have no sampler and read no partial panels.
    asked: dict[str, Any] = {"doses": doses, "times": times, "sample": sample}
    if missing_genes != "refuse":
        asked["missing_genes"] = missing_genes
    answer: Callable[..., AnnData] = model.predict
    return answer(
        adata,
        perturbations=perturbations,
        contexts=contexts,
        n_cells=n_cells,
        seed=seed,
        **{name: value for name, value in asked.items() if value is not None},
    )
