"""Rank kernels without a GPU: bounds of the time that a batch takes on an H100 or H200, from their machine code.

    python -m benchmarks.instruction_model [--kernels forward] [--head-dims 64 128 256] [--candidates] [--gluon]
                                           [--csv FILE]

All figures are inferred, never measured. The binary gives the work of each loop iteration for each unit of a
multiprocessor (read by tests/kernels/sass.py). Registers and shared memory give the number of programs that a
multiprocessor holds. The tile table of a batch gives the number of blocks of each tile. A block has two bounds:

- fast: all units work at the same time, so the busiest unit decides;
- slow: a program alternates between matrix products and all other work, and pays a latency for each wait; only other
  programs on the same multiprocessor fill the gaps.

Between them lies what the order of the code allows, "in order" (`cycles_in_order` of tests/kernels/sass.py): the cycles
of a block for a program alone, without latencies, if its warps run in step.

Kernels of the backend "gluon" (--gluon) have programs of two halves, a warpgroup each:

- fast: the busiest unit decides, or a half that has the multiprocessor to itself; work outside of the loops is free;
- slow: the halves run one after the other, in the order of the code, and pay the latencies. Forward pays none for first
  loads, because its programs are persistent.

Loads share the bandwidth of the L2 cache: 64 bytes per cycle and multiprocessor in the fast bound; in the slow bound
their share of 5.5 TB/s, which others have measured. Tiles with few rows wait for these loads.

Assumptions: 132 multiprocessors at 1.755 GHz (the boost clock; a GPU that multiplies matrices without pause runs
slower); all loads hit L2 and are requested early enough; 30 cycles per wait; 700 cycles for the first load of a loop
and for each of four memory accesses before the first loop; a program begins when another ends; programs that share a
multiprocessor leave no gap (docs/decisions/kernel-ladder.md compares this with published figures). The end of a batch
is simulated as in benchmarks/schedule.py, by multiprocessors that take one tile after the other. Masked blocks before
the full ones are counted in the loop of those after them, although they have a loop of their own.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.schedule import SLOTS, blocks_of, makespan
from benchmarks.tune import candidates
from tests.kernels.aot import Configuration, HopperConfiguration, Resources, disassemble, hopper_configurations
from tests.kernels.sass import QUADRANTS, Code, Work, count, cycles_in_order, loops, parse
from tests.lengths import distributions, visible_pairs
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.kernels.hopper import HOPPER_TILES
from tritonpack.kernels.tile_shapes import TileShape, key_gradient_kernels


class Range(NamedTuple):
    """Two bounds of a figure: if everything overlaps, and if a program does one thing after the other."""

    fast: float
    slow: float


CLOCK_HZ = 1.755e9
L2_BYTES = Range(64.0, 5.5e12 / CLOCK_HZ / SLOTS)  # per cycle and multiprocessor
WAIT, MEMORY, FIRST_ACCESSES = 30, 700, 4  # cycles, cycles, accesses one after the other

# Of one multiprocessor (compute capability 9.0).
REGISTERS, SHARED_BYTES, WARPS, PROGRAMS = 65536, 228 * 1024, 64, 32
RESERVED_BYTES = 1024  # of shared memory, by the driver, for each program

# The number of matrix products that a kernel computes; each visible pair takes part in each of them.
PRODUCTS: dict[str, int] = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}

GLUON = "gluon "  # before the names of the kernels of the backend "gluon"
BATCHES = ("one 16k", "one", "skewed", "openchat", "stdlib", "flan", "tiny")


def residents(registers: int, shared_bytes: int, warps: int) -> int:
    """The number of programs that a multiprocessor holds at a time; 0 if one program doesn't fit."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // QUADRANTS // per_warp * QUADRANTS // warps
    by_shared = SHARED_BYTES // (-(-shared_bytes // 128) * 128 + RESERVED_BYTES)
    return min(by_registers, by_shared, WARPS // warps, PROGRAMS)


@dataclass(frozen=True)
class Model:
    """The work of a compiled kernel.

    Attributes:
        configuration, resources: the kernel that was compiled, and its registers and shared memory.
        full: the work of an iteration of the shortest loop, which is over blocks that need no masking.
        masked: the work of an iteration of the next longer loop, over blocks that need masking; the same loop if the
            kernel has one loop.
        rest: the work before the first loop and after the last.
        entry: the work between two loops, the largest of these.
        full_in_order: the cycles of `full` for four warps.
    """

    configuration: Configuration | HopperConfiguration
    resources: Resources
    masked: Work
    full: Work
    rest: Work
    entry: Work
    full_in_order: float = 0.0

    @property
    def name(self) -> str:
        return self.configuration.kernel

    @property
    def tile_shape(self) -> TileShape:
        return self.configuration.tile

    @property
    def warps(self) -> int:
        return self.configuration.tile.num_warps

    @property
    def residents(self) -> int:
        return residents(self.resources.registers, self.resources.shared_bytes, self.warps)

    @property
    def loaded_bytes(self) -> int:
        """The bytes of a block's two operands, with 16 bits per element."""
        tile = self.configuration.tile
        rows = tile.block_n if self.configuration.kernel in ("forward", "dq") else tile.block_m
        return 2 * rows * 2 * triton.next_power_of_2(self.configuration.head_dim)

    def blocks(self) -> tuple[Range, Range]:
        """Cycles of a multiprocessor for a block that needs no masking, and for one that does."""
        return self.iteration(self.full), self.iteration(self.masked)

    def iteration(self, work: Work) -> Range:
        """Cycles of a multiprocessor per block."""
        units = work.cycles(self.warps)
        loads = [self.loaded_bytes / rate for rate in L2_BYTES]
        others = max(cycles for unit, cycles in units.items() if unit != "tensor")
        alone = units["tensor"] + others + WAIT * work.waits
        fast = max(*units.values(), loads[0])
        return Range(fast, max(fast, alone / self.residents, loads[1]))

    def tile(self) -> Range:
        """Cycles of a multiprocessor per tile with one loop, without its blocks."""
        return self._outside(self.rest, FIRST_ACCESSES + 1)

    def further_loop(self) -> Range:
        """Cycles of a multiprocessor for a second loop of a tile; loops without blocks cost nothing."""
        return self._outside(self.entry, 1)

    def _outside(self, work: Work, accesses: int) -> Range:
        units = work.cycles(self.warps)
        latency = WAIT * work.waits + MEMORY * accesses
        return Range(max(units.values()), max(max(units.values()), (units["issue"] + latency) / self.residents))


@dataclass(frozen=True)
class HopperModel(Model):
    """The work of a compiled kernel of the backend "gluon": full and masked loops are those of a half.

    Attributes:
        masked_in_order: the cycles of `masked` for four warps.
    """

    masked_in_order: float = 0.0

    @property
    def name(self) -> str:
        return GLUON + self.configuration.kernel

    @property
    def tile_shape(self) -> TileShape:
        shape = self.configuration.tile
        return replace(shape, heads=HOPPER_TILES[self.configuration.head_dim].heads) if self._persistent else shape

    @property
    def warps(self) -> int:
        return 2 * QUADRANTS  # those that compute

    @property
    def residents(self) -> int:
        return 1

    @property
    def _persistent(self) -> bool:
        return self.configuration.kernel == "forward"

    def blocks(self) -> tuple[Range, Range]:
        found = []
        for work, alone in ((self.full, self.full_in_order), (self.masked, self.masked_in_order)):
            loads = [self.loaded_bytes / rate for rate in L2_BYTES]
            fast = max(*work.cycles(self.warps).values(), alone, loads[0])
            found.append(Range(fast, max(fast, 2 * (alone + WAIT * work.waits), loads[1])))
        return found[0], found[1]

    def tile(self) -> Range:
        latency = 0 if self._persistent else MEMORY * (FIRST_ACCESSES + 1)
        return Range(0.0, self.rest.cycles(QUADRANTS)["issue"] + latency)  # each half executes a half of this code

    def further_loop(self) -> Range:
        return Range(0.0, 0.0)


def examine(configuration: Configuration | HopperConfiguration) -> Model:
    """Compile a configuration for sm_90 and read its machine code.

    Raises:
        ValueError: it has no loop that multiplies matrices on the tensor cores of sm_90.
    """
    resources, listing = disassemble(configuration)
    code = parse(listing)
    bodies = loops(code)
    if not bodies:
        raise ValueError(f"{configuration} has no loop with warpgroup products; the model is one of sm_90 alone.")
    full, *masked = sorted(bodies, key=len)
    if isinstance(configuration, HopperConfiguration):
        longest = masked[-1]
        ends = [0, *itertools.chain(*((body.start, body.stop) for body in bodies)), len(code.instructions)]
        return HopperModel(
            configuration=configuration,
            resources=resources,
            masked=_work(code, longest),
            full=_work(code, full),
            rest=_work(code, *(range(*pair) for pair in zip(ends[::2], ends[1::2], strict=True))),
            entry=Work(),
            full_in_order=cycles_in_order(code.instructions[full.start : full.stop]),
            masked_in_order=cycles_in_order(code.instructions[longest.start : longest.stop]),
        )
    between = [_work(code, range(a.stop, b.start)) for a, b in itertools.pairwise(bodies)]
    before, after = range(bodies[0].start), range(bodies[-1].stop, len(code.instructions))
    return Model(
        configuration=configuration,
        resources=resources,
        masked=_work(code, masked[0] if masked else full),
        full=_work(code, full),
        rest=_work(code, before, after),
        entry=max(between, key=lambda work: work.instructions, default=Work()),
        full_in_order=cycles_in_order(code.instructions[full.start : full.stop]),
    )


def _work(code: Code, *stretches: range) -> Work:
    return count(itertools.chain(*(code.instructions[part.start : part.stop] for part in stretches)))


def seconds(model: Model, mask: BlockDiagonalMask, heads: int, kv_heads: int) -> Range:
    """The bounds of the seconds that a batch takes, for all heads."""
    tile, kernel = model.tile_shape, model.configuration.kernel
    group = heads // kv_heads
    if kernel in ("forward", "dq"):
        together = gcd(tile.heads, group)
        tiled, rows, block = mask, tile.block_m, tile.block_n
        programs, walks = heads // together, 1
    else:
        together = 1
        tiled, rows, block = mask.transpose(), tile.block_n, tile.block_m
        programs, walks = kv_heads, group
    (table,) = tile_tables(tiled, Cut(rows // together, long=rows))
    full, masked = blocks_of(tiled, table[table[:, 0] < table[:, 1]], block)
    further = ((full > 0) & (masked > 0)).long()
    spans = []
    for per_tile, per_loop, per_full, per_masked in zip(
        model.tile(), model.further_loop(), *model.blocks(), strict=True
    ):
        work = per_tile + per_loop * further + walks * (per_full * full + per_masked * masked)
        spans.append(makespan(work.tolist(), programs) / CLOCK_HZ)
    return Range(*spans)


def tflops(model: Model, lengths: Sequence[int], heads: int = 32, kv_heads: int = 8) -> tuple[float, float]:
    """The slow and the fast bound of TFLOP/s on a causal batch, counting only visible pairs."""
    time = seconds(model, BlockDiagonalMask.from_seqlens(list(lengths)), heads, kv_heads)
    configuration = model.configuration
    work = 2 * PRODUCTS[configuration.kernel] * configuration.head_dim * heads * visible_pairs(list(lengths))
    return work / time.slow / 1e12, work / time.fast / 1e12


def batches(tokens: int = 32768) -> dict[str, list[int]]:
    """Name -> lengths: distributions of tests/lengths.py, and one document of 16,384 tokens."""
    return {
        name: lengths for name, lengths in ({"one 16k": [16384]} | distributions(tokens)).items() if name in BATCHES
    }


def row(configuration: Configuration | HopperConfiguration) -> dict[str, Any] | None:
    """The row of a configuration; None if it doesn't compile, doesn't fit, or is a tile of Triton's that spills."""
    try:
        model = examine(configuration)
    except Exception:  # a compiler fails in many ways
        return None
    if (model.resources.spills and not isinstance(model, HopperModel)) or not model.residents:
        return None
    tile = model.tile_shape
    facts: dict[str, Any] = {
        "triton": triton.__version__,
        "kernel": model.name,
        "head_dim": configuration.head_dim,
        "tile": f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
        + (f" h{tile.heads}" if tile.heads > 1 else "")
        + " deferred" * tile.deferred,
        "registers": model.resources.registers,
        "shared_kib": round(model.resources.shared_bytes / 1024, 1),
        "residents": model.residents,
    }
    for name, work, cycles in zip(("full", "masked"), (model.full, model.masked), model.blocks(), strict=True):
        facts |= {f"{name}_{unit}": round(busy) for unit, busy in work.cycles(model.warps).items()}
        facts |= {f"{name}_waits": work.waits, f"{name}_barriers": work.barriers, f"{name}_branches": work.branches}
        facts |= {f"{name}_{bound}": round(c) for bound, c in cycles._asdict().items()}
    facts["full_in_order"] = round(model.full_in_order * model.warps / QUADRANTS)
    for name, outside in (("tile", model.tile()), ("further_loop", model.further_loop())):
        facts |= {f"{name}_{bound}": round(cycles) for bound, cycles in outside._asdict().items()}
    for name, lengths in batches().items():
        slow, fast = tflops(model, lengths)
        facts |= {f"{name} slow": round(slow), f"{name} fast": round(fast)}
    return facts


def report(rows: Iterable[dict[str, Any]]) -> None:
    """Print the table: tiles, cycles per block, TFLOP/s."""
    print(f"inferred, not measured: TFLOP/s of useful work, slow to fast bound, {CLOCK_HZ / 1e9} GHz")
    print(f"{'kernel':13} {'D':>3} {'tile':>26} {'regs':>4} {'KiB':>5} {'res':>3} {'busiest unit, full':>22}", end=" ")
    print(f"{'in order':>8}", end=" ")
    print(f"{'masked/full':>11} " + " ".join(f"{name:>9}" for name in BATCHES))
    for facts in rows:
        unit = max(("tensor", "issue", "float", "integer", "special", "shared"), key=lambda u: facts[f"full_{u}"])
        print(
            f"{facts['kernel']:13} {facts['head_dim']:3} {facts['tile']:>26} {facts['registers']:4} "
            f"{facts['shared_kib']:5} {facts['residents']:3} "
            f"{unit:>8} {facts['full_fast']:5} of {facts['full_slow']:5} {facts['full_in_order']:8} "
            f"{facts['masked_fast'] / facts['full_fast']:5.2f}-{facts['masked_slow'] / facts['full_slow']:4.2f}  "
            + " ".join(f"{facts[f'{name} slow']:>4}-{facts[f'{name} fast']:<4}" for name in BATCHES),
            flush=True,
        )


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a CSV file, and keep its rows of other versions of Triton."""
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [r for r in csv.DictReader(file) if r["triton"] != triton.__version__]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for r in [*rows, *kept] for name in r))
        writer.writeheader()
        writer.writerows([*kept, *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=PRODUCTS, default=["forward"])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--candidates", action="store_true", help="all legal tiles, not only those that ship")
    parser.add_argument("--gluon", action="store_true", help='these kernels of the backend "gluon", too')
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args(arguments)
    configurations: list[Configuration | HopperConfiguration] = []
    for head_dim, kernel in itertools.product(options.head_dims, options.kernels):
        if kernel in ("dkdv", "dk", "dv") and kernel not in key_gradient_kernels(head_dim, torch.bfloat16, "sm_90"):
            continue
        shipped = Configuration(kernel, "sm_90", head_dim, torch.bfloat16)
        tiles = [shipped.tile]
        if options.candidates:
            tiles += [t for t in candidates(kernel, triton.next_power_of_2(head_dim), "sm_90") if t != shipped.tile]
        configurations += [Configuration(kernel, "sm_90", head_dim, torch.bfloat16, another_tile=t) for t in tiles]
    if options.gluon:
        configurations += [
            c
            for c in hopper_configurations()
            if (c.kernel in options.kernels and c.head_dim in options.head_dims and c.dtype == torch.bfloat16)
        ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = [facts for facts in pool.map(row, configurations) if facts is not None]
    report(rows)
    print(f"{len(rows)} of {len(configurations)} configurations are in the table")
    if options.csv:
        save(options.csv, rows)


if __name__ == "__main__":
    main()
