"""Ahead-of-time compilation of kernels for an architecture, without the hardware.

Registers, spills, shared memory and matrix instructions are read from the binary with the tools in Triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tritonpack.kernels.backward import dkdv_kernel, dq_kernel
from tritonpack.kernels.forward import forward_kernel
from tritonpack.kernels.hopper import HOPPER_TILES, ROWS, hopper_forward_kernel
from tritonpack.kernels.tile_shapes import (
    FEATURE_TILES,
    QUERIES_LEFT,
    TILES,
    WITHOUT_TMA,
    Kernel,
    TileShape,
    heads_per_tile,
    key_gradient_kernels,
    select_tile,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    # NVIDIA GPUs that use the tiles of sm_80 and sm_100
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    # AMD GPUs that use gfx942's tiles
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}

_KERNELS = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dk": dkdv_kernel,
    "dv": dkdv_kernel,
    "dq": dq_kernel,
}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MATRIX_INSTRUCTION = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA|v_mfma)")


KEY_HEADS = 8  # key heads of the compiled kernels

FEATURES = ("softcap", "sinks", "alibi", "dropout")


@dataclass(frozen=True)
class Configuration:
    """One kernel of the package, with everything that determines its machine code.

    Attributes:
        kernel, arch, head_dim, dtype: as in the table of tiles.
        head_dim_v: of the values; None means head_dim.
        group: query heads per key head.
        features: of `FEATURES` and "tree", those that are in use.
        another_tile: None means the table's.
    """

    kernel: Kernel
    arch: str
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None
    group: int = 4
    features: tuple[str, ...] = ()
    another_tile: TileShape | None = None

    @property
    def tile(self) -> TileShape:
        return self.another_tile or select_tile(
            self.kernel, max(self.blocks), self.dtype, self.arch, frozenset(self.features)
        )

    @property
    def blocks(self) -> tuple[int, int]:
        """The head dimensions of keys and values, padded to powers of two."""
        return triton.next_power_of_2(self.head_dim), triton.next_power_of_2(self.head_dim_v or self.head_dim)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"-{self.head_dim_v}")
        group = [] if self.group == 4 else [f"group{self.group}"]
        return "-".join([self.kernel, self.arch, dims, _DTYPES[self.dtype], *group, *self.features])


@dataclass(frozen=True)
class HopperConfiguration:
    """The kernel of the backend "gluon", with the interface of `Configuration`."""

    head_dim: int
    dtype: torch.dtype
    arch: str = "sm_90"

    @property
    def tile(self) -> TileShape:
        """For tables: 9 warps compute and load; the GPU rounds them up to 12 when it allocates registers."""
        tile = HOPPER_TILES[self.head_dim]
        return TileShape(2 * ROWS.value, tile.block_n, 9, tile.stages)

    def __str__(self) -> str:
        return f"gluon-forward-{self.arch}-d{self.head_dim}-{_DTYPES[self.dtype]}"


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    Attributes:
        registers: per thread (AMD: vector and accumulation registers together).
        spills: instructions that move spilled registers (AMD: spilled registers).
        shared_bytes: shared memory per program.
        matrix_instructions: how many the binary holds.
        instructions: of the whole kernel.
    """

    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    instructions: int


