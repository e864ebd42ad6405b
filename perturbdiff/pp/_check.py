"""What a file holds and what is wrong with it, before anything is learnt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from logging import LogRecord
from threading import get_ident
from typing import Final

import numpy as np
import pandas as pd
from anndata import AnnData

from perturbdiff._errors import PerturbDiffError, listed
from perturbdiff._logging import logger
from perturbdiff.config._checks import whole_number
from perturbdiff.data._conditions import Columns
from perturbdiff.data._features import read_features
from perturbdiff.data._matrix import gene_names, require_anndata
from perturbdiff.data._registry import check_roles, check_separator, control_labels
from perturbdiff.pp._check_conditions import condition_findings
from perturbdiff.pp._check_expression import expression_findings
from perturbdiff.pp._check_labels import label_findings
from perturbdiff.pp._finding import FACT, LEVELS, WARNING, Finding, refused

_COLUMNS: Final = ["level", "about", "where", "n", "found", "what_to_do"]


def check(  # noqa: PLR0913 - the columns of from_anndata
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
    min_cells: int = 20,
) -> pd.DataFrame:
    """List what the data hold and what is wrong with them, before any training.

    A fault of the data is listed and does not raise, so that all of them are seen at once.

    Parameters
    ----------
    adata
        Cells × genes; in memory, backed or a view. It is not changed.
    perturbation_key, control, covariate_keys, scale, layer, separator, library_size_key
        As they will be given to :meth:`~perturbdiff.SetDiffusion.from_anndata`.
    dose_key, time_key, embedding_key
        Likewise.
    min_cells
        Conditions with fewer cells are warned about.

    Returns
    -------
    One row for each finding, faults first. Columns: ``level`` (``fault``: a model would refuse the
    file; ``warning``: it would not, but look; ``fact``), ``about`` (genes, expression, library
    size, labels, controls, conditions, holdout), ``where`` in the file, ``n`` (cells, genes or
    conditions that it is about), ``found``, and ``what_to_do``. Facts list the cells of every
    condition, and what can be held out.

    Raises
    ------
    ConfigError
        When it is no AnnData, or the call itself makes no sense (one column in two roles, say).
    """
    require_anndata(adata)
    min_cells = whole_number("min_cells", min_cells, least=1)
    roles = {
        "perturbation_key": perturbation_key,
        "library_size_key": library_size_key,
        "dose_key": dose_key,
        "time_key": time_key,
    }
    check_roles(covariate_keys=covariate_keys, **roles)
    check_separator(separator)
    columns = Columns(
        perturbation_key=perturbation_key,
        control=control_labels(control, perturbation_key),
        covariate_keys=tuple(covariate_keys),
        separator=separator,
        dose_key=dose_key,
        time_key=time_key,
    )
    found: list[Finding] = []
    with _quiet():
        found += _genes(adata)
        found += expression_findings(adata, scale=scale, layer=layer, key=library_size_key)
        labels, readable = label_findings(adata.obs, columns)
        found += labels
        if readable is not None:
            features = embedding_key is not None
            found += condition_findings(
                _unique(adata.obs), readable, min_cells=min_cells, features=features
            )
            if embedding_key is not None:
                found += _features(adata, embedding_key, readable)
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    table = pd.DataFrame([asdict(finding) for finding in found], columns=_COLUMNS)
    table["n"] = table["n"].astype(np.int64)
    return table


def _genes(adata: AnnData) -> Iterator[Finding]:
    where = "adata.var_names"
    names = adata.var_names.astype(str)
    try:
        gene_names(adata)
    except PerturbDiffError as error:
        yield refused(error, about="genes", where=where, n=int(names.duplicated(keep=False).sum()))
    known = set(names)
    copies = sorted(
        name for name in known
        if (parts := name.rpartition("-"))[2].isdigit() and parts[0] in known
    )  # fmt: skip
    if copies:
        yield Finding(
            level=WARNING, about="genes", where=where, n=len(copies),
            found=f"names that look like copies made unique: {listed(copies)}",
            what_to_do="Sum or drop the copies if they are one gene.",
        )  # fmt: skip


def _features(adata: AnnData, key: str, columns: Columns) -> list[Finding]:
    try:
        table = read_features(adata, key, columns)
    except PerturbDiffError as error:
        return [refused(error, about="labels", where=key, n=0)]
    found = f"features of {len(table)} perturbations"
    return [Finding(level=FACT, about="labels", where=key, n=len(table), found=found)]


def _unique(obs: pd.DataFrame) -> pd.DataFrame:
    """The same cells under names that are there once, so that one fault does not hide others."""
    if obs.index.is_unique:
        return obs
    return obs.set_axis([str(number) for number in range(len(obs))], axis=0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what this thread would log: the table says it, with what to do."""
    thread = get_ident()

    def elsewhere(record: LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)
