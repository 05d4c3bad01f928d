"""Functions that the kernels for Hopper share: layouts, barriers, loads of blocks with padding, products, stores.

Each kernel computes a tile of 128 rows. One warp loads, and two warpgroups compute 64 rows each, a half of the tile.
Legend: as in hopper.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from tritonpack.kernels.primitives import load_bounds, masked_block

# Renamed after Triton 3.6.
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)  # rows of a half


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a product in a warpgroup: 64 rows of `columns` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def wide_layout(columns, warps):
    """A layout with 8 columns, 16 bytes, per thread and whole rows per warp."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def store_layout(columns):
    """A layout with 8 columns, 16 bytes, per thread, and in each warp the rows that it has in a product."""
    registers = [[0, 1], [0, 2], [0, 4]] + [[0, c] for c in (32, 64, 128) if c < columns] + [[8, 0]]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns])


@gluon.constexpr_function
def line_layout(size):
    """The layout of a vector in one warp."""
    return gl.BlockedLayout([size // 32], [32], [1], [0])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each complete after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def seen_rows(first, start_ptr, stop_ptr, end, BLOCK: gl.constexpr):
    """True for rows of a block whose interval isn't empty; False for rows from `end` on."""
    start, stop = load_bounds(start_ptr, stop_ptr, first + gl.arange(0, BLOCK, line_layout(BLOCK)), end)
    return start < stop


@gluon.jit
def count_unseen(seen):
    """The number of rows for which `seen_rows` is False."""
    return gl.sum((seen == 0).to(gl.int32), 0)


@gluon.jit
def copy_seen(copies, first, start_ptr, stop_ptr, end, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """Copy blocks of the same rows to shared memory, with zeros in rows for which `seen_rows` is False.

    A product sums over these rows, and their weight of zero times NaN is NaN. Each copy is (pointer to a head, stride
    of tokens, target). Few tiles need this, so it copies few rows at a time, which takes few registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    offs = first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for i in gl.static_range(BLOCK // 8):
        start, stop = load_bounds(start_ptr, stop_ptr, offs, end)
        seen = (start < stop)[:, None]
        for number in gl.static_range(len(copies)):
            ptr, stride_t, target = copies[number]
            rows = target.reshape([BLOCK, BLOCK_D]).slice(i * 8, 8)
            ptrs = ptr + offs.to(gl.int64)[:, None] * stride_t + offs_d[None, :]
            for column in gl.static_range(0, BLOCK_D, 64):
                rows.slice(column, 64, 1).store(gl.load(ptrs + column, mask=seen, other=0.0))
        offs += 8


@gluon.jit
def visited_block(step, masked, full, full_end):
    """The block that a tile visits in a step: first the `masked` blocks, then the full ones."""
    return gl.where(step < masked, masked_block(step, full, full_end), full + step - masked)


@gluon.jit
def between(low, high, LAYOUT: gl.constexpr, BLOCK: gl.constexpr):
    """True where a column of a block lies in the interval [low, high) of a row, [M, BLOCK]; low <= high.

    Bits 1 and 2 of a column's number depend on the thread, the others are constants of a thread. The bounds take those
    bits, and columns are compared as constants. Otherwise each would take a register, and some would spill. A
    column below `low` is also below `high`, so an exclusive or gives the same as an `and`, which the compiler would
    turn into two selections.
    """
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    of_thread, constant = (columns & 6)[None, :], (columns & ~6)[None, :]
    return (constant < low[:, None] - of_thread) ^ (constant < high[:, None] - of_thread)


@gluon.jit
def request_product(rows, others, LAYOUT: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """Start [M, D] @ [D, BLOCK] -> [M, BLOCK], scores or dP, without waiting for it; `others` is [1, BLOCK, D]."""
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    return warpgroup_mma(rows, others.reshape([BLOCK, BLOCK_D]).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def as_operand(x, dtype: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Probabilities or dS in the layout of a left operand, in registers."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))


@gluon.jit
def store_rows(rows, ptr, low, end, stride_t, BLOCK_D: gl.constexpr):
    """Store 64 rows [M, D] from token `low`, those before `end`; `ptr` points to a head."""
    WIDE: gl.constexpr = store_layout(BLOCK_D)
    rows = gl.convert_layout(rows.to(ptr.dtype.element_ty), WIDE)
    offs_m = low + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
    gl.store(ptr + offs_m.to(gl.int64)[:, None] * stride_t + offs_d[None, :], rows, mask=(offs_m < end)[:, None])
