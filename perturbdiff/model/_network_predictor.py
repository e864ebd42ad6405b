"""What predictors with a trained network share: a fitted part and a fingerprint."""

from typing import Generic, TypeVar

from perturbdiff._errors import NotFittedError
from perturbdiff.model._fitted import Responding
from perturbdiff.model._predictor import Predictor

Learnt = TypeVar("Learnt", bound=Responding)


class NetworkPredictor(Predictor, Generic[Learnt]):
    """A predictor whose network was trained."""

    split_hash = ""
    _fitted: Learnt | None = None
    _checksum: str | None = None

    @property
    def fitted(self) -> Learnt:
        """What was learnt.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        """
        if self._fitted is None:
            msg = f"This {type(self).__name__} was not fitted. Call fit(adata) or load a bundle."
            raise NotFittedError(msg)
        return self._fitted

    @property
    def checksum(self) -> str:
        """Fingerprint of everything that was learnt, the same before saving and after loading.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        """
        if self._checksum is None:
            self._checksum = self._parts().checksum
        return self._checksum
