"""Reads PTX text: the statements of its kernel, its parameters, and the strings of its assertions."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field


class Unsupported(Exception):  # noqa: N818 (as NotImplemented, it names a state)
    """PTX that the virtual GPU doesn't model; the message names the kernel, the line and the statement."""


@dataclass
class Kernel:
    """A kernel's text.

    Attributes:
        name: of the function.
        threads: of a program.
        params: (name, offset in bytes, bytes) of each parameter.
        statements: (line, text) of each statement of the body. "{" and "}" are scopes, "name:" is a label.
        strings: the bytes of global variables, by name.
    """

    name: str
    threads: int
    params: list[tuple[str, int, int]]
    statements: list[tuple[int, str]]
    strings: dict[str, bytes] = field(default_factory=dict)


_STATEMENT = re.compile(r"\s*(?:([{}])|([\w$]+):(?!:)|([^;]*);)")


def read(text: str) -> Kernel:
    """Read a module of one kernel.

    Raises:
        Unsupported: a module without exactly one kernel, or a parameter of an unknown form.
    """
    # Comments, and directives that end with their line; line numbers stay.
    bare = re.sub(r"//[^\n]*|^[ \t]*\.(?:loc|file|section|version|target|address_size)\b[^\n]*", "", text, flags=re.M)
    entries = [*re.finditer(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", bare, re.S)]
    if len(entries) != 1:
        raise Unsupported(f"a module of {len(entries)} kernels; the virtual GPU takes modules of one")
    name, declarations, directives = entries[0].groups()
    threads = re.search(r"\.reqntid\s+(\d+)", directives)
    if not threads:
        raise Unsupported(f"{name}: a kernel without .reqntid")
    strings = {
        found[1]: bytes(int(value) for value in found[2].split(","))
        for found in re.finditer(r"\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{(.*?)\}", bare, re.S)
    }
    statements = list(_statements(bare, entries[0].end()))
    return Kernel(name, int(threads[1]), _params(name, declarations), statements, strings)


def _params(kernel: str, declarations: str) -> list[tuple[str, int, int]]:
    params, offset = [], 0
    for declaration in filter(None, (part.strip() for part in declarations.split(","))):
        array = re.fullmatch(r"\.param\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", declaration)
        scalar = re.fullmatch(r"\.param\s+\.[busf](\d+)(?:\s+\.ptr\b.*?)?\s+([\w$]+)", declaration, re.S)
        if array:
            align, name, size = int(array[1]), array[2], int(array[3])
        elif scalar:
            align = size = int(scalar[1]) // 8
            name = scalar[2]
        else:
            raise Unsupported(f"{kernel}: the parameter {declaration}")
        offset = -(-offset // align) * align
        params.append((name, offset, size))
        offset += size
    return params


def _statements(text: str, start: int) -> Iterator[tuple[int, str]]:
    """The statements from an opening brace on until it closes."""
    newlines = [found.start() for found in re.finditer("\n", text)]
    depth = 1
    while found := _STATEMENT.match(text, start):
        start = found.end()
        brace, label, statement = found.groups()
        line = bisect(newlines, found.start(found.lastindex or 0)) + 1
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if not depth:
            return
        yield line, brace or (f"{label}:" if label else " ".join(statement.split()))


def operands(text: str) -> list[str]:
    """Split an instruction's operands at the commas outside of braces and brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts


def vector(text: str) -> list[str]:
    """The registers of an operand: of "{%r1, %r2}" both, of "%r1" one."""
    return [part.strip() for part in text.strip("{} ").split(",")]
