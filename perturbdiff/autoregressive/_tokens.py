"""Counts to bins and back.

Zero and the counts 1 to 4 have a bin each; above, edges cut the observed counts into parts of equal
sum, so that the few high counts are told apart as well as the many low ones.

E entries, V bins, U places within a bin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SINGLE = 5
_PLACES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpressionBins:
    """Bins of counts, and which counts were seen in each.

    ``first_count`` is the smallest count of each bin; ``seen`` holds quantiles of the observed
    counts within each.
    """

    first_count: Int[Tensor, " bins"]
    seen: Int[Tensor, "bins places"]

    @classmethod
    def fit(cls, counts: Int[Tensor, " entries"], n_bins: int) -> Self:
        """Bins for counts like these.

        Parameters
        ----------
        counts
            Observed counts; zeros may be left out.
        n_bins
            Bins at most; fewer come back where there are fewer different counts.

        Returns
        -------
        At least the bins of 0 to 4.
        """
        high = counts[counts >= _SINGLE].sort().values.long()
        single = torch.arange(_SINGLE)
        if not len(high):
            return cls(first_count=single, seen=single[:, None].expand(-1, _PLACES).clone())
        share = high.cumsum(0).double() / high.sum()
        wanted = torch.arange(1, n_bins - _SINGLE, dtype=torch.float64) / (n_bins - _SINGLE)
        inner = high[torch.searchsorted(share, wanted).clamp_max(len(high) - 1)]
        edges = torch.tensor(sorted({_SINGLE, *inner.tolist()}))
        place = torch.searchsorted(edges, high, right=True) - 1
        middle = (torch.arange(_PLACES) + 0.5) / _PLACES
        seen = []
        for number in range(len(edges)):
            own = high[place == number]
            own = own if len(own) else edges[[number]]
            seen.append(own[(middle * len(own)).long()])
        return cls(
            first_count=torch.cat([single, edges]),
            seen=torch.cat([single[:, None].expand(-1, _PLACES), torch.stack(seen)]),
        )

    def __len__(self) -> int:
        return len(self.first_count)

    @property
    def last_count(self) -> int:
        """Largest count that was seen."""
        return int(self.seen.max())

    def to(self, device: torch.device | str) -> Self:
        """The same bins on another device."""
        return type(self)(first_count=self.first_count.to(device), seen=self.seen.to(device))

    def encode(self, counts: Int[Tensor, "*entries"]) -> Int[Tensor, "*entries"]:
        """Bin of each count."""
        return torch.bucketize(counts, self.first_count, right=True) - 1

    def decode(
        self, bins: Int[Tensor, "*entries"], uniform: Float[Tensor, "*entries"]
    ) -> Int[Tensor, "*entries"]:
        """A count of each bin, drawn from those that were seen there.

        Parameters
        ----------
        bins
            Bins.
        uniform
            One number in (0, 1) each.

        Returns
        -------
        Counts.
        """
        place = (uniform * self.seen.shape[1]).long().clamp(0, self.seen.shape[1] - 1)
        return self.seen[bins, place]

    def round_trip_error(
        self, counts: Int[Tensor, " entries"], uniform: Float[Tensor, " entries"]
    ) -> float:
        """Mean absolute difference of log1p counts that went to bins and back."""
        again = self.decode(self.encode(counts), uniform)
        return float((again.double().log1p() - counts.double().log1p()).abs().mean())

    def state(self) -> dict[str, Tensor]:
        """Tensors that :meth:`from_state` reads."""
        return {"first_count": self.first_count, "seen": self.seen}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The bins that this is the state of."""
        return cls(first_count=state["first_count"], seen=state["seen"])
