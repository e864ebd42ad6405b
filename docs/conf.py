"""Sphinx: pages in Markdown, reference from docstrings, equations as MathML; nothing is fetched."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("MPLBACKEND", "Agg")

from ext import mathml, reference
from ext.commands import commands_page
from ext.settings import settings_page
from sphinx.application import Sphinx

from perturbdiff import __version__

project = "perturbdiff"
author = "the authors of perturbdiff"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated/*.md"]  # these are parts of pages
html_theme = "furo"
smartquotes = False  # which would make dashes of --options
html_title = f"perturbdiff {release}"
html_copy_source = False
html_math_renderer = "mathml"
nitpicky = True
suppress_warnings = ["ref.python"]  # `bytes` is a type, and the name of two properties

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_custom_sections = ["Returns"]  # they begin with words, not with a type

# What other packages describe, and what of this one is nobody's business.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|pandas|pd|anndata|scipy|sklearn|lightning|matplotlib)\..*"),
    (r"py:.*", r"(pathlib|collections|typing|jaxtyping|torchmetrics|httpx|click|typer)\..*"),
    (r"py:class", r"Tensor|ndarray|Axes|Json|Predictor|Verify|Ways?|tuple\[str"),
    (r"py:.*", r"perturbdiff\.(\w+\.)*_\w+(\.\w+)*"),
]


def _write_pages() -> None:
    made = HERE / "generated"
    pages = {f"{name}.rst": text for name, text in reference.pages().items()}
    pages |= {"settings.md": settings_page(), "commands.md": commands_page()}
    made.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = made / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Write the pages that are made from the code, and say how to show equations and links."""
    _write_pages()
    app.add_html_math_renderer(
        "mathml", inline_renderers=(mathml.inline, None), block_renderers=(mathml.block, None)
    )
    app.connect("missing-reference", reference.resolve)
