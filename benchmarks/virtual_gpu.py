"""Counts of the compiled attention kernels: `python -m benchmarks.virtual_gpu`.

The virtual GPU of tests/virtual_gpu executes the PTX of a forward and a backward call, and counts. The table has, for
each kernel, products of matrices, exponentials and global memory beside what the algorithm needs, the cycles that a
multiprocessor needs at least for each of its units, and which unit that makes the limit. Counts are exact for this PTX;
cycles are a lower bound by the units' rates, not a measurement of time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.lengths import visible_pairs
from tests.virtual_gpu.device import Executable, virtual_gpu
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.tolerance import run

# Per cycle and multiprocessor: multiply-adds in bfloat16, exponentials. CUDA C++ programming guide, throughput tables.
RATES = {"sm_80": (1024, 16), "sm_90": (2048, 16)}
WARPS_PER_CYCLE = 4
# Products over head dimensions that a kernel needs for a visible pair, and exponentials
NEEDED = {"forward": (2, 1), "dq": (3, 1), "dkdv": (4, 1)}


@dataclass(frozen=True)
class Counts:
    """Counts of a kernel's launches: warps' instructions, multiply-adds, exponentials, and bytes.

    `shared_passes` are passes over the 32 banks of shared memory by loads and stores (wgmma's own reads aren't among
    them), `conflicts` those beyond the fewest that their bytes need.
    """

    kernel: str
    instructions: int
    multiply_adds: int
    exponentials: int
    global_bytes: int
    shared_passes: int
    conflicts: int
    reached: int
    lines: int


def counts(executable: Executable) -> Counts:
    """Count a kernel."""
    text = executable.ptx.splitlines()
    instructions = multiply_adds = exponentials = sectors = passes = fewest = 0
    for line in executable.lines():
        opcode = _opcode(text, line.number)
        instructions += line.runs
        if found := re.match(r"wgmma\.mma_async\S*\.m64n(\d+)k16", opcode):
            multiply_adds += line.runs * 16 * int(found[1]) * 16
        elif found := re.match(r"mma\.\S*\.m16n8k(\d+)", opcode):
            multiply_adds += line.runs * 16 * 8 * int(found[1])
        elif opcode.startswith("ex2"):
            exponentials += line.lanes
        elif opcode.startswith(("ld.global", "st.global", "cp.async.c", "cp.async.bulk.tensor")):
            sectors += line.waves
        elif found := re.match(r"(?:ld|st)(matrix)?\.\S*shared\S*", opcode):
            passes += line.waves
            fewest += line.runs * _matrices(opcode) if found[1] else -(-line.lanes * _bytes(opcode) // 128)
    lines = executable.lines()
    reached = sum(line.runs > 0 for line in lines)
    return Counts(
        executable.name, instructions, multiply_adds, exponentials, 32 * sectors, passes, max(passes - fewest, 0),
        reached, len(lines),
    )  # fmt: skip


def _opcode(text: Sequence[str], number: int) -> str:
    if not number:
        return "ret"
    found = re.match(r"\s*(?:[{}]\s*)?(?:@!?\S+\s+)?([a-z][\w.:]*)", text[number - 1])
    return found[1] if found else ""


def _matrices(opcode: str) -> int:
    found = re.search(r"\.x([124])", opcode)
    return int(found[1]) if found else 1


def _bytes(opcode: str) -> int:
    found = re.search(r"(?:\.v(\d))?\.[busf](\d+)$", opcode)
    return int(found[1] or 1) * int(found[2]) // 8 if found else 4


def row(count: Counts, arch: str, pairs: int, head_dim: int) -> str:
    """A kernel's row of the table."""
    role = next((role for role in NEEDED if role in count.kernel), None)
    products, exponentials = NEEDED[role] if role else (0, 0)
    rate, special = RATES[arch]
    cycles = {
        "tensor": count.multiply_adds / rate,
        "shared": count.shared_passes,
        "exponentials": count.exponentials / special,
        "issue": count.instructions / WARPS_PER_CYCLE,
    }
    limit = max(cycles, key=lambda unit: cycles[unit])
    needed = products * pairs * head_dim

    def times(done: int, needed: int) -> str:
        return f"{done / needed:.2f}" if needed else "-"

    columns = [
        f"{times(count.multiply_adds, needed):>9}",
        f"{times(count.exponentials, exponentials * pairs):>6}",
        f"{count.instructions / pairs:>10.3f}",
        f"{count.global_bytes / 1024:>12.0f}",
        *(f"{cycles[unit]:>12.0f}" for unit in cycles),
        f"{count.conflicts:>11}",
        f"{limit:>14}",
        f"{count.reached / count.lines:>9.0%}",
    ]
    return f"{count.kernel:24}" + "".join(columns)


HEADER = "".join(
    f"{name:{'<' if width < 0 else '>'}{abs(width)}}"
    for name, width in (
        ("kernel", -24), ("products", 9), ("exp", 6), ("ins/pair", 10), ("global KiB", 12), ("tensor cyc", 12),
        ("shared cyc", 12), ("exp cyc", 12), ("issue cyc", 12), ("conflicts", 11), ("limit", 14), ("reached", 9),
    )
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.virtual_gpu", description=__doc__)
    parser.add_argument("--arch", choices=RATES, default="sm_90", help="whose PTX (default sm_90)")
    parser.add_argument("--backend", choices=("triton", "gluon"), default="triton", help="default triton")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], help="head dimensions (default 64 128)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512], help="tokens of each document (default 512)")
    parser.add_argument("--heads", type=int, default=1, help="query heads, and key heads (default 1)")
    given = parser.parse_args(arguments)
    if min(given.lengths) < 1 or given.heads < 1:
        parser.error("lengths and heads must be at least 1.")
    if given.backend == "gluon" and given.arch != "sm_90":
        parser.error(f"--backend gluon has kernels for sm_90 alone; got --arch {given.arch}.")
    for head_dim in given.head_dim:
        case = Case("counted", tuple(given.lengths), heads=given.heads, kv_heads=given.heads, head_dim=head_dim)
        with virtual_gpu(given.arch, races=False, preempts=False) as gpu:
            run(make_inputs(case, torch.bfloat16), given.backend)
        pairs = given.heads * visible_pairs(given.lengths)
        print(f"{given.arch}, {given.backend}, bfloat16, causal, head dimension {head_dim}, {pairs:,} visible pairs")
        print(HEADER)
        for executable in gpu.executables:
            print(row(counts(executable), given.arch, pairs, head_dim))
        print()


if __name__ == "__main__":
    main()
