"""NVIDIA's machine code, read from nvdisasm's text: instructions and loops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_ZERO = re.compile(r",\s*RZ\b")

_MATRIX = re.compile(r"HGMMA|HMMA|UTC\w*MMA")
_MULTIPLY_ADD = re.compile(r"FFMA2?")


class Instruction(NamedTuple):
    """One line: "HGMMA.64x64x16.F32.BF16" and "R88, gdesc[UR24], R88"."""

    opcode: str
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]


class Loop(NamedTuple):
    """What a loop of a kernel executes in an iteration, in instructions per warp."""

    instructions: int
    matrix_instructions: int = 0
    spills: int = 0  # that move spilled registers
    barriers: int = 0  # at which the program's warps wait for each other
    waits: int = 0  # at which a warp waits: barriers, and for products, loads, shuffles


class Code(NamedTuple):
    """Instructions in order, and the position of each label among them."""

    instructions: list[Instruction]
    labels: dict[str, int]


def parse(listing: str) -> Code:
    """The first kernel of nvdisasm's listing (`nvdisasm -c`)."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            instructions.append(Instruction(found[1], found[2]))
    return Code(instructions, labels)


def loops(code: Code) -> list[range]:
    """The innermost loops that multiply matrices, in order, each from the target of a backward branch to the branch."""
    return _loops(code, _MATRIX)


def count_loops(code: Code) -> list[Loop]:
    """The counts of the innermost loops that multiply matrices; without matrix instructions, of those that multiply."""
    ends = loops(code) or _loops(code, _MULTIPLY_ADD)
    return [count_instructions(code.instructions[loop.start : loop.stop]) for loop in ends]


def _loops(code: Code, stems: re.Pattern[str]) -> list[range]:
    """The innermost loops that have one of these instructions.

    What waits for a load in a loop of its own lies after the kernel's end, and its way back is none of these.
    """
    found: dict[int, int] = {}
    for position, instruction in enumerate(code.instructions):
        target = _TARGET.search(instruction.operands) if instruction.stem == "BRA" else None
        begin = code.labels.get(target[1], position + 1) if target else position + 1
        inside = {i.stem for i in code.instructions[begin : position + 1]}
        if any(map(stems.fullmatch, inside)) and "EXIT" not in inside:
            found[begin] = position + 1  # of several branches to the same place the last ends the loop
    return [
        range(begin, end)
        for begin, end in sorted(found.items())
        if not any(begin < other and found[other] <= end for other in found)
    ]


def count_instructions(instructions: Sequence[Instruction]) -> Loop:
    """The counts of a piece of code, on any architecture."""
    return Loop(
        instructions=len(instructions),
        matrix_instructions=sum(bool(_MATRIX.fullmatch(i.stem)) for i in instructions),
        spills=sum(map(_is_spill, instructions)),
        barriers=sum(i.stem == "BAR" for i in instructions),
        waits=sum(map(_is_waited_for, instructions)),
    )


def _is_spill(instruction: Instruction) -> bool:
    """A zero that is stored comes from no register: it is an argument of a call.

    Under Triton 3.6 the code for sm_120 has such a call beside each load by TMA.
    """
    return instruction.stem == "LDL" or (instruction.stem == "STL" and not _ZERO.search(instruction.operands))


def _is_waited_for(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode.startswith(("BAR.", "WARPGROUP.DEPBAR", "SHFL", "MEMBAR")) or "TRYWAIT" in opcode
