"""Tile shapes as data: which block sizes, warps and pipeline stages each kernel runs with, per architecture.

A row is kept only if it compiles without spilling a register and with matrix instructions on the newest Triton
(`python -m benchmarks.compile_report` prints the evidence; tests/kernels/test_compile.py insists on it). Triton 3.6
compiles all rows of sm_90, sm_100 and gfx942 as cleanly, but spills in most of sm_80's, where tensor descriptors become
pointers. No row depends on a token count: packing changes that at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

# "dkdv" computes both gradients in one launch; "dk" and "dv" are the same kernel, launched for one of them.
Kernel = Literal["forward", "dkdv", "dk", "dv", "dq", "row_statistics"]


@dataclass(frozen=True)
class Tile:
    """How a program works.

    Attributes:
        block_m, block_n: query rows and keys that it handles at a time.
        num_warps: of 32 threads (AMD: 64).
        num_stages: how many blocks ahead it loads.
        columns: of its output (of one output, where it has two) at most; the rest is for other programs.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    columns: int = 256


# Architecture -> kernel -> padded head dimension -> tile, for the 16-bit types. Head dimensions up to 64 share a row.
TILES: dict[str, dict[Kernel, dict[int, Tile]]] = {
    # Hopper: TMA and asynchronous warpgroup products. Eight warps need 128 rows in the product's first dimension, or
    # work is done twice; that is why both accumulators of dK and dV don't fit at head dimension 256.
    "sm_90": {
        "forward": {
            64: Tile(128, 128, 8, 2),
            128: Tile(128, 64, 8, 3),
            256: Tile(128, 32, 8, 2),
            512: Tile(128, 32, 8, 1),
        },
        "dkdv": {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 3)},
        "dk": {256: Tile(32, 128, 8, 2), 512: Tile(16, 64, 4, 1, columns=128)},
        "dv": {256: Tile(32, 128, 8, 2), 512: Tile(64, 64, 4, 1, columns=128)},
        "dq": {
            64: Tile(128, 128, 8, 2),
            128: Tile(128, 64, 8, 2),
            256: Tile(128, 32, 8, 2),
            512: Tile(64, 32, 4, 1, columns=128),
        },
    },
    # Blackwell: accumulators live in tensor memory, so registers are less of a limit than shared memory.
    "sm_100": {
        "forward": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2)},
        "dkdv": {64: Tile(64, 128, 8, 2), 128: Tile(64, 128, 8, 2), 256: Tile(32, 64, 8, 2)},
        "dq": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
    },
    # Ampere: no TMA, so addresses take registers; tiles are chosen to fit 99 KiB of shared memory (sm_86, sm_89,
    # sm_120).
    "sm_80": {
        "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 2)},
        "dkdv": {64: Tile(32, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
        "dq": {64: Tile(128, 32, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 2)},
    },
    # CDNA3: 512 registers per lane with the accumulation half, in waves of 64.
    "gfx942": {
        "forward": {64: Tile(128, 64, 4, 1), 128: Tile(64, 64, 4, 1), 256: Tile(64, 16, 4, 1)},
        "dkdv": {64: Tile(32, 64, 4, 1), 128: Tile(16, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
        "dq": {64: Tile(64, 64, 4, 1), 128: Tile(64, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    },
}

# What takes registers for every score, and with them other tiles where those above would spill.
EXTENDED = frozenset({"softcap", "alibi", "dropout", "pack_invariant"})
EXTENDED_TILES: dict[str, dict[Kernel, dict[int, Tile]]] = {
    "sm_90": {
        "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2)},
        "dkdv": {64: Tile(32, 128, 8, 2), 128: Tile(16, 128, 8, 2)},
        "dk": {256: Tile(16, 128, 8, 2, columns=128)},
        "dv": {256: Tile(32, 128, 8, 2)},
        "dq": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(128, 16, 8, 2)},
    },
    "sm_100": {},
    "sm_80": {},
    "gfx942": {},
}

# float32 is multiplied exactly ("ieee"), without matrix instructions: small tiles everywhere.
FLOAT32_TILES = {
    64: Tile(32, 32, 4, 1),
    128: Tile(32, 32, 8, 1),
    256: Tile(16, 32, 8, 1),
    512: Tile(16, 16, 8, 1, columns=128),
}

# In the interpreter speed is the number of blocks; the shapes differ so that a mix-up of the two sides shows.
INTERPRETER_TILE = Tile(64, 32, 4, 1)

ROW_STATISTICS_TILES = {64: Tile(64, 1, 4, 1), 128: Tile(32, 1, 4, 1), 256: Tile(16, 1, 4, 1), 512: Tile(8, 1, 4, 1)}

# The row statistics are padded to a multiple of this many rows, so that no block of queries reads past them.
ROW_PADDING = 128


def select_tile(kernel: Kernel, block_d: int, dtype: torch.dtype, arch: str, *, extended: bool = False) -> Tile:
    """The tile for a kernel; `block_d` is the larger of the head dimensions, padded to a power of two."""
    row = max(block_d, 64)
    if kernel == "row_statistics":
        return ROW_STATISTICS_TILES[row]
    if arch == "interpreter":
        return INTERPRETER_TILE
    if dtype == torch.float32:
        return FLOAT32_TILES[row]
    return (extended and EXTENDED_TILES[arch].get(kernel, {}).get(row)) or TILES[arch][kernel][row]


def key_gradient_kernels(block_d: int, dtype: torch.dtype, arch: str) -> tuple[Kernel, ...]:
    """The launches that compute dK and dV: one for both, or one each where the table has them apart."""
    if dtype == torch.float32 or arch == "interpreter":
        together = block_d <= 256
    else:
        together = max(block_d, 64) in TILES[arch]["dkdv"]
    return ("dkdv",) if together else ("dk", "dv")


@cache
def current_arch(device: torch.device) -> str:
    """The row of the table for a device: Ampere's for NVIDIA GPUs without their own, CDNA3's for all of AMD's."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    arch = f"sm_{torch.cuda.get_device_capability(device)[0]}0"
    return arch if arch in TILES else "sm_80"
