"""Laws of the sibling under constraints: off is free, masks hold, sets that miss go again."""

import numpy as np
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, ConstraintError, GeneError, VerifierError
from perturbdiff.model import _causal_fitted, _fitted
from perturbdiff.train import TrainerOptions

PLAIN = ptd.DecodeConfig(draft_length=0, set_size=16)
SHAPE = {"n_axes": 5, "n_response_axes": 4, "width": 16, "n_heads": 2, "gene_width": 4}
PILOT = 96


@pytest.fixture(scope="module", autouse=True)
def small_pilot():
    """Fewer pilot cells than usual, since they are most of the work here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitted, "PILOT_CELLS", PILOT)
        patch.setattr(_causal_fitted, "PILOT_CELLS", PILOT)
        yield


def fitted(adata, order):
    columns = {
        "perturbation_key": "perturbation", "control": "control", "covariate_keys": ["cell_type"],
        "embedding_key": "perturbation_features",
    }  # fmt: skip
    return ptd.CausalBaseline.from_anndata(adata, **columns).fit(
        adata,
        holdout={"cell_type": ["T1"]},
        n_top_genes=30,
        network=ptd.DecoderConfig(order=order, **SHAPE),
        train=ptd.TrainConfig(
            max_steps=6, check_every=3, n_sets=4, set_size=4, n_controls=6, warmup_steps=2
        ),
        options=TrainerOptions(progress=False, accelerator="cpu"),
    )


@pytest.fixture(scope="module")
def model(simulated_cells):
    return fitted(simulated_cells, "coexpression")


@pytest.fixture(scope="module")
def drawing(simulated_cells):
    return fitted(simulated_cells, "descending")


@pytest.fixture(scope="module")
def genes(model, simulated_cells):
    """Genes of the model from the most to the least expressed."""
    level = np.asarray(simulated_cells[:, list(model.registry.genes)].X.mean(0)).ravel()
    return [model.registry.genes[number] for number in np.argsort(-level)]


def ask(model, adata, wishes=(), enforce=None, **settings):
    settings = {"n_cells": 32, "seed": 1, "decode": PLAIN} | settings
    return model.predict(
        adata, perturbations=["P1"], contexts=[{"cell_type": "T1"}], constraints=wishes,
        enforce=enforce, **settings,
    )  # fmt: skip


def counts(pred):
    return pred.layers["counts"].toarray()


def rows(pred):
    return pred.uns["perturbdiff"]["constraints"]


def set_means(pred, gene):
    return pred[:, gene].X.toarray().astype(np.float64).reshape(-1, 16).mean(1)


# Off is free


@pytest.mark.parametrize("decoding", ["raw", "transport"])
@pytest.mark.parametrize("nothing", [(), None])
def test_no_constraints_are_free(model, simulated_cells, decoding, nothing):
    plain = model.predict(
        simulated_cells, perturbations=["P1"], contexts=[{"cell_type": "T1"}], n_cells=32, seed=1,
        decode=PLAIN, decoding=decoding,
    )  # fmt: skip
    model.fitted.plans.clear()
    again = ask(model, simulated_cells, decoding=decoding)
    model.fitted.plans.clear()
    off = ask(model, simulated_cells, nothing, decoding=decoding)
    assert np.array_equal(counts(off), counts(plain))
    assert off.uns["perturbdiff"]["nfe"] == again.uns["perturbdiff"]["nfe"] > 0
    assert off.uns["perturbdiff"]["constraint_violation"] == 0
    assert "constraints" not in off.uns["perturbdiff"]
    with pytest.raises(ConfigError, match="there are none"):
        ask(model, simulated_cells, nothing, "best_of", decoding=decoding)


def test_what_holds_anyhow_changes_nothing(model, simulated_cells, genes):
    plain = ask(model, simulated_cells)
    wishes = [ptd.NonNegative(), ptd.AtLeast(genes[0], 0.0, per="population")]
    same = ask(model, simulated_cells, wishes)
    assert np.array_equal(counts(same), counts(plain))
    assert same.uns["perturbdiff"]["nfe"] == plain.uns["perturbdiff"]["nfe"]
    assert rows(same)["satisfied"].all()
    assert rows(same)["cost"].eq(1).all()


# Masks


def wishes_of_cells(genes):
    return {
        "at_least": ptd.AtLeast(genes[1], 3.2),
        "at_most": ptd.AtMost([genes[0], genes[2]], 2.0, scale="counts"),
        "fix": ptd.Fix(genes[3], 3.217),
        "fix_counts": ptd.Fix(genes[4], 3, scale="counts"),
        "fold_change": ptd.FoldChange(genes[1], 2.0, relation="at_least", per="cell"),
        "knock_down": ptd.KnockDown(genes[0], 0.25, per="cell"),
        "not": ptd.Not(ptd.AtLeast(genes[2], 2.5)),
        "all": ptd.All([ptd.AtLeast(genes[1], 2.0), ptd.AtMost(genes[5], 1.0, scale="counts")]),
    }


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("kind", wishes_of_cells("abcdef"))
def test_what_is_about_a_gene_of_a_cell_is_masked(model, simulated_cells, genes, kind, guesses):
    config = ptd.DecodeConfig(draft_length=guesses, set_size=16)
    pred = ask(model, simulated_cells, wishes_of_cells(genes)[kind], decode=config)
    row = rows(pred).iloc[0]
    assert not row["satisfied_before"]
    assert row["satisfied"]
    assert row["promised"]
    assert (row["violation"], row["method"], row["cost"]) == (0, "mask", 1)
    assert pred.uns["perturbdiff"]["constraint_violation"] == 0
    real = list(pred.uns["perturbdiff"]["real_valued_genes"])
    assert real == ([genes[3]] if kind == "fix" else [])
    depth = counts(pred) / pred.obs["library_size"].to_numpy()[:, None] * 1e4
    np.testing.assert_allclose(pred.X.toarray(), np.log1p(depth), rtol=1e-6)
    if kind == "fix":
        assert np.abs(pred[:, genes[3]].X.toarray() - 3.217).max() <= 1e-6


def test_genes_said_before_a_masked_one_are_as_without(model, simulated_cells, genes):
    place = {int(gene): number for number, gene in enumerate(model.fitted.order.genes)}
    columns = [model.registry.genes.index(gene) for gene in genes]
    late = max(range(10), key=lambda number: place[columns[number]])
    plain = ask(model, simulated_cells)
    pred = ask(model, simulated_cells, ptd.AtLeast(genes[late], 5.0))
    said = [column for column in columns if place[column] < place[columns[late]]]
    assert len(said) > 3
    assert np.array_equal(counts(pred)[:, said], counts(plain)[:, said])
    assert (counts(pred)[:, columns[late]] != counts(plain)[:, columns[late]]).any()


def test_guesses_change_no_masked_cell(model, simulated_cells, genes):
    wish = ptd.AtLeast(genes[1], 3.2)
    plain = ask(model, simulated_cells, wish)
    guessed = ask(model, simulated_cells, wish, decode=ptd.DecodeConfig(set_size=16))
    assert (counts(plain) != counts(guessed)).mean() <= 1e-3
    assert guessed.uns["perturbdiff"]["nfe"] < plain.uns["perturbdiff"]["nfe"]


def test_a_panel_observed_in_every_cell(model, simulated_cells, genes):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 6, (32, 4))
    pred = ask(model, simulated_cells, ptd.Observed(genes[:4], values, scale="counts"))
    assert np.array_equal(counts(pred[:, genes[:4]]), values)
    exact = rng.gamma(2.0, 1.0, (32, 2))
    pred = ask(model, simulated_cells, ptd.Observed(genes[:2], exact))
    assert np.abs(pred[:, genes[:2]].X.toarray() - exact).max() <= 1e-6


@pytest.mark.parametrize("n_cells", [8, 40])
def test_masked_cells_do_not_depend_on_how_many_are_asked_for(
    model, simulated_cells, genes, n_cells
):
    wishes = [ptd.AtLeast(genes[1], 3.2)]
    some = ask(model, simulated_cells, wishes, n_cells=n_cells)
    many = ask(model, simulated_cells, wishes, n_cells=48)
    assert np.array_equal(counts(some), counts(many)[:n_cells])


# Drawing again


@pytest.mark.parametrize("decoding", ["raw", "transport"])
def test_sets_that_miss_are_drawn_again(model, simulated_cells, genes, decoding):
    settings = {"n_cells": 96, "decoding": decoding}
    plain = ask(model, simulated_cells, **settings)
    means = set_means(plain, genes[1])
    level = float(np.median(means))
    wish = ptd.AtLeast(genes[1], level, per="population")
    pred = ask(model, simulated_cells, wish, ptd.BestOf(n=8), **settings)
    reached = set_means(pred, genes[1])
    assert (reached >= level - 1e-6).mean() > (means >= level - 1e-6).mean()
    assert (reached >= means - 1e-6).all()  # never worse
    kept = np.repeat(means >= level - 1e-6, 16)
    assert np.array_equal(counts(pred)[kept], counts(plain)[kept])
    row, tree = rows(pred).iloc[0], pred.uns["perturbdiff"]["constraint_tree"]
    assert (row["method"], row["promised"]) == ("best_of", False)
    assert len(tree) == row["set_evaluations"] == row["cost"] * 6
    assert tree["kept"].sum() == 6
    again = tree[tree["node"] > 0].drop_duplicates("node")["calls"].sum()
    assert pred.uns["perturbdiff"]["nfe"] >= again > 0
    fewer = ask(model, simulated_cells, wish, ptd.BestOf(n=8), n_cells=48, decoding=decoding)
    assert np.array_equal(counts(fewer), counts(pred)[:48])


def test_masks_and_draws_together(model, simulated_cells, genes):
    def most(log1p, _):
        return max(float(log1p[:, 0].mean()) - 3.0, 0.0)

    wishes = [ptd.AtLeast(genes[1], 3.2), ptd.Verifier(most, genes=[genes[2]], name="not too much")]
    pred = ask(model, simulated_cells, wishes, ptd.BestOf(n=3))
    assert list(rows(pred)["promised"]) == [True, False]
    assert rows(pred)["satisfied"].iloc[0]
    assert rows(pred)["method"].eq("mask+best_of").all()
    either = ptd.Any([ptd.AtLeast(genes[1], 9.0), ptd.AtLeast(genes[1], 0.0)])
    assert rows(ask(model, simulated_cells, either))["satisfied"].all()


def test_an_order_that_is_drawn_draws_sets_again(drawing, simulated_cells, genes):
    plain = ask(drawing, simulated_cells)
    level = float(set_means(plain, genes[1]).max())
    pred = ask(drawing, simulated_cells, ptd.AtLeast(genes[1], level, per="population"))
    assert (set_means(pred, genes[1]) >= set_means(plain, genes[1]) - 1e-6).all()


# Refused


def test_what_cannot_be_met_is_refused_before_anything_is_written(
    model, drawing, simulated_cells, genes, monkeypatch
):
    def never(*_, **__):
        raise AssertionError

    for one in (model, drawing):
        monkeypatch.setattr(one.fitted.sampler, "counts", never)
    of_cell, of_all = ptd.AtLeast(genes[1], 3.2), ptd.AtLeast(genes[1], 3.2, per="population")
    refusals = [
        (model, of_cell, None, "raw'", {"decoding": "transport"}),
        (drawing, of_cell, None, "descending", {}),
        (model, of_all, "hard", "known only when a set is finished", {}),
        (model, [of_cell, ptd.AtMost(genes[1], 1.0)], None, genes[1], {}),
    ]
    for who, wish, way, words, settings in refusals:
        with pytest.raises(ConstraintError, match=words):
            ask(who, simulated_cells, wish, way, **settings)
    with pytest.raises(GeneError, match="nowhere"):
        ask(model, simulated_cells, ptd.AtLeast("nowhere", 1.0))
    for way, words in [
        ("soft", "draws sets again"),
        (ptd.BestOf(n=2, redraws=4), "Raise n"),
        (["best_of", "hard"], "one way"),
    ]:
        with pytest.raises(ConfigError, match=words):
            ask(model, simulated_cells, of_cell, way)


def test_ranges_that_leave_no_count_are_refused(model, simulated_cells, genes, monkeypatch):
    between = [ptd.AtLeast(genes[1], 3, scale="counts"), ptd.Fix(genes[1], 2, scale="counts")]
    monkeypatch.setattr("perturbdiff.model._causal_constrained.check_together", lambda *_, **__: 0)
    with pytest.raises(ConstraintError, match="no count of"):
        ask(model, simulated_cells, between)


def test_through_the_common_door(model, simulated_cells, genes):
    question = {"perturbations": ["P1"], "contexts": [{"cell_type": "T1"}], "n_cells": 16}
    direct = model.predict(simulated_cells, **question, constraints=ptd.AtLeast(genes[1], 3.2))
    pred = ptd.tl.predict(
        simulated_cells, model, **question, constraints=[ptd.AtLeast(genes[1], 3.2)]
    )
    assert np.array_equal(counts(pred), counts(direct))
    assert rows(pred)["satisfied"].all()
    free = ptd.tl.predict(simulated_cells, model, **question, constraints=None)
    assert "constraints" not in free.uns["perturbdiff"]
    panels = ptd.pl.constraints(pred, show=False)
    assert len(panels) == 1


def test_a_verifier_that_fails_is_named_with_its_condition(model, simulated_cells):
    def unsound(log1p, names):
        return log1p[:, names.index("nowhere")].mean() > 0

    with pytest.raises(VerifierError, match="Cells of P1 in T1: The verifier unsound raised"):
        ask(model, simulated_cells, unsound)
