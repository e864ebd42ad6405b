"""How constraints are enforced: softly, hard, by search, or several of these together."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff.config._checks import finite_number, whole_number

_REDRAWS = 16


@dataclass(frozen=True, kw_only=True)
class Soft:
    """Lower violations by the gradient of the energy on the denoised estimate; promise nothing.

    Parameters
    ----------
    strength
        1 goes to where the violation would vanish if it were linear: a Polyak step, whose size
        does not depend on units. 0 is off.
    window
        Share of the run in which it acts, from its start at 0 to its end at 1.
    through_network
        Follow the gradient through the network, which moves estimates along the network's own
        uncertainty, at about three times the cost of a call; or take it at the estimate.
    margin
        How far inside the range to aim for population means, in standard errors of a set's counts.
    redraws
        How often the counts of a set that misses are drawn again, which costs no network call.
    """

    strength: float = 1.0
    window: tuple[float, float] = (0.0, 1.0)
    through_network: bool = False
    margin: float = 2.0
    redraws: int = _REDRAWS

    def __post_init__(self) -> None:
        if not finite_number("Soft.strength", self.strength) >= 0:
            raise ConfigError("Soft.strength", self.strength, rule="must be at least 0")
        pair = isinstance(self.window, Sequence) and len(self.window) == 2
        start, end = (
            (finite_number("Soft.window", share) for share in self.window) if pair else (1.0, 0.0)
        )
        if not 0 <= start < end <= 1:
            rule = "must be two shares of the run that rise and lie in [0, 1]"
            raise ConfigError("Soft.window", self.window, rule=rule)
        if not finite_number("Soft.margin", self.margin) >= 0:
            raise ConfigError("Soft.margin", self.margin, rule="must be at least 0")
        whole_number("Soft.redraws", self.redraws, least=1)


@dataclass(frozen=True, kw_only=True)
class Hard:
    """Pull at every step, project after the last one: a promise, for what can be projected.

    Parameters
    ----------
    resamples
        How often each step is taken again from fresh noise, where genes are ``Observed``, so that
        the rest goes with them (Lugmayr et al., 2022, "RePaint"); each costs a trajectory.
    """

    resamples: int = 1

    def __post_init__(self) -> None:
        whole_number("Hard.resamples", self.resamples, least=0)


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """Candidates from the start; the first that satisfies, or the least violating.

    Parameters
    ----------
    n
        Candidates a set.
    redraws
        Draws of control cells and counts of each candidate before its first step and where it
        forks, and of counts after its last; they cost no network call.
    """

    n: int = 4
    redraws: int = 1

    def __post_init__(self) -> None:
        whole_number("BestOf.n", self.n, least=1)
        whole_number("BestOf.redraws", self.redraws, least=1)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Candidates that share their first steps and then part with fresh noise.

    Parameters
    ----------
    k
        Candidates a set.
    share
        Steps that they share.
    redraws
        As in :class:`BestOf`.
    """

    k: int = 4
    share: int = 9
    redraws: int = _REDRAWS

    def __post_init__(self) -> None:
        whole_number("Branch.k", self.k, least=1)
        whole_number("Branch.share", self.share, least=0)
        whole_number("Branch.redraws", self.redraws, least=1)

    def cost(self, n_steps: int, *, heun: bool = False) -> float:
        """Network calls in units of one trajectory."""
        s, k = self.share, self.k
        if heun and s < n_steps:
            return (2 * s + k * (2 * (n_steps - s) - 1)) / (2 * n_steps - 1)
        return 1.0 if s == n_steps else k - (k - 1) * s / n_steps


