"""Ahead-of-time compilation of kernels for an architecture, without the hardware.

Registers, spills, shared memory, loops and matrix instructions are read from the binary with the tools in Triton's
wheel, pipelined loads from Triton's intermediate form.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import amdgcn, sass
from tests.kernels.sass import Loop, count_instructions
from tests.kernels.stages import Stage, read_loads
from tritonpack.kernels.backward import dkdv_kernel, dq_kernel
from tritonpack.kernels.forward import forward_kernel
from tritonpack.kernels.hopper import HOPPER_TILES, hopper_forward_kernel
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES, HopperDkdvTileShape, hopper_dkdv_kernel
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES, HopperDqTileShape, hopper_dq_kernel
from tritonpack.kernels.hopper_primitives import ROWS
from tritonpack.kernels.tile_shapes import WITHOUT_TMA, Kernel, TileShape, heads_per_tile, select_tile

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
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
    # AMD GPUs that use others' tiles
    "gfx908": GPUTarget("hip", "gfx908", 64),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1151": GPUTarget("hip", "gfx1151", 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
}

_KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dk": dkdv_kernel, "dv": dkdv_kernel, "dq": dq_kernel}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

KEY_HEADS = 8  # key heads of the compiled kernels


@dataclass(frozen=True)
class Configuration:
    """One kernel of the package, with everything that determines its machine code.

    Attributes:
        kernel, arch, head_dim, dtype: as in the table of tiles.
        head_dim_v: of the values; None means head_dim.
        group: query heads per key head.
        features: those in use, of softcap, sinks, alibi, dropout, tree, dlse: a gradient of the log-sum-exp, and
            places: those of some keys, to which alibi counts distances as in a tree.
        another_tile: None means the table's.
        device: a key of `TARGETS`; None means arch.
        large: whether tensors have storages of more than 2 GiB, for which Triton compiles other binaries on AMD GPUs.
    """

    kernel: Kernel
    arch: str
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None
    group: int = 4
    features: tuple[str, ...] = ()
    another_tile: TileShape | None = None
    device: str | None = None
    large: bool = False

    @property
    def gpu(self) -> str:
        """The key of `TARGETS` that the kernel is compiled for."""
        return self.device or self.arch

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
        large = ["large"] * self.large
        return "-".join([self.kernel, self.gpu, dims, _DTYPES[self.dtype], *group, *self.features, *large])


@dataclass(frozen=True)
class HopperConfiguration:
    """One kernel of the backend "gluon", with the interface of `Configuration`.

    Attributes:
        another_tile: of the backward kernels; None means the table's.
    """

    kernel: Literal["forward", "dq", "dkdv"]
    head_dim: int
    dtype: torch.dtype
    arch: str = "sm_90"
    another_tile: HopperDqTileShape | HopperDkdvTileShape | None = None

    @property
    def gpu(self) -> str:
        """The key of `TARGETS` that the kernel is compiled for."""
        return self.arch

    @property
    def shape(self) -> Any:
        """The kernel's own tile shape."""
        tables: dict[str, Any] = {"forward": HOPPER_TILES, "dq": HOPPER_DQ_TILES, "dkdv": HOPPER_DKDV_TILES}
        return self.another_tile or tables[self.kernel][self.head_dim]

    @property
    def tile(self) -> TileShape:
        """For tables: 9 warps compute and load; the GPU rounds them up to 12 when it allocates registers."""
        rows = 2 * ROWS.value
        if self.kernel == "dkdv":
            return TileShape(self.shape.block_m, rows, 9, self.shape.stages)
        return TileShape(rows, self.shape.block_n, 9, self.shape.stages)

    def __str__(self) -> str:
        return f"gluon-{self.kernel}-{self.arch}-d{self.head_dim}-{_DTYPES[self.dtype]}"


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    Attributes:
        registers: per thread (AMD: vector and accumulation registers together).
        spills: instructions that move spilled registers, in the whole kernel.
        shared_bytes: shared memory per program.
        matrix_instructions, instructions: of the whole kernel.
        loops: the innermost loops that multiply, in the order of the code.
        stages: the buffers of pipelined loads.
        unstaged_loads: TMA loads in loops that are requested and waited for in the same iteration.
    """

    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    instructions: int
    loops: tuple[Loop, ...] = ()
    stages: tuple[Stage, ...] = ()
    unstaged_loads: int = 0

    @property
    def spills_in_loops(self) -> int:
        """Instructions that move spilled registers in an iteration of a loop, summed over the loops."""
        return sum(loop.spills for loop in self.loops)


def kind_of_pointer(gpu: str, *, large: bool = False) -> str:
    """What Triton's launcher says of an aligned tensor: "D", its address is a multiple of 16; "S", on AMD GPUs, its
    storage has at most 2 GiB, so that 32 bits hold an offset in bytes.

    Args:
        gpu: a key of `TARGETS`.
        large: whether its storage has more.
    """
    return "DS" if TARGETS[gpu].backend == "hip" and not large else "D"


def hopper_configurations() -> list[HopperConfiguration]:
    """All configurations of the backend "gluon"."""
    dtypes = [dtype for dtype in _DTYPES if dtype.itemsize == 2]
    return [
        *(HopperConfiguration("forward", head_dim, dtype) for head_dim in HOPPER_TILES for dtype in dtypes),
        *(HopperConfiguration("dq", head_dim, dtype) for head_dim in HOPPER_DQ_TILES for dtype in dtypes),
        *(HopperConfiguration("dkdv", head_dim, dtype) for head_dim in HOPPER_DKDV_TILES for dtype in dtypes),
    ]


def compile_configuration(configuration: Configuration | HopperConfiguration) -> Resources:
    """Compile a configuration and read the binary."""
    return disassemble(configuration)[0]


def disassemble(configuration: Configuration | HopperConfiguration) -> tuple[Resources, str]:
    """Like `compile_configuration`, with the instructions as text, too."""
    if isinstance(configuration, HopperConfiguration):
        compiled = _compile_hopper(configuration)
    else:
        tile = configuration.tile
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
        compiled = triton.compile(source(configuration), target=TARGETS[configuration.gpu], options=options)
    return read_binary(compiled)


def read_binary(compiled: Any) -> tuple[Resources, str]:
    """The resources of a kernel that Triton has compiled, and its instructions as text."""
    return _read_amd(compiled) if "amdgcn" in compiled.asm else _read_nvidia(compiled)


def _compile_hopper(configuration: HopperConfiguration) -> Any:
    """A kernel for Hopper, compiled by Triton with the launcher's argument types and alignments."""
    kernels = {"forward": hopper_forward_kernel, "dq": hopper_dq_kernel, "dkdv": hopper_dkdv_kernel}
    kernel, tile = kernels[configuration.kernel], configuration.shape
    head_dim, element, rows = configuration.head_dim, _DTYPES[configuration.dtype], ROWS.value
    block = tile.block_m if configuration.kernel == "dkdv" else tile.block_n
    constants = {
        "GROUP": 4,
        "BLOCK_M" if configuration.kernel == "dkdv" else "BLOCK_N": block,
        "BLOCK_D": head_dim,
        "STAGES": tile.stages,
        "LOAD_REGISTERS": tile.registers[0],
        "COMPUTE_REGISTERS": tile.registers[1],
    }
    heads = 1
    if configuration.kernel == "forward":
        heads = heads_per_tile(tile, 4)
        constants |= {"HEADS": heads, "TURNS": tile.turns}
    if configuration.kernel == "dq":
        constants["dlse_ptr"] = None
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    own, others = ("k", "v"), ("q", "dout")
    if configuration.kernel != "dkdv":
        own, others = others, own
    blocks = {f"{name}_desc": size for names, size in ((own, rows), (others, block)) for name in names}
    types = {name: f"tensordesc<{element}[1,{size},{head_dim}],{layout!r}>" for name, size in blocks.items()}
    if heads > 1:
        types["q_desc"] = f"tensordesc<{element}[{heads // 2},{2 * rows // heads},{head_dim}],{layout!r}>"
    types |= dict.fromkeys(("lse_ptr", "lse2_ptr", "delta_ptr"), "*fp32") | {"scale": "fp32", "scale_log2": "fp32"}
    types |= {f"{name}_ptr": f"*{element}" for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name) or _integers(name)
        if signature[name].startswith("*") or (name.startswith("stride_") and not name.startswith("stride_dl")):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS["sm_90"], options=options)


