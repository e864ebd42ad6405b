"""Parameters of the simulator: genes, programs, contexts, donors and what perturbations do.

Suffixes: G genes, L latent programs, Q response programs, F features, C contexts, P perturbations,
D donors.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from perturbdiff._errors import ConfigError

REFERENCE_HOURS = 24.0
"""Time at which a perturbation has its full effect."""


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """What ``simulated`` makes; the model is written down there.

    Parameters
    ----------
    n_genes
        Genes in the panel.
    n_contexts
        Contexts (cell types) ``T1, T2, ...``.
    n_perturbations
        Single perturbations with cells, ``P1, P2, ...``; any two of the second half interact.
    n_unseen
        Further perturbations that have features and a true effect but no cells.
    n_pairs
        Pairs with cells: interacting and additive ones in turn, as far as there are some.
    n_donors
        Donors ``D1, D2, ...``, each with the same share of every condition.
    n_cells
        Cells of each context and treated condition.
    n_controls
        Control cells of each context.
    doses
        Doses of the perturbation ``dosed``, in units of its half-effect dose; empty leaves it out.
    hours
        Times of the perturbation ``timed``; empty leaves it out.
    effect_size
        Factor on all responses, in natural log-rate; far above 1 library sizes grow unrealistic.
    interaction
        Strength of the interaction of interacting pairs; 0 makes every pair additive.
    responder_share
        Share of cells, those highest along the state program, that respond; 1 is all of them.
    donor_effect
        Standard deviation of a donor's offset of a gene's log-rate.
    dispersion
        Poisson-gamma dispersion ``theta`` of counts.
    library_median
        Median counts of a cell over all measured genes.
    library_sd
        Standard deviation of the log library size.
    panel_share
        Expected share of a control cell's counts that fall on the panel's genes.
    """

    n_genes: int = 500
    n_contexts: int = 6
    n_perturbations: int = 8
    n_unseen: int = 2
    n_pairs: int = 6
    n_donors: int = 3
    n_cells: int = 60
    n_controls: int = 180
    doses: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    hours: tuple[float, ...] = (1.0, 3.0, 6.0, 24.0)
    effect_size: float = 1.0
    interaction: float = 1.0
    responder_share: float = 1.0
    donor_effect: float = 0.15
    dispersion: float = 0.3
    library_median: float = 1700.0
    library_sd: float = 0.43
    panel_share: float = 0.07

    def __post_init__(self) -> None:
        for name in ("n_genes", "n_contexts", "n_donors", "n_cells", "n_controls"):
            if getattr(self, name) < 1:
                raise _out_of_range(self, name, "must be at least 1")
        for name in ("n_perturbations", "n_unseen", "donor_effect", "dispersion", "library_sd"):
            if getattr(self, name) < 0:
                raise _out_of_range(self, name, "must not be negative")
        pairs = self.n_perturbations * (self.n_perturbations - 1) // 2
        if not 0 <= self.n_pairs <= pairs:
            rule = (
                f"must lie between 0 and the {pairs} pairs of {self.n_perturbations} perturbations"
            )
            raise ConfigError("n_pairs", self.n_pairs, rule=rule)
        for name in ("doses", "hours"):
            if any(value <= 0 for value in getattr(self, name)):
                raise _out_of_range(self, name, "every value must be positive")
        if not 0 < self.responder_share <= 1:
            raise _out_of_range(self, "responder_share", "must lie in (0, 1]")
        if not 0 < self.panel_share <= 0.5:
            rule = (
                "must lie in (0, 0.5]: the rest of a cell's counts is of genes outside of the panel"
            )
            raise ConfigError("panel_share", self.panel_share, rule=rule)
        if self.library_median < 1:
            raise _out_of_range(self, "library_median", "must be at least 1")


def _out_of_range(config: SimulationConfig, name: str, rule: str) -> ConfigError:
    return ConfigError(name, getattr(config, name), rule=rule)


@dataclass(frozen=True, kw_only=True)
class World:
    """All parameters of one simulation; the names and equations are those of ``simulated``.

    Parameters
    ----------
    perturbations
        Names of all perturbations, in the order of ``activity`` and ``features``.
    contexts
        Names of contexts.
    donors
        Names of donors.
    base
        (C, G) log-rates of a control cell at the centre of its context: ``b``.
    loadings
        (G, L) what one unit of a latent program adds to the log-rates: ``W``; program 0 is the
        state.
    spread
        (L,) standard deviation of each latent program within a context: ``s``.
    donor
        (D, G) offsets of donors: ``o``.
    response
        (G, Q) what one unit of a response program adds to the log-rates: ``R``; the last program
        belongs to interactions.
    gain
        (C, Q) how strongly a context answers along each response program.
    activity
        (P, Q) activity of each response program under each perturbation: ``a``.
    features
        (P, F) what is known beforehand of each perturbation; the last feature is the gate of
        interaction.
    threshold
        State, in standard deviations, above which a cell responds.
    """

    perturbations: tuple[str, ...]
    contexts: tuple[str, ...]
    donors: tuple[str, ...]
    base: np.ndarray
    loadings: np.ndarray
    spread: np.ndarray
    donor: np.ndarray
    response: np.ndarray
    gain: np.ndarray
    activity: np.ndarray
    features: np.ndarray
    threshold: float


N_PROGRAMS = 8
N_RESPONSES = 6
N_FEATURES = 6


def draw_world(config: SimulationConfig, rng: np.random.Generator) -> World:
    """Draw all parameters; with the same generator state and configuration the same world."""
    names = tuple(f"P{i + 1}" for i in range(config.n_perturbations + config.n_unseen))
    names += ("dosed",) * bool(config.doses) + ("timed",) * bool(config.hours)
    spread_L = np.r_[1.0, np.full(N_PROGRAMS - 1, 0.4)]
    loadings_GL = _loadings(rng, config.n_genes, N_PROGRAMS, density=0.25, sd=0.6)
    centre_CL = rng.standard_normal((config.n_contexts, N_PROGRAMS)).clip(-1.5, 1.5)
    centre_CL[:, 0] = 0.0
    # Clipped, here and for loadings, so that no gene may swallow a cell's counts.
    level_G = 1.4 * rng.standard_normal(config.n_genes).clip(-np.inf, 1.5)
    base_CG = level_G + centre_CL @ loadings_GL.T
    donor_DG = rng.normal(0.0, config.donor_effect, (config.n_donors, config.n_genes))
    variance_G = (loadings_GL**2) @ spread_L**2
    mass_CG = np.exp(base_CG + variance_G / 2) * np.exp(donor_DG).mean(0)
    base_CG += np.log(config.panel_share / mass_CG.sum(1, keepdims=True))
    features_PF = _features(config, len(names), rng)
    # An orthogonal map: all perturbations are equally strong, effects are linear in features.
    activity_PQ = np.zeros((len(names), N_RESPONSES))
    mixing_FQ = np.linalg.qr(rng.normal(0.0, 1.0, (N_FEATURES - 1, N_RESPONSES - 1)))[0]
    activity_PQ[:, :-1] = features_PF[:, :-1] @ mixing_FQ
    gain_LQ = rng.normal(0.0, 0.35 / np.sqrt(N_PROGRAMS - 1), (N_PROGRAMS, N_RESPONSES))
    return World(
        perturbations=names,
        contexts=tuple(f"T{i + 1}" for i in range(config.n_contexts)),
        donors=tuple(f"D{i + 1}" for i in range(config.n_donors)),
        base=base_CG,
        loadings=loadings_GL,
        spread=spread_L,
        donor=donor_DG,
        response=_loadings(rng, config.n_genes, N_RESPONSES, density=0.15, sd=1.2),
        gain=np.exp(centre_CL @ gain_LQ),
        activity=config.effect_size * activity_PQ,
        features=features_PF,
        threshold=float(-ndtri(config.responder_share)),
    )


def _loadings(
    rng: np.random.Generator, rows: int, columns: int, *, density: float, sd: float
) -> np.ndarray:
    value = sd * rng.standard_normal((rows, columns)).clip(-1.5, 1.5)
    return value * (rng.random((rows, columns)) < density)


def _features(config: SimulationConfig, n: int, rng: np.random.Generator) -> np.ndarray:
    features_PF = rng.normal(0.0, 1.0, (n, N_FEATURES))
    features_PF /= np.linalg.norm(features_PF[:, :-1], axis=1, keepdims=True)
    gate_P = np.zeros(n)
    gate_P[config.n_perturbations // 2 : config.n_perturbations] = 1.0
    # Of the unseen perturbations every second one belongs to the interacting half.
    gate_P[config.n_perturbations : config.n_perturbations + config.n_unseen : 2] = 1.0
    features_PF[:, -1] = gate_P
    return features_PF