@dataclass(frozen=True, kw_only=True)
class Particles:
    """Feynman-Kac steering (Singhal et al., 2025): particles of a set are resampled as they go.

    Runs with the stochastic sampler, since copies of a particle must part.

    Parameters
    ----------
    n
        Particles a set.
    temperature
        Weights are ``exp(-energy / temperature)``.
    resample_below
        Resample the particles of a set when their effective number is below this share of n.
    redraws
        As in :class:`BestOf`.
    """

    n: int = 4
    temperature: float = 0.1
    resample_below: float = 0.5
    redraws: int = _REDRAWS

    def __post_init__(self) -> None:
        whole_number("Particles.n", self.n, least=1)
        whole_number("Particles.redraws", self.redraws, least=1)
        if not finite_number("Particles.temperature", self.temperature) > 0:
            raise ConfigError("Particles.temperature", self.temperature, rule="must be above 0")
        name = "Particles.resample_below"
        if not 0 <= finite_number(name, self.resample_below) <= 1:
            rule = "must be from 0 to 1"
            raise ConfigError(name, self.resample_below, rule=rule)


@dataclass(frozen=True, kw_only=True)
class DepthFirst:
    """Depth-first search: follow a trajectory while it promises well, else go back and fork.

    Parameters
    ----------
    budget
        Network calls a set, at most; at least one trajectory is always finished.
    width
        Children of a node.
    levels
        Places along the run where candidates are judged, the end among them.
    redraws
        As in :class:`BestOf`.
    """

    budget: int = 72
    width: int = 3
    levels: int = 3
    redraws: int = _REDRAWS

    def __post_init__(self) -> None:
        whole_number("DepthFirst.budget", self.budget, least=1)
        whole_number("DepthFirst.width", self.width, least=1)
        whole_number("DepthFirst.levels", self.levels, least=1)
        whole_number("DepthFirst.redraws", self.redraws, least=1)


Search = BestOf | Branch | Particles | DepthFirst
Way = Soft | Hard | Search
NAMED: dict[str, type[Way]] = {
    "soft": Soft,
    "hard": Hard,
    "best_of": BestOf,
    "branch": Branch,
    "particles": Particles,
    "depth_first": DepthFirst,
}


@dataclass(frozen=True, kw_only=True)
class Enforcement:
    """At most one way of each kind."""

    soft: Soft | None = None
    hard: Hard | None = None
    search: Search | None = None

    @property
    def redraws(self) -> int:
        """Draws of the counts of a finished set."""
        return max((way.redraws for way in (self.soft, self.search) if way is not None), default=1)

    @property
    def method(self) -> str:
        """Names of the ways, for reports."""
        names = {kind: name for name, kind in NAMED.items()}
        ways = [self.soft, self.search]
        parts = [names[type(way)] for way in ways if way is not None]
        return "+".join([*parts, *(["hard"] if self.hard is not None else [])]) or "none"


def enforcement(
    ways: "str | Way | Sequence[str | Way] | None", *, projects: bool, promised: Sequence[str]
) -> Enforcement:
    """How to enforce, from what a user said.

    Parameters
    ----------
    ways
        Names or settings of ways; ``None`` is hard where everything projects, and else the best
        of a few for what does not.
    projects
        Whether all constraints can be projected.
    promised
        Texts of constraints that cannot, for the message.

    Returns
    -------
    One way of each kind.

    Raises
    ------
    ConfigError
        When a name is unknown, or two ways of a kind are given.
    """
    if ways is None:
        return Enforcement(hard=Hard(), search=None if projects else BestOf())
    listed = [ways] if isinstance(ways, str) or not isinstance(ways, Sequence) else list(ways)
    made = [_way(way) for way in listed]
    soft = [way for way in made if isinstance(way, Soft)]
    search = [way for way in made if not isinstance(way, Soft | Hard)]
    hard = [way for way in made if isinstance(way, Hard)]
    if len(soft) > 1 or len(search) > 1 or len(hard) > 1:
        raise ConfigError("enforce", listed, rule="must hold one way of each kind at most")
    if hard and not projects:
        msg = f"{promised[0]}: cannot be projected, so it cannot be enforced hard. Use a search."
        raise ConstraintError(msg)
    return Enforcement(
        soft=soft[0] if soft else None,
        hard=hard[0] if hard else None,
        search=search[0] if search else None,
    )


def _way(way: "str | Way") -> Way:
    if isinstance(way, Way):
        return way
    if not isinstance(way, str) or way not in NAMED:
        rule = f"must be one of {', '.join(NAMED)}, or settings such as perturbdiff.Soft()"
        raise ConfigError("enforce", way, rule=rule)
    return NAMED[way]()
