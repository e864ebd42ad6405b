"""Equations as MathML, which browsers show without any script."""

import re
from unicodedata import lookup

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.writers.html5 import HTML5Translator

_VARIANT = re.compile(r'<mi mathvariant="(double-struck|script)">([A-Z])</mi>')


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """An equation within a line."""
    writer.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """An equation of its own."""
    writer.body.append(f'<div class="math">{_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def _mathml(text: str, display: str) -> str:
    """Letters of other alphabets as themselves, since browsers no longer know their variants."""
    return _VARIANT.sub(
        lambda found: f"<mi>{_letter(*found.groups())}</mi>", convert(text, display=display)
    )


def _letter(variant: str, letter: str) -> str:
    name = f"{variant.upper()} CAPITAL {letter}"
    try:
        return lookup(f"MATHEMATICAL {name}")
    except KeyError:
        return lookup(name)  # those that were there before the others
