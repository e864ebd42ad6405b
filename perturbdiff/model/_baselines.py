"""The baselines as a user holds them: fitted on an AnnData, answering with cells.

They answer through the same door as a set diffusion model, from the same training cells, genes and
control partners.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np
import scipy.sparse as sp
import torch
from anndata import AnnData
from jaxtyping import Float

import perturbdiff.prior as on_arrays
from perturbdiff._errors import ConfigError, NotFittedError, UnknownKeyError
from perturbdiff.config import NetworkConfig, SampleConfig
from perturbdiff.config._checks import seed_number
from perturbdiff.data import Condition, Registry
from perturbdiff.data._splits import Holdout
from perturbdiff.model._bundle import Parts
from perturbdiff.model._cells import SET_SIZE, moved_cells, transported_cells
from perturbdiff.model._predictor import (
    Predictor,
    answer,
    controls_by_context,
    require_counts,
    support,
    written_baselines,
)
from perturbdiff.model._questions import Controls
from perturbdiff.model._saved import baseline_parts, restore_baseline
from perturbdiff.model._training_data import prepare, prior_features


class BaselinePredictor(Predictor):
    """A baseline that states a mean, and control cells brought to that mean."""

    baseline: ClassVar[type[on_arrays.Baseline]]
    kind: ClassVar[str]  # name of the baseline in tables and bundles
    split_hash = ""
    _checksum: str | None = None
    _fitted: on_arrays.Baseline | None = None
    _mean: np.ndarray
    _loadings: np.ndarray

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = cls.baseline.name

    @property
    def fitted(self) -> on_arrays.Baseline:
        """The baseline on arrays.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        """
        if self._fitted is None:
            msg = f"This {type(self).__name__} was not fitted. Call fit(adata)."
            raise NotFittedError(msg)
        return self._fitted

    def fit(
        self,
        adata: AnnData,
        *,
        holdout: Holdout | None = None,
        n_top_genes: int | None = 2000,
        seed: int = 0,
        **settings: Any,
    ) -> Self:
        """Learn from the cells that are not held out.

        Parameters
        ----------
        adata
            Control and perturbed cells. It is not changed.
        holdout
            Labels to leave out by column, e.g. ``{"cell_type": ["NK"]}``; control cells stay.
        n_top_genes
            Highly variable genes to work on, chosen from training cells; ``None`` for all.
        seed
            Seed of baselines that draw anything.
        settings
            For models with a network; a baseline has none, and refuses them.

        Returns
        -------
        The fitted baseline itself.

        Raises
        ------
        SplitError, LabelError, UnknownLevelError
            When nothing is left to learn from, or a label is unknown.
        ScaleError, ExpressionError, GeneError
            When the expression is not what was declared.
        ConfigError, UnknownKeyError
            When settings of a network are given, or a keyword is unknown.
        """
        for name, value in settings.items():
            if name in ("network", "train", "options"):
                rule = f"a {type(self).__name__} has no network to train; leave {name} out"
                raise ConfigError(name, value, rule=rule)
            known = ["holdout", "n_top_genes", "seed"]
            raise UnknownKeyError(f"{type(self).__name__}.fit", name, known=known)  # noqa: EM102
        seed, n_axes = seed_number(seed), NetworkConfig().n_axes
        data = prepare(
            adata, self.registry, holdout=holdout, n_top_genes=n_top_genes, n_axes=n_axes
        )
        features = prior_features(data.registry.features)
        self._fitted = self.baseline().fit(data.summaries, features=features, seed=seed)
        self._mean, self._loadings = data.mean, data.loadings
        self.seed, self._checksum = seed, None
        self._controls = data.cells.take(data.cells.is_control)
        self.registry, self.split_hash = data.registry, data.split_hash
        return self

    def quote(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be quoted: a baseline has no network whose calls could be counted.

        Raises
        ------
        ConfigError
            Always.
        """
        rule = "has no network whose time could be told before it runs; call predict"
        raise ConfigError("model", type(self).__name__, rule=rule)

    def predict(  # noqa: PLR0913 - each is something that a question may name
        self,
        adata: AnnData | None = None,
        *,
        perturbations: Sequence[str],
        contexts: Sequence[Mapping[str, str]] | None = None,
        n_cells: int = 256,
        seed: int = 0,
        doses: Sequence[float] | None = None,
        times: Sequence[float] | None = None,
        sample: SampleConfig | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        cells: str = "transport",
    ) -> AnnData:
        """Control cells of every context, brought to the mean that the baseline states.

        Parameters
        ----------
        adata
            File with the control cells of the contexts; ``None`` where a model was loaded with
            control cells of its own.
        perturbations
            Labels; combinations in any order of members.
        contexts
            Levels of the covariates; ``None`` for every context with control cells.
        n_cells
            Cells of each condition.
        seed
            Seed of all draws.
        doses, times
            Where the baseline was told of such columns: every perturbation at every dose and time.
        sample
            For models that sample; a baseline does not, and refuses it.
        missing_genes
            ``"refuse"`` a file that lacks genes of the baseline, or take the others and predict all
            (``"infer"``): absent genes start from no counts, at the level of known contexts.
        cells
            ``"transport"`` thins or adds counts until the mean is right; ``"shift"`` adds the shift
            to log1p values and clips at zero, which leaves no counts.

        Returns
        -------
        New AnnData, as that of :meth:`SetDiffusion.predict`.

        Raises
        ------
        UndefinedBaselineError
            Where the baseline has no answer; the message is the reason.
        UnknownLevelError, LabelError
            When a perturbation or context is unknown or has no control cells.
        GeneError
            When the file lacks genes of the baseline.
        ScaleError
            When counts are to be transported and there are none.
        ConfigError
            When settings of a sampler are given, or ``cells`` is neither.
        """
        seed = seed_number(seed)
        if sample is not None:
            rule = "a baseline makes cells without a sampler; leave sample out"
            raise ConfigError("sample", type(sample).__name__, rule=rule)
        if cells not in ("transport", "shift"):
            raise ConfigError("cells", cells, rule="must be 'transport' or 'shift'")
        question = self._ask(
            adata,
            perturbations,
            contexts=contexts,
            n_cells=n_cells,
            doses=doses,
            times=times,
            missing_genes=missing_genes,
        )
        if cells == "transport":
            require_counts(question.controls)
        by_context = controls_by_context(
            question,
            self.registry,
            loadings=self._loadings,
            mean=self._mean,
            known=self.fitted.conditions,
        )
        own = {condition: by_context[condition.context] for condition in question.conditions}
        means = {c: self.fitted.predict_mean(own[c].question(c)) for c in own}
        make = self._transported if cells == "transport" else self._shifted
        made = [make(c, own[c], means[c], n_cells=n_cells, seed=seed) for c in own]
        sizes = [size for _, size in made if size is not None]
        return answer(
            [matrix for matrix, _ in made],
            sizes or None,
            self.registry,
            conditions=question.conditions,
            set_size=SET_SIZE,
            provenance={
                "model": self.kind,
                "bundle_checksum": self.checksum,
                "seed": seed,
                "sampler": f"control_cells_{cells}",
                "n_steps": 0,
                "nfe": 0,
                "precision": "float32",
                "compiled": False,
                "guidance_scale": 1.0,
                "constraint_violation": 0.0,
                "support": support(question.conditions, self.fitted.conditions, self.registry),
                "baselines": written_baselines({c: {self.kind: means[c]} for c in means}),
            },
        )

    @property
    def checksum(self) -> str:
        """Fingerprint of what was learnt, the same before saving and after loading."""
        if self._checksum is None:
            self._checksum = self._parts().checksum
        return self._checksum

    def _parts(self) -> Parts:
        plain, arrays = baseline_parts(self.fitted)
        plain["fit"] = {"seed": self.seed, "split_hash": self.split_hash}
        plain["registry"] = self.registry.to_json()
        own = {"mean": self._mean, "loadings": self._loadings}
        arrays |= {name: torch.from_numpy(array) for name, array in own.items()}
        return Parts(kind=self.kind, plain=plain, arrays=arrays)

    @classmethod
    def from_parts(cls, parts: Parts) -> Self:
        """The baseline that these are the parts of."""
        made = cls(Registry.from_json(parts.plain["registry"]))
        made.seed, made.split_hash = parts.plain["fit"]["seed"], parts.plain["fit"]["split_hash"]
        made._fitted = restore_baseline(cls.baseline, made.registry, parts, seed=made.seed)
        made._mean, made._loadings = (parts.arrays[name].numpy() for name in ("mean", "loadings"))
        return made

    def to(self, device: str | torch.device) -> Self:
        """The baseline itself: it has no network that could be elsewhere."""
        return self

    def _transported(
        self,
        condition: Condition,
        controls: Controls,
        mean: Float[np.ndarray, " genes"],
        *,
        n_cells: int,
        seed: int,
    ) -> tuple[sp.csr_array, Float[np.ndarray, " cells"] | None]:
        own = controls.cells
        assert own.counts is not None  # refused before
        assert own.library_size is not None
        return transported_cells(
            own.counts,
            own.library_size,
            None
            if controls.panel is None and np.array_equal(mean, controls.summary.mean)
            else mean,
            genes=own.genes,
            condition=condition.name,
            n_cells=n_cells,
            seed=seed,
        )

    def _shifted(
        self,
        condition: Condition,
        controls: Controls,
        mean: Float[np.ndarray, " genes"],
        *,
        n_cells: int,
        seed: int,
    ) -> tuple[sp.csr_array, Float[np.ndarray, " cells"] | None]:
        there = np.asarray(controls.cells.log1p.mean(0, dtype=np.float64)).ravel()
        moved = moved_cells(
            controls.cells.log1p,
            mean - (controls.summary.mean if controls.panel is None else there),
            condition=condition.name,
            n_cells=n_cells,
            seed=seed,
        )
        return moved, None


