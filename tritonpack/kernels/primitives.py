"""Functions that the forward and backward kernels share: tiles, phases, loads, masks, scores, dropout.

Legend: M query rows of a tile or block, N keys of a tile or block, D head dimension padded to a power of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The phases of a tile's loop over blocks of keys, in order (`phase_range`). A tile runs the first three, or the second
# and the last. Zeroing isn't a branch in the masked phases, because every masked block would then load its operand
# through registers, even if nothing is zeroed: up to 3% more instructions and 86% more passes over shared memory in all
# (docs/decisions/backward-ladder.md).
LEFT_MASKED, UNMASKED, RIGHT_MASKED, ZEROED_KEYS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_tile(tiles_ptr, head_blocks, FIELDS: tl.constexpr):
    """This program's block of heads, its tile's index and entry in the table, and the entry's first three fields.

    An entry has 3 fields, or 5 in a mask of trees (backends/tile_table.py, tree_table.py). The first axis of the grid
    holds tiles and heads, because the other axes are limited to 65,535. The block of heads varies fastest, so that the
    heaviest tiles of all heads start first.
    """
    number = tl.program_id(0) // head_blocks
    tile = tiles_ptr + FIELDS * number
    return tl.program_id(0) % head_blocks, number, tile, tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def block_range(start_ptr, stop_ptr, first, last, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    """The blocks of BLOCK columns, from column `begin` on, that a tile of rows `first` to `last` visits.

    Both bounds ascend, so the tile sees columns [start[first], stop[last]), and each of its rows sees all columns
    [start[last], stop[first]). Blocks [full, full_end) lie in the latter and need no mask; [0, full) and
    [full_end, blocks) need one.

    With EVEN `begin` is even, as `kept` needs, and may be one column before the first that the tile sees.
    """
    begin = tl.load(start_ptr + first)
    if EVEN:
        begin -= begin & 1
    end = tl.load(stop_ptr + last)
    common = tl.load(start_ptr + last)
    common_end = tl.load(stop_ptr + first)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    full = tl.minimum(tl.cdiv(tl.maximum(common - begin, 0), BLOCK), blocks)
    full_end = tl.maximum(tl.maximum(common_end - begin, 0) // BLOCK, full)
    return begin, full, full_end, blocks


@triton.jit
def phase_range(phase: tl.constexpr, reads_unseen_keys, full, full_end, blocks):
    """The steps [begin, end) of a phase in a tile of queries.

    LEFT_MASKED has the blocks before the full ones, UNMASKED the full ones. RIGHT_MASKED has the blocks after them; it
    compares keys only with each row's `stop`, because every row's `start` lies before these blocks. A step is a block.

    A tile that reads unseen keys runs ZEROED_KEYS instead of the other masked phases. It has all masked blocks, and a
    step is an index for `masked_block`. It sets keys that no query sees to zero, because they may be NaN, and a weight
    of zero times NaN is NaN.
    """
    zeroed = reads_unseen_keys != 0
    if phase == LEFT_MASKED:
        begin = tl.where(zeroed, full, 0)
        end = full
    elif phase == UNMASKED:
        begin = full
        end = full_end
    elif phase == RIGHT_MASKED:
        begin = tl.where(zeroed, blocks, full_end)
        end = blocks
    else:
        begin = 0
        end = tl.where(zeroed, full + blocks - full_end, 0)
    return begin, end


@triton.jit
def tree_phase_range(phase: tl.constexpr, tile_ptr, begin):
    """`phase_range` in masks of trees: a tile's entry has the ranges of its masked blocks and of its full blocks."""
    middle = tl.load(tile_ptr + 3)
    if phase == UNMASKED:
        begin = middle
        end = tl.load(tile_ptr + 4)
    else:
        end = middle
    return begin, end


@triton.jit
def masked_block(number, full, full_end):
    """The block of an index among the masked blocks, which lie before and after the full ones."""
    return number + tl.where(number >= full, full_end - full, 0)


@triton.jit
def load_bounds(start_ptr, stop_ptr, offs, size):
    """The intervals [start, stop) that rows `offs` see; rows from `size` on see nothing."""
    start = tl.load(start_ptr + offs, mask=offs < size, other=0)
    stop = tl.load(stop_ptr + offs, mask=offs < size, other=0)
    return start, stop


@triton.jit
def within(offs, start, length):
    """True where start <= offs < start + length, in int32: one comparison, because smaller numbers wrap around."""
    return (offs - start).to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)


@triton.jit
def visible_keys(phase: tl.constexpr, offs_n, start, stop):
    """True for visible pairs of a masked block, [M, N]; RIGHT_MASKED compares with `stop` alone."""
    if phase == RIGHT_MASKED:
        visible = offs_n[None, :] < stop[:, None]
    else:
        visible = within(offs_n[None, :], start[:, None], (stop - start)[:, None])
    return visible


@triton.jit
def visible_transposed(rows, columns, start_ptr, stop_ptr, size):
    """True where a row lies in a column's interval; rows and columns broadcast, columns from `size` on see nothing.

    In a mask of trees a pair is visible if this and `visible_keys` are both true.
    """
    start, stop = load_bounds(start_ptr, stop_ptr, columns, size)
    return within(rows, start, stop - start)


@triton.jit
def load_places(places_ptr, offs_n, end):
    """The positions of keys for ALiBi: from `places_ptr` up to `end`, or without it the indices of the keys."""
    place = offs_n
    if places_ptr is not None:
        place = tl.load(places_ptr + offs_n, mask=offs_n < end, other=0)
    return place