def shipped_configurations() -> list[Configuration]:
    """Every row of the tables in bfloat16, and on sm_90 also what else runs on the same rows; all that for trees, too.

    That is the smallest head dimension, keys of 192 with values of 128, float16, float32, and dQ with groups of one.
    Tiles for features are compiled for each of these features alone.
    """
    configurations = []
    for arch in TILES:
        kinds: list[tuple[torch.dtype, int, int | None]] = [(torch.bfloat16, d, None) for d in (64, 128, 256, 512)]
        if arch == "sm_90":
            kinds += [(torch.bfloat16, 16, None), (torch.bfloat16, 192, 128)]
            kinds += [(torch.float16, 128, None), (torch.float32, 128, None)]
        for dtype, head_dim, head_dim_v in kinds:
            row = triton.next_power_of_2(max(head_dim, head_dim_v or 0))
            kernels: tuple[Kernel, ...] = ("forward", *key_gradient_kernels(row, dtype, arch), "dq")
            configurations += [Configuration(kernel, arch, head_dim, dtype, head_dim_v) for kernel in kernels]
    configurations += [Configuration("dq", "sm_90", head_dim, torch.bfloat16, group=1) for head_dim in (64, 128)]
    configurations += [replace(c, features=("tree",)) for c in configurations]
    for arch, kernels_of in FEATURE_TILES.items():
        configurations += [
            Configuration(kernel, arch, head_dim, torch.bfloat16, features=(feature,))
            for kernel, rows in kernels_of.items()
            for head_dim, tiles in rows.items()
            for feature in " ".join(tiles).split()
            if feature != "tree"
        ]
    return configurations


def hopper_configurations() -> list[HopperConfiguration]:
    """All configurations of the backend "gluon"."""
    return [
        HopperConfiguration(head_dim, dtype) for head_dim in HOPPER_TILES for dtype in _DTYPES if dtype.itemsize == 2
    ]


def compile_configuration(configuration: Configuration | HopperConfiguration, target: str | None = None) -> Resources:
    """Compile for a key of `TARGETS`, by default the configuration's architecture, and read the binary."""
    return disassemble(configuration, target)[0]


def disassemble(configuration: Configuration | HopperConfiguration, target: str | None = None) -> tuple[Resources, str]:
    """Like `compile_configuration`, with the instructions as text, too."""
    if isinstance(configuration, HopperConfiguration):
        compiled = _compile_hopper(configuration)
    else:
        tile = configuration.tile
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
        compiled = triton.compile(_source(configuration), target=TARGETS[target or configuration.arch], options=options)
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared), compiled.asm["amdgcn"]
    return _read_nvidia(compiled.asm["cubin"], compiled.metadata.shared)


