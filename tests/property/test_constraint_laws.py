"""Laws of generation under constraints: off is free, batching is invisible, promises hold."""

import numpy as np
import pytest
import torch

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError, GeneError
from perturbdiff.diffusion._samplers import network_calls
from perturbdiff.guidance import CountCalls
from perturbdiff.model import _constrained_course, _fitted, _sampling

QUICK = ptd.SampleConfig(n_steps=5, set_size=16)
PILOT = 96


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    """Fewer pilot cells than usual, since they are most of the work here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", PILOT)
        yield


@pytest.fixture(scope="module")
def trained(simulated_cells, small_fit):
    """A model whose latent values say something of every gene."""
    model = small_fit(simulated_cells)
    model.fitted.dependence = 0.9
    model.fitted.dispersion = _Uneven()
    return model


class _Uneven:
    """Cells that respond unevenly, which a fit this short does not find."""

    def predict(self, shares, mean):
        return np.full(len(mean), 0.5)


@pytest.fixture
def model(trained):
    """The model with nothing remembered."""
    trained.fitted.plans.clear()
    trained.fitted.sampler._memory.clear()
    return trained


@pytest.fixture(scope="module")
def genes(trained, simulated_cells):
    """Genes of the model from the most to the least expressed."""
    level = np.asarray(simulated_cells[:, list(trained.registry.genes)].X.mean(0)).ravel()
    return [trained.registry.genes[number] for number in np.argsort(-level)]


def ask(model, adata, wishes=(), enforce=None, perturbations=("P1",), **settings):
    settings = {"n_cells": 32, "seed": 1, "sample": QUICK} | settings
    return model.predict(
        adata,
        perturbations=list(perturbations),
        contexts=[{"cell_type": "T1"}],
        constraints=wishes,
        enforce=enforce,
        **settings,
    )


def counts(pred):
    return pred.layers["counts"].toarray()


def rows(pred):
    return pred.uns["perturbdiff"]["constraints"]


# Off is free


def test_no_constraints_are_free(model, simulated_cells, monkeypatch):
    plain = model.predict(
        simulated_cells, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=32, seed=1,
        sample=QUICK,
    )  # fmt: skip
    model.fitted.plans.clear()
    off = ask(model, simulated_cells, [])
    assert np.array_equal(off.X.toarray(), plain.X.toarray())
    assert off.uns["perturbdiff"]["nfe"] == plain.uns["perturbdiff"]["nfe"]
    assert off.uns["perturbdiff"]["constraint_violation"] == 0
    assert "constraints" not in off.uns["perturbdiff"]
    with pytest.raises(ConfigError, match="there are none"):
        ask(model, simulated_cells, [], "soft")


def test_calls_are_those_that_this_answer_made(model, simulated_cells):
    first, again = (ask(model, simulated_cells, None) for _ in range(2))
    assert np.array_equal(counts(first), counts(again))
    assert first.uns["perturbdiff"]["nfe"] > 0
    assert again.uns["perturbdiff"]["nfe"] == 0  # the pilot's latent values are kept


def test_a_soft_pull_without_strength_changes_nothing(model, simulated_cells, genes):
    plain = ask(model, simulated_cells)
    wish = [ptd.AtLeast(genes[0], 9.0, per="population")]
    off = ask(model, simulated_cells, wish, ptd.Soft(strength=0, redraws=1))
    assert np.array_equal(counts(off), counts(plain))


def test_a_constraint_that_holds_anyhow_changes_nothing(model, simulated_cells, genes):
    plain = ask(model, simulated_cells)
    for way in ("hard", "soft", "best_of", "branch"):
        same = ask(model, simulated_cells, [ptd.AtLeast(genes[0], 0.0, per="population")], way)
        assert np.array_equal(counts(same), counts(plain))


# Promises


@pytest.mark.parametrize("per", ["cell", "population"])
@pytest.mark.parametrize("kind", [ptd.AtLeast, ptd.AtMost, ptd.Fix])
def test_hard_holds_after_the_cast_to_float32(model, simulated_cells, genes, kind, per):
    value = 3.217
    pred = ask(model, simulated_cells, [kind(genes[1], value, per=per)])
    found = pred[:, genes[1]].X.toarray().ravel()
    assert found.dtype == np.float32
    reached = found.astype(np.float64) if per == "cell" else found.mean(dtype=np.float64)
    if kind is ptd.Fix:
        # one count in one cell
        step = np.log1p(1e4 / pred.obs["library_size"].min()) / len(found)
        assert np.abs(reached - value).max() <= (1e-6 if per == "cell" else step)
    else:
        sign = 1 if kind is ptd.AtLeast else -1
        assert (sign * (reached - value)).min() >= -1e-6
    whole = counts(pred)
    real = kind is ptd.Fix and per == "cell"
    assert np.array_equal(whole, whole.round()) != real
    assert list(pred.uns["perturbdiff"]["real_valued_genes"]) == ([genes[1]] if real else [])
    depth = whole / pred.obs["library_size"].to_numpy()[:, None] * 1e4
    np.testing.assert_allclose(pred.X.toarray(), np.log1p(depth), rtol=1e-6)
    row = rows(pred).iloc[0]
    assert row["satisfied"]
    assert row["violation"] == 0
    assert row["promised"]
    assert pred.uns["perturbdiff"]["constraint_violation"] == 0


def test_means_that_are_moved_leave_other_genes_alone(model, simulated_cells, genes):
    plain = ask(model, simulated_cells)
    pred = ask(model, simulated_cells, [ptd.FoldChange(genes[2], 2.0), ptd.KnockDown(genes[3])])
    others = [gene not in genes[2:4] for gene in model.registry.genes]
    assert np.array_equal(counts(pred)[:, others], counts(plain)[:, others])
    assert rows(pred)["satisfied"].all()
    assert np.isfinite(rows(pred)["energy_distance"]).all()
    assert rows(pred)["set_evaluations"].eq(0).all()  # the pilot is enough


def test_order_of_constraints_does_not_matter(model, simulated_cells, genes):
    wishes = [
        ptd.FoldChange(genes[2], 2.0),
        ptd.KnockDown(genes[3]),
        ptd.AtLeast(genes[0], 2, scale="counts"),
    ]
    one, other = (ask(model, simulated_cells, order) for order in (wishes, wishes[::-1]))
    np.testing.assert_array_equal(counts(one), counts(other))


def test_states_are_reached_by_exchanging_cells(model, simulated_cells, genes):
    gene = model.registry.genes.index(genes[4])
    middle = float(np.median(ask(model, simulated_cells).X.toarray()[:, gene]))

    class High:
        classes_ = np.array([False, True])

        def predict(self, X):
            return X[:, gene] > middle

    for share in (0.0, 0.25, 0.9):
        pred = ask(model, simulated_cells, [ptd.StateFraction(High(), True, share)])
        assert (pred.X.toarray()[:, gene] > middle).sum() == round(share * 32)
    impossible = ptd.StateFraction(_Never(), True, 0.5)
    with pytest.raises(ConstraintError, match="only 0 would help and 16 are needed"):
        ask(model, simulated_cells, [impossible])


class _Never:
    classes_ = np.array([False, True])

    def predict(self, X):
        return np.zeros(len(X), dtype=bool)


def test_library_sizes_take_counts_with_them(model, simulated_cells):
    plain = ask(model, simulated_cells)
    limit = float(np.median(plain.obs["library_size"]))
    pred = ask(model, simulated_cells, [ptd.LibrarySize(at_most=limit)])
    assert pred.obs["library_size"].max() <= limit
    assert np.abs(pred.X.toarray() - plain.X.toarray()).mean() < 0.2


def test_observed_genes_are_as_observed_and_the_rest_is_filled_in(model, simulated_cells, genes):
    truth = ask(model, simulated_cells, seed=7).X.toarray().astype(np.float64)
    panel = genes[:10]
    columns = [model.registry.genes.index(gene) for gene in panel]
    wish = ptd.Observed(panel, truth[:, columns])
    pred = ask(model, simulated_cells, [wish])
    np.testing.assert_allclose(pred.X.toarray()[:, columns], truth[:, columns], atol=1e-6)
    n_sets, each = 2, QUICK.n_steps
    # every step but the last is taken twice
    assert rows(pred)["set_evaluations"].eq(n_sets * (2 * each - 1)).all()
    once = ask(model, simulated_cells, [wish], ptd.Hard(resamples=0))
    assert rows(once)["set_evaluations"].eq(n_sets * each).all()


# Laws of batching


def test_what_else_is_asked_is_invisible(model, simulated_cells, genes, monkeypatch):
    wishes = [ptd.AtLeast(genes[0], 2.0), ptd.FoldChange(genes[2], 1.5)]
    alone = ask(model, simulated_cells, wishes, ["soft", "hard"])
    model.fitted.plans.clear()
    monkeypatch.setattr(_sampling, "SETS_AT_ONCE", 3)
    monkeypatch.setattr(_constrained_course, "_SETS_AT_ONCE", 1)
    both = ask(model, simulated_cells, wishes, ["soft", "hard"], perturbations=["P2", "P1"])
    part = counts(both)[both.obs["perturbation"] == "P1"]
    assert np.abs(part - counts(alone)).sum() <= 1


@pytest.mark.parametrize("way", ["soft", "branch", "particles", "depth_first"])
def test_sets_do_not_depend_on_how_many_cells_are_asked(model, simulated_cells, genes, way):
    wish = [ptd.AtLeast(genes[0], 5.0, per="population")]
    few = ask(model, simulated_cells, wish, way, n_cells=16)
    many = ask(model, simulated_cells, wish, way, n_cells=48)
    assert np.abs(counts(many)[:16] - counts(few)).sum() <= 1


def test_what_depends_on_how_many_cells_are_asked(model, simulated_cells, genes):
    """Per cell nothing; means only in the genes that they name, which hold for what is returned."""
    cellwise = [ptd.AtLeast(genes[0], 3.0)]
    few, many = (ask(model, simulated_cells, cellwise, n_cells=n) for n in (16, 48))
    assert np.abs(counts(many)[:16] - counts(few)).sum() <= 1
    mean = [ptd.Fix(genes[1], 2.5, per="population")]
    few, many = (ask(model, simulated_cells, mean, n_cells=n) for n in (16, 48))
    others = [gene != genes[1] for gene in model.registry.genes]
    assert np.array_equal(counts(many)[:16][:, others], counts(few)[:, others])
    assert rows(few)["satisfied"].all()
    assert rows(many)["satisfied"].all()


def test_more_cells_than_the_pilot(model, simulated_cells, genes):
    mean = [ptd.AtLeast(genes[1], 2.5, per="population")]
    pred = ask(model, simulated_cells, mean, n_cells=PILOT + 20)
    assert pred.n_obs == PILOT + 20
    assert rows(pred)["satisfied"].all()


# Soft


@pytest.mark.parametrize("through", [False, True])
def test_soft_lowers_the_violation_at_the_cost_of_one_trajectory(
    model, simulated_cells, genes, through
):
    plain = ask(model, simulated_cells, n_cells=64)
    wish = [ptd.AtLeast(genes[1], float(plain[:, genes[1]].X.mean()) + 0.3, per="population")]
    pred = ask(model, simulated_cells, wish, ptd.Soft(through_network=through), n_cells=64)
    row = rows(pred).iloc[0]
    assert row["violation"] < 0.5 * row["violation_before"]
    assert row["cost"] == 1
    assert not row["promised"]
    course = pred.uns["perturbdiff"]["constraint_course"]
    assert course["step"].tolist() == [1, 2, 3, 4, 5]
    assert course["energy"].iloc[-1] < 0.1
    window = ask(
        model, simulated_cells, wish, ptd.Soft(through_network=through, window=(0.0, 0.2)),
        n_cells=64,
    )  # fmt: skip
    assert rows(window)["reached"].iloc[0] < row["reached"]


def test_a_verifier_has_no_gradient_and_no_projection(model, simulated_cells):
    def fine(log1p, genes):
        return True

    with pytest.raises(ConstraintError, match="fine: has no gradient"):
        ask(model, simulated_cells, [fine], "soft")
    with pytest.raises(ConstraintError, match="fine: cannot be projected"):
        ask(model, simulated_cells, [fine], "hard")
    assert rows(ask(model, simulated_cells, [fine]))["method"].tolist() == ["best_of+hard"]


# Search


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "stochastic"])
@pytest.mark.parametrize("share", [0, 3, 5])
def test_branching_costs_what_the_formula_says(model, simulated_cells, sampler, share):
    def never(log1p, genes):
        return 1.0

    k, n_steps = 4, 5
    branch = ptd.Branch(k=k, share=share)
    config = ptd.SampleConfig(n_steps=n_steps, set_size=16, sampler=sampler)
    pred = ask(model, simulated_cells, [never], branch, sample=config)
    one = network_calls(sampler, n_steps)
    if sampler != "heun":
        expected = k - (k - 1) * share / n_steps
    elif share < n_steps:
        expected = (2 * share + k * (2 * (n_steps - share) - 1)) / (2 * n_steps - 1)
    else:
        expected = 1
    row = rows(pred).iloc[0]
    assert row["cost"] == pytest.approx(expected, abs=1e-12)
    assert branch.cost(n_steps, heun=sampler == "heun") == pytest.approx(expected)
    tree = pred.uns["perturbdiff"]["constraint_tree"]
    assert tree["calls"].sum() == row["set_evaluations"] == round(expected * one * 2)


def test_branching_example_of_fifty_steps():
    assert ptd.Branch(k=4, share=40).cost(50) == pytest.approx(1.6)


@pytest.mark.parametrize(
    "way",
    [
        ptd.BestOf(n=3),
        ptd.Branch(k=3, share=2),
        ptd.Particles(n=3),
        ptd.DepthFirst(budget=15, width=2, levels=2),
    ],
)
def test_searches_find_what_no_gradient_leads_to(model, simulated_cells, genes, way):
    column = model.registry.genes.index(genes[1])
    limit = float(ask(model, simulated_cells, n_cells=96).X.toarray()[:, column].mean())

    def high(log1p, names):
        return max(limit - float(log1p[:, column].mean()), 0.0)

    pred = ask(model, simulated_cells, [high], way, n_cells=96)
    row = rows(pred).iloc[0]
    assert row["satisfied_sets"] > 0.6  # about half of the sets obey without
    tree = pred.uns["perturbdiff"]["constraint_tree"]
    assert tree["calls"].sum() == row["set_evaluations"]
    assert (tree.groupby("set")["calls"].sum() <= 15).all()
    ends = tree[tree["last"] == QUICK.n_steps]
    assert (ends.groupby("set")["kept"].sum() == 1).all()
    known = set(zip(tree["set"], tree["node"], strict=True))
    children = tree[tree["parent"] >= 0]
    assert all(pair in known for pair in zip(children["set"], children["parent"], strict=True))
    if isinstance(way, ptd.Particles):
        assert 1 <= row["effective_particles"] <= 3


def test_depth_first_keeps_its_budget_and_finishes_one(model, simulated_cells):
    def never(log1p, genes):
        return 1.0

    for budget in (1, 7, 23):
        way = ptd.DepthFirst(budget=budget, width=3, levels=3)
        pred = ask(model, simulated_cells, [never], way)
        spent = pred.uns["perturbdiff"]["constraint_tree"].groupby("set")["calls"].sum()
        assert (spent <= max(budget, QUICK.n_steps)).all()
        assert (spent >= QUICK.n_steps).all()


def test_calls_are_those_that_reach_the_network(model, simulated_cells, genes, monkeypatch):
    calls = CountCalls()
    denoiser = model.fitted.denoiser
    monkeypatch.setattr(model.fitted, "denoiser", _Counted(denoiser, calls))
    pred = ask(model, simulated_cells, [ptd.AtLeast(genes[0], 3.0)])
    model.fitted.plans.clear()
    plain = ask(model, simulated_cells)
    assert calls.nfe == pred.uns["perturbdiff"]["nfe"] - plain.uns["perturbdiff"]["nfe"]


class _Counted:
    def __init__(self, denoiser, calls):
        self._denoiser, self._counted = denoiser, calls(denoiser)

    def __call__(self, *arguments):
        return self._counted(*arguments)

    def __getattr__(self, name):
        return getattr(self._denoiser, name)


# Before sampling


def test_mistakes_are_found_before_anything_is_sampled(model, simulated_cells, genes, monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(model.fitted, "respond", fail)
    for wishes, error in [
        ([ptd.AtLeast("G9999", 1.0)], GeneError),
        ([ptd.AtLeast(genes[0], 2.0), ptd.AtMost(genes[0], 1.0)], ConstraintError),
        ([ptd.Observed([genes[0]], np.ones((3, 1)))], ConstraintError),
    ]:
        with pytest.raises(error):
            ask(model, simulated_cells, wishes)


def test_what_was_never_seen_is_marked(model, simulated_cells, genes):
    pred = ask(
        model,
        simulated_cells,
        [ptd.AtLeast(genes[-1], 5.0, per="population"), ptd.AtLeast(genes[0], 0.5)],
    )
    assert rows(pred)["supported"].tolist() == [False, True]
    assert rows(pred)["outside"].iloc[0] > 1
    assert rows(pred)["outside"].iloc[1] == 0


def test_the_report_survives_a_file(model, simulated_cells, genes, tmp_path):
    import anndata  # noqa: PLC0415

    pred = ask(model, simulated_cells, [ptd.Fix(genes[0], 2.0)], ["branch", "hard"])
    pred.write_h5ad(tmp_path / "pred.h5ad")
    again = anndata.read_h5ad(tmp_path / "pred.h5ad")
    for name in ("constraints", "constraint_course", "constraint_tree"):
        left, right = (a.uns["perturbdiff"][name] for a in (pred, again))
        assert list(left.columns) == list(right.columns)
        assert len(left) == len(right) > 0
    assert ptd.tl.predict  # the same door


def test_tl_predict_takes_constraints(model, simulated_cells, genes):
    pred = ptd.tl.predict(
        simulated_cells, model, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=16,
        sample=QUICK, constraints=[ptd.AtLeast(genes[0], 2.0)],
    )  # fmt: skip
    assert rows(pred)["satisfied"].all()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("way", [ptd.BestOf(n=4), ptd.Branch(k=4, share=2, redraws=1)])
def test_candidates_are_made_from_control_cells_of_their_own(model, simulated_cells, genes, way):
    def hopeless(log1p, _):
        return 10 - float(log1p.mean())

    wish = ptd.Verifier(hopeless, genes=genes[:3], name="far away")
    plain = ask(model, simulated_cells, n_cells=64)
    pred = ask(model, simulated_cells, wish, way, n_cells=64)
    tree = pred.uns["perturbdiff"]["constraint_tree"]
    ends = tree[(tree["last"] == 5) & tree["kept"]]
    first = ends["node"].to_numpy() == (1 if isinstance(way, ptd.Branch) else 0)
    same = pred.obs["library_size"].to_numpy() == plain.obs["library_size"].to_numpy()
    same = same.reshape(-1, 16).all(1)
    assert not first.all()
    assert np.array_equal(same, first)


def test_draws_without_the_network_find_sets_that_obey(model, simulated_cells, genes):
    plain = ask(model, simulated_cells, n_cells=96)
    gene = genes[1]
    means = plain[:, gene].X.toarray().reshape(-1, 16).mean(1)
    wish = ptd.AtLeast(gene, float(np.sort(means)[-2]), per="population")
    few, many = (
        ask(model, simulated_cells, wish, ptd.BestOf(n=2, redraws=redraws), n_cells=96)
        for redraws in (1, 24)
    )
    assert rows(few)["set_evaluations"].iloc[0] == rows(many)["set_evaluations"].iloc[0]
    assert rows(many)["satisfied_sets"].iloc[0] > rows(few)["satisfied_sets"].iloc[0]