@triton.jit
def zero_unseen(keys, query_start_ptr, query_stop_ptr, offs_n, key_end):
    """Keys or values [N, D] with zeros in place of keys that no query sees and of keys from `key_end` on."""
    query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, key_end)
    return tl.where((query_start < query_stop)[:, None], keys, 0.0)


@triton.jit
def load_rows(
    source,
    row,
    head,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
    HEADS: tl.constexpr = 1,
):
    """Rows from `row` of a tensor (heads, tokens, WIDTH), with zeros outside it, [ROWS, BLOCK].

    The rows are ROWS / HEADS tokens of HEADS heads from `head`. `source` is a descriptor, or on GPUs without TMA
    (pointer, 16 * tokens, bytes between heads, bytes between tokens); see `backends.triton.descriptor`.
    """
    if isinstance(source, tl.tensor_descriptor):
        rows = tl.reshape(source.load([head, row, 0]), (ROWS, BLOCK))
    else:
        UNIT: tl.constexpr = 128 // source[0].dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
        stride_h, stride_t = source[2] // 16 * UNIT, source[3] // 16 * UNIT
        base = source[0] + tl.cast(head, tl.int64) * stride_h + tl.cast(row, tl.int64) * stride_t
        number = tl.arange(0, ROWS)
        token = number % (ROWS // HEADS)
        offs = token.to(tl.int64) * stride_t
        if HEADS > 1:
            offs += (number // (ROWS // HEADS)).to(tl.int64) * stride_h
        offs_d = tl.arange(0, BLOCK)
        inside = (row + token < source[1] // 16)[:, None] & (offs_d < WIDTH)[None, :]
        rows = tl.load(base + (offs[:, None] + offs_d[None, :]), mask=inside, other=0.0)
    # Triton's interpreter multiplies bfloat16 matrices wrongly, without an error.
    return rows.to(tl.float32) if UPCAST else rows  # [ROWS, BLOCK]


@triton.jit
def load_alibi(alibi_ptr, diagonal_ptr, offs_m, head, size, stride_at, stride_ah):
    """The ALiBi slopes of rows in base 2, and the keys at the rows' own positions, [M]; zeros without ALiBi."""
    slopes = tl.zeros(offs_m.shape, dtype=tl.float32)
    diagonal = tl.zeros(offs_m.shape, dtype=tl.int32)
    if alibi_ptr is not None:
        rows = offs_m.to(tl.int64)
        slopes = tl.load(alibi_ptr + rows * stride_at + head * stride_ah, mask=offs_m < size, other=0.0) * LOG2E
        diagonal = tl.load(diagonal_ptr + offs_m, mask=offs_m < size, other=0)
    return slopes, diagonal  # [M]


@triton.jit
def score(products, scale_log2, softcap_log2, alibi_ptr, slopes, distance):
    """Apply scale, softcap and ALiBi to products of queries and keys: (scores, unit, slope).

    `scores * unit` are the scores in base 2. Without softcap and ALiBi `unit` is the scale, which costs nothing there
    because it is part of the exponential. `slope` is the derivative of the scores by the scaled products.
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
    """The hyperbolic tangent in float32 precision; near zero a series, because the quotient cancels there."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.04, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def philox(key, first, second):
    """Philox 2x32-7: both output words for a key and the two words of a counter; all uint32, with broadcasting."""
    for _ in tl.static_range(7):
        product = first.to(tl.uint64) * 0xD256D193  # one instruction; umulhi and a product are two
        first = (product >> 32).to(tl.uint32) ^ key ^ second
        second = product.to(tl.uint32)
        key += 0x9E3779B9
    return first, second


@triton.jit
def dropout_keys(seed, heads):
    """The generator's key of each head, as in backends/dropout.py."""
    seed = seed.to(tl.uint64)
    first, _ = philox(seed.to(tl.uint32), heads.to(tl.uint32), (seed >> 32).to(tl.uint32))
    return first


@triton.jit
def swap_halves(word):
    """Exchange the lower and the upper 16 bits of a uint32."""
    return (word << 16) | (word >> 16)


@triton.jit
def kept(key, rows, column, COLUMNS: tl.constexpr, drop_below, OF_KEYS: tl.constexpr = False):
    """True for pairs that dropout keeps, as in backends/dropout.py, [R, COLUMNS].

    Rows are queries, or keys if OF_KEYS. `column` is even, so one call of the generator serves two neighbouring
    columns, which one thread has in most layouts of products. `both` packs their two random words into 64 bits, because
    Triton moves other forms through shared memory, or gives the next product a worse layout
    (docs/decisions/kernel-forms.md).
    """
    half_rows = (rows >> 1).to(tl.uint32, bitcast=True)[:, None]
    half_columns = ((column >> 1) + tl.arange(0, COLUMNS // 2)).to(tl.uint32, bitcast=True)[None, :]
    is_even = (rows & 1 == 0)[:, None]
    if OF_KEYS:
        first, second = philox(key, half_columns, half_rows)
        even = tl.where(is_even, swap_halves(first), first)
        odd = tl.where(is_even, swap_halves(second), second)
    else:
        first, second = philox(key, half_rows, half_columns)
        odd = tl.where(is_even, first, second)
        even = swap_halves(odd)
    both = even.to(tl.uint64) | (odd.to(tl.uint64) << 32)  # [R, COLUMNS / 2]
    number = (both[:, :, None] >> (tl.arange(0, 2) * 32).to(tl.uint64)[None, None, :]).to(tl.uint32)
    return tl.reshape(number, (rows.shape[0], COLUMNS)) >= (drop_below << 1).to(tl.uint32, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; `a` is rounded to the dtype of `b`, because tensor cores need equal dtypes."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")
