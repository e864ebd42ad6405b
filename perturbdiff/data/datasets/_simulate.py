"""Simulated perturbation data with a known truth: exact means, and as many true cells as wanted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import combinations

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy import sparse

from perturbdiff._constants import UNS_KEY
from perturbdiff._errors import UnknownLevelError
from perturbdiff._logging import logger
from perturbdiff.config._checks import seed_number
from perturbdiff.data.datasets._expectation import CountNoise, mean_log1p_curve, normal_nodes
from perturbdiff.data.datasets._world import REFERENCE_HOURS, SimulationConfig, World, draw_world

CONTROL = "control"
SEPARATOR = "+"
_HALF_TIME = 4.0


@dataclass(frozen=True)
class Treatment:
    """One simulated condition: what is given to which cells, how much and for how long.

    Parameters
    ----------
    perturbation
        A label such as ``"P1"``, ``"P1+P2"`` or ``"control"``, members in any order.
    cell_type
        Context.
    dose
        Dose in units of the half-effect dose; every simulated effect size refers to dose 1.
    hours
        Hours after treatment; every simulated effect size refers to 24.
    donor
        A donor, or None for all of them in equal shares.
    """

    perturbation: str
    cell_type: str
    dose: float = 1.0
    hours: float = REFERENCE_HOURS
    donor: str | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """Sorted members of the perturbation; empty for control."""
        parts = self.perturbation.split(SEPARATOR)
        return tuple(sorted({part for part in parts if part != CONTROL}))


@dataclass(frozen=True, eq=False)
class Simulation:
    """Simulated cells with everything that is true of them.

    Parameters
    ----------
    adata
        The measured cells; see ``simulated`` for its keys.
    config
        What was asked for.
    world
        All parameters.
    treatments
        The measured conditions, controls first.
    seed
        Seed of world and cells.
    """

    adata: AnnData
    config: SimulationConfig
    world: World
    treatments: tuple[Treatment, ...]
    seed: int

    @property
    def unseen(self) -> tuple[str, ...]:
        """Perturbations that have features and a true effect but no cells."""
        first = self.config.n_perturbations
        return self.world.perturbations[first : first + self.config.n_unseen]

    @property
    def interacting(self) -> tuple[str, ...]:
        """Perturbations any two of which interact; all other pairs are additive in log-rate."""
        gate_P = self.world.features[:, -1]
        return tuple(np.asarray(self.world.perturbations, dtype=object)[gate_P == 1])

    def log_rate_shift(self, treatment: Treatment) -> np.ndarray:
        """What the treatment adds to the log-rate of a responding cell, per gene (natural log)."""
        world, scale = self.world, _strength(treatment)
        activity_MQ = world.activity[[self._perturbation(name) for name in treatment.members]]
        activity_Q = activity_MQ.sum(0)
        gate_M = world.features[[self._perturbation(m) for m in treatment.members], -1]
        for i, j in combinations(range(len(treatment.members)), 2):
            strength = self.config.interaction * gate_M[i] * gate_M[j]
            activity_Q = activity_Q - strength / 2 * (activity_MQ[i] + activity_MQ[j])
            activity_Q[-1] += strength * self.config.effect_size
        gain_Q = world.gain[self._context(treatment.cell_type)]
        return np.asarray(scale * world.response @ (gain_Q * activity_Q))

    def mean(self, treatment: Treatment) -> np.ndarray:
        """True mean of ``log1p(counts / library_size * 10^4)`` per gene, by quadrature."""
        world = self.world
        shift_G = self.log_rate_shift(treatment)
        level_DG = world.base[self._context(treatment.cell_type)] + self._donors(treatment)
        state_G = world.loadings[:, 0] * world.spread[0]
        rest_G = np.sqrt((world.loadings[:, 1:] ** 2) @ world.spread[1:] ** 2)
        rest_R, weight_R = normal_nodes(-np.inf, np.inf)
        total_G = np.zeros(len(state_G))
        kinds = [(-np.inf, world.threshold, 0.0), (world.threshold, np.inf, 1.0)]
        for low, high, responds in kinds:
            if low >= high:
                continue
            for node, weight in zip(*normal_nodes(low, high), strict=True):
                eta_DG = level_DG + node * state_G + responds * shift_G
                values_RDG = self._curve(eta_DG + rest_R[:, None, None] * rest_G)
                total_G += weight * np.tensordot(weight_R, values_RDG.mean(1), 1)
        return total_G

    def shift(self, treatment: Treatment) -> np.ndarray:
        """True mean shift per gene: ``mean`` of the treatment minus that of its control cells."""
        control = Treatment(CONTROL, treatment.cell_type, donor=treatment.donor)
        return np.asarray(self.mean(treatment) - self.mean(control))

    def sample(self, treatment: Treatment, n_cells: int, *, seed: int = 0) -> AnnData:
        """True cells of any condition, measured or not; they are none of the cells of ``adata``.

        Parameters
        ----------
        treatment
            Condition.
        n_cells
            How many cells. Donors take turns.
        seed
            Which cells; the same treatment and seed give the same cells.

        Returns
        -------
        Cells with the same keys as ``adata``.

        Raises
        ------
        UnknownLevelError
            Where a perturbation, cell type or donor is not part of the simulation.
        """
        return _checked(self._draw(treatment, n_cells, stream=f"sample {seed}"))

    @cached_property
    def _curve(self) -> Callable[[np.ndarray], np.ndarray]:
        config = self.config
        return mean_log1p_curve(
            CountNoise(
                dispersion=config.dispersion,
                library_median=config.library_median,
                library_sd=config.library_sd,
            )
        )

    def _perturbation(self, name: str) -> int:
        return _position("perturbation", name, self.world.perturbations)

    def _context(self, name: str) -> int:
        return _position("cell_type", name, self.world.contexts)

    def _donors(self, treatment: Treatment) -> np.ndarray:
        if treatment.donor is None:
            return self.world.donor
        return self.world.donor[[_position("donor", treatment.donor, self.world.donors)]]

    def _draw(self, treatment: Treatment, n_cells: int, *, stream: str) -> AnnData:
        world, config = self.world, self.config
        name = _name(treatment)
        rng = _generator(self.seed, stream, name)
        offset_DG = self._donors(treatment)
        donor_N = np.arange(n_cells) % len(offset_DG)
        z_NL = rng.standard_normal((n_cells, len(world.spread)))
        responds_N = z_NL[:, 0] > world.threshold
        eta_NG = world.base[self._context(treatment.cell_type)] + offset_DG[donor_N]
        eta_NG += (z_NL * world.spread) @ world.loadings.T
        eta_NG += responds_N[:, None] * self.log_rate_shift(treatment)
        spread = config.library_sd * rng.standard_normal(n_cells)
        library_N = np.round(config.library_median * np.exp(spread)).clip(1)
        rate_NG = library_N[:, None] * np.exp(eta_NG)
        if config.dispersion > 0:
            rate_NG *= rng.gamma(1 / config.dispersion, config.dispersion, rate_NG.shape)
        counts = sparse.csr_matrix(rng.poisson(rate_NG).astype(np.int32))
        panel_N = np.asarray(counts.sum(1)).ravel()
        names = [treatment.donor] if treatment.donor else world.donors
        control = not treatment.members
        obs = pd.DataFrame(
            {
                "perturbation": SEPARATOR.join(treatment.members) or CONTROL,
                "cell_type": treatment.cell_type,
                "donor": np.asarray(names, dtype=object)[donor_N],
                "dose": 0.0 if control else treatment.dose,
                "hours": 0.0 if control else treatment.hours,
                "responder": responds_N,
                "library_size": np.maximum(library_N, panel_N).astype(np.int64),
            },
            index=[f"{stream} {name} {i}" for i in range(n_cells)],
        )
        genes = pd.DataFrame(index=[f"G{i + 1:04d}" for i in range(config.n_genes)])
        return AnnData(X=counts, obs=obs, var=genes)


def simulated(config: SimulationConfig | None = None, *, seed: int = 0) -> Simulation:
    r"""Simulated cells with a known response to single, paired, unseen, dosed, timed perturbations.

    A cell of context c and donor d has latent programs ``z ~ N(0, 1)``. Given the perturbations M
    with dose u and time t, gene g's count over a library of L counts is Poisson-gamma,

    .. math::

        L &\sim \mathrm{round\ LogNormal}(\log \tilde L, \sigma_L), \quad
        y_g \sim \mathrm{Poisson}(L\, e^{\eta_g} \gamma_g), \quad
        \gamma_g \sim \mathrm{Gamma}(1/\theta, \theta) \\
        \eta_g &= b_{cg} + o_{dg} + \sum_l W_{gl} s_l z_l + [z_0 > \tau]\, h(u)\, k(t)\, e_g \\
        e_g &= \sum_q R_{gq}\, \Gamma_{cq} \Big( \sum_{m \in M} a_{mq} + \kappa \sum_{m < n}
            g_m g_n \big( \beta [q = Q] - \tfrac12 (a_{mq} + a_{nq}) \big) \Big)

    The activities ``a_m`` are a linear map of the perturbation's features, of norm
    ``effect_size``, so that effects of unseen perturbations can be learned. The last feature is
    the gate ``g_m``, 1 for the interacting half: two of those damp each other and switch on a
    program ``Q`` of their own, ``beta = effect_size``. All other pairs are additive in log-rate,
    exactly. The gain of a context is ``exp`` of a linear function of its latent centre, which its
    control cells show. The dose curve ``h(u) = 2 u / (1 + u)`` is 1 at dose 1; the time course
    ``k(t) = (1 - 2 ** (-t / 4)) / (1 - 2 ** -6)`` is 1 at 24 hours. With ``responder_share``
    below 1 only cells high along the state, program 0, respond.

    Parameters
    ----------
    config
        Sizes and strengths; None takes the defaults.
    seed
        Seed of parameters and cells. No global random state is read or changed.

    Returns
    -------
    The cells in ``adata`` and their truth. ``adata`` has integer counts in ``X``
    (sparse); in ``obs`` ``perturbation`` (``"control"``, singles, pairs such as ``"P1+P2"``),
    ``cell_type``, ``donor``, ``dose`` and ``hours`` (0 for controls), ``responder`` (the cell is
    of the responding kind) and ``library_size`` (counts over all measured genes: the panel and
    the rest); in ``uns`` the table ``perturbation_features``, one row a perturbation, unseen ones
    included.

    Raises
    ------
    ConfigError
        Where the seed is none, or a size or strength is out of range (``SimulationConfig``).

    Examples
    --------
    >>> simulation = simulated(SimulationConfig(n_cells=10, n_controls=20), seed=1)
    >>> pair = Treatment("P1+P2", "T1")
    >>> simulation.shift(pair).shape
    (500,)
    >>> simulation.sample(pair, 5).shape
    (5, 500)
    """
    config, seed = config or SimulationConfig(), seed_number(seed)
    world = draw_world(config, _generator(seed, "world"))
    treatments = _design(config, world)
    empty = Simulation(AnnData(), config, world, treatments, seed)
    parts = []
    for treatment in treatments:
        size = config.n_cells if treatment.members else config.n_controls
        parts.append(empty._draw(treatment, size, stream="cell"))
    obs = pd.concat([part.obs for part in parts])
    for key in ("perturbation", "cell_type", "donor"):
        obs[key] = obs[key].astype("category")
    counts = sparse.csr_matrix(sparse.vstack([part.X for part in parts], format="csr"))
    adata = AnnData(X=counts, obs=obs, var=parts[0].var)
    adata.uns["perturbation_features"] = pd.DataFrame(
        world.features,
        index=pd.Index(world.perturbations, name="perturbation"),
        columns=[f"feature_{i + 1}" for i in range(world.features.shape[1])],
    )
    adata.uns[UNS_KEY] = {"scale": "counts"}
    return Simulation(_checked(adata), config, world, treatments, seed)


def _design(config: SimulationConfig, world: World) -> tuple[Treatment, ...]:
    singles = world.perturbations[: config.n_perturbations]
    gate = dict(zip(world.perturbations, world.features[:, -1], strict=True))
    pairs = list(combinations(singles, 2))
    both = [pair for pair in pairs if gate[pair[0]] * gate[pair[1]] == 1]
    additive = [pair for pair in pairs if pair not in both]
    # In turn as long as there are some of each kind, then whatever is left.
    turns = sorted(
        [(2 * i, p) for i, p in enumerate(both)] + [(2 * i + 1, p) for i, p in enumerate(additive)]
    )
    labels = [*singles, *(SEPARATOR.join(pair) for _, pair in turns[: config.n_pairs])]
    treatments = [Treatment(CONTROL, context) for context in world.contexts]
    for context in world.contexts:
        treatments += [Treatment(label, context) for label in labels]
        treatments += [Treatment("dosed", context, dose=dose) for dose in config.doses]
        treatments += [Treatment("timed", context, hours=time) for time in config.hours]
    return tuple(treatments)


def _checked(adata: AnnData) -> AnnData:
    full = (np.asarray(adata.X.sum(1)).ravel() >= adata.obs["library_size"].to_numpy()).sum()
    if full:
        logger.warning(
            "%d of %d simulated cells have more counts in the panel than they were to have in all: "
            "their library_size is raised, and the stated means are not exact for them. "
            "Lower effect_size or panel_share, or take more genes.",
            full,
            adata.n_obs,
        )
    return adata


def _strength(treatment: Treatment) -> float:
    rise = -np.expm1(-np.log(2) * treatment.hours / _HALF_TIME)
    full = -np.expm1(-np.log(2) * REFERENCE_HOURS / _HALF_TIME)
    return float(2 * treatment.dose / (1 + treatment.dose) * rise / full)


def _position(key: str, name: str, known: tuple[str, ...]) -> int:
    if name not in known:
        raise UnknownLevelError(key, [name], known=known)
    return known.index(name)


def _name(treatment: Treatment) -> str:
    given = f"{treatment.cell_type} {SEPARATOR.join(treatment.members) or CONTROL}"
    if treatment.members:
        given += f" {treatment.dose!r} {treatment.hours!r}h"
    return f"{given} {treatment.donor}" if treatment.donor else given


def _generator(seed: int, *names: str) -> np.random.Generator:
    key = blake2b("\x1f".join(names).encode(), digest_size=8).digest()
    return np.random.default_rng([seed, int.from_bytes(key, "little")])
