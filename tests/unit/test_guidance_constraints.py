"""Constraints: what they mean, what is refused, how they join, how counts are brought to obey."""

import json

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError, GeneError, UnknownKeyError
from perturbdiff.guidance import (
    CellValues,
    Reference,
    as_constraints,
    check_together,
    enforcement,
    from_json,
    read_gmt,
    to_json,
    way_from_json,
    way_to_json,
)
from perturbdiff.guidance._logic import conjuncts
from perturbdiff.guidance._settling import Draft, settle

GENES = ("ISG15", "IFIT1", "ACTB", "GAPDH")
N = 40


@pytest.fixture
def reference():
    rng = np.random.default_rng(0)
    size = torch.from_numpy(rng.uniform(800, 3000, 60))
    counts = torch.from_numpy(rng.poisson([0.2, 1.0, 4.0, 8.0], (60, 4))).double()
    depth = counts / size[:, None] * 1e4
    return Reference(
        genes=GENES,
        control_log1p=depth.log1p().mean(0),
        control_depth=depth.mean(0),
        library_size=size,
    )


@pytest.fixture
def draft():
    rng = np.random.default_rng(1)
    counts = torch.from_numpy(rng.poisson([0.5, 1.5, 4.0, 8.0], (N, 4))).double()
    size = torch.from_numpy(rng.uniform(800, 3000, N))
    return Draft(
        counts=counts,
        library_size=size,
        rate=counts + 0.3,
        chance=torch.from_numpy(rng.uniform(0.01, 0.99, (N, 4))),
        number=torch.arange(N),
    )


def values(log1p, size=1e4):
    log1p = torch.as_tensor(log1p, dtype=torch.float64)
    shape = log1p.shape[:-1]
    return CellValues(
        log1p=log1p,
        library_size=torch.full(shape, float(size), dtype=torch.float64),
        number=torch.arange(shape[-1]).expand(shape),
    )


# Meaning, by hand


def test_bounds_in_each_unit(reference):
    cells = values([[1.0, 0.0, 2.0, 3.0], [3.0, 0.0, 2.0, 3.0]], size=2000)
    per_cell = ptd.AtLeast("ISG15", 2.0).bind(reference)
    assert per_cell.holds(cells).tolist() == [False, True]
    assert per_cell.violation(cells) == pytest.approx(1.0)
    mean = ptd.AtLeast("ISG15", 2.0, per="population").bind(reference)
    assert mean.holds(cells).tolist() == [True]
    counts = ptd.AtMost("ISG15", 1.0, scale="counts").bind(reference)
    # expm1(1) / 5 = 0.34 counts; expm1(3) / 5 = 3.8 counts
    assert counts.holds(cells).tolist() == [True, False]
    assert counts.violation(cells) == pytest.approx(np.expm1(3.0) / 5 - 1)


def test_fold_changes_are_of_mean_counts_in_control(reference):
    bound = ptd.FoldChange(["ACTB", "GAPDH"], 2.0).bind(reference)
    np.testing.assert_allclose(bound.lower[0], 2 * reference.control_depth[2:], rtol=1e-12)
    down = ptd.KnockDown("ACTB", 0.25).bind(reference)
    assert float(down.upper) == pytest.approx(float(reference.control_depth[2]) / 4)
    assert not bool(down.lower.isfinite())


def test_gene_sets_and_unchanged_are_about_means_of_log_values(reference):
    shift = ptd.GeneSetShift(["ISG15", "IFIT1"], 0.5, relation="at_least").bind(reference)
    assert float(shift.lower) == pytest.approx(float(reference.control_log1p[:2].mean()) + 0.5)
    cells = values(reference.control_log1p.expand(3, -1))
    assert bool(ptd.Unchanged(["ACTB", "GAPDH"]).bind(reference).holds(cells).all())
    assert shift.violation(cells) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (ptd.Not(ptd.AtLeast("ISG15", 2.0)), [True, False]),
        (ptd.All([ptd.AtLeast("ISG15", 0.5), ptd.AtMost("ISG15", 2.0)]), [True, False]),
        (ptd.Any([ptd.AtLeast("ISG15", 2.0), ptd.AtLeast("ACTB", 9.0)]), [False, True]),
        (ptd.NonNegative(), [True, True]),
        (ptd.LibrarySize(at_most=1e4), [True, True]),
    ],
)
def test_joined_constraints_hold_cell_by_cell(reference, constraint, expected):
    cells = values([[1.0, 0.0, 2.0, 3.0], [3.0, 0.0, 2.0, 3.0]])
    bound = constraint.bind(reference)
    assert bound.holds(cells).tolist() == expected
    assert (bound.distance(cells) <= 1e-9).tolist() == expected
    assert (bound.violation(cells) == 0) == all(expected)


