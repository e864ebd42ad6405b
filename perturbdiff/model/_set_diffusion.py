"""The set diffusion model as a user holds it."""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch
from anndata import AnnData
from torch import Tensor

from perturbdiff._errors import ConfigError
from perturbdiff._typing import PrecisionName
from perturbdiff.config import NetworkConfig, SampleConfig, TrainConfig
from perturbdiff.config._checks import seed_number, settings_of
from perturbdiff.data import Registry, SetDataModule
from perturbdiff.data._splits import Holdout
from perturbdiff.diffusion import Compiled
from perturbdiff.guidance import Constraint
from perturbdiff.model._bundle import Parts
from perturbdiff.model._constrained import (
    Asked,
    Verify,
    Ways,
    Wish,
    respond_with,
    with_exact_values,
)
from perturbdiff.model._fitted import Fitted
from perturbdiff.model._learning import Lesson, finished, learn, prepare_lesson
from perturbdiff.model._network_predictor import NetworkPredictor
from perturbdiff.model._predictor import answer, baseline_means, support, written_baselines
from perturbdiff.model._quote_constrained import quote_with
from perturbdiff.model._quote_points import diffusion_points
from perturbdiff.model._quote_rest import Request
from perturbdiff.model._saved import diffusion_parts, restore_diffusion
from perturbdiff.model._training_data import prepare
from perturbdiff.nn import require_precision
from perturbdiff.profiling import Quote, Subject
from perturbdiff.train import SetDiffusionTask, TrainerOptions
from perturbdiff.train._checkpoint import check_kept
from perturbdiff.train._task import run_settings


