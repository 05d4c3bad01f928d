"""Ahead-of-time compilation of kernels for a GPU, without the hardware.

Each kernel is compiled as in a call: the package launches it for tensors on the CPU, and what Triton's launcher would
compile then is recorded. Registers, spills, shared memory, loops and matrix instructions are read from the binary with
the tools in Triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels import amdgcn, sass
from tests.kernels.sass import Loop, count_instructions
from tritonpack.backends import gluon
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels import intervals
from tritonpack.kernels.hopper import HOPPER_TILES
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES
from tritonpack.kernels.hopper_primitives import ROWS
from tritonpack.kernels.tile_shapes import Kernel, TileShape, key_gradient_kernels, select_tile
from tritonpack.options import make_options
from tritonpack.testing import Case, make_inputs

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 103, 120)},
    **{gpu: GPUTarget("hip", gpu, 64) for gpu in ("gfx908", "gfx90a", "gfx942", "gfx950")},
    **{gpu: GPUTarget("hip", gpu, 32) for gpu in ("gfx1100", "gfx1151", "gfx1200", "gfx1201")},
}

# GPUs without tiles of their own, and whose they use (`tile_shapes.current_arch`).
USES_TILES_OF = {
    "sm_86": "sm_80", "sm_89": "sm_80", "sm_103": "sm_100", "gfx908": "gfx942", "gfx90a": "gfx942",
    "gfx950": "gfx942", "gfx1151": "gfx1100", "gfx1200": "gfx1201",
}  # fmt: skip

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KEY_HEADS = 8  # of the compiled kernels
LENGTHS = (200, 133)  # tokens; their number isn't a multiple of 16


@dataclass(frozen=True)
class Configuration:
    """One kernel of the package, with everything that determines its machine code."""

    kernel: Kernel
    gpu: str  # a key of `TARGETS`
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None  # None means head_dim
    group: int = 4  # query heads per key head
    features: tuple[str, ...] = ()  # of softcap, sinks, alibi, dropout, tree, dlse: a gradient of the log-sum-exp
    large: bool = False  # storages of more than 2 GiB, for which Triton compiles other binaries on AMD GPUs
    backend: str = "triton"  # or "gluon"

    @property
    def arch(self) -> str:
        """The key of the table of tiles."""
        return USES_TILES_OF.get(self.gpu, self.gpu)

    @property
    def block_d(self) -> int:
        """The larger head dimension, padded to a power of two."""
        return max(triton.next_power_of_2(x) for x in (self.head_dim, self.head_dim_v or 0))

    @property
    def tile(self) -> TileShape:
        """The kernel's tile. In Gluon 9 warps compute and load; the GPU rounds them up to 12 for registers."""
        if self.backend == "triton":
            return select_tile(self.kernel, self.block_d, self.dtype, self.arch, frozenset(self.features))
        if self.kernel == "dkdv":
            keys = HOPPER_DKDV_TILES[self.head_dim]
            return TileShape(keys.block_m, 2 * ROWS.value, 9, keys.stages)
        queries = (HOPPER_TILES if self.kernel == "forward" else HOPPER_DQ_TILES)[self.head_dim]
        return TileShape(2 * ROWS.value, queries.block_n, 9, queries.stages)

    def __str__(self) -> str:
        gluon = ["gluon"] * (self.backend == "gluon")
        dims = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"-{self.head_dim_v}")
        group = [] if self.group == 4 else [f"group{self.group}"]
        large = ["large"] * self.large
        name = [*gluon, self.kernel, self.gpu, dims, DTYPES[self.dtype], *group, *self.features, *large]
        return "-".join(name)


