"""AMD's machine code, read from LLVM's assembly.

LLVM writes into comments to which loop a block belongs, and which instructions move spilled registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.kernels.sass import Loop

_CONTINUED = re.compile(r"\n {20,};")  # a comment of several lines
_BLOCK = re.compile(r"^(?:\.L(?P<label>BB\d+_\d+):|; %bb\.\d+:)(?P<comment>.*)")
_MEMBER = re.compile(r"in Loop: Header=(BB\d+_\d+) ")
_PARENT = re.compile(r"Parent Loop (BB\d+_\d+) ")
_INSTRUCTION = re.compile(r"^\t(?:[sv]|buffer|global|flat|ds|scratch)_\w+")

_PRODUCT = re.compile(r"^\tv_(?:mfma|wmma)")
_MULTIPLY_ADD = re.compile(r"^\tv_(?:pk_|dual_)?fmac?_f32")
# Spilled registers are in scratch memory, or on CDNA in accumulation registers. Wide moves have no comment.
_SPILL = re.compile(r"^\t(?:scratch_|buffer_.* off, s\[)|Folded (?:Spill|Reload)|Reload Reuse")
_BARRIER = re.compile(r"^\ts_barrier(?:_wait)?\b")
_WAIT = re.compile(r"^\ts_wait(?:cnt|_\w*cnt)\b")


class Code(NamedTuple):
    """The lines of the instructions in order, and for each loop those of its blocks, those of inner loops included."""

    instructions: list[str]
    loops: dict[str, list[str]]


def parse(assembly: str) -> Code:
    """The first kernel of an assembly listing. A loop's name is the label of its first block."""
    lines = _CONTINUED.sub(" ", assembly.split(".end_amdhsa_kernel")[0]).splitlines()
    blocks = {number: block for number, line in enumerate(lines) if (block := _BLOCK.match(line))}
    around: dict[str, list[str]] = {}  # loop -> itself and the loops around it
    for block in blocks.values():
        if "Loop Header" in block["comment"]:
            around[block["label"]] = [block["label"], *_PARENT.findall(block["comment"])]
    code = Code([], {name: [] for name in around})
    inside: list[str] = []
    for number, line in enumerate(lines):
        if block := blocks.get(number):
            member = _MEMBER.search(block["comment"])
            inside = around.get(block["label"]) or (around[member[1]] if member else [])
        elif _INSTRUCTION.match(line):
            code.instructions.append(line)
            for name in inside:
                code.loops[name].append(line)
    return code


def count(lines: Iterable[str]) -> Loop:
    """The counts of a piece of code."""
    lines = list(lines)
    patterns = {"matrix_instructions": _PRODUCT, "spills": _SPILL, "barriers": _BARRIER, "waits": _WAIT}
    return Loop(len(lines), **{name: sum(map(bool, map(p.search, lines))) for name, p in patterns.items()})


def loops(code: Code) -> list[Loop]:
    """The innermost loops that multiply matrices, in order; if there are none, those with multiply-adds."""
    for pattern in (_PRODUCT, _MULTIPLY_ADD):
        found = {name: set(map(id, lines)) for name, lines in code.loops.items() if any(map(pattern.search, lines))}
        inner = [name for name in found if not any(found[name] > other for other in found.values())]
        if inner:
            return [count(code.loops[name]) for name in inner]
    return []
