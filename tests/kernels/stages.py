"""The pipelined loads of a kernel, read from Triton's intermediate form (TTGIR).

Triton keeps the stages of a load in one buffer of shared memory, whose first dimension counts them. TMA writes only to
addresses that are multiples of 128 bytes, so a stage that TMA fills needs a multiple of 128 bytes.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

_BUFFER = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<([^>]+)>")
_STAGE = re.compile(r"ttg\.memdesc_index .*!ttg\.memdesc<([^>]+)> -> !ttg\.memdesc<([^>]+)>")
_TMA_LOAD = re.compile(r"ttng\.async_tma_(?:copy_global_to_local|gather)\b.* -> !ttg\.memdesc<([^>]+)>")
_LOOP = re.compile(r"^(\s*).*\bscf\.for\b.*\{$")
_SHAPE = re.compile(r"((?:\d+x)+)[a-z]+(\d+)")

TMA_ALIGNMENT = 128  # bytes


class Stage(NamedTuple):
    """A buffer of a pipelined load: how many stages it has, the bytes of each, and whether TMA fills it."""

    number: int
    bytes: int
    by_tma: bool

    @property
    def is_misaligned(self) -> bool:
        """Whether TMA would have to write a stage to an address that it doesn't take."""
        return self.by_tma and self.number > 1 and self.bytes % TMA_ALIGNMENT != 0


def read_loads(ttgir: str) -> tuple[tuple[Stage, ...], int]:
    """The buffers of pipelined loads, and the number of TMA loads in loops that aren't pipelined.

    The buffers don't include the barriers that the loads signal (64-bit integers).
    """
    stage_of = dict(_STAGE.findall(ttgir))
    targets = _tma_targets(ttgir)
    every = {target for target, _ in targets}
    stages = []
    for buffer in _BUFFER.findall(ttgir):
        if buffer in stage_of and "xi64" not in buffer:
            (number, *_), bits = _shape(buffer)
            stages.append(Stage(number, prod(_shape(stage_of[buffer])[0]) * bits // 8, stage_of[buffer] in every))
    staged = set(stage_of.values())
    return tuple(stages), sum(in_loop and target not in staged for target, in_loop in targets)


def _tma_targets(ttgir: str) -> list[tuple[str, bool]]:
    """For each TMA load the type of what it fills, and whether it is in a loop."""
    targets: list[tuple[str, bool]] = []
    loops: list[str] = []  # the indentations of the loops around a line
    for line in ttgir.splitlines():
        if loops and line.startswith(f"{loops[-1]}}}"):
            loops.pop()
        if loop := _LOOP.match(line):
            loops.append(loop[1])
        elif load := _TMA_LOAD.search(line):
            targets.append((load[1], bool(loops)))
    return targets


def _shape(buffer: str) -> tuple[list[int], int]:
    """The shape of a buffer and the bits of an element, from "2x32x128xbf16, #shared"."""
    found = _SHAPE.match(buffer)
    assert found, buffer
    return [int(size) for size in found[1].split("x")[:-1]], int(found[2])
