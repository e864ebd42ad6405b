"""Equations as MathML, which browsers show without any script."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.writers.html5 import HTML5Translator


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """An equation within a line."""
    writer.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """An equation of its own."""
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