def test_order_of_joined_constraints_does_not_matter(reference):
    members = [ptd.AtLeast("ISG15", 2.0), ptd.AtMost("ACTB", 1.0), ptd.Unchanged("GAPDH")]
    cells = values(np.random.default_rng(0).uniform(0, 4, (5, 7, 4)))
    for kind in (ptd.All, ptd.Any):
        one, other = (kind(order).bind(reference) for order in (members, members[::-1]))
        torch.testing.assert_close(one.energy(cells), other.energy(cells), rtol=0, atol=1e-12)
        assert torch.equal(one.holds(cells), other.holds(cells))


def test_verifiers_return_truth_or_a_violation(reference):
    cells = values([[1.0, 0.0, 2.0, 3.0], [3.0, 0.0, 2.0, 3.0]])

    def high(log1p, genes):
        return bool(log1p[:, genes.index("ACTB")].mean() > 1)

    (yes,) = as_constraints([high])
    assert bool(yes.bind(reference).holds(cells).all())
    misses = ptd.Verifier(lambda log1p, _: float(5 - log1p[:, 0].mean()), genes=["ISG15"])
    assert misses.bind(reference).violation(cells) == pytest.approx(3.0)
    assert yes.describe() == "high"


class Threshold:
    """A classifier as scikit-learn has them: high or low by the first gene."""

    classes_ = np.array(["high", "low"])

    def predict(self, X):
        return np.where(X[:, 0] > 2, "high", "low")


def test_states_of_classifiers_count_cells(reference):
    cells = values([[x, 0.0, 0.0, 0.0] for x in (0.0, 1.0, 3.0, 4.0)])
    half = ptd.StateFraction(Threshold(), "high", 0.5).bind(reference)
    assert bool(half.holds(cells).all())
    third = ptd.StateFraction(Threshold(), "high", 1 / 3).bind(reference)
    assert third.allowed(4) == (1, 1)  # to one cell
    assert third.reached(cells) == 0.5
    network = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.zeros_(network.bias)
    with torch.no_grad():
        network.weight[1, 0] = 10.0
        network.bias[1] = -20.0
    by_torch = ptd.StateFraction(network, 1, 0.5).bind(reference)
    assert by_torch.differentiable
    assert bool(by_torch.holds(cells).all())


def test_gmt_files_are_read(tmp_path, reference):
    path = tmp_path / "sets.gmt"
    path.write_text("IFN\thttp://x\tISG15\tIFIT1\tISG15\tUNKNOWN\nOTHER\t\tMYC\n")
    assert read_gmt(path)["IFN"] == ("ISG15", "IFIT1", "UNKNOWN")
    shift = ptd.GeneSetShift.from_gmt(path, "IFN", 0.4, among=GENES)
    assert shift.genes == ("ISG15", "IFIT1")
    assert "IFN" in shift.bind(reference).text
    with pytest.raises(UnknownKeyError, match="Did you mean 'IFN'"):
        ptd.GeneSetShift.from_gmt(path, "IFNA", 0.4, among=GENES)
    with pytest.raises(GeneError, match="None of the 1 genes"):
        ptd.GeneSetShift.from_gmt(path, "OTHER", 0.4, among=GENES)
    path.write_text("IFN ISG15\n")
    with pytest.raises(ConfigError, match=r"sets.gmt, line 1"):
        read_gmt(path)


# What is refused


