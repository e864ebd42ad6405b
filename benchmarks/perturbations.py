"""Single perturbations held out in folds and predicted through features of the genes they target.

N cells, G genes, C conditions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp

from benchmarks.annotation import gene_features, read_gene_sets
from benchmarks.cache import Cache, file_checksum
from benchmarks.contexts import N_AXES_OF_DISTANCE, simple_sources
from benchmarks.environment import DECISIVE, environment, versions
from benchmarks.fits import Recipe, Wanted, kept_fit, predicted_cells, rows_of, summary
from benchmarks.held_out import HeldOut, half_shifts, true_shift
from benchmarks.report import MODEL_ONCE
from benchmarks.simple import answers, fitted_baselines, score_simple
from benchmarks.tables import average
from perturbdiff._constants import DEPTH
from perturbdiff.config import NetworkConfig
from perturbdiff.data import Cells, Condition, Registry, encode, split
from perturbdiff.metrics import Projection
from perturbdiff.model._questions import Controls
from perturbdiff.model._training_data import prepare

FEATURES = "gene_features"
TRANSPORTED = ("mean_shift", "gene_ridge", "additive", "effect_prior")
SOURCES = ("held_out.py", "simple.py", "perturbations.py", "annotation.py")


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Conditions held out together: those to be scored, and others that would give them away."""

    label: str
    scored: tuple[str, ...]
    hidden: tuple[str, ...]


def folds_of(labels: Sequence[str], *, n_folds: int, separator: str = "+") -> list[Fold]:
    """Singles dealt into folds by a fixed shuffle; pairs with a held-out member are hidden too.

    Parameters
    ----------
    labels
        Treated labels.
    n_folds
        Folds.
    separator
        Between the members of a pair.

    Returns
    -------
    One fold for each, every single scored once.
    """
    singles = sorted(label for label in labels if separator not in label)
    order = np.random.default_rng(0).permutation(len(singles))
    folds = []
    for number in range(min(n_folds, len(singles))):
        scored = sorted(singles[place] for place in order[number::n_folds])
        hidden = sorted(
            label
            for label in labels
            if separator in label and set(label.split(separator)) & set(scored)
        )
        folds.append(Fold(label=f"fold {number}", scored=tuple(scored), hidden=tuple(hidden)))
    return folds


def known_pairs(labels: Sequence[str], *, separator: str = "+") -> tuple[str, ...]:
    """Pairs of which both members were measured alone."""
    there = set(labels)
    return tuple(
        sorted(
            label
            for label in there
            if separator in label and all(member in there for member in label.split(separator))
        )
    )


def recovered_depth(
    log1p_NG: sp.csr_array, counts_NG: sp.csr_array, otherwise_N: np.ndarray
) -> np.ndarray:
    """Depth that each cell was normalised by, from its counts and log values.

    Parameters
    ----------
    log1p_NG, counts_NG
        ``log1p(counts / depth * 10^4)`` and counts, with the same entries.
    otherwise_N
        Depth of cells without a count.
    """
    ratio = sp.csr_array(counts_NG, dtype=np.float64)
    values = np.asarray(log1p_NG[ratio.nonzero()], dtype=np.float64).ravel()
    rows = ratio.nonzero()[0]
    depth = np.array(otherwise_N, dtype=np.float64)
    each = ratio.data * DEPTH / np.expm1(values)
    for row in np.unique(rows):
        depth[row] = np.round(np.median(each[rows == row]))
    return depth


