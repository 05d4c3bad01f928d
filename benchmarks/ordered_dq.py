"""Compare a backward of two passes with one pass that adds dQ in a fixed order. All figures are counts or simulation.

    python -m benchmarks.ordered_dq [--tokens 32768] [--compile]

In one pass a program of 128 keys also adds each block's dQ to global memory, in float32. The sum is deterministic only
if the programs add in a fixed order, here the order in which they start, as in FlashAttention-3's deterministic mode.

The first table counts the work of 128 keys x 64 queries of a head for a multiprocessor, in cycles of the tensor cores,
of the exponential unit and of shared memory. Probabilities and dS are left operands in registers, except for dQ in one
pass, whose left operand dS has both halves' keys. The second table simulates multiprocessors that take one tile after
the other. A block costs as many units as it has products. `waits` is the makespan of one pass with the order over that
without it. `two passes` is the makespan of two passes over that of one ordered pass; above 1, one pass is faster.
Blocks of one pass begin at multiples of 64 queries, because programs must add to the same blocks.

With --compile it compiles the kernels of two passes and a sketch of one (benchmarks/ordered_dkdv.py) for sm_90, and
prints instead what their loops execute for 128 keys x 64 queries without and with a mask, in the half whose loop is
longer: instructions of a warp, and the cycles of each unit and of the two halves one after the other. Spills are those
of both halves. It needs Triton 3.9.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.ordered_dkdv import ordered_dkdv_kernel
from benchmarks.schedule import HEADS, SLOTS, TILE, makespan
from tests.backends.blocks import blocks_of
from tests.kernels.aot import TARGETS, HopperConfiguration, Resources, disassemble, read_binary
from tests.kernels.sass import (
    PRODUCT_RATE,
    QUADRANTS,
    SHARED_RATE,
    count,
    count_instructions,
    cycles_in_order,
    loops,
    parse,
)
from tests.lengths import distributions
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES
from tritonpack.kernels.hopper_primitives import ROWS

KEYS, QUERIES, KV_HEADS = 128, 64, 8
UNITS = ("tensor", "issue", "special", "shared")
EXPONENTIALS = 16  # per cycle and multiprocessor


def operands(rows: int, columns: int, depth: int, *, in_registers: bool = False) -> int:
    """The bytes that a product [rows, depth] @ [depth, columns] of one warpgroup reads from shared memory."""
    return 2 * depth * (columns + (0 if in_registers else rows))


def work(head_dim: int, *, one_pass: bool) -> dict[str, float]:
    """Cycles of each unit for 128 keys x 64 queries."""
    pairs, element = KEYS * QUERIES, 2
    scores = 2 * operands(64, QUERIES, head_dim)  # two warpgroups of 64 keys
    sums = 2 * operands(64, head_dim, QUERIES, in_registers=True)
    shared = 2 * scores + 2 * sums + 2 * QUERIES * head_dim * element  # and the copies of q and dout
    if one_pass:
        products, exponentials = 5, 1
        shared += 2 * pairs * element // 2  # dS is stored
        shared += 2 * operands(QUERIES, head_dim // 2, KEYS)  # each warpgroup computes half of the columns of dQ
        shared += 2 * 4 * QUERIES * head_dim  # stored, and read by the unit that adds it
    else:
        products, exponentials = 7, 2
        shared += operands(64, KEYS, head_dim, in_registers=True) + operands(64, KEYS, head_dim)
        shared += operands(64, head_dim, KEYS, in_registers=True) + KEYS * head_dim * element  # and half a copy of k, v
    return {
        "tensor": products * 2 * pairs * head_dim / PRODUCT_RATE,
        "special": exponentials * pairs / EXPONENTIALS,
        "shared": shared / SHARED_RATE,
        "added bytes": 4.0 * QUERIES * head_dim * one_pass,
    }


def one_pass(mask: BlockDiagonalMask, tiles: torch.Tensor, *, ordered: bool) -> float:
    """The makespan of one pass, in units of a product of a block."""
    queries = mask.transpose()
    low = queries.key_start[tiles[:, 0].long()] // QUERIES
    high = (queries.key_stop[tiles[:, 1].long() - 1] + QUERIES - 1) // QUERIES
    free = [0.0] * SLOTS
    added = np.zeros((HEADS, mask.num_queries // QUERIES + 2))
    for begin, end in torch.stack([low, high], 1).tolist():
        steps = 5.0 * np.arange(max(end - begin, 0))
        for kv_head in range(KV_HEADS):
            now = free[0] + 5 * TILE
            for head in range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS):
                before = added[head, begin:end] if ordered else np.zeros(len(steps))
                done = np.maximum.accumulate(np.maximum(before - 5.0 - steps, now - steps * 0)) + steps + 5.0
                if ordered:
                    added[head, begin:end] = done
                now = float(done[-1]) if len(done) else now
            heapq.heapreplace(free, now)
    return max(free)


def two_passes(mask: BlockDiagonalMask, keys: torch.Tensor, queries: torch.Tensor) -> float:
    """The makespan of dK and dV after dQ, in the same units."""
    spans = []
    for side, tiles, block, products, walks, programs in (
        (mask.transpose(), keys, QUERIES, 4.0, HEADS // KV_HEADS, KV_HEADS),
        (mask, queries, QUERIES, 3.0, 1, HEADS),  # 128 queries x 64 keys have as many pairs
    ):
        full, masked = blocks_of(side, tiles, block)
        spans.append(makespan((products * (walks * (full + masked) + TILE)).tolist(), programs))
    return sum(spans)


def compile_one_pass(head_dim: int) -> tuple[Resources, str]:
    """The resources and the machine code of the sketch, with as many stages as fit beside dS and dQ."""
    rows, layouts = ROWS.value, {bits: gl.NVMMASharedLayout(128, bits, rank=3) for bits in (16, 32)}
    tile = HOPPER_DKDV_TILES[head_dim]
    constants = {
        "GROUP": HEADS // KV_HEADS,
        "BLOCK_M": QUERIES,
        "BLOCK_D": head_dim,
        "STAGES": {64: 4, 128: 2}[head_dim],
        "LOAD_REGISTERS": tile.registers[0],
        "COMPUTE_REGISTERS": tile.registers[1],
    }
    blocks = {"q": QUERIES, "dout": QUERIES, "k": rows, "v": rows}
    types = {f"{name}_desc": f"tensordesc<bf16[1,{size},{head_dim}],{layouts[16]!r}>" for name, size in blocks.items()}
    types["dq_desc"] = f"tensordesc<fp32[1,{QUERIES},{head_dim // 2}],{layouts[32]!r}>"
    types |= dict.fromkeys(("lse2_ptr", "delta_ptr"), "*fp32") | dict.fromkeys(("scale", "scale_log2"), "fp32")
    types |= {f"{name}_ptr": "*bf16" for name in ("q", "dout", "dk", "dv")}
    signature, attributes = {}, {}
    for position, name in enumerate(ordered_dkdv_kernel.arg_names):
        usual = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, usual)
        if signature[name].startswith("*") or name.startswith("stride_"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(ordered_dkdv_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(ordered_dkdv_kernel, signature, constexprs, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return read_binary(triton.compile(source, target=TARGETS["sm_90"], options=options))


def print_compiled(head_dim: int) -> None:
    """Print what the loops of two passes and of one execute for 128 keys x 64 queries."""
    pairs = KEYS * QUERIES
    kernels: dict[str, tuple[Resources, str, int]] = {"one pass": (*compile_one_pass(head_dim), pairs)}
    passes: tuple[Literal["dkdv", "dq"], ...] = ("dkdv", "dq")
    for kernel in passes:
        shipped = HopperConfiguration(kernel, head_dim, torch.bfloat16)
        kernels[kernel] = (*disassemble(shipped), shipped.tile.block_m * shipped.tile.block_n)
    for name, (resources, listing, block) in kernels.items():
        code, share = parse(listing), pairs / block
        bodies = [code.instructions[body.start : body.stop] for body in loops(code)]
        figures = []
        by_length = sorted(bodies, key=len)  # each half has a loop over full blocks and a longer one over masked ones
        for both in (by_length[: len(bodies) // 2], by_length[len(bodies) // 2 :]):
            body = both[-1]
            units = {unit: cycles for unit, cycles in count(body).cycles(2 * QUADRANTS).items() if unit in UNITS}
            copied = 2 * 2 + (4 if name == "one pass" else 0)  # by TMA: q and dout, or k and v, and sums of dQ
            units["shared"] += copied * QUERIES * head_dim / SHARED_RATE / share
            units["in turn"] = 2 * cycles_in_order(body)
            spills = sum(count_instructions(loop).spills for loop in both)
            figures.append(
                f"{share * len(body):.0f} ({spills} spills), "
                + " ".join(f"{unit} {share * cycles:.0f}" for unit, cycles in units.items())
            )
        kib = resources.shared_bytes / 1024
        print(f"head dimension {head_dim:3}, {name:8}  {kib:.0f} KiB  {';  '.join(figures)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--compile", action="store_true", help="compile a sketch of one pass, and count its work")
    options = parser.parse_args(arguments)
    if options.compile:
        for head_dim in HOPPER_DKDV_TILES:
            print_compiled(head_dim)
        return
    for head_dim in (64, 128):
        for name, single in (("two passes", False), ("one pass", True)):
            figures = "  ".join(f"{unit} {x:5.0f}" for unit, x in work(head_dim, one_pass=single).items())
            print(f"head dimension {head_dim:3}, {name:10}  {figures}")
    print(f"{'batch':9} {'waits':>6} {'two passes':>11}")
    for name, lengths in distributions(options.tokens).items():
        mask = BlockDiagonalMask.from_seqlens(lengths)
        keys, queries = (t[t[:, 0] < t[:, 1]] for t in tile_tables(mask, Cut(KEYS, of_keys=True), Cut(128)))
        ordered = one_pass(mask, keys, ordered=True)
        waits = ordered / one_pass(mask, keys, ordered=False)
        print(f"{name:9} {waits:6.2f} {two_passes(mask, keys, queries) / ordered:11.2f}", flush=True)


if __name__ == "__main__":
    main()