def test_unknown_genes_are_named_with_the_nearest(reference):
    with pytest.raises(GeneError, match="Did you mean 'ISG15'"):
        ptd.AtLeast("ISG51", 1.0).bind(reference)
    with pytest.raises(GeneError, match="twice: 'ACTB'"):
        ptd.Unchanged(["ACTB", "ACTB"]).bind(reference)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ([ptd.AtLeast("ISG15", 2.0), ptd.AtMost("ISG15", 1.0)], "ISG15 >= 2"),
        ([ptd.AtLeast("ACTB", 5, scale="counts"), ptd.Fix("ACTB", 3, scale="counts")], "ACTB = 3"),
        ([ptd.AtLeast("ACTB", 2.0), ptd.AtMost("ACTB", 1.0, per="population")], "ACTB <= 1"),
        ([ptd.Fix("ACTB", 9.0), ptd.AtMost("ACTB", 1, scale="counts")], "ACTB = 9"),
        ([ptd.KnockDown("ACTB", 0.0), ptd.Unchanged("ACTB")], "ACTB knocked down"),
        (
            [
                ptd.AtMost(["ISG15", "IFIT1"], 0.0, per="population"),
                ptd.GeneSetShift(["ISG15", "IFIT1"], 1.0),
            ],
            "mean of ISG15 and 1 more",
        ),
        ([ptd.LibrarySize(at_most=1000), ptd.LibrarySize(at_least=2000)], "library size"),
        (
            [
                ptd.StateFraction(Threshold(), "high", 0.8, relation="at_least"),
                ptd.StateFraction(Threshold(), "high", 0.1),
            ],
            "share of cells in high",
        ),
    ],
)
def test_contradictions_are_found_and_both_are_named(reference, pair, words):
    for order in (pair, pair[::-1]):
        bounds = [constraint.bind(reference) for constraint in order]
        with pytest.raises(ConstraintError, match="cannot hold together") as error:
            check_together(bounds, reference, n_cells=20)
        assert words in str(error.value)


def test_what_can_hold_together_passes(reference):
    wishes = [
        ptd.AtLeast("ISG15", 1.0),
        ptd.AtMost("ISG15", 6.0, per="population"),
        ptd.Unchanged("ACTB"),
        ptd.KnockDown("GAPDH"),
        ptd.Any([ptd.AtMost("ISG15", 0.5), ptd.AtLeast("IFIT1", 1.0, per="population")]),
    ]
    check_together([wish.bind(reference) for wish in wishes], reference, n_cells=20)


