"""Pages of the documentation: what they quote stands in a report, what they name is there."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import perturbdiff as ptd
from perturbdiff import metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
REPORTS = ROOT / "benchmarks" / "reports"
KANG = {
    "ceiling": "ceiling (split halves)",
    "`SetDiffusion`": "SetDiffusion",
    "`effect_prior`, transported": "effect_prior, transported",
    "`mixture_log_ratio`, transported": "mixture_log_ratio, transported",
    "`mixture_log_ratio`, shifted": "mixture_log_ratio, shifted",
    "`mean_shift`, shifted": "mean_shift, shifted",
    "`copy_control`": "copy_control",
}


def reference():
    """The module that writes the pages of the reference."""
    path = ROOT / "docs" / "ext" / "reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_public_has_a_place_in_the_reference():
    pages = reference().pages()
    rooms = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "perturbdiff").rglob("__init__.py")
    }
    assert {*pages} == rooms - {"perturbdiff.cli"} | {"errors"}  # commands have their own page
    for room in rooms & {*pages}:
        module = importlib.import_module(room)
        for name in module.__all__:
            if isinstance(getattr(module, name), ModuleType):
                continue  # a room of its own
            here = f":: {room}.{name}\n" in pages[room]
            assert here or f"`{name} <perturbdiff." in pages[room], f"{room}.{name}"
    assert set(re.findall(r"^generated/([\w.]+)$", PAGES["index"], re.M)) == {*pages}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(text):
    """Numbers of each row of the first table that has it, by the words of its first column."""
    found = {}
    for line in text.splitlines():
        if line.startswith("|"):
            name, *numbers = cells(line)
            found.setdefault(name, numbers)
    return found


def test_figures_of_a_good_number_are_those_of_the_report():
    quoted = rows(PAGES["scores"].partition("## What a good number is")[2])
    report = rows((REPORTS / "quality_kang2018.md").read_text())
    places = [0, 1, 2, 3, 5, 6, 7, 8]  # without MMD, and without what was ranked first
    for here, there in KANG.items():
        assert quoted[here] == [report[there][place] for place in places], here


@pytest.mark.parametrize("page", sorted(PAGES))
def test_reports_that_are_named_are_there(page):
    for name in re.findall(r"benchmarks/reports/[\w.]+\.md", PAGES[page]):
        assert (ROOT / name).is_file(), name


def test_every_score_is_explained_with_its_direction():
    for info in metrics.METRICS.values():
        line = next((x for x in PAGES["scores"].splitlines() if f"| `{info.name}` |" in x), None)
        if info.name != "ranked_first":  # only in reports
            assert line is not None, info.name
            assert ("higher" if info.higher_is_better else "lower") in cells(line)[2]


def test_branching_costs_what_the_page_says():
    assert ptd.Branch(k=4, share=40).cost(50) == pytest.approx(1.6)
    assert "4 candidates that share 40 of 50 steps cost 1.6" in PAGES["method"]


def test_pages_are_listed():
    listed = set(re.findall(r"^(\w+)$", PAGES["index"], re.M))
    assert listed == set(PAGES) - {"index"}
