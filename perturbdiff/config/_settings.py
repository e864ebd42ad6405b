"""What can be set about the network, the training and the sampling."""

from dataclasses import dataclass
from typing import Any, ClassVar

from perturbdiff._errors import ConfigError
from perturbdiff._typing import LikelihoodName, OrderName, SamplerName
from perturbdiff.config._checks import Settings


def _at_least(owner: Settings, **least: float) -> None:
    for name, bound in least.items():
        value: Any = getattr(owner, name)
        if not value >= bound:
            field = f"{owner.section}.{name}"
            raise ConfigError(field, value, rule=f"must be at least {bound}")


def _at_most(owner: Settings, **most: float) -> None:
    for name, bound in most.items():
        value: Any = getattr(owner, name)
        if not value <= bound:
            field = f"{owner.section}.{name}"
            raise ConfigError(field, value, rule=f"must be at most {bound:g}")


def _share(owner: Settings, *names: str) -> None:
    for name in names:
        value: Any = getattr(owner, name)
        if not 0 <= value <= 1:
            field = f"{owner.section}.{name}"
            raise ConfigError(field, value, rule="must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Settings):
    """Shape of the denoiser.

    Parameters
    ----------
    n_axes
        Principal axes that control cells are encoded in.
    n_response_axes
        Axes along which treated cells of one population differ; the diffusion runs in these.
    width, n_blocks, n_heads
        Width, depth and attention heads.
    expansion
        Width of the hidden layer of each block, in units of ``width``.
    """

    section: ClassVar[str] = "network"

    n_axes: int = 40
    n_response_axes: int = 30
    width: int = 96
    n_blocks: int = 2
    n_heads: int = 4
    expansion: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(
            self, n_axes=1, n_response_axes=1, width=2, n_blocks=1, n_heads=1,
            expansion=1,
        )  # fmt: skip
        if self.width % self.n_heads:
            rule = f"must be a multiple of n_heads = {self.n_heads}"
            raise ConfigError("network.width", self.width, rule=rule)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Settings):
    """Shape of the causal decoder, and the order in which it says genes.

    Parameters
    ----------
    order
        ``"vocabulary"`` as the file has them, ``"random"`` shuffled once, ``"coexpression"`` genes
        that vary together next to each other, ``"descending"`` from the highest count down, each
        gene drawn among those left.
    order_seed
        Seed of the random order.
    likelihood
        ``"bins"``: a free distribution over bins; ``"negative_binomial"``: mean and dispersion.
    smoothing
        Share of a wide bin's mass that its neighbours are lent in training.
    n_bins
        Bins of counts; 0 to 4 have one each.
    n_axes, n_response_axes, width, n_blocks, n_heads, control_expansion
        As ``n_axes``, ..., ``expansion`` in :class:`NetworkConfig`.
    hidden
        Width of the hidden layers; 0 for as many as bring the number of parameters to that of a
        set diffusion model of the same shape.
    gene_width
        Numbers learned about each gene.
    draft_steps
        Steps for which a draft is trained when the decoder is, to guess ahead in decoding; 0 for no
        draft. Where genes are drawn there is none.
    """

    section: ClassVar[str] = "decoder"

    order: OrderName = "coexpression"
    order_seed: int = 0
    likelihood: LikelihoodName = "bins"
    smoothing: float = 0.1
    n_bins: int = 32
    n_axes: int = 40
    n_response_axes: int = 30
    width: int = 96
    n_blocks: int = 2
    n_heads: int = 4
    control_expansion: int = 2
    hidden: int = 0
    gene_width: int = 16
    draft_steps: int = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        _share(self, "smoothing")
        _at_least(
            self, n_bins=6, n_axes=1, n_response_axes=1, width=2, n_blocks=1, n_heads=1,
            control_expansion=1, hidden=0, gene_width=1, draft_steps=0,
        )  # fmt: skip
        if self.width % self.n_heads:
            rule = f"must be a multiple of n_heads = {self.n_heads}"
            raise ConfigError("decoder.width", self.width, rule=rule)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How the denoiser is trained.

    Parameters
    ----------
    max_steps
        Most optimiser steps; inner folds of the training conditions choose how many of them.
    check_every
        Steps between looks at the inner folds; also the length of an epoch.
    patience
        Looks without improvement after which an inner fold stops.
    n_sets, set_size, n_controls
        Sets a batch, cells a set, control cells beside each set.
    learning_rate, weight_decay, warmup_steps
        AdamW with linear warm-up and cosine decay.
    ema_decay
        Decay of the average of the weights that is kept.
    distribution_weight
        Weight of the energy distance between the denoised and the clean set.
    drop_condition, drop_partner, drop_identity
        Share of sets, below 1, that are trained without condition, without partners, without the
        identity of the perturbation and the covariates. Guidance needs some without condition.
    shift_noise
        Noise on the direction of the effect prior, which is never quite right at test time.
    """

    section: ClassVar[str] = "train"

    max_steps: int = 800
    check_every: int = 100
    patience: int = 2
    n_sets: int = 16
    set_size: int = 32
    n_controls: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    ema_decay: float = 0.99
    distribution_weight: float = 0.1
    drop_condition: float = 0.1
    drop_partner: float = 0.1
    drop_identity: float = 0.3
    shift_noise: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(
            self, max_steps=1, check_every=1, patience=1, n_sets=1, set_size=2,
            n_controls=1, learning_rate=0, weight_decay=0, warmup_steps=0, distribution_weight=0,
            shift_noise=0,
        )  # fmt: skip
        drops = ("drop_condition", "drop_partner", "drop_identity")
        _share(self, "ema_decay", *drops)
        for name in drops:
            if (value := getattr(self, name)) == 1:
                field = f"train.{name}"
                rule = "must be below 1: predictions tell the network what it would never have seen"
                raise ConfigError(field, value, rule=rule)


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Settings):
    """How cells are sampled.

    Parameters
    ----------
    sampler, n_steps
        Sampler and number of intervals.
    sigma_min, sigma_max, rho
        Noise levels in units of model space, and their spacing.
    guidance_scale
        1 is the model as trained and costs nothing, 0 the null condition, more amplifies; 100 is
        the most.
    set_size
        Cells generated jointly.
    """

    section: ClassVar[str] = "sample"

    sampler: SamplerName = "dpmpp_2m"
    n_steps: int = 18
    sigma_min: float = 0.05
    sigma_max: float = 10.0
    rho: float = 7.0
    guidance_scale: float = 1.0
    set_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, n_steps=1, set_size=1, guidance_scale=0, sigma_min=1e-6)
        _at_most(self, guidance_scale=100, sigma_max=1e6)
        if not self.rho > 0:
            raise ConfigError(
                "sample.rho", self.rho, rule="must be above 0; 1 spaces levels evenly"
            )
        if not 0 < self.sigma_min < self.sigma_max:
            rule = f"must be above 0 and below sigma_max = {self.sigma_max}"
            raise ConfigError("sample.sigma_min", self.sigma_min, rule=rule)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Settings):
    """How an autoregressive model says cells.

    Parameters
    ----------
    temperature, top_p
        1 is the model as trained; less makes what is likely more so.
    set_size
        Cells that share a key of a set, as in :class:`SampleConfig`.
    draft_length
        Genes that a draft guesses ahead of each call of the network, 0 for none. What is wrong is
        said anew, so the cells stay the same, up to rounding that tips a choice. By default 8 where
        the model has a draft; a model that draws its genes has none and refuses any other than 0.
    """

    section: ClassVar[str] = "decode"

    temperature: float = 1.0
    top_p: float = 1.0
    set_size: int = 32
    draft_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, set_size=1)
        if self.draft_length is not None:
            _at_least(self, draft_length=0)
        for name in ("temperature", "top_p"):
            if not getattr(self, name) > 0:
                field = f"decode.{name}"
                raise ConfigError(field, getattr(self, name), rule="must be above 0")
        _share(self, "top_p")
