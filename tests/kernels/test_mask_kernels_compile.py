"""Compiles the kernels that build and write masks for each architecture, without the hardware."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

import triton
from triton.compiler import ASTSource

from tests.kernels.aot import TARGETS
from tritonpack.kernels import dense_mask, intervals, trees

pytestmark = pytest.mark.compile

ROWS = {"ROWS": intervals.RUN_ROWS, "LOOK": intervals.LOOK}
TREES = {"ROWS": trees.ROWS, "PIECE": trees.PIECE}
KERNELS = {
    "offsets": (intervals.offsets_kernel, {"ROWS": intervals.OFFSET_ROWS}, "*i32", 4),
    "offsets-int64": (intervals.offsets_kernel, {"ROWS": intervals.OFFSET_ROWS}, "*i64", 4),
    "positions": (intervals.runs_kernel, {"RULE": "positions", **ROWS}, "*i64", intervals.RUN_WARPS),
    "segments": (intervals.runs_kernel, {"RULE": "segments", **ROWS}, "*i64", intervals.RUN_WARPS),
    "codes": (intervals.runs_kernel, {"RULE": "codes", **ROWS}, "*u8", intervals.RUN_WARPS),
    "tree-parents": (trees.parents_kernel, TREES, "*i64", trees.WARPS),
    "tree-parents-int32": (trees.parents_kernel, TREES, "*i32", trees.WARPS),
    "tree-ends": (trees.ends_kernel, {"ROWS": trees.ROWS}, "*i64", 4),
    "tree-depths": (trees.depths_kernel, TREES, "*i64", trees.WARPS),
    "tree-depths-of-ends": (trees.depths_kernel, {"parents_ptr": None, **TREES}, "*i64", trees.WARPS),
    "tree-starts": (trees.starts_kernel, TREES, "*i64", trees.WARPS),
    **{
        f"dense-{per_word}": (
            dense_mask.dense_mask_kernel,
            {"PER_WORD": per_word, "BLOCK_M": dense_mask.BLOCK_M, "BLOCK_N": dense_mask.BLOCK_N},
            "*i32",
            4,
        )
        for per_word in (1, 2, 4, 32)
    },
}


class Code(NamedTuple):
    registers: int
    spills: int
    assembly: str


def compile_kernel(name: str, arch: str) -> Code:
    """Compile like the launcher: pointers aligned to 16 bytes, numbers of any value."""
    kernel, constants, ids, num_warps = KERNELS[name]
    types = dict.fromkeys(("ids_ptr", "cu_q_ptr", "cu_k_ptr", "parents_ptr", "given_ptr"), ids)
    types |= {"first_ptr": "*i8", "sound_ptr": "*i8"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*i32" if "_ptr" in argument else "i32")
        for argument in kernel.arg_names
    }
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[argument]: value for argument, value in constants.items()},
        attrs={
            places[argument]: [["tt.divisibility", 16]] for argument in places if signature[argument].startswith("*")
        },
    )
    asm = triton.compile(source, target=TARGETS[arch], options={"num_warps": num_warps}).asm
    if "amdgcn" in asm:
        code = asm["amdgcn"]
        registers, spills = (int(re.search(rf"\.{x}:\s+(\d+)", code)[1]) for x in ("vgpr_count", "vgpr_spill_count"))
        return Code(registers, spills, code)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    return Code(int(re.search(r"\bREG:(\d+)", usage)[1]), len(re.findall(r"\b(?:LDL|STL)\b", code)), code)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name: str, arch: str) -> None:
    code = compile_kernel(name, arch)
    assert code.spills == 0
    assert code.registers <= 64  # so 1,024 threads, at least two programs, fit on a multiprocessor
    if name.startswith("dense"):
        wide, any_store = (
            (r"global_store_dwordx4", r"global_store_") if arch == "gfx942" else (r"STG\.E\S*\.128", "STG")
        )
        assert re.search(wide, code.assembly)
        assert len(re.findall(wide, code.assembly)) == len(re.findall(any_store, code.assembly))
