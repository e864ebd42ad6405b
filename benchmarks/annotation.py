"""Features of genes from annotation: which gene sets each gene belongs to, in few numbers.

P perturbed genes, A annotated genes, T terms, F features.
"""

import gzip
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.decomposition import TruncatedSVD

N_FEATURES = 10


def read_gene_sets(path: Path) -> dict[str, set[str]]:
    """Terms of each gene.

    Parameters
    ----------
    path
        ``.gmt`` (name, identifier, genes...), or a table (tab-separated, may be gzipped) whose
        first two columns are gene and term.

    Returns
    -------
    Set of terms by gene symbol.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    sets: dict[str, set[str]] = {}
    for number, line in enumerate(text.splitlines()):
        words = line.split("\t")
        if path.suffix == ".gmt":
            for gene in words[2:]:
                sets.setdefault(gene, set()).add(words[1])
        elif number and len(words) > 1:
            sets.setdefault(words[0], set()).add(words[1])
    return sets


def gene_features(
    sets: dict[str, set[str]], genes: Iterable[str], *, n_features: int = N_FEATURES
) -> pd.DataFrame:
    """Leading directions of the gene × term matrix, for some of the genes.

    Each term counts by the log of its rarity, each gene has length one, and the directions are
    those of all annotated genes: a gene's numbers do not depend on which others are asked for.

    Parameters
    ----------
    sets
        From :func:`read_gene_sets`.
    genes
        Genes to describe; one without annotation has zeros.
    n_features
        How many numbers a gene gets.

    Returns
    -------
    One row a gene, in sorted order.
    """
    known = sorted(sets)
    terms = sorted(set().union(*sets.values()))
    column = {term: number for number, term in enumerate(terms)}
    rows, columns = [], []
    for number, gene in enumerate(known):
        rows += [number] * len(sets[gene])
        columns += sorted(column[term] for term in sets[gene])
    shape = (len(known), len(terms))
    table_AT = sp.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    rarity_T = np.log(shape[0] / np.maximum(np.asarray(table_AT.sum(0)).ravel(), 1.0))
    table_AT = sp.csr_array(table_AT.multiply(rarity_T[None, :]))
    length_A = np.sqrt(np.asarray(table_AT.multiply(table_AT).sum(1)).ravel())
    table_AT = sp.csr_array(table_AT.multiply(1 / np.maximum(length_A, 1e-12)[:, None]))
    n_features = min(n_features, min(shape) - 1)
    scores_AF = TruncatedSVD(n_features, random_state=0).fit_transform(sp.csr_matrix(table_AT))
    place = {gene: number for number, gene in enumerate(known)}
    wanted = sorted(set(genes))
    values_PF = np.stack(
        [scores_AF[place[g]] if g in place else np.zeros(n_features) for g in wanted]
    )
    names = [f"annotation_{number + 1}" for number in range(n_features)]
    return pd.DataFrame(values_PF, index=pd.Index(wanted, name="gene"), columns=names)
