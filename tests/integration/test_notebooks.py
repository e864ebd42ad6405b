"""Notebooks answer the question they open with, run as they stand, and keep what they showed."""

import re

import nbformat
import pytest

from notebooks.execute import NOTEBOOKS, ROOT, execute

MACHINE = re.compile(
    r"(?<![\w.:])/(?:home|root|work|mnt|Users|usr|opt|tmp|var)/"  # paths
    r"|\b\w+@[\w-]+:|0x[0-9a-f]{8,}"  # prompts, addresses of objects
)
LARGEST = 400_000


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def kept(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What the outputs of a cell are: a stream by its name, anything else by its forms."""
    return [
        {output.name} if output.output_type == "stream" else set(output.data)
        for output in cell.outputs
    ]


def text_of(cell):
    """What can be read in the outputs of a cell."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type != "error":
            parts += [text for form, text in output.data.items() if form.startswith("text/")]
    return "\n".join(parts)


def test_seven_are_numbered_and_named_in_the_readme():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02d}_" for number in range(1, 8)]
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in readme] == []


def test_it_opens_with_a_question(kept):
    first = kept.cells[0]
    assert first.cell_type == "markdown"
    title, *rest = first.source.splitlines()
    assert title.startswith("# ")
    assert title.endswith("?")
    assert any(rest), "and says in some lines how it is answered"


def test_cells_were_run_in_order_without_an_error_or_a_warning(kept):
    cells = code(kept)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
    for cell in cells:
        assert all(output.output_type != "error" for output in cell.outputs)
        assert {"stderr"} not in kinds(cell), text_of(cell)
        assert "Warning" not in text_of(cell)


def test_it_names_no_machine_and_is_small(path, kept):
    assert path.stat().st_size < LARGEST
    for cell in kept.cells:
        said = [cell.source, *([text_of(cell)] if cell.cell_type == "code" else [])]
        assert not [found for text in said for found in MACHINE.findall(text)]
        assert not cell.metadata


def test_links_lead_somewhere(path, kept):
    words = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", words)
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.notebook
@pytest.mark.slow
def test_it_runs_in_a_fresh_kernel_and_shows_what_is_kept(path, kept):
    ran = execute(path)
    assert [cell.source for cell in ran.cells] == [cell.source for cell in kept.cells]
    for now, before in zip(code(ran), code(kept), strict=True):
        assert kinds(now) == kinds(before), f"{now.source}\n{text_of(now)}"
