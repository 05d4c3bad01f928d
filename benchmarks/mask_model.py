"""Bound the time that an H200 takes for the mask and the tile tables of a batch, by counts. Nothing is measured.

    python -m benchmarks.mask_model [--tokens 131072] [--head-dim 128]

For each launch from a mask's constructor to the tables of forward and backward: its programs, the bytes that they read
and write, the serial steps of the slowest program, and the comparisons of the kernel that orders tiles. The counts
follow the code of tritonpack/kernels/intervals.py and tables.py and use its constants. Causal self-attention, int64
ids and offsets, the tiles of a head dimension with four query heads per key head on Hopper.

The bound of a launch is the sum of four terms, as if nothing overlapped: the launch itself; the serial steps, times the
rounds in which multiprocessors take the programs; bytes; comparisons. What a program reads twice is counted once,
because the L1 cache holds it; all bytes count at the bandwidth of the device's memory, although most are in the L2
cache. Programs that order empty entries of the tables end at once and don't count.

Assumptions: 132 multiprocessors at 1.755 GHz; 4.8 TB/s; 1 us for a launch behind another one; 700 cycles for a
program's first access, because its data may lie in memory; 350 for each further one that depends on one before, which
finds its data in the L2 cache; 150 for a reduction or a scan over the threads of a program; 3 instructions for a
comparison; entries of the hash table are taken at random.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import triton
from rich.console import Console
from rich.table import Table

from tests.lengths import distributions
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import MOST_ORDERED, Cut, capacity, cut_rows
from tritonpack.kernels import intervals, tables

TARGET_US = 30.0
MULTIPROCESSORS, CLOCK, BYTES_PER_S = 132, 1.755e9, 4.8e12
LAUNCH_S, FIRST_CYCLES, ACCESS_CYCLES, REDUCTION_CYCLES = 1e-6, 700, 350, 150
LANES, INSTRUCTIONS = 128, 3  # instructions that a multiprocessor starts per cycle, and those of a comparison
ALL_REGISTERS = 65536  # of a multiprocessor
# Bounds of the registers of a thread, which a test compares with the binaries.
REGISTERS = {"offsets": 64, "edges": 64, "runs": 104, "transpose": 64, "chunks": 72, "begins": 64, "order": 64}
# By head dimension the cuts of forward, dQ, and the gradients of keys; equal ones share a table.
CUTS = {
    64: (Cut(32, 64, 128), Cut(16, 64, 64), Cut(64, of_keys=True)),
    128: (Cut(32, 64, 128), Cut(64, of_keys=True)),
    256: (Cut(128, 64, 128), Cut(128, 32, 128), Cut(128, of_keys=True)),
}
INT, ID = 4, 8  # bytes


class Launch(NamedTuple):
    """What a launch does.

    Attributes:
        programs, threads: their number, and the threads of each.
        bytes: that all programs load and store.
        accesses, reductions: those of the slowest program that wait for one before.
        comparisons: of all programs.
    """

    kernel: str
    programs: int
    threads: int
    bytes: int
    accesses: int
    reductions: int
    comparisons: int = 0

    @property
    def rounds(self) -> int:
        """How often a multiprocessor takes programs, as many at once as fit."""
        fit = min(2048 // self.threads, ALL_REGISTERS // (self.threads * REGISTERS[self.kernel]))
        return -(-self.programs // (MULTIPROCESSORS * fit))

    @property
    def seconds(self) -> float:
        """The bound of the launch's time."""
        cycles = FIRST_CYCLES + (self.accesses - 1) * ACCESS_CYCLES + self.reductions * REDUCTION_CYCLES
        work = INSTRUCTIONS * self.comparisons / (MULTIPROCESSORS * LANES)
        return LAUNCH_S + (self.rounds * cycles + work) / CLOCK + self.bytes / BYTES_PER_S