def _compile_hopper(configuration: HopperConfiguration) -> Any:
    """The Hopper kernel, compiled by Triton with the launcher's argument types and alignments."""
    tile, head_dim, element = HOPPER_TILES[configuration.head_dim], configuration.head_dim, _DTYPES[configuration.dtype]
    constants = {
        "GROUP": 4,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": head_dim,
        "STAGES": tile.stages,
        "TURNS": tile.turns,
        "LOAD_REGISTERS": tile.registers[0],
        "COMPUTE_REGISTERS": tile.registers[1],
    }
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    blocks = {"q_desc": ROWS.value, "k_desc": tile.block_n, "v_desc": tile.block_n}
    types = {name: f"tensordesc<{element}[1,{rows},{head_dim}],{layout!r}>" for name, rows in blocks.items()}
    types |= {"v_ptr": f"*{element}", "out_ptr": f"*{element}", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    signature, attributes = {}, {}
    for position, name in enumerate(hopper_forward_kernel.arg_names):
        signature[name] = (
            "constexpr" if name in constants else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        )
        if signature[name].startswith("*") or name.startswith("stride_"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(hopper_forward_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(hopper_forward_kernel, signature, constexprs, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS["sm_90"], options=options)


def _source(configuration: Configuration) -> ASTSource:
    """The kernel with the launcher's argument types and alignments."""
    kernel, tile, (block_d, block_v) = _KERNELS[configuration.kernel], configuration.tile, configuration.blocks
    features, element = configuration.features, _DTYPES[configuration.dtype]
    width = block_v if configuration.kernel in ("forward", "dv") else block_d
    columns = width if configuration.kernel == "dkdv" else min(tile.columns, width)
    of_v = columns if configuration.kernel == "forward" else block_v
    heads = heads_per_tile(tile, configuration.group)
    constants: dict[str, Any] = {
        "GROUP": configuration.group,
        "HEADS": heads,
        "HEAD_BLOCKS": KEY_HEADS * (configuration.group // heads if configuration.kernel in ("forward", "dq") else 1),
        "HEAD_DIM": configuration.head_dim,
        "HEAD_DIM_V": configuration.head_dim_v or configuration.head_dim,
        "UPCAST": False,
        "HAS_DK": configuration.kernel != "dv",
        "HAS_DV": configuration.kernel != "dk",
        "QUERIES_LEFT": configuration.arch in QUERIES_LEFT,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "COLUMNS": columns,
    }
    absent = {"alibi": ("alibi_ptr", "diagonal_ptr"), "dropout": ("seed_ptr",), "softcap": ("softcap_log2",)}
    absent["sinks"] = ("sinks_ptr", "dsinks_ptr")
    bounds = ("key_start_ptr", "key_stop_ptr") if kernel is dkdv_kernel else ()
    absent["tree"] = ("blocks_ptr", "num_keys", *bounds)
    constants |= {name: None for feature, names in absent.items() if feature not in features for name in names}
    if columns == width:
        constants |= {"q_columns_desc": None, "k_columns_desc": None}
    descriptors = {
        "q_desc": (heads, tile.block_m // heads, block_d),
        "q_columns_desc": (1, tile.block_m, columns),
        "k_desc": (1, tile.block_n, block_d),
        "k_columns_desc": (1, tile.block_n, columns),
        "v_desc": (1, tile.block_n, of_v),
        "dout_desc": (heads, tile.block_m // heads, columns if configuration.kernel == "dv" else block_v),
    }
    types: dict[str, str | tuple[str, ...]] = {
        "scale": "fp32", "scale_log2": "fp32", "softcap_log2": "fp32", "keep_scale": "fp32", "seed_ptr": "*i64",
        "lse_ptr": "*fp32", "dlse_ptr": "*fp32", "lse2_ptr": "*fp32", "delta_ptr": "*fp32", "sinks_ptr": "*fp32",
        "dsinks_ptr": "*fp32", "alibi_ptr": "*fp32", "out_ptr": f"*{element}",
        "dq_ptr": f"*{element}", "dk_ptr": f"*{element}", "dv_ptr": f"*{element}",
    }  # fmt: skip
    pointers = configuration.arch in WITHOUT_TMA
    for name, block in descriptors.items():
        described = f"tensordesc<{element}[{','.join(map(str, block))}]>"
        types[name] = (f"*{element}", "i32", "i32", "i32") if pointers else described
    unaligned = {
        "num_queries", "num_keys", "stride_at", "stride_ah", "stride_dlh", "stride_dlt", "drop_below",
    }  # fmt: skip

    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = (
            "constexpr" if name in constants else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        )
        if isinstance(signature[name], tuple):
            attributes |= {(position, part): [["tt.divisibility", 16]] for part in range(4)}
        elif signature[name].startswith("*") or (signature[name] == "i32" and name not in unaligned):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs: dict[Any, Any] = {
        (position,): constants[name] for position, name in enumerate(kernel.arg_names) if name in constants
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _read_nvidia(cubin: bytes, shared_bytes: int) -> tuple[Resources, str]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    registers = re.search(r"\bREG:(\d+)", usage)
    assert registers, usage
    resources = Resources(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=shared_bytes,
        matrix_instructions=len(_MATRIX_INSTRUCTION.findall(code)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
    )
    return resources, code


def _read_amd(assembly: str, shared_bytes: int) -> Resources:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found, name
        return int(found[1])

    return Resources(
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count"),
        shared_bytes=shared_bytes,
        matrix_instructions=len(_MATRIX_INSTRUCTION.findall(assembly)),
        instructions=len(re.findall(r"^\t[sv]_|^\t(?:buffer|global|ds)_", assembly, re.MULTILINE)),
    )


def _run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
