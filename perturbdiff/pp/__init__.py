"""Preprocessing of an AnnData, scanpy-like."""

from perturbdiff.pp._check import check
from perturbdiff.pp._normalize import normalize
from perturbdiff.pp._select_genes import select_genes

__all__ = ["check", "normalize", "select_genes"]
