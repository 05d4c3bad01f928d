"""Tile shapes as data: which block sizes, warps and pipeline stages each kernel runs with, per architecture.

Except on RDNA, every row for head dimensions 64 and 128 compiles without spills in loops and with matrix instructions
on Triton 3.6 and 3.9, so no row depends on the version (docs/decisions/kernel-forms.md). docs/compile-matrix.md has all
that a compiler says of them, and tests/benchmarks/test_compile_matrix.py names the exceptions. No row depends on a
token count, because packing changes it all the time.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from tritonpack.checks import describe, is_int

if TYPE_CHECKING:
    from tritonpack.kernels.hopper import HopperTileShape

# "dkdv" computes both gradients in one launch; "dk" and "dv" are the same kernel, launched for one of them.
Kernel = Literal["forward", "dkdv", "dk", "dv", "dq"]


@dataclass(frozen=True)
class TileShape:
    """The shape of a tile, and how a program computes it.

    Attributes:
        block_m, block_n: query rows and keys per block.
        num_warps: warps of 32 threads (AMD: 64).
        num_stages: how many blocks ahead the program loads.
        heads: the largest number of query heads of one key head that divide the rows of a tile among them (forward and
            dQ; a power of two). Tiles with few tokens of many heads have fewer blocks to mask and fewer empty rows than
            tiles with many tokens of one head, and the same number of products.
        deferred: whether forward sums a block's output during the softmax of the next block, which takes registers for
            the weights of one block.
        queries_left: whether dK and dV multiply with queries on the left (docs/decisions/kernel-forms.md). Products
            that read operands from registers read a block's queries then, in place of the tile's keys, which would
            occupy registers across the loop.
        by_pointers: whether rows are loaded through pointers also on GPUs with TMA. A tile's own rows are in shared
            memory then, from which each product reads them, and not in registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads: int = 1
    deferred: bool = False
    queries_left: bool = False
    by_pointers: bool = False


# dK and dV at head dimension 512 on NVIDIA GPUs; docs/decisions/kernel-forms.md compares them with chunks of columns.
_WIDE_DK = TileShape(16, 32, 8, 1, queries_left=True, by_pointers=True)
_WIDE_DV = TileShape(32, 32, 8, 1, queries_left=True, by_pointers=True)

