"""What a prediction will cost, told before it runs."""

from dataclasses import asdict, dataclass
from typing import Any

from perturbdiff.profiling._work import Work


@dataclass(frozen=True, kw_only=True)
class Quote:
    """Time and memory of a prediction that was not run yet.

    Parameters
    ----------
    seconds, low, high
        Expected time, and the range that most runs on an otherwise idle machine fall in.
    memory_bytes
        Most that tensors and the answer take at once, beyond what is loaded already. A process may
        grow by half as much again, since memory that was freed is not used again to the full.
    network_calls
        Calls of the network; the most where a search may end early, which ``how`` then says.
    work
        Operations and bytes of these calls.
    phases
        Seconds of each part; they add up to ``seconds``. Under constraints one of them,
        ``"constraints"``, is everything from the pilot of a condition to its report.
    bound
        What limits the calls of the network: ``"products"``, ``"memory"`` or ``"overhead"``.
    share_of_limit
        How near the calls are to that limit.
    how
        How the figures were derived, and what they depend on.
    """

    seconds: float
    low: float
    high: float
    memory_bytes: float
    network_calls: float
    work: Work
    phases: dict[str, float]
    bound: str | None
    share_of_limit: float | None
    how: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        return (
            f"{self.seconds:.2f} s ({self.low:.2f} to {self.high:.2f}), "
            f"{self.memory_bytes / 2**20:.0f} MiB, {self.network_calls:.0f} network calls; {parts}"
        )


def expected_largest(values: list[float], count: int) -> float:
    """Mean of the largest of ``count`` draws from some values, with replacement.

    The largest is at most the i-th smallest of m values with probability ``(i / m)^count``.

    Parameters
    ----------
    values
        What is drawn from.
    count
        How many are drawn.

    Returns
    -------
    The mean, between the mean and the largest of the values.
    """
    ordered, m = sorted(values), len(values)
    return sum(
        value * ((i / m) ** count - ((i - 1) / m) ** count)
        for i, value in enumerate(ordered, start=1)
    )
