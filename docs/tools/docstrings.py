"""Prepares docstrings for the reference: fences worked examples, and gives every parameter its own entry."""

import re
from collections.abc import Sequence
from typing import Any

import griffe

# `a, b: text` or `a, ..., c: text` in a section, with the continuation lines of the text.
_SHARED = re.compile(r"^( {4})(\w+(?:, (?:\w+|\.\.\.))+)(: .*(?:\n {8}.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Prepares each docstring before griffe parses it as Google's style."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            parameters = [p.name for p in obj.parameters] if isinstance(obj, griffe.Function) else []
            obj.docstring.value = prepared(obj.docstring.value, parameters)


def prepared(text: str, parameters: Sequence[str] = ()) -> str:
    """Fence doctests, repeat an entry of several names for each name, and make sources paragraphs."""

    def each(entry: re.Match[str]) -> str:
        return "\n".join(entry[1] + name + entry[3] for name in _names(entry[2].split(", "), parameters))

    text = "\n\n".join(_fenced(paragraph) for paragraph in text.split("\n\n"))
    text = _SHARED.sub(each, text)
    return re.sub(r"^Source: (.*(?:\n +.*)*)", _source, text, flags=re.MULTILINE)


def _names(listed: list[str], parameters: Sequence[str]) -> Sequence[str]:
    """The names of an entry. Dots stand for the parameters between the names beside them."""
    if "..." not in listed:
        return listed
    place = listed.index("...")
    first, last = (parameters.index(listed[i]) for i in (place - 1, place + 1))
    return [*listed[:place], *parameters[first + 1 : last], *listed[place + 1 :]]


def _fenced(paragraph: str) -> str:
    """The paragraph, fenced from its first `>>>` on."""
    lines = paragraph.split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith(">>> ")), None)
    if first is None:
        return paragraph
    return "\n".join([*lines[:first], "", "```pycon", *lines[first:], "```"])


def _source(found: re.Match[str]) -> str:
    return "*Source*: " + re.sub(r"\n +", "\n", found[1])