def test_what_cannot_hold_alone_is_refused(reference):
    silent = Reference(
        genes=GENES,
        control_log1p=reference.control_log1p,
        control_depth=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        library_size=reference.library_size,
    )
    with pytest.raises(ConstraintError, match="ISG15 has no counts in the control cells"):
        ptd.FoldChange("ISG15", 2.0).bind(silent)
    with pytest.raises(ConstraintError, match="below zero"):
        ptd.GeneSetShift(["ISG15"], -9.0).bind(reference)
    between = ptd.All([ptd.AtLeast("ACTB", 0.4, scale="counts"), ptd.AtMost("ACTB", 0.6)])
    with pytest.raises(ConstraintError, match="cannot hold together"):
        check_together([between.bind(reference)], reference, n_cells=3)
    narrow = ptd.FoldChange("ACTB", 1e-9, relation="at_least", per="cell").bind(reference)
    check_together([narrow], reference, n_cells=3)
    contradicting = ptd.All([ptd.AtLeast("ACTB", 2.0), ptd.AtMost("ACTB", 1.0)])
    with pytest.raises(ConstraintError, match="No member of any of"):
        check_together([ptd.Any([contradicting]).bind(reference)], reference, n_cells=3)
    panel = ptd.Observed(["ACTB"], np.ones((2, 1)))
    with pytest.raises(ConstraintError, match="values of 2 cells for 3"):
        check_together([panel.bind(reference)], reference, n_cells=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ptd.AtLeast("A", -1.0),
        lambda: ptd.AtLeast("A", float("nan")),
        lambda: from_json({"kind": "at_least", "gene": "A", "value": 1.0, "scale": "raw"}),
        lambda: ptd.Fix("A", 1.5, scale="counts"),
        lambda: from_json({"kind": "fold_change", "gene": "A", "fold": 2.0, "relation": "so"}),
        lambda: ptd.KnockDown("A", 1.5),
        lambda: ptd.GeneSetShift([], 0.1),
        lambda: ptd.Unchanged("A", tolerance=-1.0),
        lambda: ptd.Observed(["A"], np.ones((2, 2))),
        lambda: ptd.Observed(["A"], np.array([np.nan])),
        lambda: ptd.Observed(["A"], np.array([0.5]), scale="counts"),
        ptd.LibrarySize,
        lambda: ptd.LibrarySize(at_least=5, at_most=3),
        lambda: ptd.StateFraction(Threshold(), "middle", 0.5),
        lambda: ptd.StateFraction(Threshold(), "high", 1.5),
        lambda: ptd.StateFraction("no classifier", "high", 0.5),
        lambda: ptd.All([]),
        lambda: as_constraints([3]),
        lambda: ptd.Soft(strength=-1),
        lambda: ptd.Soft(window=(0.5, 0.5)),
        lambda: ptd.Soft(margin=-1),
        lambda: ptd.BestOf(n=0),
        lambda: ptd.Branch(share=-1),
        lambda: ptd.Particles(temperature=0),
        lambda: ptd.Particles(resample_below=2),
        lambda: ptd.DepthFirst(width=0),
        lambda: enforcement("gently", projects=True, promised=[]),
        lambda: enforcement(["soft", ptd.Soft()], projects=True, promised=[]),
    ],
)
def test_settings_without_a_meaning_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_hard_is_offered_only_where_there_is_a_projection():
    with pytest.raises(ConstraintError, match="mine: cannot be projected"):
        enforcement("hard", projects=False, promised=["mine"])
    ways = enforcement(None, projects=False, promised=["mine"])
    assert isinstance(ways.search, ptd.BestOf)
    assert enforcement(None, projects=True, promised=[]).search is None


# JSON


@pytest.mark.parametrize(
    "constraint",
    [
        ptd.AtLeast("ISG15", 2.0, per="population"),
        ptd.Fix(("ISG15", "ACTB"), 3.0, scale="counts"),
        ptd.FoldChange("ACTB", 2.0, relation="at_least"),
        ptd.KnockDown("ACTB"),
        ptd.GeneSetShift(("ISG15", "IFIT1"), -0.1, name="IFN"),
        ptd.Unchanged(("ACTB",), 0.1),
        ptd.LibrarySize(at_most=3000),
        ptd.NonNegative(),
        ptd.All([ptd.Not(ptd.AtLeast("ISG15", 2.0)), ptd.Any([ptd.KnockDown("ACTB")])]),
        ptd.Observed(("ISG15",), np.array([[1.0], [2.0]])),
    ],
)
def test_constraints_go_to_json_and_back(constraint):
    text = json.dumps(to_json(constraint))
    again = from_json(json.loads(text))
    assert type(again) is type(constraint)
    assert json.dumps(to_json(again)) == text
    assert again.describe() == constraint.describe()


def test_json_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="no form in JSON"):
        to_json(ptd.Verifier(print))
    with pytest.raises(ConfigError, match="mapping with a kind"):
        from_json({"gene": "ISG15"})
    with pytest.raises(UnknownKeyError, match="Did you mean 'at_least'"):
        from_json({"kind": "at_leest", "gene": "ISG15"})
    with pytest.raises(UnknownKeyError, match="Did you mean 'value'"):
        from_json({"kind": "at_least", "gene": "ISG15", "values": 2.0})
    with pytest.raises(ConfigError, match="lacks 'value'"):
        from_json({"kind": "at_least", "gene": "ISG15"})
    with pytest.raises(UnknownKeyError, match="ways of enforcing"):
        way_from_json("gently")
    with pytest.raises(UnknownKeyError, match="Did you mean 'share'"):
        way_from_json({"kind": "branch", "shares": 3})


@pytest.mark.parametrize("way", [ptd.Soft(window=(0.2, 0.9)), ptd.Hard(), ptd.Branch(k=3, share=2)])
def test_ways_go_to_json_and_back(way):
    assert way_from_json(json.loads(json.dumps(way_to_json(way)))) == way