def hopper_configurations() -> list[Configuration]:
    """All configurations of the backend "gluon"."""
    tables: dict[Kernel, Any] = {"forward": HOPPER_TILES, "dq": HOPPER_DQ_TILES, "dkdv": HOPPER_DKDV_TILES}
    return [
        Configuration(kernel, "sm_90", head_dim, dtype, backend="gluon")
        for kernel, table in tables.items()
        for head_dim in table
        for dtype in (torch.bfloat16, torch.float16)
    ]


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel."""

    registers: int  # per thread (AMD: vector and accumulation registers together)
    spills: int  # instructions that move spilled registers
    shared_bytes: int  # shared memory per program
    matrix_instructions: int
    instructions: int
    loops: tuple[Loop, ...] = ()  # the innermost that multiply, in the order of the code

    @property
    def spills_in_loops(self) -> int:
        """Instructions that move spilled registers in an iteration of a loop, summed over the loops."""
        return sum(loop.spills for loop in self.loops)


class Launch(NamedTuple):
    """What Triton's launcher would compile for a launch: the kernel with the types of its arguments, and options."""

    source: Any
    options: dict[str, Any]
    target: GPUTarget

    def compile(self) -> tuple[Resources, str]:
        """The resources of the binary, and its instructions as text."""
        compiled = triton.compile(self.source, target=self.target, options=self.options)
        return _read_amd(compiled) if "amdgcn" in compiled.asm else _read_nvidia(compiled)


@contextmanager
def recorded(gpu: str, *, large: bool = False) -> Iterator[list[Launch]]:
    """Record the launches of a block as on a GPU of `TARGETS`, if `large` as if every storage had more than 2 GiB.
    Nothing is compiled, and the tensors lie in host memory."""
    launches: list[Launch] = []
    target, on_amd = TARGETS[gpu], gpu.startswith("gfx")

    def keep(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, *_: Any
    ) -> None:
        launches.append(Launch(self.ASTSource(self, signature, constants, attrs), options.__dict__, target))

    asked = {"get_current_target": target, "get_current_device": f"recorded {gpu}", "get_current_stream": 0}
    answers = {name: lambda *_, answer=answer: answer for name, answer in asked.items()}
    with ExitStack() as stack:
        for replaced in (
            patch.object(JITFunction, "_do_compile", keep),
            patch.object(driver, "_active", SimpleNamespace(**answers)),
            patch.object(torch.version, "hip", "7.0" if on_amd else None),
            patch.object(triton_backend, "current_arch", lambda device: USES_TILES_OF.get(gpu, gpu)),
            patch.object(gluon, "_multiprocessors", lambda device: 132),
            patch.dict(intervals.ASSERTIONS, debug=not on_amd),
        ):
            stack.enter_context(replaced)
        if large:
            stack.enter_context(patch.object(torch.UntypedStorage, "size", lambda storage: 2**31))
        yield launches


def launch_of(configuration: Configuration) -> Launch:
    """The launch of a kernel in a call of its backend, forward and backward.

    Slopes and the gradient of the log-sum-exp have odd strides, which the kernels don't know.
    """
    backend = gluon if configuration.backend == "gluon" else triton_backend
    features, heads = set(configuration.features), KEY_HEADS * configuration.group
    case = Case(
        "", LENGTHS, heads=heads, kv_heads=KEY_HEADS, head_dim=configuration.head_dim,
        head_dim_v=configuration.head_dim_v, softcap=5.0 * ("softcap" in features), sinks="sinks" in features,
        dropout_p=0.1 * ("dropout" in features),
        parents=tuple(range(-1, sum(LENGTHS) - 1)) if "tree" in features else None,
    )  # fmt: skip
    inputs = make_inputs(case, configuration.dtype)
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    slopes = torch.ones(len(LENGTHS), 3 * heads + 1)[:, 1::3] if "alibi" in features else None
    options = make_options(q, mask, sinks=inputs.sinks, alibi_slopes=slopes, **inputs.keywords)
    dlse = torch.ones(heads, 3 * sum(LENGTHS))[:, ::3] if "dlse" in features else None
    with recorded(configuration.gpu, large=configuration.large) as launches:
        tiles = backend.plan_tiles(q, k, v, mask, options, backward=True)
        out, lse = backend.forward(q, k, v, mask, options, tiles)
        backend.backward(inputs.dout, dlse, q, k, v, out, lse, mask, options, tiles)
    names = ("forward", "dq", *key_gradient_kernels(configuration.block_d, configuration.dtype, configuration.arch))
    return dict(zip(names, launches, strict=True))[configuration.kernel]


def compile_configuration(configuration: Configuration) -> Resources:
    """Compile a configuration and read the binary."""
    return launch_of(configuration).compile()[0]


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
    shared, products = compiled.metadata.shared, whole.matrix_instructions
    return Resources(registers, whole.spills, shared, products, whole.instructions, tuple(loops))


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
