"""The autoregressive sibling as a user holds it."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict
from typing import Any, Literal, Self

import torch
from anndata import AnnData
from torch import Tensor

from perturbdiff._errors import ConfigError
from perturbdiff._typing import PrecisionName
from perturbdiff.autoregressive import ExpressionBins, GeneOrder
from perturbdiff.config import DecodeConfig, DecoderConfig, TrainConfig
from perturbdiff.config._checks import seed_number, settings_of
from perturbdiff.data import Registry, SetDataModule
from perturbdiff.data._splits import Holdout
from perturbdiff.guidance import Constraint
from perturbdiff.model._bundle import Parts
from perturbdiff.model._causal_constrained import written_with
from perturbdiff.model._causal_fitted import CausalFitted
from perturbdiff.model._causal_learning import finished, learn, restored_draft
from perturbdiff.model._causal_lesson import CausalLesson, causal_task, prepare_causal
from perturbdiff.model._constrained import Verify, Ways, Wish, with_exact_values
from perturbdiff.model._constrained_answer import Asked
from perturbdiff.model._network_predictor import NetworkPredictor
from perturbdiff.model._predictor import answer, baseline_means, support, written_baselines
from perturbdiff.model._quote_points import causal_points
from perturbdiff.model._quote_rest import Request
from perturbdiff.model._quote_written import written_quote
from perturbdiff.model._saved import fitted_parts, prefixed, restore_shared, under
from perturbdiff.model._training_data import prepare
from perturbdiff.profiling import Quote, Subject
from perturbdiff.train import CausalTask, TrainerOptions

CAUSAL_TRAIN = TrainConfig(
    max_steps=200,
    check_every=50,
    n_sets=8,
    set_size=2,
    learning_rate=3e-3,
    warmup_steps=30,
    ema_decay=0.98,
)
"""Few cells a step: each is a sequence of all genes. The rate was chosen on inner folds."""

_PRECISIONS: tuple[PrecisionName, ...] = ("float32", "bfloat16", "int8")


class CausalBaseline(NetworkPredictor[CausalFitted, CausalLesson, CausalTask]):
    """Autoregressive decoder that writes a cell gene by gene, in an order that was chosen.

    It is told what :class:`SetDiffusion` is told and answers the same questions. Each gene starts
    from the negative binomial that the effect prior states at the cell's library size; the network
    learns what partner, context and the genes said before change about it.
    """

    kind = "causal_baseline"

    def fit(
        self,
        adata: AnnData,
        *,
        holdout: Holdout | None = None,
        n_top_genes: int | None = 2000,
        seed: int = 0,
        network: DecoderConfig | None = None,
        train: TrainConfig | None = None,
        options: TrainerOptions | None = None,
        inner_folds: bool = False,
    ) -> Self:
        """Learn from the cells that are not held out.

        Parameters
        ----------
        adata, holdout, n_top_genes, seed, options
            As in :meth:`SetDiffusion.fit`.
        network
            Shape of the decoder, and the order of genes.
        train
            Training; by default few cells a step, since each is a sequence of all genes.
        inner_folds
            Whether held-out training conditions choose the number of steps. By default training
            runs for ``train.max_steps``: in the time that a set diffusion model takes, the loss on
            held-out conditions still falls.

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
        TrainingError
            When a run shall resume from a checkpoint that is damaged or belongs to another run.
        """
        options = settings_of(TrainerOptions, "options", options)
        lesson = self._study(adata, holdout, n_top_genes, seed=seed, network=network, train=train)
        self._take(learn(lesson, options=options, inner_folds=inner_folds), lesson)
        return self

    def prepare_training(
        self,
        adata: AnnData,
        *,
        holdout: Holdout | None = None,
        n_top_genes: int | None = 2000,
        seed: int = 0,
        network: DecoderConfig | None = None,
        train: TrainConfig | None = None,
    ) -> tuple[CausalTask, SetDataModule]:
        """What to give to a Lightning trainer of your own; then :meth:`adopt` what it trained.

        Parameters
        ----------
        adata, holdout, n_top_genes, seed, network, train
            As in :meth:`fit`.

        Returns
        -------
        A task with first weights, and the training conditions as a data module.
        """
        lesson = self._study(adata, holdout, n_top_genes, seed=seed, network=network, train=train)
        self._lesson = lesson
        return lesson.new_task(), lesson.data_module(lesson.populations)

    @staticmethod
    def _finished(lesson: CausalLesson, task: CausalTask) -> CausalFitted:
        return finished(lesson, task)

    def _study(
        self,
        adata: AnnData,
        holdout: Holdout | None,
        n_top_genes: int | None,
        *,
        seed: int,
        network: DecoderConfig | None,
        train: TrainConfig | None,
    ) -> CausalLesson:
        seed = seed_number(seed)
        network = settings_of(DecoderConfig, "network", network)
        train = settings_of(TrainConfig, "train", train, default=CAUSAL_TRAIN)
        data = prepare(
            adata, self.registry, holdout=holdout, n_top_genes=n_top_genes, n_axes=network.n_axes
        )
        return prepare_causal(data, network, train, seed=seed)

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
        decoding: str = "raw",
        decode: DecodeConfig | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        constraints: Constraint | Verify | Sequence[Constraint | Verify] | None = (),
        enforce: Ways = None,
    ) -> AnnData:
        """Predicted cells of every perturbation in every context.

        Parameters
        ----------
        adata, perturbations, contexts, n_cells, seed, doses, times, missing_genes
            As in :meth:`SetDiffusion.predict`.
        decoding
            ``"raw"``: counts as the decoder writes them. ``"transport"``: they only say how cells
            differ; counts are made from the partners' counts around the effect prior's mean, as a
            set diffusion model makes them.
        decode
            Temperature, share of the likely choices that are drawn from, cells a set, guesses.
        constraints
            What the cells shall obey, as in :meth:`SetDiffusion.predict`. What is about one gene
            of one cell is met by masking counts as the gene is said; everything else is known only
            when a set is finished, and sets that miss are drawn again.
        enforce
            ``"best_of"`` or :class:`~perturbdiff.BestOf`: how many draws a set at most, 4 where
            nothing is said; ``"hard"`` refuses what masks do not meet.

        Returns
        -------
        New AnnData, as that of :meth:`SetDiffusion.predict`. In ``constraint_tree`` the sets of a
        turn share its calls; ``constraint_course`` is empty, since nothing can be said of
        unfinished cells.

        Raises
        ------
        ConfigError
            When ``decoding`` or ``decode`` is something else, or guesses are wanted of a model
            without a draft.
        UnknownLevelError, LabelError
            When a perturbation or context is unknown or has no control cells.
        ConstraintError
            When constraints cannot hold; when one is met by masks, and counts are made by
            ``"transport"`` or the order of genes is drawn; before anything is written.
        """
        _check_decoding(decoding)
        seed, wish = seed_number(seed), Wish.of(constraints, enforce)
        config, fitted = settings_of(DecodeConfig, "decode", decode), self.fitted
        draft_length = fitted.draft_length(config)
        question = self._ask(
            adata, perturbations, contexts=contexts, n_cells=n_cells, doses=doses, times=times,
            missing_genes=missing_genes,
        )  # fmt: skip
        pairs = self._with_controls_of(question)
        asked = [Asked(condition=c, controls=own, target=fitted.target(c, own)) for c, own in pairs]
        found = written_with(
            fitted, asked, wish, decoding=decoding, n_cells=n_cells, config=config, seed=seed
        )
        answers = {pair[0]: baseline_means(fitted.baselines, *pair) for pair in pairs}
        pred = answer(
            [counts for counts, _ in found.drawn],
            [size for _, size in found.drawn],
            self.registry,
            conditions=question.conditions,
            set_size=config.set_size,
            promised=bool(wish.constraints),
            provenance={
                "model": self.kind,
                "bundle_checksum": self.checksum,
                "seed": seed,
                "sampler": f"autoregressive_{decoding}",
                "order": fitted.order.name,
                "n_steps": len(self.registry.genes),
                "nfe": found.nfe,
                "precision": fitted.precision,
                "compiled": False,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "draft_length": draft_length,
                "guidance_scale": 1.0,
                "support": support(question.conditions, fitted.prior.conditions, self.registry),
                "baselines": written_baselines(answers),
                **found.notes,
            },
        )
        return with_exact_values(pred, found)

    def quote(  # noqa: PLR0913 - each is something that a question may name
        self,
        adata: AnnData | None = None,
        *,
        n_cells: int = 256,
        n_conditions: int = 1,
        n_contexts: int = 1,
        decoding: str = "raw",
        decode: DecodeConfig | None = None,
        missing_genes: Literal["refuse", "infer"] = "refuse",
        constraints: Constraint | Verify | Sequence[Constraint | Verify] | None = (),
        enforce: Ways = None,
    ) -> Quote:
        """Time and memory of a prediction before it runs; how close it can be is in ``how``.

        Parameters
        ----------
        adata, n_cells, n_conditions, n_contexts, missing_genes
            As in :meth:`SetDiffusion.quote`.
        decoding, decode, constraints, enforce
            As in :meth:`predict`. Constraints that were not quoted before are tried in short
            predictions.

        Returns
        -------
        As that of :meth:`SetDiffusion.quote`. Where sets may have to be drawn again, the most.

        Raises
        ------
        ConfigError
            When a number or ``decoding`` makes no sense, or there are no control cells to measure
            on.
        ConstraintError
            When constraints cannot hold, or cannot be met as asked.
        """
        _check_decoding(decoding)
        config = settings_of(DecodeConfig, "decode", decode)
        return written_quote(
            self, adata, request=Request.of(n_cells, n_conditions, n_contexts), config=config,
            decoding=decoding, missing_genes=missing_genes, wish=Wish.of(constraints, enforce),
        )  # fmt: skip

    def probe_points(self) -> Subject:
        """Where :class:`~perturbdiff.profiling.Probe` goes around this model."""
        return causal_points(self.fitted, self.kind)

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        fitted = self.fitted
        plain, arrays = fitted_parts(
            fitted,
            fitted.decoder,
            settings={
                "network": asdict(fitted.network),
                "order": fitted.order.name,
                **({} if fitted.precision == "float32" else {"precision": fitted.precision}),
            },
        )
        arrays |= prefixed("bins", fitted.bins.state())
        arrays |= {"order": fitted.order.genes, "log_dispersion": fitted.log_dispersion}
        if fitted.draft is not None:
            arrays |= prefixed("draft", fitted.draft.state_dict())
        return plain, arrays

    @staticmethod
    def _restored(registry: Registry, parts: Parts) -> CausalFitted:
        shared = restore_shared(registry, parts.plain, parts.arrays)
        settings = parts.plain["settings"]
        own: dict[str, Any] = {
            "bins": ExpressionBins.from_state(under("bins", parts.arrays)),
            "order": GeneOrder(name=settings["order"], genes=parts.arrays["order"]),
            "log_dispersion": parts.arrays["log_dispersion"],
        }
        network = DecoderConfig(**settings["network"])
        task = causal_task(
            shared["vocabulary"], shared["codec"], network, config=CAUSAL_TRAIN, seed=0, **own
        )
        precision = settings.get("precision", "float32")
        decoder = task.averaged.lowered(precision).eval()
        decoder.load_state_dict(under("denoiser", parts.arrays))
        draft = restored_draft(decoder, under("draft", parts.arrays), precision=precision)
        return CausalFitted(
            network=network, decoder=decoder, draft=draft, precision=precision, **own, **shared
        )

    def in_precision(self, precision: str) -> Self:
        """The model with its networks in another precision: faster for many cells, not for few.

        Rates, what is drawn from them, priors and counts stay as they are. What is lost in every
        score, and what is gained where, stands in the report of ``benchmarks.inference``. That a
        cell does not depend on what else is asked, and that guessing ahead changes nothing, holds
        only as far as the precision of the network goes: where two bins are about as likely, other
        batches may round to the other one.

        Parameters
        ----------
        precision
            ``"bfloat16"``: half the memory of what cells look back on, which is what bounds the
            time of many of them; on a processor a single cell takes half as long again.
            ``"int8"``: layers of the blocks in 8 bits besides, for smaller files: at widths of 96
            and 256 it takes about as long. ``"float32"``: a copy.

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
        name: PrecisionName | None = next((one for one in _PRECISIONS if one == precision), None)
        if name is None:
            rule = f"must be one of {', '.join(_PRECISIONS)} for an autoregressive model"
            raise ConfigError("precision", precision, rule=rule)
        fitted = self.fitted
        if fitted.precision != "float32":
            rule = f"this model is in {fitted.precision}; begin with the one in float32"
            raise ConfigError("precision", precision, rule=rule)
        other = copy(self)
        other._fitted, other._checksum = fitted.lowered(name), None
        return other

    def to(self, device: str | torch.device) -> Self:
        """The model with its network on another device."""
        self.fitted.decoder.to(device)
        if self.fitted.draft is not None:
            self.fitted.draft.to(device)
        self.fitted.codec.to(device)
        return self


def _check_decoding(decoding: str) -> None:
    if decoding not in ("raw", "transport"):
        raise ConfigError("decoding", decoding, rule="must be 'raw' or 'transport'")
