"""Compiles the kernels that build and write masks for each architecture, without the hardware."""

import re

import pytest

pytest.importorskip("triton")

import triton
from triton.compiler import ASTSource, make_backend

from tests.kernels.aot import TARGETS, Resources, kind_of_pointer, read_binary
from tritonpack.backends.tile_table import MOST_ORDERED
from tritonpack.kernels import dense_mask, intervals, tables, tree_tables, trees
from tritonpack.kernels.tile_shapes import TILES

pytestmark = pytest.mark.compile

ROWS = {"ROWS": intervals.RUN_ROWS, "LOOK": intervals.LOOK}
UNCHECKED = ROWS | {"table_ptr": None}
TREES = {"ROWS": trees.ROWS, "PIECE": trees.PIECE}
# Tiles of a shipped configuration: forward, dq and the gradients of keys.
CUTS = {"ROWS": (32, 32, 128), "LONG": (128, 128, 128), "OF_KEYS": (False, False, True), "TREE": False}
BLOCKS = {"BLOCK": (64, 64, 128), "OF_KEYS": CUTS["OF_KEYS"]}
EXTREMES = BLOCKS | {"RANGES": tree_tables.RANGES, "STEP": tree_tables.STEP}
COUNT = BLOCKS | {"ROWS_AT_ONCE": tree_tables.ROWS_AT_ONCE, "BLOCKS": tree_tables.BLOCKS}
SIZES = {name: getattr(tables, name) for name in ("WINDOW", "TILES", "OTHERS", "STEP")}
ORDER = CUTS | SIZES | {"BLOCK": (64, 64, 0), "EVEN": (0, 0, 0), "GROUPS": MOST_ORDERED}
SHARED, WHOLE = {"HALO": 128, "document_ptr": None}, {"HALO": 0}
FIRST_ROWS = dict.fromkeys(("ends_ptr", "tables_ptr", "BLOCK", "EVEN", "GROUPS")) | {"TREE": True}
TABLES = {
    "tables": (tables.tables_kernel, ORDER | SHARED, "*i32", tables.WARPS),
    "tables-even": (tables.tables_kernel, ORDER | SHARED | {"EVEN": (1, 1, 0)}, "*i32", tables.WARPS),
    "tables-whole": (tables.tables_kernel, ORDER | WHOLE, "*i32", tables.WARPS),
    "first-rows-tree": (tables.tables_kernel, ORDER | SHARED | FIRST_ROWS, "*i32", tables.WARPS),
    "extremes": (tree_tables.extremes_kernel, EXTREMES, "*i32", 4),
    "count": (tree_tables.count_kernel, COUNT, "*i32", 4),
    "fill": (tree_tables.fill_kernel, COUNT | {"OTHERS": tree_tables.OTHERS}, "*i32", 4),
}
KERNELS = {
    **TABLES,
    "transpose": (intervals.transpose_kernel, {"CHECKED": True, "ROWS": intervals.OFFSET_ROWS}, "*i32", 4),
    "transpose-unchecked": (intervals.transpose_kernel, {"CHECKED": False, "ROWS": intervals.OFFSET_ROWS}, "*i32", 4),
    "offsets": (intervals.offsets_kernel, {"ROWS": intervals.OFFSET_ROWS}, "*i32", 4),
    "offsets-int64": (intervals.offsets_kernel, {"ROWS": intervals.OFFSET_ROWS}, "*i64", 4),
    "positions": (intervals.runs_kernel, {"RULE": "positions", **UNCHECKED}, "*i64", intervals.RUN_WARPS),
    "segments": (intervals.runs_kernel, {"RULE": "segments", **ROWS}, "*i64", intervals.RUN_WARPS),
    "padding": (intervals.runs_kernel, {"RULE": "padding", **ROWS}, "*u8", intervals.RUN_WARPS),
    "codes": (intervals.runs_kernel, {"RULE": "codes", **UNCHECKED}, "*u8", intervals.RUN_WARPS),
    "tree-parents": (trees.parents_kernel, TREES, "*i64", trees.WARPS),
    "tree-parents-int32": (trees.parents_kernel, TREES, "*i32", trees.WARPS),
    "tree-ends": (trees.ends_kernel, {"ROWS": trees.ROWS}, "*i64", 4),
    "tree-depths": (trees.depths_kernel, TREES, "*i64", trees.WARPS),
    "tree-depths-of-ends": (trees.depths_kernel, {"parents_ptr": None, **TREES}, "*i64", trees.WARPS),
    "tree-starts": (trees.starts_kernel, TREES, "*i64", trees.WARPS),
    "tree-check": (trees.check_kernel, {"ROWS": trees.ROWS}, "*i32", 4),
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


def compile_kernel(name: str, arch: str) -> tuple[Resources, str]:
    """Compile like the launcher: pointers aligned to 16 bytes, numbers of any value. The resources, and the code."""
    kernel, constants, ids, num_warps = KERNELS[name]
    if not arch.startswith("sm"):  # nothing is asserted there
        constants = constants | {"table_ptr": None}
    types = dict.fromkeys(("ids_ptr", "cu_q_ptr", "cu_k_ptr", "parents_ptr", "given_ptr"), ids)
    types |= {"first_ptr": "*i32" if name in TABLES else "*i8", "rooms": ("i32", "i32", "i32")}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*i32" if "_ptr" in argument else "i32")
        for argument in kernel.arg_names
    }
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    attributes = make_backend(TARGETS[arch]).parse_attr(kind_of_pointer(arch))
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[argument]: value for argument, value in constants.items() if argument in places},
        attrs={places[x]: attributes for x in places if str(signature[x]).startswith("*")},
    )
    options = {"num_warps": num_warps, "debug": arch.startswith("sm"), "sanitize_overflow": False}
    return read_binary(triton.compile(source, target=TARGETS[arch], options=options))


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.fast(*(f"{name}-sm_90" for name in ("dense-32", "tables", "positions", "transpose", "tree-ends")))
def test_compiles_without_spills(name: str, arch: str) -> None:
    resources, code = compile_kernel(name, arch)
    assert resources.spills == 0
    # At least two programs of up to 512 threads fit on a multiprocessor; one of tables, of which a call has three. RDNA
    # has more registers.
    rdna = arch.startswith("gfx1")
    assert resources.registers <= (128 if name in TABLES else 64) * (3 if rdna else 1)
    if name.startswith("dense"):
        any_store = "STG" if arch.startswith("sm") else "buffer_store"
        wide = {"STG": r"STG\.E\S*\.128"}.get(any_store, "buffer_store_b128" if rdna else "buffer_store_dwordx4")
        assert len(re.findall(wide, code)) == len(re.findall(any_store, code)) > 0


@pytest.mark.fast("segments")
@pytest.mark.parametrize(
    "name", ["offsets", "segments", "padding", "transpose", "tree-parents", "tree-ends", "tree-depths", "tree-check"]
)
def test_assertions_are_compiled(name: str) -> None:
    assert "__assertfail" in compile_kernel(name, "sm_90")[1]
