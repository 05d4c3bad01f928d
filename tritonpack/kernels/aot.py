"""Ahead-of-time compilation: what the compiler makes of a kernel on an architecture, without the hardware.

Registers, spills, shared memory and matrix instructions are read from the binary with the tools in Triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tritonpack.kernels.backward import dkdv_kernel, dq_kernel, row_statistics_kernel
from tritonpack.kernels.forward import forward_kernel
from tritonpack.kernels.tiles import TILES, Kernel, Tile, key_gradient_kernels, select_tile

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_KERNELS = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dk": dkdv_kernel,
    "dv": dkdv_kernel,
    "dq": dq_kernel,
    "row_statistics": row_statistics_kernel,
}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MATRIX_INSTRUCTION = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA|v_mfma)")


@dataclass(frozen=True)
class Configuration:
    """One kernel as the package ships it: everything that decides what the compiler makes of it."""

    kernel: Kernel
    arch: str
    head_dim: int
    dtype: torch.dtype
    group: int = 4

    @property
    def block_d(self) -> int:
        return triton.next_power_of_2(self.head_dim)

    @property
    def tile(self) -> Tile:
        return select_tile(self.kernel, self.block_d, self.dtype, self.arch)

    def __str__(self) -> str:
        return f"{self.kernel}-{self.arch}-d{self.head_dim}-{_DTYPES[self.dtype]}"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

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
    """Every kernel of every architecture in the table: bfloat16 at each power of two, float16 and float32 at 128."""
    head_dims = {torch.bfloat16: (16, 32, 64, 128, 256), torch.float16: (128,), torch.float32: (128,)}
    configurations = []
    for arch in TILES:
        for dtype, dims in head_dims.items():
            for head_dim in dims:
                kernels: tuple[Kernel, ...] = (
                    "forward",
                    *key_gradient_kernels(head_dim, dtype, arch),
                    "dq",
                    "row_statistics",
                )
                configurations += [Configuration(kernel, arch, head_dim, dtype) for kernel in kernels]
    return configurations


def compile_configuration(configuration: Configuration) -> Resources:
    """Compile for the configuration's architecture and read the binary."""
    tile = configuration.tile
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(_source(configuration), target=TARGETS[configuration.arch], options=options)
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _read_nvidia(compiled.asm["cubin"], compiled.metadata.shared)


def _source(configuration: Configuration) -> ASTSource:
    """The kernel with the argument types and alignments that the launcher gives it."""
    kernel, tile, block_d = _KERNELS[configuration.kernel], configuration.tile, configuration.block_d
    element = _DTYPES[configuration.dtype]
    constants = {
        "GROUP": configuration.group,
        "HEAD_DIM": configuration.head_dim,
        "PRECISION": "ieee" if configuration.dtype == torch.float32 else "tf32",
        "UPCAST": False,
        "HAS_DK": configuration.kernel != "dv",
        "HAS_DV": configuration.kernel != "dk",
        "HAS_DLSE": True,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
    }
    rows = {"q_desc": tile.block_m, "dout_desc": tile.block_m, "k_desc": tile.block_n, "v_desc": tile.block_n}
    signature: dict[str, str] = {}
    aligned: list[int] = []
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in rows:
            signature[name] = f"tensordesc<{element}[1,{rows[name]},{block_d}]>"
        elif name.endswith("_desc"):
            signature[name] = f"tensordesc<fp32[{tile.block_m}]>"
        elif name.endswith("_ptr"):
            bounds, statistics = ("start" in name or "stop" in name), ("lse" in name or "delta" in name)
            signature[name] = "*i32" if bounds else "*fp32" if statistics else f"*{element}"
            aligned.append(position)
        elif name.startswith("scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.startswith("stride_") or name == "num_rows":
                aligned.append(position)
    attributes = {(position,): [["tt.divisibility", 16]] for position in aligned}
    constexprs: dict[Any, Any] = {
        (position,): constants[name] for position, name in enumerate(kernel.arg_names) if name in constants
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _read_nvidia(cubin: bytes, shared_bytes: int) -> Resources:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    registers = re.search(r"\bREG:(\d+)", usage)
    assert registers, usage
    return Resources(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=shared_bytes,
        matrix_instructions=len(_MATRIX_INSTRUCTION.findall(code)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
    )


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
