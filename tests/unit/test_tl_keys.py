"""Results are written under names that files keep, and read as what they are."""

import numpy as np
import pandas as pd
import pytest

import perturbdiff as ptd
from perturbdiff._errors import ConfigError, UnknownKeyError

COLUMNS = {"perturbation_key": "perturbation", "control": "control", "scale": "counts"}
WRITERS = {
    "tl.score": lambda x, cells, m, key: ptd.tl.score(x, reference=cells, key_added=key),
    "tl.response": lambda x, cells, m, key: ptd.tl.response(x, reference=cells, key_added=key),
    "tl.trajectory": lambda x, cells, m, key: ptd.tl.trajectory(
        x, m, reference=cells, key_added=key
    ),
    "tl.uncertainty": lambda x, cells, m, key: ptd.tl.uncertainty(
        x, m, reference=cells, key_added=key
    ),
    "tl.rank_perturbations": lambda x, cells, m, key: ptd.tl.rank_perturbations(
        cells, m, target=[ptd.AtLeast(x.var_names[0], 1.0)], key_added=key
    ),
    "pp.select_genes": lambda x, cells, m, key: ptd.pp.select_genes(
        cells, **COLUMNS, key_added=key
    ),
}
USUAL = {
    "tl.score": "score",
    "tl.response": "response",
    "tl.trajectory": "trajectory",
    "tl.uncertainty": "uncertainty",
    "tl.rank_perturbations": "perturbation_ranking",
}
READERS = {
    "tl.score": (ptd.pl.scores, ptd.tl.summarise_scores),
    "tl.response": (ptd.tl.response_genes,),
    "tl.trajectory": (ptd.pl.trajectory,),
    "tl.uncertainty": (ptd.pl.uncertainty,),
}


@pytest.fixture(scope="module")
def pred(small_model, simulated_cells):
    """Do not change it."""
    return ptd.tl.predict(
        simulated_cells, small_model, perturbations=["P1"], contexts=[{"cell_type": "T1"}],
        n_cells=8,
    )  # fmt: skip


@pytest.mark.parametrize("key", ["", "  ", "a/b", "perturbdiff", "log1p", "_index"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_name_that_would_be_lost_or_do_harm_is_refused(
    small_model, simulated_cells, pred, writer, key
):
    kept, there = list(pred.uns), list(simulated_cells.uns)
    with pytest.raises(ConfigError, match="key_added = "):
        WRITERS[writer](pred, simulated_cells, small_model, key)
    assert (list(pred.uns), list(simulated_cells.uns)) == (kept, there)


def test_the_features_of_perturbations_are_not_written_over(small_model, simulated_cells, pred):
    key = small_model.registry.embedding_key
    with pytest.raises(ConfigError, match="the name of something else"):
        WRITERS["tl.rank_perturbations"](pred, simulated_cells, small_model, key)


@pytest.mark.parametrize(
    ("writer", "usual"),
    [
        (writer, usual)
        for writer, own in USUAL.items()
        for usual in ("uncertainty_flags", *USUAL.values())
        if usual != own
    ],
)
def test_the_usual_name_of_another_table_is_refused(
    small_model, simulated_cells, pred, writer, usual
):
    with pytest.raises(ConfigError, match=f"'{usual}': is the usual name of another table, of tl"):
        WRITERS[writer](pred, simulated_cells, small_model, usual)


@pytest.mark.parametrize("writer", USUAL)
def test_what_is_there_already_is_not_replaced(small_model, simulated_cells, pred, writer):
    made, cells = pred.copy(), simulated_cells.copy()
    for file in (made, cells):
        file.uns |= {"mine": pd.DataFrame({"gene": ["g"]}), "neighbors": {"params": 1}}
    for key in ("mine", "neighbors"):
        with pytest.raises(ConfigError, match=f"{key!r}: uns of .* holds something else there"):
            WRITERS[writer](made, cells, small_model, key)
        assert list(made.uns["mine"].columns) == ["gene"]
        assert cells.uns["neighbors"] == {"params": 1}


def test_flags_and_axes_do_not_replace_what_is_there(small_model, simulated_cells, pred):
    made = pred.copy()
    made.uns["mine_flags"] = [1, 2]
    with pytest.raises(ConfigError, match="'mine_flags': uns of pred holds something else"):
        WRITERS["tl.uncertainty"](made, simulated_cells, small_model, "mine")
    made.varm["PCs"] = np.ones((made.n_vars, 2))
    with pytest.raises(ConfigError, match="'PCs': varm of pred holds something else"):
        WRITERS["tl.trajectory"](made, simulated_cells, small_model, "PCs")


@pytest.mark.parametrize("writer", ["tl.response", "tl.trajectory", "tl.rank_perturbations"])
def test_the_same_function_writes_again(small_model, simulated_cells, pred, writer):
    made, cells = pred.copy(), simulated_cells.copy()
    for _ in range(2):
        WRITERS[writer](made, cells, small_model, "again")
    assert len({**made.uns, **cells.uns}["again"]) > 0


@pytest.mark.parametrize("values", [["a"] * 40, [0.5] * 40, [0, 1] * 20, ["True", None] * 20])
def test_a_column_of_genes_that_is_no_mask_is_not_replaced(simulated_cells, values):
    cells = simulated_cells.copy()
    cells.var["mine"] = values
    with pytest.raises(ConfigError, match="'mine': is a column of var that is no mask"):
        ptd.pp.select_genes(cells, **COLUMNS, key_added="mine")
    assert cells.var["mine"].dropna().iloc[0] == values[0]


@pytest.mark.parametrize("values", [[True, False] * 20, [True, None] * 20])
def test_a_mask_of_genes_is_replaced(simulated_cells, values):
    cells = simulated_cells.copy()
    cells.var["mine"] = values
    ptd.pp.select_genes(cells, **COLUMNS, n_top_genes=5, key_added="mine")
    assert 5 <= cells.var["mine"].sum() < 20


@pytest.mark.parametrize("writer", READERS)
def test_what_another_function_wrote_is_named_as_such(pred, writer):
    made = pred.copy()
    for read in READERS[writer]:
        made.uns |= {"mine": pd.DataFrame({"a": [1]}), "note": "text"}
        with pytest.raises(
            ConfigError, match=f"'mine': holds another table than {writer} writes; call {writer}"
        ):
            read(made, key="mine")
        with pytest.raises(ConfigError, match="'note': holds something else than"):
            read(made, key="note")
        with pytest.raises(UnknownKeyError, match=rf"\(written by {writer}\) has no 'notes'"):
            read(made, key="notes")


def test_the_table_that_would_do_is_named(pred, simulated_cells):
    made = ptd.tl.response(pred, reference=simulated_cells, key_added="de", copy=True)
    made.uns["response"] = "text"
    with pytest.raises(ConfigError, match=r"those of tl\.response here: 'de'"):
        ptd.tl.response_genes(made)
    assert len(ptd.tl.response_genes(made, key="de", fdr=1)) > 0
