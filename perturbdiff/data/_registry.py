"""The registry: what the columns and genes of the training file mean, as a value."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, cast

import numpy as np
import pandas as pd
from anndata import AnnData
from jaxtyping import Float, Int

from perturbdiff._errors import (
    ConfigError,
    LabelError,
    UnknownKeyError,
    UnknownLevelError,
    listed,
    nearest,
)
from perturbdiff._logging import logger
from perturbdiff._typing import Json, Scale
from perturbdiff.data._checks import check_values, known_scale, resolve_scale, warn_labels
from perturbdiff.data._conditions import Columns, read_rows
from perturbdiff.data._features import read_features
from perturbdiff.data._labels import column_of, nearly_control, read_column, sounds_like_control
from perturbdiff.data._matrix import BLOCK, gene_names, read_matrix
from perturbdiff.data._numbers import read_numbers


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Sorted labels of one kind. Codes start at 1; 0 is kept for padding and the unknown."""

    key: str
    levels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.levels)

    def __contains__(self, label: object) -> bool:
        return label in self._codes

    @property
    def _codes(self) -> dict[str, int]:
        return {level: code for code, level in enumerate(self.levels, start=1)}

    def encode(
        self, labels: Sequence[str], *, unknown: str = "refuse"
    ) -> Int[np.ndarray, " labels"]:
        """Codes of labels.

        Parameters
        ----------
        labels
            Labels to look up.
        unknown
            ``"refuse"`` labels that are not in the vocabulary, or give them code 0 (``"zero"``).

        Returns
        -------
        One code from 1 to ``len(self)`` for each label.

        Raises
        ------
        UnknownLevelError
            When a label is unknown and refused; names the nearest known one.
        """
        codes = self._codes
        strange = sorted(set(labels) - set(codes))
        if strange and unknown == "refuse":
            raise UnknownLevelError(self.key, strange, known=self.levels)
        return np.array([codes.get(label, 0) for label in labels], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Names, vocabularies and units that a model was fitted with, and no cell's expression."""

    perturbation_key: str
    control: tuple[str, ...]
    covariate_keys: tuple[str, ...]
    separator: str | None
    scale: Scale
    layer: str | None
    library_size_key: str | None
    dose_key: str | None
    dose_unit: str | None
    time_key: str | None
    time_unit: str | None
    embedding_key: str | None
    measured_genes: tuple[str, ...]
    perturbations: Vocabulary  # single members; combinations are made of them
    covariates: tuple[Vocabulary, ...]
    features: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    genes: tuple[str, ...] = ()  # selected in fit; empty before
    gene_mean: tuple[float, ...] = ()
    gene_scale: tuple[float, ...] = ()

    @classmethod
    def from_anndata(  # noqa: PLR0913 - one flat keyword for each thing a file may name
        cls,
        adata: AnnData,
        *,
        perturbation_key: str,
        control: str | Sequence[str],
        covariate_keys: Sequence[str] = (),
        scale: str | None = None,
        layer: str | None = None,
        separator: str | None = "+",
        library_size_key: str | None = None,
        dose_key: str | None = None,
        time_key: str | None = None,
        embedding_key: str | None = None,
    ) -> Self:
        """Read names, labels and declared units; learn nothing from the values.

        Parameters
        ----------
        adata
            Cells × genes. It is not changed.
        perturbation_key
            Column of ``obs`` with the perturbation of each cell.
        control
            Label or labels in that column that mean unperturbed.
        covariate_keys
            Columns that define the context, such as cell type or donor.
        scale
            ``"counts"`` or ``"log1p_cp10k"``; may be left out where the file declares it.
        layer
            Layer with the expression; ``None`` for ``X``.
        separator
            What stands between the members of a combination; ``None`` when there are none.
        library_size_key
            Column with each cell's counts over all measured genes. Without it,
            ``obs["library_size"]`` is used where present, else counts are summed.
        dose_key, time_key
            Columns of numbers, where there are any.
        embedding_key
            Perturbation features: a DataFrame or mapping in ``uns``, or an array in ``obsm``.

        Returns
        -------
        A registry whose vocabularies are sorted, so that the order of rows leaves no trace.

        Raises
        ------
        ConfigError
            When two roles are given to one column, or control labels or separator are no text.
        UnknownKeyError
            When a named column, layer or table is not there.
        LabelError
            When there are no control cells, or labels, doses or times cannot be read.
        GeneError
            When gene names are not unique.
        ScaleError, ExpressionError
            When the scale is not declared, or the numbers are not on it.
        """
        genes = gene_names(adata)
        check_separator(separator)
        check_roles(
            perturbation_key=perturbation_key,
            covariate_keys=covariate_keys,
            library_size_key=library_size_key,
            dose_key=dose_key,
            time_key=time_key,
        )
        registry = cls(
            perturbation_key=perturbation_key,
            control=control_labels(control, perturbation_key),
            covariate_keys=tuple(covariate_keys),
            separator=separator,
            scale=resolve_scale(adata, scale, layer),
            layer=layer,
            library_size_key=library_size_key,
            dose_key=dose_key,
            dose_unit=dose_key and read_numbers(adata.obs, dose_key, separator=separator).unit,
            time_key=time_key,
            time_unit=time_key and read_numbers(adata.obs, time_key).unit,
            embedding_key=embedding_key,
            measured_genes=genes,
            perturbations=Vocabulary(key=perturbation_key, levels=()),
            covariates=(),
        )
        registry = registry._with_labels(adata.obs)
        if library_size_key is not None:
            column_of(adata.obs, library_size_key)
        _check_some_values(adata, registry)
        if embedding_key is None:
            return registry
        return replace(registry, features=read_features(adata, embedding_key, registry.columns))

    def with_genes(
        self,
        names: Iterable[str],
        *,
        mean: Float[np.ndarray, " genes"] | Sequence[float] = (),
        scale: Float[np.ndarray, " genes"] | Sequence[float] = (),
    ) -> Self:
        """The registry of a model that works on these genes.

        Parameters
        ----------
        names
            Selected genes, in order.
        mean, scale
            Centre and spread of each gene in training cells, where used.

        Returns
        -------
        A new registry.

        Raises
        ------
        UnknownKeyError
            When a gene was not measured.
        ConfigError
            When a gene is there twice, or the lengths differ.
        """
        genes = tuple(names)
        known = set(self.measured_genes)
        for name in genes:
            if name not in known:
                where = "The list of measured genes"
                raise UnknownKeyError(where, name, known=self.measured_genes)
        if len(set(genes)) < len(genes):
            raise ConfigError("genes", len(genes), rule="names must be distinct")
        for label, values in (("mean", mean), ("scale", scale)):
            if len(values) not in (0, len(genes)):
                raise ConfigError(
                    label, len(values), rule=f"needs one value for {len(genes)} genes"
                )
        return replace(
            self,
            genes=genes,
            gene_mean=tuple(float(value) for value in mean),
            gene_scale=tuple(float(value) for value in scale),
        )

    @property
    def columns(self) -> Columns:
        """The columns that make up a condition."""
        return Columns(**{item.name: getattr(self, item.name) for item in fields(Columns)})

    @property
    def label_keys(self) -> tuple[str, ...]:
        """Columns that hold labels, the perturbation first, then the covariates."""
        return self.perturbation_key, *self.covariate_keys

    def context(self, levels: Mapping[str, str]) -> tuple[str, ...]:
        """The context that names one level of every covariate, in the order of the covariates."""
        for key in levels:
            if key not in self.covariate_keys:
                raise UnknownKeyError("The context", key, known=self.covariate_keys)
        for key in self.covariate_keys:
            if key not in levels:
                raise UnknownKeyError("The question", key, known=tuple(levels))
        return tuple(str(levels[key]) for key in self.covariate_keys)

    def knows(self, member: str) -> bool:
        """Whether a single perturbation was seen in training or has features."""
        return member in self.perturbations or member in self.features

    def to_json(self) -> dict[str, Json]:
        """The registry as plain lists, strings and numbers."""
        plain = asdict(self)
        plain["features"] = [[name, list(values)] for name, values in sorted(self.features.items())]
        return cast("dict[str, Json]", _lists(plain))

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The registry that ``to_json`` wrote.

        Raises
        ------
        UnknownKeyError
            When there is an entry that this version does not know, or one is missing.
        """
        names = [item.name for item in fields(cls)]
        for key in plain:
            if key not in names:
                raise UnknownKeyError("The registry", key, known=names)
        for name in names:
            if name not in plain:
                raise UnknownKeyError("The saved registry", name, known=list(plain))
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()
        }
        values["perturbations"] = _vocabulary(plain["perturbations"])
        values["covariates"] = tuple(_vocabulary(entry) for entry in plain["covariates"])
        values["features"] = {name: tuple(row) for name, row in plain["features"]}
        known_scale(plain["scale"])
        return cls(**values)

    def _with_labels(self, obs: pd.DataFrame) -> Self:
        """Vocabularies fitted on the labels of a table of cells."""
        rows = read_rows(obs, self.columns)
        names: dict[str, tuple[str, ...]] = {
            key: read_column(obs, key).levels
            for key in (self.perturbation_key, *self.covariate_keys)
        }
        written = names[self.perturbation_key]
        for label in self.control:
            if label not in written:
                msg = (
                    f"obs[{self.perturbation_key!r}] has no cell labelled {label!r}, named as "
                    f"control. {nearest(label, written)}"
                )
                raise LabelError(msg)
        members = {member for condition in rows.conditions for member in condition.members}
        if near := nearly_control({*written, *members}, self.control):
            msg = (
                f"obs[{self.perturbation_key!r}] has {listed(near)} beside the control label "
                f"{listed(self.control)}. Such cells would be learnt as treated: rename them, or "
                f"name every control label (control={[*self.control, *near]!r})."
            )
            raise LabelError(msg)
        if others := sounds_like_control({*written, *members}, self.control):
            logger.warning(
                "obs[%r] has %s beside the control label %s; such cells are learnt as treated. "
                "If they are control, name every control label: control=%r",
                *(self.perturbation_key, listed(others), listed(self.control)),
                [*self.control, *others],
            )
        sizes = np.bincount(rows.condition, minlength=len(rows.conditions)).tolist()
        if not any(condition.is_control for condition in rows.conditions):
            msg = f"No control cell ({listed(self.control)}) has all its labels."
            raise LabelError(msg)
        warn_labels(names, dict(zip(rows.conditions, sizes, strict=True)))
        levels = [{c.context[n] for c in rows.conditions} for n in range(len(self.covariate_keys))]
        return replace(
            self,
            perturbations=Vocabulary(key=self.perturbation_key, levels=tuple(sorted(members))),
            covariates=tuple(
                Vocabulary(key=key, levels=tuple(sorted(found)))
                for key, found in zip(self.covariate_keys, levels, strict=True)
            ),
        )


def check_roles(*, covariate_keys: Sequence[str], **roles: str | None) -> None:
    """Refuse two roles for one column, before anything is read."""
    several = isinstance(covariate_keys, Iterable) and not isinstance(covariate_keys, str)
    if not several or not all(isinstance(key, str) for key in covariate_keys):
        rule = "must be a list of columns, which may be empty"
        raise ConfigError("covariate_keys", covariate_keys, rule=rule)
    if not isinstance(roles["perturbation_key"], str):
        rule = "must be the name of the column with perturbations"
        raise ConfigError("perturbation_key", roles["perturbation_key"], rule=rule)
    taken: dict[str, str] = {}
    named = [(role, key) for role, key in roles.items() if key is not None]
    for role, key in named:
        if not isinstance(key, str):
            raise ConfigError(role, key, rule="must be the name of a column, or None for none")
    for role, key in [*named, *(("covariate_keys", key) for key in covariate_keys)]:
        if key in taken:
            rule = f"obs[{key!r}] is already the {taken[key]}; a column has one role"
            if role == taken[key]:
                rule = f"obs[{key!r}] is named twice"
            raise ConfigError(role, key, rule=rule)
        taken[key] = role


def check_separator(separator: object) -> None:
    """Refuse what cannot stand between the members of a combination."""
    if separator is not None and not (isinstance(separator, str) and separator):
        rule = "must be text of one character or more, or None where there are no combinations"
        raise ConfigError("separator", separator, rule=rule)


def control_labels(control: object, key: str) -> tuple[str, ...]:
    """Control labels as given, one or several."""
    labels = (control,) if isinstance(control, str) else control
    found = tuple(labels) if isinstance(labels, Iterable) else (labels,)
    if not found or not all(isinstance(label, str) for label in found):
        texts = [str(label) for label in found]
        example = f", such as {(texts if len(texts) > 1 else texts[0])!r}" if texts else ""
        rule = f"must be labels of obs[{key!r}] as text, one or a list{example}"
        raise ConfigError("control", control, rule=rule)
    return found


def _check_some_values(adata: AnnData, registry: Registry) -> None:
    """Check numbers against the scale; of a large or backed matrix, rows at equal distances."""
    n_cells, n_genes = adata.shape
    rows = None
    if adata.isbacked or n_cells * n_genes > 16 * BLOCK:
        rows = np.unique(np.linspace(0, n_cells - 1, min(n_cells, 1024)).astype(np.int64))
    matrix = read_matrix(adata, registry.layer, rows=rows)
    check_values(matrix, registry.scale, adata=adata, layer=registry.layer)


def _vocabulary(plain: Mapping[str, Any]) -> Vocabulary:
    return Vocabulary(key=plain["key"], levels=tuple(plain["levels"]))


def _lists(value: object) -> object:
    """The same with tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(entry) for key, entry in value.items()}
    return [_lists(entry) for entry in value] if isinstance(value, list | tuple) else value