class CopyControl(BaselinePredictor):
    """Nothing happens: control cells as they are."""

    baseline = on_arrays.CopyControl


class MeanShift(BaselinePredictor):
    """The average shift of the same perturbation elsewhere."""

    baseline = on_arrays.MeanShift


class SimilarityShift(BaselinePredictor):
    """Shifts of other contexts, weighted by how alike their control cells are."""

    baseline = on_arrays.SimilarityShift


class CarriedLogRatio(BaselinePredictor):
    """As :class:`SimilarityShift`, with log-ratios re-applied at the new base level."""

    baseline = on_arrays.CarriedLogRatio


class MixtureLogRatio(BaselinePredictor):
    """Log-ratios weighted by seeing the context as a mixture of known ones."""

    baseline = on_arrays.MixtureLogRatio


class GeneRidge(BaselinePredictor):
    """A ridge shared by all genes over simple features."""

    baseline = on_arrays.GeneRidge


class Additive(BaselinePredictor):
    """For combinations: the sum of the shifts of the members, each as measured alone."""

    baseline = on_arrays.Additive


class NearestContext(BaselinePredictor):
    """The shift of the context whose control cells are most alike."""

    baseline = on_arrays.NearestContext


class EffectPrior(BaselinePredictor):
    """The mean that a set diffusion model starts from, and no network."""

    baseline = on_arrays.EffectPrior