def offsets(lengths: Sequence[int]) -> Launch:
    """The kernel that builds a mask and its transpose from offsets."""
    total, steps = sum(lengths), len(lengths).bit_length()
    programs = triton.cdiv(total, intervals.OFFSET_ROWS)
    # Rows of a warp lie in few documents, whose offsets fill few sectors of 32 bytes: 2, and more for short documents.
    documents = min(32, 1 + 32 * len(lengths) // total)
    sectors = 2 + documents * ID // 32
    loads = 2 * steps + 6
    checks = triton.cdiv(len(lengths) + 1, programs * intervals.OFFSET_ROWS)
    read = loads * sectors * 32 * triton.cdiv(total, 32) + 4 * ID * checks * programs * intervals.OFFSET_ROWS
    return Launch("offsets", programs, 128, read + 6 * INT * total, accesses=steps + 1 + 2 * checks, reductions=2)


def runs(lengths: Sequence[int], *, checked: bool) -> list[Launch]:
    """The two kernels of position ids, or, `checked`, of segment ids, with a hash table that the first one fills."""
    total = sum(lengths)
    programs = triton.cdiv(total, intervals.RUN_ROWS)
    slots = triton.next_power_of_2(2 * total) if checked else 0
    steps = triton.cdiv(programs, intervals.LOOK)  # the others before a program, and those after it
    edges = Launch("edges", programs, 128, ID * total + 3 * INT * programs + INT * slots, accesses=1, reductions=3)
    read = ID * total + 3 * INT * programs * programs
    written = 6 * INT * total
    accesses, reductions = 2 + steps, 4 + 2 * steps
    if checked:
        # An exchange with the table, of 32 bytes a row, and a look at the entry. If entries are taken at random, the
        # slowest of n searches finds about log(n) / log(slots / n) that are taken.
        tries = 1 + math.ceil(math.log(len(lengths)) / math.log(slots / len(lengths)))
        read += tries * 32 * total
        accesses, reductions = accesses + 2 * tries, reductions + tries + 2
    threads = 32 * intervals.RUN_WARPS
    return [edges, Launch("runs", programs, threads, read + written, accesses, reductions)]


def transpose(total: int) -> Launch:
    """The kernel of transposes, which checks given bounds, too."""
    steps, programs = total.bit_length(), triton.cdiv(total, intervals.OFFSET_ROWS)
    read = 2 * steps * 64 * triton.cdiv(total, 32)  # keys of a warp read neighbouring bounds
    checked = 2 * INT * total
    return Launch("transpose", programs, 128, read + checked + 2 * INT * total, accesses=steps + 1, reductions=1)


def tile_tables(lengths: Sequence[int], cuts: Sequence[Cut]) -> list[Launch]:
    """The three kernels of tile tables."""
    total, mask = sum(lengths), BlockDiagonalMask.from_seqlens(lengths)
    halo = max(cut.threshold for cut in cuts)
    window = max(tables.WINDOW, triton.next_power_of_2(4 * halo))
    chunks = triton.cdiv(total, window - 2 * halo)
    threads = 32 * tables.WARPS
    rows = 2 * INT * window
    number = chunks * len(cuts)
    steps = triton.cdiv(chunks, tables.SUMMARIES)
    capacities = [capacity(mask, cut) for cut in cuts]
    used = [int((found[:, 0] < found[:, 1]).sum()) for found in (cut_rows(mask, cut) for cut in cuts)]
    stride = triton.cdiv(max(capacities) + 1, 16) * 16
    blocks = [triton.cdiv(n, tables.TILES) for n in used]
    groups = [n >> max(0, math.ceil(math.log2(n / MOST_ORDERED))) for n in used]
    others = triton.cdiv(max(groups), tables.OTHERS)
    # The bounds of all groups for each block of tiles; those of each tile's rows, and of the keys behind.
    pairs = [
        block * tables.TILES * triton.cdiv(n, tables.OTHERS) * tables.OTHERS
        for block, n in zip(blocks, groups, strict=True)
    ]
    compared = sum(2 * INT * n // tables.TILES for n in pairs)
    looked = sum(2 * INT * n * (cut.rows + cut.block) for n, cut in zip(used, cuts, strict=True) if cut.block)
    gaps = max(
        triton.cdiv(cut.rows - 1, tables.STEP) + triton.cdiv(cut.block, tables.STEP) for cut in cuts if cut.block
    )
    return [
        Launch("chunks", number, threads, number * (rows + 3 * INT), accesses=1, reductions=6),
        Launch(
            "begins", number, threads, number * (rows + 3 * INT * chunks) + 3 * INT * sum(used),
            accesses=2 + steps, reductions=5 + 4 * steps,
        ),
        Launch(
            "order", sum(blocks), threads, compared + looked + 3 * INT * stride * len(cuts),
            accesses=3 + others + gaps, reductions=1 + others + gaps, comparisons=sum(pairs),
        ),
    ]  # fmt: skip


SOURCES: dict[str, Callable[[Sequence[int]], list[Launch]]] = {
    "offsets": lambda lengths: [offsets(lengths)],
    "position ids": lambda lengths: runs(lengths, checked=False),
    "segment ids": lambda lengths: runs(lengths, checked=True),
    "bounds": lambda lengths: [transpose(sum(lengths))],
}


def microseconds(lengths: Sequence[int], head_dim: int) -> dict[str, float]:
    """By source of the mask the bound of all its launches, up to the tables of forward and backward."""
    of_tables = sum(x.seconds for x in tile_tables(lengths, CUTS[head_dim]))
    return {name: 1e6 * (of_tables + sum(x.seconds for x in build(lengths))) for name, build in SOURCES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of the batch")
    parser.add_argument("--head-dim", type=int, choices=CUTS, default=128)
    options = parser.parse_args(arguments)
    parts = Table("lengths", "launch", "programs", "rounds", "MB", "accesses", "reductions", "comparisons", "us")
    sums = Table("lengths", *SOURCES, title=f"microseconds up to the tables; the target is {TARGET_US:.0f}")
    for name, lengths in distributions(options.tokens).items():
        found = {x.kernel: x for build in SOURCES.values() for x in build(lengths)}
        for x in [*found.values(), *tile_tables(lengths, CUTS[options.head_dim])]:
            parts.add_row(
                name, x.kernel, f"{x.programs}", f"{x.rounds}", f"{x.bytes / 1e6:.1f}", f"{x.accesses}",
                f"{x.reductions}", f"{x.comparisons:,}", f"{1e6 * x.seconds:.1f}",
            )  # fmt: skip
        parts.add_section()
        sums.add_row(name, *(f"{us:.1f}" for us in microseconds(lengths, options.head_dim).values()))
    console = Console(width=130)
    console.print(parts)
    console.print(sums)


if __name__ == "__main__":
    main()
