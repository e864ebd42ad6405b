"""Answers that obey: generation under constraints, and what it cost.

The plan of the population is solved first, without constraints, on the pilot that an unconstrained
question would have; so nothing that is solved once depends on what is asked for. Then sets are
generated under guidance or by search, means are moved on the pilot, counts are drawn, and what was
asked hard is projected on the drawn cells.

What a set is made of, and what is solved on the pilot, never depends on how many cells are asked
for, nor do projections of single cells. Projections of means and shares are over the cells that
are returned, since that is what they promise: they touch only the genes (or cells) that they name.

N cells, G genes, K latent axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData

from perturbdiff._constants import DEPTH
from perturbdiff._errors import ConfigError, ConstraintError
from perturbdiff._logging import logger
from perturbdiff.config import SampleConfig
from perturbdiff.data import Condition
from perturbdiff.guidance import (
    Constraint,
    Reference,
    as_constraints,
    check_together,
    enforcement,
)
from perturbdiff.guidance._enforcement import Way
from perturbdiff.model._constrained_answer import Answer, Asked, Rules, reference_of
from perturbdiff.model._constrained_report import naming, tree_table
from perturbdiff.model._fitted import Drawn, Fitted, as_drawn

__all__ = [
    "Asked",
    "Constrained",
    "Verify",
    "Ways",
    "Wish",
    "respond_constrained",
    "respond_with",
    "with_exact_values",
]

Verify = Callable[[np.ndarray, tuple[str, ...]], Any]
Ways = str | Way | Sequence[str | Way] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Wish:
    """Constraints, and how to enforce them."""

    constraints: tuple[Constraint, ...]
    ways: Ways = None

    @classmethod
    def of(cls, constraints: object, ways: Ways) -> "Wish":
        """Constraints as a user gives them: functions are verifiers, None is none."""
        given = () if constraints is None else as_constraints(constraints)
        return cls(constraints=given, ways=ways)

    def refuse_ways_alone(self) -> None:
        """A way of enforcing that has nothing to enforce is a mistake."""
        if self.ways is not None:
            name, rule = "enforce", "says how to enforce constraints, and there are none"
            raise ConfigError(name, self.ways, rule=rule)

    def bound(self, reference: Reference, *, n_cells: int) -> Rules:
        """The constraints for one context, checked, and how they are enforced."""
        bounds = [constraint.bind(reference) for constraint in self.constraints]
        check_together(bounds, reference, n_cells=n_cells)
        firm = [bound.text for bound in bounds if not bound.projects]
        ways = enforcement(self.ways, projects=not firm, promised=firm)
        if ways.soft is not None and not any(bound.differentiable for bound in bounds):
            msg = f"{bounds[0].text}: has no gradient, so it cannot be enforced softly. Search."
            raise ConstraintError(msg)
        return Rules(constraints=self.constraints, bounds=bounds, ways=ways)


@dataclass(frozen=True, kw_only=True, eq=False)
class Constrained:
    """Cells of every condition, and the report."""

    drawn: list[Drawn]
    nfe: int
    report: pd.DataFrame
    course: pd.DataFrame
    tree: pd.DataFrame
    real_valued: tuple[str, ...]

    @property
    def notes(self) -> dict[str, Any]:
        """What a prediction says about its constraints."""
        if not len(self.report):
            return {"constraint_violation": 0.0}
        return {
            "constraint_violation": float(self.report["violation"].max()),
            "constraints": _for_people(self.report),
            "constraint_course": _for_people(self.course),
            "constraint_tree": _for_people(self.tree),
            "real_valued_genes": list(self.real_valued),
        }


def respond_constrained(
    fitted: Fitted,
    asked: Sequence[Asked],
    wish: Wish,
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> Constrained:
    """Cells of each condition that obey, as far as was promised.

    Parameters
    ----------
    fitted
        The model.
    asked
        Conditions.
    wish
        Constraints.
    n_cells
        Cells a condition.
    config, seed
        How to sample.

    Returns
    -------
    Counts and library sizes, network calls, and the report.

    Raises
    ------
    ConstraintError, GeneError, ConfigError
        Before anything is sampled, when the constraints cannot hold or name unknown genes.
    VerifierError
        When a function of the user's raises an error.
    """
    rules = [wish.bound(reference_of(fitted, one.controls), n_cells=n_cells) for one in asked]
    answers = [
        Answer(fitted, one, rule, n_cells=n_cells, config=config, seed=seed)
        for one, rule in zip(asked, rules, strict=True)
    ]
    parts = []
    for answer in answers:
        with naming(answer.asked.condition):
            parts.append(as_drawn(*answer.run()))
    report = pd.concat([answer.report for answer in answers], ignore_index=True)
    warn_of(report)
    genes = fitted.vocabulary.registry.genes
    real = sorted({gene for answer in answers for gene in answer.real.nonzero()[:, 0].tolist()})
    return Constrained(
        drawn=parts,
        nfe=sum(answer.nfe for answer in answers),
        report=report,
        course=joined_tables([(a.name, a.passed) for a in answers]),
        tree=joined_tables(
            [(a.name, tree_table(a.found.tree if a.found else [])) for a in answers]
        ),
        real_valued=tuple(genes[number] for number in real),
    )


def warn_of(report: pd.DataFrame) -> None:
    """Name every constraint that the cells do not obey; a search and guidance promise nothing."""
    for row in report[~report["satisfied"]].itertuples():
        logger.warning(
            "%s: not satisfied in %s after enforce = %r, off by up to %.3g (%s)",
            row.constraint,
            Condition.named(str(row.condition)),
            *(row.method, row.violation, row.unit),
        )


def joined_tables(tables: Sequence[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """The tables of several conditions, each line with its condition."""
    named = [table.assign(condition=name) for name, table in tables if len(table)]
    return pd.concat(named, ignore_index=True) if named else pd.DataFrame({"condition": []})


def _for_people(table: pd.DataFrame) -> pd.DataFrame:
    """The table with conditions as people read them, and the names that code finds them by."""
    names = table["condition"].astype(str)
    texts = {name: str(Condition.named(name)) for name in names.unique()}
    return table.assign(condition=names.map(texts), condition_key=names)


def respond_with(
    fitted: Fitted,
    asked: Sequence[Asked],
    wish: Wish,
    *,
    n_cells: int,
    config: SampleConfig,
    seed: int,
) -> Constrained:
    """Cells of each condition; without constraints, just what the model answers.

    Parameters
    ----------
    fitted, asked, wish, n_cells, config, seed
        As in :func:`respond_constrained`.

    Returns
    -------
    Cells and report; the report is empty where nothing was asked.

    Raises
    ------
    ConfigError
        When guidance is asked of a network that was not trained for it.
    """
    fitted.check(config)
    if wish.constraints:
        return respond_constrained(fitted, asked, wish, n_cells=n_cells, config=config, seed=seed)
    wish.refuse_ways_alone()
    cells, nfe = fitted.respond(
        [one.condition for one in asked],
        [one.controls for one in asked],
        [one.target for one in asked],
        n_cells=n_cells,
        config=config,
        seed=seed,
    )
    none = pd.DataFrame()
    return Constrained(drawn=cells, nfe=nfe, report=none, course=none, tree=none, real_valued=())


def with_exact_values(pred: AnnData, found: Constrained) -> AnnData:
    """Put the genes that became real-valued in, which no count can say."""
    if not found.real_valued:
        return pred
    columns = pred.var_names.get_indexer(list(found.real_valued))
    counts = pred.layers["counts"].toarray().astype(np.float64)
    log1p = pred.X.toarray()
    exact = sp.vstack([counts[:, columns] for counts, _ in found.drawn]).toarray()
    size = np.concatenate([size for _, size in found.drawn])[:, None]
    counts[:, columns] = exact
    log1p[:, columns] = np.log1p(exact * (DEPTH / size))
    pred.layers["counts"], pred.X = sp.csr_matrix(counts), sp.csr_matrix(log1p)
    return pred
