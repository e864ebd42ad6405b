"""What genes are called in pictures: by their names, or by a column of symbols."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from perturbdiff._errors import ConfigError, UnknownKeyError

if TYPE_CHECKING:
    from anndata import AnnData


def gene_labels(gene_symbols: str | None, *files: "AnnData | None") -> Mapping[str, str]:
    """Symbol of each gene that has one, by its name in ``var_names``.

    Parameters
    ----------
    gene_symbols
        Column of ``var``; ``None`` to call genes by their names.
    files
        Where it may be; the first that has it counts.

    Raises
    ------
    ConfigError
        When it is no text.
    UnknownKeyError
        When none has such a column.
    """
    if gene_symbols is None:
        return {}
    if not isinstance(gene_symbols, str):
        rule = "must be the name of a column of var, as text"
        raise ConfigError("gene_symbols", gene_symbols, rule=rule)
    there = [file.var for file in files if file is not None]
    for var in there:
        if gene_symbols in var:
            column = var[gene_symbols]
            pairs = zip(var.index, column, strict=True)
            return {str(n): str(s) for n, s in pairs if not pd.isna(s) and str(s).strip()}
    known = list(dict.fromkeys(str(name) for var in there for name in var.columns))
    where = "var of the files given"
    if any(file is None for file in files):
        where = "No reference= was given, and var of the prediction"
    raise UnknownKeyError(where, gene_symbols, known=known)
