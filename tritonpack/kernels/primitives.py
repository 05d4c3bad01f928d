"""What the forward and backward kernels share: their tile, a mask's intervals by the block, loads, scores, dropout.

Legend: M query rows of a tile or block, N keys of a tile or block, D head dimension padded to a power of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# What is done with the blocks that a tile of queries visits, in this order; see `phase_range`.
EARLY, FULL, LATE, CLEANED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_tile(tiles_ptr, head_blocks):
    """This program's block of heads and its tile: the number, and the table's three numbers (backends/tile_table.py).

    Both are in the grid's first axis, because the others end at 65,535. Blocks of heads turn fastest, so that the
    heaviest tiles of all heads start first.
    """
    number = tl.program_id(0) // head_blocks
    tile = tiles_ptr + 3 * number
    return tl.program_id(0) % head_blocks, number, tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


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
def phase_range(phase: tl.constexpr, exposed, full, full_end, blocks):
    """The steps [begin, end) of a tile of queries in a phase.

    EARLY masks the blocks before the full ones, FULL doesn't mask, LATE masks the blocks after them, by the rows' last
    keys alone, as all rows' keys have begun there. Of an exposed tile CLEANED takes all masked blocks instead: it also
    puts zeros where nothing sees, because a weight of zero doesn't hide a NaN, and that is the dearest part of a masked
    block. A step is a block, in CLEANED the number of a masked one (`masked_block`).
    """
    cleaned = exposed != 0
    if phase == EARLY:
        begin = tl.where(cleaned, full, 0)
        end = full
    elif phase == FULL:
        begin = full
        end = full_end
    elif phase == LATE:
        begin = tl.where(cleaned, blocks, full_end)
        end = blocks
    else:
        begin = 0
        end = tl.where(cleaned, full + blocks - full_end, 0)
    return begin, end


@triton.jit
def masked_block(number, full, full_end):
    """The masked block of that number; they lie before and after the full ones."""
    return number + tl.where(number >= full, full_end - full, 0)


@triton.jit
def load_bounds(start_ptr, stop_ptr, offs, size):
    """The intervals of rows `offs`; rows from `size` on see nothing."""
    start = tl.load(start_ptr + offs, mask=offs < size, other=0)
    stop = tl.load(stop_ptr + offs, mask=offs < size, other=0)
    return start, stop


@triton.jit
def within(offs, start, length):
    """Whether start <= offs < start + length, with int32 numbers: one comparison, as what is below wraps around."""
    return (offs - start).to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)


@triton.jit
def visible_keys(phase: tl.constexpr, offs_n, start, stop):
    """Which pairs of a masked block are seen, [M, N]; in LATE the rows' last keys decide alone."""
    if phase == LATE:
        visible = offs_n[None, :] < stop[:, None]
    else:
        visible = within(offs_n[None, :], start[:, None], (stop - start)[:, None])
    return visible


@triton.jit
def clean(keys, query_start_ptr, query_stop_ptr, offs_n, key_end):
    """Rows of keys or values [N, D], zeros where no query sees them, or from `key_end` on."""
    query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, key_end)
    return tl.where((query_start < query_stop)[:, None], keys, 0.0)


@triton.jit
def load_rows(desc, row, head, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr):
    """Rows from `row` and columns from `column` of one head of a (heads, tokens, D) descriptor, zeros outside it."""
    rows = tl.reshape(desc.load([head, row, column]), (ROWS, COLUMNS))
    # Triton's interpreter multiplies bfloat16 matrices wrongly, without a word.
    return rows.to(tl.float32) if UPCAST else rows  # [ROWS, COLUMNS]


@triton.jit
def load_alibi(alibi_ptr, diagonal_ptr, offs_m, head, size, stride_at, stride_ah):
    """What rows lose per key of distance, in base 2, and the keys at their own place; zeros without ALiBi."""
    slopes = tl.zeros(offs_m.shape, dtype=tl.float32)
    diagonal = tl.zeros(offs_m.shape, dtype=tl.int32)
    if alibi_ptr is not None:
        rows = offs_m.to(tl.int64)
        slopes = tl.load(alibi_ptr + rows * stride_at + head * stride_ah, mask=offs_m < size, other=0.0) * LOG2E
        diagonal = tl.load(diagonal_ptr + offs_m, mask=offs_m < size, other=0)
    return slopes, diagonal  # [M]


@triton.jit
def score(products, scale_log2, softcap_log2, alibi_ptr, slopes, distance):
    """Scores in base 2, as a pair (scores, unit) whose product they are, and their slope by the scaled products.

    Without softcap and ALiBi the unit is the scale, which then costs nothing: it folds into the exponential.
    """
    slope = 1.0
    if softcap_log2 is None and alibi_ptr is None:
        scores = products
        unit = scale_log2
    else:
        scores = products * scale_log2
        unit = 1.0
    if softcap_log2 is not None:
        capped = tanh(scores / softcap_log2)
        scores = capped * softcap_log2
        slope = 1.0 - capped * capped
    if alibi_ptr is not None:
        scores -= slopes * tl.abs(distance).to(tl.float32)
    return scores, unit, slope


@triton.jit
def tanh(x):
    """The hyperbolic tangent to float32's precision, also near zero, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.04, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def kept(seed, head, queries, keys, drop_below):
    """Which pairs dropout keeps, as backends/dropout.py has it; queries and keys broadcast against each other."""
    zero = (queries + keys) * 0
    bits, _, _, _ = tl.philox(seed, zero + keys, zero + queries, zero + head, zero)
    return (bits >> 1).to(tl.int32) >= drop_below


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32, `a` rounded to the dtype of `b` as the tensor cores take them."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
