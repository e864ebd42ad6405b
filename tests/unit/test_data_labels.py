"""Labels, doses and times: what is one thing, what is several, and what is refused."""

import numpy as np
import pandas as pd
import pytest

from perturbdiff._errors import LabelError, UnknownKeyError
from perturbdiff.data import Condition, canonical, label_of
from perturbdiff.data._labels import looks_missing, near_duplicates, read_column
from perturbdiff.data._numbers import read_numbers


@pytest.mark.parametrize(
    ("label", "members"),
    [
        ("A", ("A",)),
        ("B+A", ("A", "B")),
        ("B + A", ("A", "B")),
        ("A+A", ("A",)),
        ("ctrl", ()),
        (" ctrl ", ()),
        ("ctrl+ctrl", ()),
        ("DMSO+A+ctrl", ("A",)),
        ("(+/-)-ibuprofen", ("(+/-)-ibuprofen",)),
        ("(+/-)-ibuprofen+A", ("(+/-)-ibuprofen", "A")),
        ("Ca2+", ("Ca2+",)),
        ("+A", ("+A",)),
        ("Na++Ca2+", ("Ca2+", "Na+")),
        ("CD14+ Monocytes", ("CD14+ Monocytes",)),
        ("CTLA4/PD1", ("CTLA4/PD1",)),
        ("a)+b", ("a)", "b")),
    ],
)
def test_members_of_a_label(label, members):
    assert canonical(label, control=("ctrl", "DMSO")) == members
    assert canonical(label_of(members, control="ctrl"), control="ctrl") == members


def test_a_label_that_would_not_read_back_is_refused():
    with pytest.raises(LabelError, match="does not split at '\\+'"):
        canonical("B)+A(")
    with pytest.raises(LabelError, match="does not split"):
        label_of(["A+B", "C"])
    with pytest.raises(LabelError, match="no separator was declared"):
        label_of(["A", "B"], separator=None)


FORMS = {
    "object": lambda x: pd.Series(x, dtype=object),
    "category": lambda x: pd.Series(pd.Categorical(x, categories=["unused", "b", "a"])),
    "string": lambda x: pd.Series(x, dtype="string"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_column_reads_the_same_in_every_dtype(form):
    obs = pd.DataFrame({"key": FORMS[form](["b", None, "a", "b"])})
    column = read_column(obs, "key")
    assert column.levels == ("a", "b")
    assert column.codes.tolist() == [1, -1, 0, 1]


@pytest.mark.parametrize("values", [[1, 2], [1.0, 2.0], ["1", "2"], [np.int8(1), np.float32(2)]])
def test_whole_numbers_are_one_label_with_or_without_a_point(values):
    obs = pd.DataFrame({"donor": pd.Series([*values, None], dtype=object)})
    assert read_column(obs, "donor").levels == ("1", "2")


def test_a_column_there_twice_is_refused():
    obs = pd.DataFrame(np.zeros((2, 2)), columns=["key", "key"])
    with pytest.raises(LabelError, match="2 columns called 'key'"):
        read_column(obs, "key")


def test_labels_that_nearly_agree_are_found():
    assert near_duplicates(["stim", "Stim ", "ctrl"]) == [("Stim ", "stim")]
    assert near_duplicates(["B cell", "B cells", "B_cell", "T cell"]) == [
        ("B cell", "B cells", "B_cell")
    ]
    assert near_duplicates(["KLF1+ MAP2K6", "KLF1+MAP2K6"]) == [("KLF1+ MAP2K6", "KLF1+MAP2K6")]


@pytest.mark.parametrize(
    "labels",
    [["CD4+", "CD4-"], ["drug 1.0", "drug 10"], ["A_1_1", "A_11"], ["HLA-A", "HLA-B"], ["a", "b"]],
)
def test_labels_that_differ_are_left_alone(labels):
    assert near_duplicates(labels) == []


def test_labels_that_look_missing_are_found():
    assert looks_missing(["A", "NaN", " none", "Unassigned", "unknown gene"]) == [
        "NaN",
        " none",
        "Unassigned",
    ]


def numbers(values, **options):
    index = list("abcdef"[: len(values)])
    obs = pd.DataFrame({"dose": pd.Series(values, index=index, dtype=object)})
    column = read_numbers(obs, "dose", **options)
    return [column.entries[code] if code >= 0 else None for code in column.codes], column.unit


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["10", 1, 0.1, None, "1e-1"], [10, 1, 0.1, None, 0.1]),
        ([np.float32(0.1), 0.1, "  .1 ", ""], [0.1, 0.1, 0.1, None]),
        (["6h", "24 h", np.nan], [6, 24, None]),
    ],
)
def test_one_number_however_written(values, expected):
    read, _ = numbers(values)
    assert read == [None if x is None else (float(x),) for x in expected]


def test_float32_columns_give_the_numbers_as_written():
    obs = pd.DataFrame({"dose": np.array([0.1, 0.3], np.float32)})
    assert read_numbers(obs, "dose").entries == ((0.1,), (0.3,))


def test_a_number_for_each_member():
    assert numbers(["1+2", "1e+1", "0.5"], separator="+")[0] == [(1.0, 2.0), (10.0,), (0.5,)]


def test_units_are_kept_and_never_mixed():
    assert numbers(["10uM", "1 uM"]) == ([(10.0,), (1.0,)], "uM")
    with pytest.raises(
        LabelError, match=r"not in the unit of the other values.*'10nM' \(cell 'b'\)"
    ):
        numbers(["10", "10nM"])
    with pytest.raises(LabelError, match="uM"):
        numbers(["10nM"], unit="uM")


@pytest.mark.parametrize("bad", ["low", "-1", "inf", "1,5", "1+x", True, -0.5])
def test_what_is_no_number_is_refused_with_its_row(bad):
    with pytest.raises(LabelError, match=r"not a number.*\(cell 'b'\)"):
        numbers([2, bad], separator="+")


def test_an_absent_column_is_named():
    with pytest.raises(UnknownKeyError, match=r"has no 'dosis'\. Did you mean 'dose'"):
        read_numbers(pd.DataFrame({"dose": [1]}), "dosis")


def test_names_of_conditions_are_unambiguous():
    different = [
        Condition(("A", "B"), ("T",)),
        Condition(("A",), ("B", "T")),
        Condition(('A", "B',), ("T",)),
        Condition(("A+B",), ("T",)),
        Condition(("A", "B"), ("T",), (1.0, 1.0)),
        Condition(("A", "B"), ("T",), (), 1.0),
        Condition((), ("T",)),
    ]
    assert len({condition.name for condition in different}) == len(different)
    assert sorted(different)[0].is_control
    assert str(different[4]) == "A and B in T, dose 1+1"
    assert str(different[-1]) == "control in T"
