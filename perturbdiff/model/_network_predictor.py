"""What predictors with a trained network share: a lesson, a fitted part, a bundle."""

from abc import abstractmethod
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from perturbdiff._errors import NotFittedError
from perturbdiff.data import Condition, Question, Registry
from perturbdiff.model._bundle import Parts
from perturbdiff.model._fitted import Responding
from perturbdiff.model._predictor import Predictor, controls_by_context, require_counts
from perturbdiff.model._questions import Controls
from perturbdiff.model._training_data import TrainingData
from perturbdiff.profiling import Subject


@runtime_checkable
class Study(Protocol):
    """What a network is trained on."""

    @property
    def data(self) -> TrainingData:
        """Cells to learn from."""
        ...

    @property
    def seed(self) -> int:
        """Seed of first weights and all draws."""
        ...


Learnt = TypeVar("Learnt", bound=Responding)
Lesson = TypeVar("Lesson", bound=Study)
Task = TypeVar("Task")


class NetworkPredictor(Predictor, Generic[Learnt, Lesson, Task]):
    """A predictor whose network was trained."""

    kind = ""
    split_hash = ""
    _fitted: Learnt | None = None
    _checksum: str | None = None
    _lesson: Lesson | None = None  # prepared, to be trained elsewhere

    def __repr__(self) -> str:
        precision = getattr(self._fitted, "precision", "float32")
        lower = "" if precision == "float32" else f", in {precision}"
        compiled = ", compiled" if getattr(self._fitted, "compiled", False) else ""
        return f"{super().__repr__()}{lower}{compiled}"

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

    def adopt(self, task: Task) -> Self:
        """Take over the averaged weights of a task that was prepared here and trained elsewhere.

        Parameters
        ----------
        task
            The task of the last ``prepare_training``.

        Returns
        -------
        The fitted model itself.

        Raises
        ------
        NotFittedError
            When nothing was prepared.
        TrainingError
            When the task has another shape than the one that was prepared.
        """
        if self._lesson is None:
            msg = "There is nothing to adopt weights for. Call prepare_training(adata) first."
            raise NotFittedError(msg)
        self._take(self._finished(self._lesson, task), self._lesson)
        self._lesson = None
        return self

    @staticmethod
    @abstractmethod
    def _finished(lesson: Lesson, task: Task) -> Learnt:
        """The model with the averaged weights of a trained task."""

    def _take(self, fitted: Learnt, lesson: Lesson) -> None:
        data = lesson.data
        self._fitted, self._checksum = fitted, None
        self.registry, self.split_hash, self.seed = data.registry, data.split_hash, lesson.seed
        self._controls = data.cells.take(data.cells.is_control)

    def _with_controls_of(self, question: Question) -> list[tuple[Condition, Controls]]:
        """Each condition that is asked for, with the control cells of its context."""
        require_counts(question.controls)
        controls = controls_by_context(
            question,
            self.registry,
            loadings=self.fitted.loadings,
            mean=self.fitted.mean,
            known=self.fitted.prior.conditions,
        )
        return [(condition, controls[condition.context]) for condition in question.conditions]

    @abstractmethod
    def probe_points(self) -> Subject:
        """Where :class:`~perturbdiff.profiling.Probe` goes around this model."""

    @abstractmethod
    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values and tensors of what was learnt."""

    @staticmethod
    @abstractmethod
    def _restored(registry: Registry, parts: Parts) -> Learnt:
        """What these are the contents of, on the CPU."""

    def _parts(self) -> Parts:
        plain, arrays = self._contents()
        plain["fit"] = {"seed": self.seed, "split_hash": self.split_hash}
        plain["registry"] = self.registry.to_json()
        return Parts(kind=self.kind, plain=plain, arrays=arrays)

    @classmethod
    def from_parts(cls, parts: Parts) -> Self:
        """The model that these are the parts of, on the CPU."""
        model = cls(Registry.from_json(parts.plain["registry"]))
        model._fitted = cls._restored(model.registry, parts)
        fit = parts.plain["fit"]
        model.seed, model.split_hash = fit["seed"], fit["split_hash"]
        return model
