"""Preprocessing of an AnnData, scanpy-like."""

from perturbdiff.pp._check import check
from perturbdiff.pp._normalize import normalize

__all__ = ["check", "normalize"]
