"""What the forward and backward kernels share: reading a mask's intervals by the block, loading rows, products.

Legend: M query rows of a tile or block, N keys of a tile or block, D head dimension padded to a power of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_range(start_ptr, stop_ptr, first, last, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """How a tile of rows `first` to `last` walks the other side, in blocks of BLOCK columns from `begin`.

    Both bounds ascend, so the tile sees columns [start[first], stop[last]), and every row of it sees all of
    [start[last], stop[first]). Blocks [0, full) and [full_end, blocks) need masking, blocks [full, full_end) don't.
    """
    begin = tl.load(start_ptr + first) // ALIGN * ALIGN
    end = tl.load(stop_ptr + last)
    common = tl.load(start_ptr + last)
    common_end = tl.load(stop_ptr + first)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    full = tl.minimum(tl.cdiv(tl.maximum(common - begin, 0), BLOCK), blocks)
    full_end = tl.maximum(tl.maximum(common_end - begin, 0) // BLOCK, full)
    return begin, full, full_end, blocks


@triton.jit
def load_bounds(start_ptr, stop_ptr, offs, size):
    """The intervals of rows `offs`; rows past the end see nothing."""
    start = tl.load(start_ptr + offs, mask=offs < size, other=0)
    stop = tl.load(stop_ptr + offs, mask=offs < size, other=0)
    return start, stop


@triton.jit
def load_rows(desc, row, head, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """Rows [row, row + ROWS) of one head of a (heads, tokens, D) descriptor, zeros outside it."""
    rows = tl.reshape(desc.load([head, row, 0]), (ROWS, BLOCK_D))
    # Triton's interpreter multiplies bfloat16 matrices wrongly, without a word.
    return rows.to(tl.float32) if UPCAST else rows  # [ROWS, D]


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32, `a` rounded to the dtype of `b` as the tensor cores take them."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