@dataclass(eq=False, kw_only=True)
class PerturbationStudy:
    """A file with many perturbations in one context."""

    path: Path
    annotation: Path
    perturbation_key: str
    control: str
    n_folds: int
    recipe: Recipe
    cache: Cache

    @cached_property
    def checksum(self) -> str:
        """Checksums of the file and of the annotation."""
        return f"{file_checksum(self.path)} {file_checksum(self.annotation)}"

    @cached_property
    def adata(self) -> ad.AnnData:
        """The file with library sizes and features of genes."""
        adata = ad.read_h5ad(self.path)
        counts = sp.csr_array(adata.layers["counts"])
        counts.eliminate_zeros()
        adata.obs["library_size"] = recovered_depth(
            sp.csr_array(adata.X), counts, adata.obs["ncounts"].to_numpy(np.float64)
        )
        sets = read_gene_sets(self.annotation)
        members = {m for label in adata.obs[self.perturbation_key] for m in label.split("+")}
        adata.uns[FEATURES] = gene_features(sets, members - {self.control})
        return adata

    @cached_property
    def registry(self) -> Registry:
        """What its columns mean; doses such as ``1+1`` are read a member at a time."""
        return Registry.from_anndata(
            self.adata,
            perturbation_key=self.perturbation_key,
            control=self.control,
            scale="counts",
            layer="counts",
            dose_key="dose" if "dose" in self.adata.obs else None,
            embedding_key=FEATURES,
        )

    @cached_property
    def cells(self) -> Cells:
        """All cells."""
        return encode(self.adata, self.registry)

    @cached_property
    def conditions(self) -> dict[str, Condition]:
        """Treated conditions by label as written in the file."""
        labels = self.adata.obs[self.perturbation_key].astype(str).to_numpy()
        return {
            str(labels[self.cells.rows[rows[0]]]): condition
            for condition, rows in self.cells.conditions().items()
        }

    def holdout(self, fold: Fold) -> dict[str, list[str]]:
        """What is left out of training."""
        return {self.perturbation_key: [*fold.scored, *fold.hidden]}

    def wanted(self, fold: Fold) -> Wanted:
        """What the model is asked."""
        return Wanted(
            label=fold.label,
            holdout=self.holdout(fold),
            perturbations=fold.scored,
            contexts=None,
            split_hash=split(self.cells, self.registry, holdout=self.holdout(fold)).hash,
            doses=(1.0,) if self.registry.dose_key else None,
        )

    def held_out(self, fold: Fold) -> tuple[Any, dict[str, HeldOut]]:
        """Training data without the fold, and each of its conditions."""
        data = prepare(
            self.adata, self.registry, holdout=self.holdout(fold), n_top_genes=None,
            n_axes=NetworkConfig().n_axes,
        )  # fmt: skip
        cells = self.cells
        treated, (base,) = cells.conditions(), cells.controls().values()
        size = len(self.conditions[fold.scored[0]].members)
        labels = [name for name, c in self.conditions.items() if len(c.members) <= size]
        cells_of = [cells.log1p[treated[self.conditions[name]]] for name in labels]
        controls_of = [cells.log1p[base]] * len(labels)
        shifts = np.stack([true_shift(t, c) for t, c in zip(cells_of, controls_of, strict=True)])
        halves = half_shifts(cells_of, controls_of)
        controls = Controls(cells.take(base), (), data.loadings, data.mean)
        project = Projection(data.mean, data.loadings[:, :N_AXES_OF_DISTANCE].T)
        found = {
            name: HeldOut(
                condition=self.conditions[name],
                controls=controls,
                truth=cells.log1p[treated[self.conditions[name]]].toarray(),
                project=project,
                true_shifts=shifts,
                half_shifts=halves,
                own=labels.index(name),
            )
            for name in fold.scored
        }
        return data, found

    def simple(self, fold: Fold) -> dict[str, Any]:
        """Scores of the baselines and the ceiling for each condition of a fold."""
        key = {
            "data": self.checksum,
            "split": self.wanted(fold).split_hash,
            "source": simple_sources(*SOURCES),
            "packages": versions(DECISIVE),
        }
        plain, _ = self.cache.get(
            f"simple {self.path.stem} {fold.label}", key, lambda: (self._score_simple(fold), {})
        )
        return plain

    def _score_simple(self, fold: Fold) -> dict[str, Any]:
        data, held = self.held_out(fold)
        baselines = fitted_baselines(data)
        return {
            name: {
                **score_simple(answers(baselines, one), one, transported=TRANSPORTED),
                "ceiling": one.ceiling(),
                "n_true": len(one.truth),
                "n_control": len(one.controls),
            }
            for name, one in held.items()
        }

    def fit(self, fold: Fold) -> dict[str, Any]:
        """The model's scores of each condition of a fold, times and origin."""
        plain, arrays, name = kept_fit(
            self.cache, self.adata, self.wanted(fold), registry=self.registry,
            data_checksum=self.checksum, recipe=self.recipe, seed=0,
        )  # fmt: skip
        key = {"fit": name, "source": simple_sources(*SOURCES)}

        def score() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            _, held = self.held_out(fold)
            cells = predicted_cells(plain, arrays)
            members = {str(label): rows_of(plain, label) for label in set(plain["labels"])}
            by_members = {frozenset(label.split("+")): rows for label, rows in members.items()}
            found = {}
            for name, one in held.items():
                own = cells[by_members[frozenset(one.condition.members)]]
                scores = one.score(own)
                once = scores if one.n_once == len(own) else one.score(own[: one.n_once])
                found[name] = scores | {"once": once}
            return found, {}

        scores, _ = self.cache.get(f"score {self.path.stem} {fold.label}", key, score)
        kept = {name: value for name, value in plain.items() if name not in ("genes", "labels")}
        return {"fold": fold.label, "seed": 0, **kept, "scores": scores}

    def result(self, *, fit: bool, command: str, say: Callable[[str], None]) -> dict[str, Any]:
        """Everything that was measured."""
        labels = list(self.conditions)
        folds = folds_of(labels, n_folds=self.n_folds)
        pairs = known_pairs(labels)
        if pairs:
            folds.append(Fold(label="pairs", scored=pairs, hidden=()))
        simple, fits = {}, {}
        for fold in folds:
            say(f"{fold.label}: {', '.join(fold.scored)}")
            simple[fold.label] = self.simple(fold)
            if fit:
                fits[fold.label] = self.fit(fold)
        groups = {
            "singles": [f for f in folds if f.label != "pairs"],
            "pairs": [f for f in folds if f.label == "pairs"],
        }
        depth = self.adata.obs["library_size"] / self.adata.obs["ncounts"]
        missing = self.adata.uns[FEATURES].index[(self.adata.uns[FEATURES] == 0).all(axis=1)]
        return {
            "question": "How good are predicted cells of single perturbations never seen?",
            "command": command,
            "environment": environment(),
            "data": {
                "file": self.path.name,
                "annotation": self.annotation.name,
                "checksums": self.checksum,
                "cells": self.adata.n_obs,
                "genes": self.adata.n_vars,
                "median_depth_over_ncounts": float(depth.median()),
                "without_annotation": list(missing),
            },
            "recipe": self.recipe.key(),
            "folds": [
                {"label": f.label, "scored": list(f.scored), "hidden": list(f.hidden)}
                for f in folds
            ],
            "averages": {
                group: self._averages(chosen, simple, fits) for group, chosen in groups.items()
            },
            "undefined": _reasons(simple),
            "times": summary(list(fits.values())) if fits else None,
            "simple": simple,
            "fits": fits,
        }

    def _averages(
        self,
        folds: Sequence[Fold],
        simple: Mapping[str, Any],
        fits: Mapping[str, Any],
    ) -> dict[str, Any]:
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for fold in folds:
            for name in fold.scored:
                if fold.label in fits:
                    scores = fits[fold.label]["scores"][name]
                    rows.setdefault("SetDiffusion", []).append(scores["values"])
                    rows.setdefault(MODEL_ONCE, []).append(scores["once"]["values"])
                entry = simple[fold.label][name]
                for method, row in entry["cells"].items():
                    rows.setdefault(method, []).append(row["values"])
                rows.setdefault("ceiling (split halves)", []).append(entry["ceiling"]["values"])
        return {
            method: dict(zip(("values", "n"), average(parts), strict=True))
            for method, parts in rows.items()
        }


def _reasons(simple: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Why a baseline has no answer, apart for singles and pairs."""
    reasons: dict[str, dict[str, str]] = {"singles": {}, "pairs": {}}
    for label, entries in simple.items():
        group = "pairs" if label == "pairs" else "singles"
        for entry in entries.values():
            reasons[group] |= entry["undefined"]
    return reasons