# Projection of counts


@pytest.mark.parametrize(
    "wishes",
    [
        [ptd.AtLeast("ISG15", 2.0)],
        [ptd.AtMost("GAPDH", 2, scale="counts"), ptd.AtLeast("ISG15", 1, scale="counts")],
        [ptd.Fix("ACTB", 3, scale="counts")],
        [ptd.AtLeast("ISG15", 2.5, per="population")],
        [ptd.Fix("ACTB", 1.7, per="population"), ptd.Fix("GAPDH", 2.5, per="population")],
        [ptd.FoldChange(["ACTB", "IFIT1"], 0.5), ptd.Unchanged("GAPDH")],
        [ptd.KnockDown("GAPDH", 0.1)],
        [ptd.GeneSetShift(["ISG15", "IFIT1"], 0.8)],
        [ptd.GeneSetShift(["ISG15", "IFIT1"], 0.8, per="cell", relation="at_least")],
        [ptd.AtLeast("ISG15", 1.0), ptd.GeneSetShift(["ISG15", "ACTB"], 0.3)],
        [ptd.Not(ptd.AtLeast("ACTB", 2, scale="counts"))],
    ],
)
def test_projected_counts_obey_and_stay_whole(reference, draft, wishes):
    before = draft.counts.clone()
    bounds = conjuncts([wish.bind(reference) for wish in wishes])
    real = settle(draft, bounds)
    assert not bool(real.any())
    assert torch.equal(draft.counts, draft.counts.round())
    assert bool((draft.counts >= 0).all())
    for bound in bounds:
        assert bool(bound.holds(draft.values).all())
    named = torch.cat([bound.genes for bound in bounds]).unique()
    others = [gene for gene in range(4) if gene not in named]
    assert torch.equal(draft.counts[:, others], before[:, others])


def test_means_are_reached_with_as_few_counts_as_it_takes(reference, draft):
    bound = ptd.AtLeast("ISG15", 20.0, scale="counts", per="population").bind(reference)
    missing = 20 * N - draft.counts[:, 0].sum()
    before = draft.counts.sum()
    settle(draft, [bound])
    assert draft.counts.sum() - before == missing


def test_exact_log_values_make_a_gene_real_valued(reference, draft):
    bound = ptd.Fix("ACTB", 1.2345).bind(reference)
    real = settle(draft, [bound])
    assert real.tolist() == [False, False, True, False]
    assert float((draft.values.log1p[:, 2] - 1.2345).abs().max()) < 1e-6


def test_what_cannot_be_reached_is_said(reference, draft):
    both = [
        ptd.Fix("ACTB", 2, scale="counts").bind(reference),
        ptd.Fix("ACTB", 9.0, scale="counts", per="population").bind(reference),
    ]
    with pytest.raises(ConstraintError, match="does not hold together"):
        settle(draft, both)


def test_order_of_projections_does_not_matter_where_genes_differ(reference, draft):
    import copy  # noqa: PLC0415

    bounds = [
        ptd.AtLeast("ISG15", 2.5, per="population").bind(reference),
        ptd.KnockDown("GAPDH", 0.1).bind(reference),
        ptd.AtMost("ACTB", 2, scale="counts").bind(reference),
    ]
    other = copy.deepcopy(draft)
    settle(draft, bounds)
    settle(other, bounds[::-1])
    assert torch.equal(draft.counts, other.counts)


@pytest.mark.parametrize(
    ("relation", "share", "expected"),
    [
        ("at_least", 0.5, (0.3, 1.0)),
        ("at_most", 0.5, (0.0, 0.3)),
        ("exactly", 0.5, (0.3, 0.3)),
        ("at_least", 0.0, (0.0, 1.0)),
        ("at_most", 0.1, (0.0, 0.0)),
    ],
)
def test_limits_of_a_share_move_with_what_they_are_read_off(reference, relation, share, expected):
    bound = ptd.StateFraction(Threshold(), "high", share, relation=relation).bind(reference)
    moved = bound.moved(-0.2)
    assert (moved.lower, moved.upper) == pytest.approx(expected)
