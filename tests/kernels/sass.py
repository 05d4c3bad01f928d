"""NVIDIA's machine code, read from nvdisasm's text: instructions, loops, and the work of a piece of code for an SM.

Instructions and loops are read for every architecture, the work for compute capability 9.0. The rates are from the CUDA
C++ Programming Guide's table of arithmetic throughput, and from the published peak of the tensor cores (4,096 dense
16-bit operations per cycle and SM). Instructions are counted for one warp, so code in which warps take different roles
(warp specialisation) isn't described by one number of warps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_ZERO = re.compile(r",\s*RZ\b")
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\.")

_MATRIX = re.compile(r"HGMMA|HMMA|UTC\w*MMA")
_MULTIPLY_ADD = re.compile(r"FFMA2?")

# All other arithmetic runs at half rate: integers, comparisons, selections, conversions.
_FULL_RATE = frozenset({"FFMA", "FADD", "FMUL", "IMAD", "HFMA2", "HADD2", "HMUL2"})
_SHARED = frozenset({"LDS", "STS", "LDSM", "STSM", "ATOMS", "SHFL"})
_BRANCHES = frozenset({"BRA", "BRX", "CALL", "RET", "EXIT", "BSSY", "BSYNC"})
# These take a slot, and other units execute them: memory, barriers, the uniform datapath (all names with U).
_ELSEWHERE = frozenset(
    {"HGMMA", "MUFU", "WARPGROUP", "BAR", "SYNCS", "DEPBAR", "MEMBAR", "FENCE", "LDGDEPBAR", "LDG", "STG", "LDGSTS"}
    | {"LDC", "R2UR", "S2R", "S2UR", "ELECT", "VOTEU", "NOP", "WARPSYNC", "LDL", "STL", "ERRBAR", "CCTL", "RED"}
)

LANES = 32
PRODUCT_RATE = 4096  # dense 16-bit operations of the tensor cores per cycle and SM
SHARED_RATE = 128  # bytes of shared memory per cycle and SM
QUADRANTS = 4  # each issues one instruction of one warp per cycle


class Instruction(NamedTuple):
    """One line: "HGMMA.64x64x16.F32.BF16" and "R88, gdesc[UR24], R88"."""

    opcode: str
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class Work:
    """The work of a piece of code for an SM.

    Attributes:
        instructions: issue slots, per warp.
        full_rate, half_rate: of these, float32 arithmetic (128 lanes per cycle and SM) and other arithmetic (64).
        special: exponentials, logarithms, reciprocals (16 lanes).
        products: operations of the tensor cores, per warpgroup.
        operand_bytes: what these read from shared memory, per warpgroup.
        shared_bytes: of loads, stores and shuffles, per warp.
        barriers: at which the program's warps wait for each other.
        waits: all for which a warp stands still: barriers, products, shuffles, loads.
        branches: per warp.
    """

    instructions: int = 0
    full_rate: int = 0
    half_rate: int = 0
    special: int = 0
    products: int = 0
    operand_bytes: int = 0
    shared_bytes: int = 0
    barriers: int = 0
    waits: int = 0
    branches: int = 0

    def cycles(self, warps: int) -> dict[str, float]:
        """The cycles for which each unit of an SM is busy with this code, for a program of `warps` warps."""
        per_quadrant, groups = warps / QUADRANTS, warps / 4
        return {
            "tensor": self.products * groups / PRODUCT_RATE,
            "issue": self.instructions * per_quadrant,
            "float": self.full_rate * per_quadrant,
            "integer": self.half_rate * 2 * per_quadrant,
            "special": self.special * 8 * per_quadrant,
            "shared": (self.shared_bytes * warps + self.operand_bytes * groups) / SHARED_RATE,
        }


class Loop(NamedTuple):
    """What a loop of a kernel executes in an iteration, in instructions per warp.

    Attributes:
        instructions: all of them.
        matrix_instructions: those that multiply matrices.
        spills: those that move spilled registers.
        barriers: those at which the program's warps wait for each other.
        waits: those at which a warp waits: barriers, and for products, loads, shuffles.
    """

    instructions: int
    matrix_instructions: int = 0
    spills: int = 0
    barriers: int = 0
    waits: int = 0


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


def events(instructions: Iterable[Instruction]) -> str:
    """The events in order, a letter each.

    H is a part of a matrix product, | a wait for products, e an exponential, b a barrier of threads, a an arrival at a
    barrier in memory, w a wait for one.
    """
    marks = {
        "HGMMA": "H", "WARPGROUP.DEPBAR": "|", "MUFU.EX2": "e", "BAR.SYNC": "b", "SYNCS.ARRIVE": "a",
        "SYNCS.PHASECHK": "w",
    }  # fmt: skip
    return "".join(mark for i in instructions for name, mark in marks.items() if i.opcode.startswith(name))


def count(instructions: Iterable[Instruction]) -> Work:
    """The work of a piece of code that executes each instruction once."""
    total: Counter[str] = Counter()
    for instruction in instructions:
        stem = instruction.stem
        total["instructions"] += 1
        total["full_rate"] += stem in _FULL_RATE
        total["special"] += stem == "MUFU"
        total["branches"] += stem in _BRANCHES
        total["barriers"] += stem == "BAR"
        total["waits"] += _is_waited_for(instruction)
        if stem == "HGMMA":
            total["products"] += _product(instruction)
            total["operand_bytes"] += _operand_bytes(instruction)
        elif stem in _SHARED:
            total["shared_bytes"] += _shared_bytes(instruction)
        named = _FULL_RATE | _SHARED | _BRANCHES | _ELSEWHERE
        total["half_rate"] += stem not in named and not stem.startswith("U")
    return Work(**total)


def cycles_in_order(loop: Sequence[Instruction]) -> float:
    """The cycles of an iteration of a loop for four warps that have a multiprocessor to themselves.

    They issue in order, all instructions at the same pace, and wait for products where the code does. Products run one
    after the other.
    """
    others = [instruction for instruction in loop if instruction.stem != "HGMMA"]
    pace = max(count(others).cycles(QUADRANTS).values()) / max(len(others), 1)
    now, free, ends = 0.0, 0.0, [0.0]  # ends of the groups of products that code can wait for
    for _ in range(3):
        begin = now
        for instruction in loop:
            if instruction.stem == "HGMMA":
                free = max(free, now) + _product(instruction) / PRODUCT_RATE
                if "gsb0" in instruction.operands:
                    ends.append(free)
                continue
            if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
                left = int(instruction.operands.split(",")[1], 16)  # groups that may still run
                now = max(now, ends[max(-1 - left, -len(ends))])
            now += pace
    return now - begin


def _is_waited_for(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode.startswith(("BAR.", "WARPGROUP.DEPBAR", "SHFL", "MEMBAR")) or "TRYWAIT" in opcode


def _product(instruction: Instruction) -> int:
    shape = _SHAPE.search(instruction.opcode)
    assert shape, instruction
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k


def _operand_bytes(instruction: Instruction) -> int:
    """The bytes that a product reads from shared memory: the right operand, and the left one unless in registers."""
    shape = _SHAPE.search(instruction.opcode)
    assert shape, instruction
    m, n, _ = map(int, shape.groups())
    row = 32  # bytes of a row of an operand, whatever its type
    left_in_registers = instruction.operands.split(",")[1].strip().startswith("R")
    return row * (n if left_in_registers else m + n)


def _shared_bytes(instruction: Instruction) -> int:
    parts = instruction.opcode.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 128 * int(parts[-1]) if parts[-1].isdigit() else 128  # the number of 8 x 8 matrices
    width = next((int(p) for p in reversed(parts) if p.isdigit()), 32)
    width = next((int(p[1:]) for p in parts if re.fullmatch(r"[US]\d+", p)), width)
    return LANES * width // 8
