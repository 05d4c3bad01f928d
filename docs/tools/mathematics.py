"""A Markdown extension: formulas become MathML when the site is built, so that pages need no script to show them."""

import html
import re
from typing import Any

import math_core
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

# What pymdownx.arithmatex makes of `$...$` and `$$...$$`.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


class _Formulas(Postprocessor):
    converter = math_core.LatexToMathML()

    def run(self, text: str) -> str:
        return _FORMULA.sub(self.mathml, text)

    def mathml(self, found: re.Match[str]) -> str:
        block = found[1] == "div"
        formula = self.converter.convert_with_local_state(html.unescape(found[2]), displaystyle=block)
        return f'<div class="formula">{formula}</div>' if block else formula


class _Mathematics(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.postprocessors.register(_Formulas(md), "mathematics", 0)  # last: raw HTML is put back before it


def makeExtension(**options: Any) -> Extension:  # noqa: N802
    """The extension, by the name that Markdown asks for."""
    return _Mathematics(**options)
