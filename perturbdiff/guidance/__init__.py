"""Guidance: denoiser in, denoiser out; constraints on cells, and search for cells that obey."""

from perturbdiff.guidance._classifier_free import ClassifierFreeGuidance
from perturbdiff.guidance._constraints import (
    AtLeast,
    AtMost,
    Constraint,
    Fix,
    FoldChange,
    KnockDown,
)
from perturbdiff.guidance._contradictions import check_together
from perturbdiff.guidance._enforcement import (
    BestOf,
    Branch,
    DepthFirst,
    Enforcement,
    Hard,
    Particles,
    Soft,
    enforcement,
)
from perturbdiff.guidance._gene_sets import GeneSetShift, Observed, Unchanged, read_gmt
from perturbdiff.guidance._joined import All, Any, Not, as_constraints
from perturbdiff.guidance._json import from_json, to_json, way_from_json, way_to_json
from perturbdiff.guidance._logits import CountMask, Masked
from perturbdiff.guidance._reference import CellValues, Reference
from perturbdiff.guidance._whole_cells import LibrarySize, NonNegative, StateFraction, Verifier
from perturbdiff.guidance._wrapping import CountCalls, Wrapper, wrap

__all__ = [
    "All",
    "Any",
    "AtLeast",
    "AtMost",
    "BestOf",
    "Branch",
    "CellValues",
    "ClassifierFreeGuidance",
    "Constraint",
    "CountCalls",
    "CountMask",
    "DepthFirst",
    "Enforcement",
    "Fix",
    "FoldChange",
    "GeneSetShift",
    "Hard",
    "KnockDown",
    "LibrarySize",
    "Masked",
    "NonNegative",
    "Not",
    "Observed",
    "Particles",
    "Reference",
    "Soft",
    "StateFraction",
    "Unchanged",
    "Verifier",
    "Wrapper",
    "as_constraints",
    "check_together",
    "enforcement",
    "from_json",
    "read_gmt",
    "to_json",
    "way_from_json",
    "way_to_json",
    "wrap",
]
