"""Functions that the forward and backward kernels share: tiles, blocks of keys, loads, scores, dropout.

Legend: M query rows of a tile or block, N keys of a tile or block, D head dimension padded to a power of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The phases in which a tile of queries visits its blocks, in this order; see `phase_range`.
EARLY, FULL, LATE, CLEANED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_tile(tiles_ptr, head_blocks, FIELDS: tl.constexpr):
    """This program's block of heads, its tile's number and entry in the table, and the entry's first three fields.

    An entry has 3 fields, or 5 in a mask of trees (backends/tile_table.py, tree_table.py). The first axis of the grid
    holds tiles and heads, because the other axes end at 65,535. The block of heads varies fastest, so that the heaviest
    tiles of all heads start first.
    """
    number = tl.program_id(0) // head_blocks
    tile = tiles_ptr + FIELDS * number
    return tl.program_id(0) % head_blocks, number, tile, tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def block_range(start_ptr, stop_ptr, first, last, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    """The blocks of BLOCK columns, from `begin`, that a tile of rows `first` to `last` visits.

    With EVEN, for `kept`, they begin at an even column, which may be the one before the first that the tile sees.

    Both bounds ascend, so the tile sees columns [start[first], stop[last]), and every row of it sees all of
    [start[last], stop[first]). Blocks [0, full) and [full_end, blocks) need masking, blocks [full, full_end) don't.
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
def phase_range(phase: tl.constexpr, exposed, full, full_end, blocks):
    """The steps [begin, end) of a tile of queries in a phase.

    EARLY masks the blocks before the full ones. FULL doesn't mask. LATE masks the blocks after the full ones, only by
    each row's `stop`, because every row's `start` lies before them. In an exposed tile CLEANED takes all masked blocks
    instead of EARLY and LATE: it also zeroes keys that no query sees, because a weight of zero doesn't hide a NaN. That
    is the most expensive part of a masked block. A step is a block, in CLEANED the number of a masked block
    (`masked_block`).
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
def listed_range(phase: tl.constexpr, tile_ptr, begin):
    """`phase_range` of a tile of a tree, whose entry names its masked blocks, then its full ones, in a list."""
    middle = tl.load(tile_ptr + 3)
    if phase == FULL:
        begin = middle
        end = tl.load(tile_ptr + 4)
    else:
        end = middle
    return begin, end


@triton.jit
def masked_block(number, full, full_end):
    """The masked block of a number; masked blocks lie before and after the full ones."""
    return number + tl.where(number >= full, full_end - full, 0)


@triton.jit
def load_bounds(start_ptr, stop_ptr, offs, size):
    """The intervals of rows `offs`; rows from `size` on see nothing."""
    start = tl.load(start_ptr + offs, mask=offs < size, other=0)
    stop = tl.load(stop_ptr + offs, mask=offs < size, other=0)
    return start, stop


@triton.jit
def within(offs, start, length):
    """Whether start <= offs < start + length, for int32: one comparison, because smaller numbers wrap around."""
    return (offs - start).to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)


@triton.jit
def visible_keys(phase: tl.constexpr, offs_n, start, stop):
    """Whether each pair of a masked block is visible, [M, N]; in LATE only `stop` decides."""
    if phase == LATE:
        visible = offs_n[None, :] < stop[:, None]
    else:
        visible = within(offs_n[None, :], start[:, None], (stop - start)[:, None])
    return visible


@triton.jit
def other_side(rows, columns, start_ptr, stop_ptr, size):
    """Whether each row lies in the interval of each column; rows and columns broadcast, columns from `size` on: no."""
    start, stop = load_bounds(start_ptr, stop_ptr, columns, size)
    return within(rows, start, stop - start)


@triton.jit
def load_places(places_ptr, offs_n, end):
    """The places of keys, to which ALiBi counts distances: those given, up to `end`, or the numbers of the keys."""
    place = offs_n
    if places_ptr is not None:
        place = tl.load(places_ptr + offs_n, mask=offs_n < end, other=0)
    return place


@triton.jit
def clean(keys, query_start_ptr, query_stop_ptr, offs_n, key_end):
    """Keys or values [N, D] with zeros in rows that no query sees, and from `key_end` on."""
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
    """The ALiBi slopes of rows, in base 2, and the keys at the rows' own places; zeros without ALiBi."""
    slopes = tl.zeros(offs_m.shape, dtype=tl.float32)
    diagonal = tl.zeros(offs_m.shape, dtype=tl.int32)
    if alibi_ptr is not None:
        rows = offs_m.to(tl.int64)
        slopes = tl.load(alibi_ptr + rows * stride_at + head * stride_ah, mask=offs_m < size, other=0.0) * LOG2E
        diagonal = tl.load(diagonal_ptr + offs_m, mask=offs_m < size, other=0)
    return slopes, diagonal  # [M]


@triton.jit
def score(products, scale_log2, softcap_log2, alibi_ptr, slopes, distance):
    """Scores in base 2 as a pair (scores, unit), whose product they are, and their derivative by the scaled products.

    Without softcap and ALiBi the unit is the scale, which then costs nothing because it is part of the exponential.
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
    """The hyperbolic tangent in float32 precision, by a series near zero, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.04, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def philox(key, first, second):
    """Both words of Philox 2x32-7 for a key and the two words of a counter, which broadcast; all are uint32."""
    for _ in tl.static_range(7):
        product = first.to(tl.uint64) * 0xD256D193  # one instruction gives both halves, umulhi and a product are two
        first = (product >> 32).to(tl.uint32) ^ key ^ second
        second = product.to(tl.uint32)
        key += 0x9E3779B9
    return first, second


@triton.jit
def dropout_keys(seed, heads):
    """A key for each head, as in backends/dropout.py."""
    seed = seed.to(tl.uint64)
    first, _ = philox(seed.to(tl.uint32), heads.to(tl.uint32), (seed >> 32).to(tl.uint32))
    return first


@triton.jit
def swap_halves(word):
    """A uint32 with its lower 16 bits before its upper ones."""
    return (word << 16) | (word >> 16)


@triton.jit
def kept(key, rows, column, COLUMNS: tl.constexpr, drop_below, OF_KEYS: tl.constexpr = False):
    """Whether dropout keeps each pair, as in backends/dropout.py, [R, COLUMNS].

    Rows are queries, or keys if OF_KEYS. The columns begin at an even number, so a call of the generator serves two
    neighbouring ones, which lie in one thread in most layouts of products. `both` has the numbers of the two, because
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
    """acc + a @ b in float32, with `a` rounded to the dtype of `b`, which tensor cores need."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")
