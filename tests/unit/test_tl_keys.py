"""Results are written under names that files keep, and read as what they are."""

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