# Architecture -> kernel -> padded head dimension -> tile, for the 16-bit types. Head dimensions up to 64 share a row.
TILES: dict[str, dict[Kernel, dict[int, TileShape]]] = {
    # Hopper: TMA and asynchronous warpgroup products. If registers allow, two programs of four warps run on a
    # multiprocessor, and one computes while the other waits (docs/decisions/kernel-ladder.md). Eight warps need 128
    # rows in the product's first dimension, or they compute the same twice. So both accumulators of dK and dV don't
    # fit at head dimension 256.
    "sm_90": {
        "forward": {
            64: TileShape(128, 64, 4, 2, heads=8),
            128: TileShape(128, 64, 8, 3, heads=8, deferred=True),
            256: TileShape(128, 64, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
        "dkdv": {64: TileShape(64, 64, 4, 2), 128: TileShape(32, 64, 4, 2)},
        "dk": {256: TileShape(32, 128, 8, 2), 512: _WIDE_DK},
        "dv": {256: TileShape(32, 128, 8, 2), 512: _WIDE_DV},
        "dq": {
            64: TileShape(64, 64, 4, 2, heads=4),
            128: TileShape(128, 64, 8, 2, heads=4),
            256: TileShape(128, 32, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
    },
    # Blackwell: accumulators are in tensor memory, so shared memory limits tiles more than registers do.
    "sm_100": {
        "forward": {
            64: TileShape(128, 128, 8, 2, heads=8),
            128: TileShape(128, 64, 8, 2, heads=8),
            256: TileShape(128, 32, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
        "dkdv": {64: TileShape(64, 128, 8, 2), 128: TileShape(64, 128, 8, 2), 256: TileShape(32, 64, 8, 2)},
        "dk": {512: _WIDE_DK},
        "dv": {512: _WIDE_DV},
        "dq": {
            64: TileShape(128, 64, 8, 2, heads=4),
            128: TileShape(64, 64, 4, 2, heads=4),
            256: TileShape(64, 32, 4, 2),
            512: TileShape(32, 32, 8, 1),
        },
    },
    # Ampere and Ada: no TMA. These tiles, for 16 bits, fit 99 KiB of shared memory (sm_86, sm_89). With two stages dK
    # and dV at 128 would take 105 KiB with 64 x 64, or spill.
    "sm_80": {
        "forward": {
            64: TileShape(128, 64, 8, 2, heads=8),
            128: TileShape(128, 32, 8, 2, heads=8),
            256: TileShape(64, 32, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
        "dkdv": {64: TileShape(32, 64, 4, 2), 128: TileShape(32, 64, 4, 1), 256: TileShape(16, 32, 8, 2)},
        "dk": {512: _WIDE_DK},
        "dv": {512: _WIDE_DV},
        "dq": {
            64: TileShape(128, 32, 8, 2, heads=4),
            128: TileShape(128, 32, 8, 2, heads=4),
            256: TileShape(32, 32, 8, 2),
            512: TileShape(16, 16, 8, 1),
        },
    },
    # Consumer Blackwell: TMA, but the products of Ampere, whose operands are in registers, and 99 KiB of shared memory.
    # At head dimension 128 dQ would spill with several heads in a tile.
    "sm_120": {
        "forward": {
            64: TileShape(128, 64, 8, 2, heads=8),
            128: TileShape(128, 32, 8, 2, heads=8),
            256: TileShape(64, 32, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
        "dkdv": {64: TileShape(32, 32, 4, 2, queries_left=True), 128: TileShape(16, 64, 8, 2, queries_left=True)},
        "dk": {256: TileShape(16, 32, 8, 2, queries_left=True), 512: _WIDE_DK},
        "dv": {256: TileShape(16, 32, 8, 2, queries_left=True), 512: _WIDE_DV},
        "dq": {
            64: TileShape(128, 32, 8, 2, heads=4),
            128: TileShape(64, 64, 8, 2),
            256: TileShape(32, 32, 8, 2),
            512: TileShape(32, 32, 8, 1),
        },
    },
    # CDNA3: waves of 64, with 512 registers per lane, half of them for accumulation; they hold a tile's own operands.
    "gfx942": {
        "forward": {
            64: TileShape(128, 64, 4, 1, heads=8),
            128: TileShape(64, 64, 4, 1, heads=8),
            256: TileShape(64, 16, 4, 1),
            512: TileShape(32, 16, 4, 1),
        },
        "dkdv": {64: TileShape(32, 64, 4, 1), 128: TileShape(16, 64, 4, 1), 256: TileShape(16, 32, 4, 1)},
        "dk": {512: TileShape(16, 32, 4, 1)},
        "dv": {512: TileShape(16, 32, 4, 1)},
        "dq": {
            64: TileShape(64, 64, 4, 1, heads=4),
            128: TileShape(64, 32, 4, 1, heads=4),
            256: TileShape(32, 16, 4, 1),
            512: TileShape(32, 16, 4, 1),
        },
    },
    # RDNA 3 and 4: waves of 32, 256 registers per lane, which hold a tile's own operands. RDNA 3 holds some operands
    # twice. At head dimension 128 its dK, dV and dQ spill with every tile. At 64 dK and dV spill outside of the loops,
    # which costs less than a tile without spills (docs/decisions/kernel-forms.md).
    "gfx1100": {
        "forward": {
            64: TileShape(64, 32, 4, 1, heads=8),
            128: TileShape(64, 16, 4, 1, heads=8),
            256: TileShape(32, 16, 8, 1),
            512: TileShape(16, 16, 8, 1),
        },
        "dkdv": {64: TileShape(16, 64, 4, 1), 128: TileShape(16, 32, 8, 1)},
        "dk": {256: TileShape(16, 16, 8, 1), 512: TileShape(16, 16, 8, 1)},
        "dv": {256: TileShape(16, 16, 8, 1), 512: TileShape(16, 16, 8, 1)},
        "dq": {
            64: TileShape(32, 16, 4, 1, heads=4),
            128: TileShape(32, 16, 4, 1, heads=4),
            256: TileShape(16, 16, 8, 1),
            512: TileShape(32, 16, 8, 1),
        },
    },
    "gfx1201": {
        "forward": {
            64: TileShape(64, 32, 4, 1, heads=8),
            128: TileShape(64, 16, 4, 1, heads=8),
            256: TileShape(64, 16, 8, 1),
            512: TileShape(16, 16, 8, 1),
        },
        "dkdv": {64: TileShape(16, 64, 4, 1), 128: TileShape(16, 64, 8, 1)},
        "dk": {256: TileShape(16, 16, 8, 1), 512: TileShape(16, 16, 8, 1)},
        "dv": {256: TileShape(16, 16, 8, 1), 512: TileShape(16, 16, 8, 1)},
        "dq": {
            64: TileShape(64, 16, 4, 1, heads=4),
            128: TileShape(64, 16, 8, 1, heads=4),
            256: TileShape(16, 16, 8, 1),
            512: TileShape(32, 16, 8, 1),
        },
    },
}

# Tiles for calls with softcap, sinks, ALiBi or dropout, or with masks of trees, if the tiles above would spill in a
# loop or, because of `deferred`, load fewer blocks ahead: the features that need it, and the tile. The first that
# applies is taken; several features at once may spill.
FEATURE_TILES: dict[str, dict[Kernel, dict[int, dict[str, TileShape]]]] = {
    "sm_90": {
        "forward": {
            64: {"alibi dropout tree": TileShape(128, 64, 8, 2, heads=8)},
            128: {"softcap alibi dropout tree": TileShape(128, 64, 8, 3, heads=8)},
            256: {"softcap alibi dropout tree": TileShape(128, 32, 8, 2)},
        },
        "dkdv": {64: {"dropout": TileShape(32, 64, 4, 2)}, 128: {"dropout": TileShape(16, 64, 4, 2)}},
        "dk": {256: {"softcap alibi dropout": TileShape(16, 128, 8, 2)}},
        "dq": {
            128: {
                "alibi dropout": TileShape(128, 32, 8, 2, heads=4),
                "tree": TileShape(64, 64, 4, 2, heads=4),
            },
            256: {"softcap alibi dropout": TileShape(128, 16, 8, 2)},
        },
    },
    "sm_100": {
        "forward": {
            64: {"softcap alibi dropout tree": TileShape(128, 64, 8, 2, heads=8)},
            256: {"softcap alibi dropout": TileShape(64, 64, 8, 2)},
        },
        "dkdv": {
            64: {"dropout": TileShape(32, 128, 8, 2)},
            128: {"dropout": TileShape(32, 128, 8, 2)},
            256: {"softcap alibi dropout": TileShape(32, 64, 8, 1)},
        },
        "dq": {256: {"softcap alibi dropout": TileShape(128, 32, 8, 2)}},
    },
    "sm_80": {
        "forward": {256: {"softcap alibi dropout": TileShape(64, 16, 8, 2)}},
        "dkdv": {
            128: {"dropout": TileShape(64, 64, 8, 1)},
            256: {"softcap alibi dropout": TileShape(16, 32, 8, 1)},
        },
    },
}

# Architectures whose kernels get pointers instead of descriptors (`primitives.load_rows`). Triton would turn
# descriptors into pointers there, and load each element alone, because it doesn't know that rows are aligned.
WITHOUT_TMA = frozenset({"sm_80", "gfx942", "gfx1100", "gfx1201"})

# float32 products are exact ("ieee"), without matrix instructions, so all tiles are small.
FLOAT32_TILES = {
    64: TileShape(32, 32, 4, 1, by_pointers=True),
    128: TileShape(32, 32, 8, 1, by_pointers=True),
    256: TileShape(16, 16, 8, 1, by_pointers=True),
    512: TileShape(16, 16, 8, 1, by_pointers=True),
}

# The shared memory in KiB that these tiles take on NVIDIA GPUs, the most of forward and of the kernels of backward; a
# test compares it with the compile report. On AMD GPUs they take 32 at most.
FLOAT32_KIB: dict[int, dict[str, int]] = {
    64: {"forward": 24, "backward": 40},
    128: {"forward": 48, "backward": 80},
    256: {"forward": 48, "backward": 80},
    512: {"forward": 96, "backward": 160},
}

# The shared memory of a program in KiB on NVIDIA GPUs that have less than 160, by compute capability.
SMALL_SHARED_KIB = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 6): 99, (8, 9): 99, (12, 0): 99, (12, 1): 99}

# The interpreter's time is the number of blocks. The two sizes differ, so that tests notice if they are confused.
INTERPRETER_TILE = TileShape(64, 32, 4, 1, heads=4, deferred=True)

# The shared memory of a program, in KiB, at most (sm_80: the smallest GPU with these tiles).
SHARED_KIB = {
    "sm_80": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx1100": 64, "gfx1201": 64,
}  # fmt: skip

# Tiles that a user has loaded, by (architecture, kernel, padded head dimension); they replace the tables' tiles.
_loaded: dict[tuple[str, Kernel, int], TileShape] = {}


def select_tile(
    kernel: Kernel, block_d: int, dtype: torch.dtype, arch: str, features: frozenset[str] = frozenset()
) -> TileShape:
    """The tile for a kernel.

    Args:
        block_d: the larger of the head dimensions, padded to a power of two.
        features: those in use of "softcap", "sinks", "alibi", "dropout" and, for masks of trees, "tree".
    """
    row = max(block_d, 64)
    if arch == "interpreter":
        return INTERPRETER_TILE
    if dtype == torch.float32:
        return FLOAT32_TILES[row]
    for spilling, tile in FEATURE_TILES.get(arch, {}).get(kernel, {}).get(row, {}).items():
        if not features.isdisjoint(spilling.split()):
            return tile
    tile = TILES[arch][kernel][row]
    return _loaded.get((arch, kernel, row), tile) if features.isdisjoint(("softcap", "alibi", "dropout")) else tile


def why_illegal(kernel: Kernel, tile: TileShape, block_d: int, arch: str) -> str | None:
    """Why a tile can't work for a kernel in a 16-bit type, or None. Tables, files and the tuner use this rule.

    Args:
        kernel, tile: an entry of the tables.
        block_d: the head dimension of keys and values, a power of two.
        arch: a key of `TILES`.
    """
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n}
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            return f"{name} must be a power of two from 16; got {size}"
    if tile.num_warps not in (1, 2, 4, 8, 16) or not 1 <= tile.num_stages <= 8:
        return f"warps must be 1, 2, 4, 8 or 16 and stages 1 to 8; got {tile.num_warps} and {tile.num_stages}"
    if tile.heads not in (1, 2, 4, 8, 16) or (tile.heads > 1 and kernel not in ("forward", "dq")):
        return f"heads must be 1, 2, 4, 8 or 16, and 1 but in forward and dq; got {tile.heads}"
    if tile.block_m < 8 * tile.heads:
        return f"block_m must hold 8 tokens of each of the {tile.heads} heads; got {tile.block_m}"
    if tile.deferred and kernel != "forward":
        return f"deferred must be false but in forward; got {tile.deferred}"
    own, other = (tile.block_m, tile.block_n) if kernel in ("forward", "dq") else (tile.block_n, tile.block_m)
    if arch == "sm_90" and 64 <= own < 16 * tile.num_warps:  # fewer rows are multiplied as on Ampere
        return f"{tile.num_warps} warps compute the same twice unless a tile has {16 * tile.num_warps} rows; got {own}"
    if tile.queries_left and kernel in ("forward", "dq"):
        return f"queries_left must be false in {kernel}; got {tile.queries_left}"
    resident = 0 if arch.startswith("gfx") else own * block_d * (1 if kernel in ("forward", "dv") else 2)
    streamed = other * block_d * (2 if tile.num_stages > 1 else 1)  # without stages keys and values share their place
    kib = 2 * (resident + tile.num_stages * streamed) / 1024
    if kib > SHARED_KIB[arch]:
        return f"about {kib:.0f} KiB of shared memory, of {SHARED_KIB[arch]}"
    return None


def load_tiles(path: str | os.PathLike[str]) -> int:
    """Use the tiles of a file that `python -m benchmarks.tune` wrote, instead of the tables.

    They apply to this process, to 16-bit types without softcap, ALiBi or dropout. The environment
    variable TRITONPACK_TILES names a file to load at import.

    Args:
        path: JSON, {"tiles": [{"arch": "sm_90", "kernel": "forward", "block_d": 128, "block_m": 128, ...}, ...]}.

    Returns:
        The number of tiles.

    Raises:
        ValueError: a file without this form, or a tile that can't work; then no tile is loaded.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path must be the name of a file, a str or a Path; got {describe(path)}.")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = content.get("tiles") if isinstance(content, dict) else None
        if not isinstance(rows, list):
            given = content if rows is None else rows
            raise ValueError(f'the file must hold {{"tiles": [...]}}; got {describe(given)}')
        loaded: dict[tuple[str, Kernel, int], TileShape] = {}
        for number, row in enumerate(rows):
            place, tile = _read_row(row, number)
            if place in loaded:
                raise ValueError(f"row {number} is a second tile for {', '.join(map(str, place))}")
            loaded[place] = tile
    except (OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} holds no usable tiles: {type(error).__name__}: {error}") from error
    for (arch, kernel, block_d), tile in loaded.items():
        other: Kernel | None = {"dk": "dv", "dv": "dk"}.get(kernel)  # type: ignore[assignment]
        if other and (loaded.get((arch, other, block_d)) or TILES[arch][other][block_d]).block_n != tile.block_n:
            raise ValueError(f"{os.fspath(path)}: dk and dv of {arch} at {block_d} must have the same block_n.")
    _loaded.update(loaded)
    return len(loaded)


def _read_row(row: Any, number: int) -> tuple[tuple[str, Kernel, int], TileShape]:
    """A row of a file as its key in `_loaded` and the tile.

    Raises:
        ValueError: the row isn't a tile that can work.
    """
    if not isinstance(row, dict):
        raise ValueError(f"row {number} must be a mapping; got {describe(row)}")
    place, sizes = ("arch", "kernel", "block_d"), {field.name: field for field in fields(TileShape)}
    required = {*place, *(name for name, field in sizes.items() if field.default is MISSING)}
    if unknown := sorted(row.keys() - {*place, *sizes}):
        raise ValueError(f"row {number} has {unknown[0]!r}; allowed are {', '.join([*place, *sizes])}")
    if missing := sorted(required - row.keys()):
        raise ValueError(f"row {number} lacks {', '.join(missing)}")
    for name in sizes.keys() & row.keys():
        is_flag = isinstance(sizes[name].default, bool)
        if is_flag and not isinstance(row[name], bool):
            raise ValueError(f"{name} of row {number} must be true or false; got {row[name]!r}")
        if not is_flag and not is_int(row[name]):
            raise ValueError(f"{name} of row {number} must be an integer; got {row[name]!r}")
    arch, kernel, block_d = (row[name] for name in place)
    known = isinstance(arch, str) and arch in TILES and kernel in get_args(Kernel)
    if not known or not is_int(block_d) or block_d not in (64, 128, 256, 512):
        raise ValueError(f"no table has a row for {arch!r}, {kernel!r}, {block_d!r}")
    tile = TileShape(**{name: row[name] for name in sizes if name in row})
    if reason := why_illegal(kernel, tile, block_d, arch):
        raise ValueError(f"{kernel} on {arch} at head dimension {block_d}: {reason}")
    return (arch, kernel, block_d), tile


def save_tiles(path: str | os.PathLike[str], tiles: dict[tuple[str, Kernel, int], TileShape], **facts: str) -> None:
    """Write a file that `load_tiles` reads; `facts` describe its origin."""
    rows = [{"arch": arch, "kernel": kernel, "block_d": d, **asdict(tile)} for (arch, kernel, d), tile in tiles.items()]
    Path(path).write_text(json.dumps(facts | {"tiles": rows}, indent=1) + "\n", encoding="utf-8")


def key_gradient_kernels(block_d: int, dtype: torch.dtype, arch: str) -> tuple[Kernel, ...]:
    """The launches that compute dK and dV: one for both, or one for each if the table has separate tiles."""
    if dtype == torch.float32 or arch == "interpreter":
        together = block_d <= 256
    else:
        together = max(block_d, 64) in TILES[arch]["dkdv"]
    return ("dkdv",) if together else ("dk", "dv")


def heads_per_tile(tile: TileShape | HopperTileShape, group: int) -> int:
    """The number of query heads in a tile: a power of two that divides `group`, the query heads per key head."""
    heads = tile.heads  # a loop, because torch.compile traces no gcd of a symbolic size
    while group % heads:
        heads //= 2
    return heads


@cache
def small_shared_kib(device: torch.device) -> int | None:
    """The shared memory of a program in KiB, for a GPU on which not all float32 tiles fit; None for others."""
    if device.type == "cpu" or torch.version.hip:
        return None
    return SMALL_SHARED_KIB.get(torch.cuda.get_device_capability(device))


@cache
def current_arch(device: torch.device) -> str:
    """The architecture whose tiles a device uses.

    A GPU without tiles uses the tiles of its major version or else of sm_80 (NVIDIA), or of its family (AMD): gfx1100
    for gfx11 (RDNA 3 and 3.5), gfx1201 for gfx12 (RDNA 4), gfx942 for CDNA. Of GPUs that use others' tiles,
    docs/compile-matrix.md says which ones are compiled. AMD's older GPUs run float32 alone, whose tiles are the same
    everywhere.
    """
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        families = {"gfx11": "gfx1100", "gfx12": "gfx1201"}
        return families.get(torch.cuda.get_device_properties(device).gcnArchName[:5], "gfx942")
    arch = f"sm_{torch.cuda.get_device_capability(device)[0]}0"
    return arch if arch in TILES else "sm_80"


if "TRITONPACK_TILES" in os.environ:
    load_tiles(os.environ["TRITONPACK_TILES"])