class SetDiffusion(NetworkPredictor[Fitted, Lesson, SetDiffusionTask]):
    """Diffusion model whose samples are sets of cells, each cell a set of (gene, value) pairs.

    An effect prior predicts the mean response; the diffusion model, conditioned on control cells,
    predicts how cells differ around it; counts are made from a control partner's counts by count
    transport.
    """

    kind = "set_diffusion"

    def fit(
        self,
        adata: AnnData,
        *,
        holdout: Holdout | None = None,
        n_top_genes: int | None = 2000,
        seed: int = 0,
        network: NetworkConfig | None = None,
        train: TrainConfig | None = None,
        options: TrainerOptions | None = None,
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
            Seed of first weights and all draws.
        network, train, options
            Shape of the network, training, and trainer.

        Returns
        -------
        The fitted model itself.

        Raises
        ------
        SplitError, LabelError, UnknownLevelError
            When nothing is left to learn from, or a label is unknown.
        ScaleError, ExpressionError, GeneError
            When the expression is not what was declared.
        ConfigError
            When settings are of another kind. That is looked at before anything else.
        ConfigError, TrainingError
            When a run shall resume and there is no checkpoint, a damaged one, or that of another
            run. That is looked at before anything else.
        """
        options = settings_of(TrainerOptions, "options", options)
        network = settings_of(NetworkConfig, "network", network)
        train = settings_of(TrainConfig, "train", train)
        if options.resume and options.checkpoint_dir is not None:
            known = run_settings(network, train, seed=seed)
            for name in ("network.n_axes", "network.n_response_axes"):  # fewer where data are few
                del known[name]
            check_kept(options.checkpoint_dir, known)
        lesson = self._study(adata, holdout, n_top_genes, seed=seed, network=network, train=train)
        self._take(learn(lesson, options=options), lesson)
        return self

    def prepare_training(
        self,
        adata: AnnData,
        *,
        holdout: Holdout | None = None,
        n_top_genes: int | None = 2000,
        seed: int = 0,
        network: NetworkConfig | None = None,
        train: TrainConfig | None = None,
    ) -> tuple[SetDiffusionTask, SetDataModule]:
        """What to give to a Lightning trainer of your own; then :meth:`adopt` what it trained.

        Parameters
        ----------
        adata, holdout, n_top_genes, seed, network, train
            As in :meth:`fit`.

        Returns
        -------
        A task with first weights, and the training conditions as a data module. Nothing is held
        out to check on; the trainer decides how long to train.
        """
        lesson = self._study(adata, holdout, n_top_genes, seed=seed, network=network, train=train)
        self._lesson = lesson
        return lesson.new_task(), lesson.data_module(lesson.populations)

    @staticmethod
    def _finished(lesson: Lesson, task: SetDiffusionTask) -> Fitted:
        return finished(lesson, task)

    def _study(
        self,
        adata: AnnData,
        holdout: Holdout | None,
        n_top_genes: int | None,
        *,
        seed: int,
        network: NetworkConfig | None,
        train: TrainConfig | None,
    ) -> Lesson:
        seed = seed_number(seed)
        network = settings_of(NetworkConfig, "network", network)
        train = settings_of(TrainConfig, "train", train)
        data = prepare(
            adata, self.registry, holdout=holdout, n_top_genes=n_top_genes, n_axes=network.n_axes
        )
        return prepare_lesson(data, network, train, seed=seed)

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
        constraints: Constraint | Verify | Sequence[Constraint | Verify] | None = (),
        enforce: Ways = None,
    ) -> AnnData:
        """Predicted cells of every perturbation in every context.

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
            Seed of all noise. A cell depends on it, its condition and its number, on nothing else.
        doses, times
            Where the model was told of such columns: every perturbation at every dose and time.
        sample
            Sampler, steps, guidance.
        missing_genes
            ``"refuse"`` a file that lacks genes of the model, or take the others and predict all
            (``"infer"``): absent genes start from no counts, at the level of known contexts.
        constraints
            What the cells shall obey, one or several: :class:`~perturbdiff.AtLeast` and the like,
            or functions of ``(log1p, genes)`` that judge them; ``None`` is none.
        enforce
            ``"soft"``, ``"hard"``, ``"best_of"``, ``"branch"``, ``"particles"``,
            ``"depth_first"``, settings of these, or several together; ``None`` is hard, and the
            best of a few sets for what cannot be projected.

        Returns
        -------
        New AnnData: ``X`` log1p of counts per 10,000, ``layers["counts"]``, labels and library
        size in ``obs``, provenance and the baselines' answers in ``uns["perturbdiff"]``. ``nfe``
        there is the network calls that this answer made: latent values of the pilot of a condition
        are kept with the model, so asking the same again costs fewer, or none.

        Raises
        ------
        UnknownLevelError, LabelError
            When a perturbation or context is unknown or has no control cells.
        ConfigError
            When ``sample`` is something else, or a number makes no sense.
        ConstraintError
            When constraints cannot hold, or cannot be enforced as asked; before sampling wherever
            that can be told.
        """
        config = settings_of(SampleConfig, "sample", sample)
        seed, wish = seed_number(seed), Wish.of(constraints, enforce)
        question = self._ask(
            adata,
            perturbations,
            contexts=contexts,
            n_cells=n_cells,
            doses=doses,
            times=times,
            missing_genes=missing_genes,
        )
        fitted, pairs = self.fitted, self._with_controls_of(question)
        asked = [Asked(condition=c, controls=own, target=fitted.target(c, own)) for c, own in pairs]
        found = respond_with(fitted, asked, wish, n_cells=n_cells, config=config, seed=seed)
        answers = {pair[0]: baseline_means(fitted.baselines, *pair) for pair in pairs}
        pred = answer(
            [counts for counts, _ in found.drawn],
            [size for _, size in found.drawn],
            self.registry,
            conditions=question.conditions,
            set_size=config.set_size,
            promised=bool(wish.constraints),
            provenance={
                **self._made_with(config, seed=seed, nfe=found.nfe),
                "support": support(question.conditions, fitted.prior.conditions, self.registry),
                "baselines": written_baselines(answers),
                **found.notes,
            },
        )
        return with_exact_values(pred, found)

    def _made_with(self, config: SampleConfig, *, seed: int, nfe: int) -> dict[str, Any]:
        """How cells were made, for the provenance."""
        return {
            "model": self.kind,
            "bundle_checksum": self.checksum,
            "seed": seed,
            "sampler": config.sampler,
            "n_steps": config.n_steps,
            "precision": self.fitted.precision,
            "compiled": self.fitted.compiled,
            "nfe": nfe,
            "guidance_scale": config.guidance_scale,
        }

    def quote(  # noqa: PLR0913 - each is something that a question may name
        self,
        adata: AnnData | None = None,
        *,
        n_cells: int = 256,
        n_conditions: int = 1,
        n_contexts: int = 1,
        n_steps: int | None = None,
        guidance_scale: float | None = None,
        sample: SampleConfig | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        constraints: Constraint | Verify | Sequence[Constraint | Verify] | None = (),
        enforce: Ways = None,
    ) -> Quote:
        """Time and memory of a prediction before it runs, for a question not asked before.

        The first quote on a machine times some calls and short predictions, for some seconds; what
        they say is kept in the cache folder of the user.

        Parameters
        ----------
        adata
            File with the control cells, which the time depends on; ``None`` for those of the model.
        n_cells
            Cells of each condition.
        n_conditions, n_contexts
            Conditions in all, each dose and time counted, and the contexts that they are in.
        n_steps, guidance_scale
            In place of those of ``sample``.
        sample, missing_genes, constraints, enforce
            As in :meth:`predict`. Constraints that were not quoted before are tried in short
            predictions.

        Returns
        -------
        Seconds with a range, bytes, network calls, operations, and how they were derived. Of a
        search that may end early, the most.

        Raises
        ------
        ConfigError
            When a number makes no sense, or there are no control cells to measure on.
        ConstraintError
            When constraints cannot hold, or cannot be enforced as asked.
        """
        config = settings_of(SampleConfig, "sample", sample)
        config = config if n_steps is None else replace(config, n_steps=n_steps)
        if guidance_scale is not None:
            config = replace(config, guidance_scale=guidance_scale)
        request, wish = Request.of(n_cells, n_conditions, n_contexts), Wish.of(constraints, enforce)
        return quote_with(
            self, adata, request=request, config=config, missing_genes=missing_genes, wish=wish
        )

    def probe_points(self) -> Subject:
        """Where :class:`~perturbdiff.profiling.Probe` goes around this model."""
        return diffusion_points(self.fitted, self.kind)

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return diffusion_parts(self.fitted)

    @staticmethod
    def _restored(registry: Registry, parts: Parts) -> Fitted:
        return restore_diffusion(registry, parts.plain, parts.arrays)

    def in_precision(self, precision: str) -> Self:
        """The model with its network in another precision: faster, and not quite the same.

        Noise, schedule, priors and counts stay as they are. What is lost in every score stands in
        the report of ``benchmarks.inference``. That a cell does not depend on what else is asked
        holds only as far as the precision of the network goes.

        Parameters
        ----------
        precision
            ``"bfloat16"``: half the memory of the weights; on a processor that knows it, faster by
            1.5 to 1.9 at width 96 and by 2.1 to 3.1 at 256 and more. ``"int8"``: linear layers of
            the blocks in 8 bits with bfloat16 between, for wide networks. ``"float8"``: the same
            layers in the 8 bits that GPUs of compute capability 8.9 and later multiply; on a
            processor no faster than float32. ``"float32"``: a copy.

        Returns
        -------
        A new model, which is saved and loaded as it is; this one stays.

        Raises
        ------
        ConfigError
            When there is no such precision, or this model is in a lower one already.
        NotFittedError
            Before ``fit``.
        """
        known: tuple[PrecisionName, ...] = get_args(PrecisionName)
        if precision not in known:
            raise ConfigError("precision", precision, rule=f"must be one of {', '.join(known)}")
        if self.fitted.precision != "float32":
            rule = f"this model is in {self.fitted.precision}; begin with the one in float32"
            raise ConfigError("precision", precision, rule=rule)
        other = copy(self)
        other._fitted, other._checksum = self.fitted.lowered(known[known.index(precision)]), None
        return other

    def compiled(self) -> Self:
        """The model with each call of its network compiled by ``torch.compile``.

        For many predictions on one machine: the first calls take some seconds each, later ones less
        than they did (``benchmarks.inference``, section ``ways``). One compilation serves all
        numbers of cells. On a CUDA device calls are recorded and replayed as CUDA graphs. Needs a
        C++ compiler on a processor. Cells are those of the model but for rounding. Bytes that
        probes and quotes tell are those of kernels before they are fused.

        Returns
        -------
        A new model with weights of its own; this one stays. Saved and loaded, it is not compiled.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        """
        fitted = self.fitted
        other = copy(self)
        other._fitted = replace(fitted, denoiser=Compiled(deepcopy(fitted.denoiser)).eval())
        return other

    def to(self, device: str | torch.device) -> Self:
        """The model with its network on another device.

        Raises
        ------
        ConfigError
            When the network is in ``"float8"`` and the GPU does not multiply such numbers.
        """
        require_precision(self.fitted.precision, torch.device(device))
        self.fitted.denoiser.to(device)
        self.fitted.codec.to(device)
        return self
