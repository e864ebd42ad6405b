"""What predictors with a trained network share: a fitted part, a fingerprint, a folder."""

from abc import abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from perturbdiff._errors import NotFittedError
from perturbdiff.model._bundle import Parts, write_bundle
from perturbdiff.model._fitted import Responding
from perturbdiff.model._predictor import Predictor

Learnt = TypeVar("Learnt", bound=Responding)


class NetworkPredictor(Predictor, Generic[Learnt]):
    """A predictor whose network was trained."""

    seed = 0
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

    def save(self, path: str | Path) -> None:
        """Save as one folder of JSON and safetensors that :func:`~perturbdiff.load` reads.

        It holds means and variances of the training conditions, and no cells.

        Parameters
        ----------
        path
            Folder to make.

        Raises
        ------
        BundleError
            When there is something at that path already.
        NotFittedError
            Before ``fit``.
        """
        write_bundle(self._parts(), Path(path))

    @abstractmethod
    def _parts(self) -> Parts:
        """Everything that the model is made of."""