def _integers(name: str) -> str:
    """The type of an argument that no table of types names: integers are known by their names."""
    if name.endswith("_ptr"):
        return "*i32"
    if not name.startswith(("stride_", "num_")) and name not in ("drop_below", "head_blocks"):
        raise ValueError(f"the argument {name} of a kernel has no type here; add it to `types` in {__file__}.")
    return "i32"


def source(configuration: Configuration) -> ASTSource:
    """The kernel with the launcher's argument types and alignments."""
    kernel, tile, (block_d, block_v) = _KERNELS[configuration.kernel], configuration.tile, configuration.blocks
    features, element = configuration.features, _DTYPES[configuration.dtype]
    heads = heads_per_tile(tile, configuration.group)
    constants: dict[str, Any] = {
        "GROUP": configuration.group,
        "HEADS": heads,
        "HEAD_BLOCKS": KEY_HEADS * (configuration.group // heads if configuration.kernel in ("forward", "dq") else 1),
        "HEAD_DIM": configuration.head_dim,
        "HEAD_DIM_V": configuration.head_dim_v or configuration.head_dim,
        "UPCAST": False,
        "QUERIES_LEFT": tile.queries_left,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "DEFERRED": tile.deferred,
    }
    absent = {"alibi": ("alibi_ptr", "diagonal_ptr"), "dropout": ("seed_ptr",)}
    absent |= {"softcap": ("softcap_log2",), "sinks": ("sinks_ptr", "dsinks_ptr"), "dlse": ("dlse_ptr",)}
    bounds = ("key_start_ptr", "key_stop_ptr") if kernel is dkdv_kernel else ()
    absent["tree"] = ("blocks_ptr", "num_keys", *bounds)
    constants |= {name: None for feature, names in absent.items() if feature not in features for name in names}
    if "alibi" not in features or not {"tree", "places"} & set(features):
        constants["places_ptr"] = None
    constants |= {"dk": {"dv_ptr": None}, "dv": {"dk_ptr": None}}.get(configuration.kernel, {})
    descriptors = {
        "q_desc": (heads, tile.block_m // heads, block_d),
        "k_desc": (1, tile.block_n, block_d),
        "v_desc": (1, tile.block_n, block_v),
        "dout_desc": (heads, tile.block_m // heads, block_v),
    }
    types: dict[str, str | tuple[str, ...]] = {
        "scale": "fp32", "scale_log2": "fp32", "softcap_log2": "fp32", "keep_scale": "fp32", "seed_ptr": "*i64",
        "lse_ptr": "*fp32", "dlse_ptr": "*fp32", "lse2_ptr": "*fp32", "delta_ptr": "*fp32", "sinks_ptr": "*fp32",
        "dsinks_ptr": "*fp32", "alibi_ptr": "*fp32", "out_ptr": f"*{element}",
        "dq_ptr": f"*{element}", "dk_ptr": f"*{element}", "dv_ptr": f"*{element}",
    }  # fmt: skip
    pointers = tile.by_pointers or configuration.arch in WITHOUT_TMA
    for name, block in descriptors.items():
        described = f"tensordesc<{element}[{','.join(map(str, block))}]>"
        types[name] = (f"*{element}", "i32", "i32", "i32") if pointers else described
    unaligned = {
        "num_queries", "num_keys", "stride_at", "stride_ah", "stride_dlh", "stride_dlt", "drop_below",
    }  # fmt: skip

    parse = make_backend(TARGETS[configuration.gpu]).parse_attr
    aligned, pointer = parse("D"), parse(kind_of_pointer(configuration.gpu, large=configuration.large))
    signature: dict[str, str | tuple[str, ...]] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else types.get(name) or _integers(name)
        signature[name] = kind
        if isinstance(kind, tuple):
            attributes |= {(position, 0): pointer, **{(position, part): aligned for part in (1, 2, 3)}}
        elif kind.startswith("*"):
            attributes[(position,)] = pointer
        elif kind == "i32" and name not in unaligned:
            attributes[(position,)] = aligned
    constexprs: dict[Any, Any] = {
        (position,): constants[name] for position, name in enumerate(kernel.arg_names) if name in constants
    }
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _read_nvidia(compiled: Any) -> tuple[Resources, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run_tool("cuobjdump", "-res-usage", file.name)
        listing = _run_tool("nvdisasm", "-c", file.name)
    registers = re.search(r"\bREG:(\d+)", usage)
    assert registers, usage
    code = sass.parse(listing)
    whole = count_instructions(code.instructions)
    return _resources(compiled, int(registers[1]), whole, sass.count_loops(code)), listing


def _read_amd(compiled: Any) -> tuple[Resources, str]:
    assembly = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    assert registers, assembly[-2000:]
    code = amdgcn.parse(assembly)
    return _resources(compiled, int(registers[1]), amdgcn.count(code.instructions), amdgcn.loops(code)), assembly


def _resources(compiled: Any, registers: int, whole: Loop, loops: list[Loop]) -> Resources:
    stages, unstaged = read_loads(compiled.asm["ttgir"])
    return Resources(
        registers=registers,
        spills=whole.spills,
        shared_bytes=compiled.metadata.shared,
        matrix_instructions=whole.matrix_instructions,
        instructions=whole.instructions,
        loops=tuple(loops),
        stages=stages,
        unstaged_loads=unstaged,
    )


def _run_tool(name: str, *arguments: str) -> str:
    """The output of a tool in Triton's wheel, or else in the installed one.

    Triton 3.6 compiles for sm_103, whose binaries its own tools can't read.
    """
    wheels = (Path(triton.__file__).parent, Path(sysconfig.get_path("purelib")) / "triton")
    for wheel in wheels:
        command = [str(wheel / "backends" / "nvidia" / "bin" / name), *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return result.stdout
    raise RuntimeError(f"{name} can't read the binary: {result.stderr}")
