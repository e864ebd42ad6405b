"""Seconds of a call from its sizes: a few coefficients, learnt from a few calls that were timed.

    seconds = overhead + c₁ · sets + c₂ · products + c₃ · attention + c₄ · bytes, then corrected

with coefficients of at least 0, fitted to relative errors. Each stands for a limit: launches, work
that is done once a set, rates of products and of attention, and bandwidth. What the sum misses
(products too small to run at full rate, arrays that leave the processor's caches) is corrected by a
smooth factor: a weighted mean of the log-ratios that were seen near by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

_REACH = 1.0  # in logarithms of the sizes: how far a timed call speaks for its neighbours
_FAR = 1e-3  # weight of no correction, where nothing near by was timed


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Predicts seconds from features, with a correction by size.

    Parameters
    ----------
    coefficients
        Seconds a unit of each feature.
    places
        Logarithms of the sizes of what was timed.
    residuals
        Log of how much longer each took than the sum says.
    spread
        Relative error to be expected, from leaving each timed call out in turn.
    """

    coefficients: tuple[float, ...]
    places: tuple[tuple[float, ...], ...]
    residuals: tuple[float, ...]
    spread: float = 0.0

    @classmethod
    def fit(
        cls,
        features: Sequence[Sequence[float]],
        sizes: Sequence[Sequence[float]],
        seconds: Sequence[float],
    ) -> Self:
        """Learn from calls that were timed.

        Parameters
        ----------
        features
            What takes time, for each call.
        sizes
            Sizes of each call, at least 1, along which the correction is smooth.
        seconds
            How long each took.

        Returns
        -------
        A timing, with the error that it makes on calls that it has not seen.
        """
        rows, took = np.asarray(features, float), np.asarray(seconds, float)
        places = np.log(np.asarray(sizes, float))
        whole = cls._fitted(rows, places, took)
        errors = []
        for number in range(len(took)):
            rest = np.arange(len(took)) != number
            part = cls._fitted(rows[rest], places[rest], took[rest])
            errors.append(abs(part._at(rows[number], places[number]) / took[number] - 1))
        return cls(**{**asdict(whole), "spread": float(np.median(errors))})

    @classmethod
    def _fitted(
        cls,
        rows: Float[np.ndarray, "calls features"],
        places: Float[np.ndarray, "calls sizes"],
        took: Float[np.ndarray, " calls"],
    ) -> Self:
        scale = np.maximum(rows.max(0), 1e-300)  # so that units do not matter
        found, _ = nnls(rows / scale / took[:, None], np.ones(len(took)))
        coefficients = found / scale
        return cls(
            coefficients=tuple(coefficients.tolist()),
            places=tuple(tuple(place) for place in places.tolist()),
            residuals=tuple(np.log(took / (rows @ coefficients)).tolist()),
        )

    def __call__(self, features: Sequence[float], sizes: Sequence[float]) -> float:
        """Seconds of a call."""
        return self._at(np.asarray(features, float), np.log(np.asarray(sizes, float)))

    def _at(self, row: Float[np.ndarray, " features"], place: Float[np.ndarray, " sizes"]) -> float:
        weight = np.exp(-((np.asarray(self.places) - place) ** 2).sum(1) / (2 * _REACH**2))
        correction = weight @ np.asarray(self.residuals) / (weight.sum() + _FAR)
        return float(row @ np.asarray(self.coefficients)) * float(np.exp(correction))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The timing that these are the values of."""
        return cls(
            coefficients=tuple(values["coefficients"]),
            places=tuple(tuple(place) for place in values["places"]),
            residuals=tuple(values["residuals"]),
            spread=values["spread"],
        )
