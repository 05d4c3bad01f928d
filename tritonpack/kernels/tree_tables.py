"""The kernels that build the tables of trees: `tree_tables` of tritonpack/backends/tree_table.py in torch.

Four launches build the tables of all kernels of a call and the list of blocks that they share. The first one cuts the
rows into tiles (tables.py), the second one finds the extremes of the bounds of each block, the third one counts the
blocks that each tile visits. The last one computes from these counts each tile's place in the table and in the list,
and writes both.

Legend: as in tables.py. A tile and a block are compared by the extremes of their bounds (docs/math.md, section 8).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonpack.kernels.tables import Bounds, first_rows, load_tiles, pick, pick_side

RANGES = 32  # blocks of which a program finds the extremes
STEP = 32  # rows of each block that it reads at once
ROWS_AT_ONCE = 128  # rows of a tile that are read at once
BLOCKS = 512  # blocks that a tile is compared with at once
OTHERS = 512  # tiles whose counts are added at once


@triton.jit(do_not_specialize=["num_queries", "num_keys", "block_stride"])
def extremes_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    extremes_ptr,
    num_queries,
    num_keys,
    block_stride,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    RANGES: tl.constexpr,
    STEP: tl.constexpr,
):
    """The extremes [cuts, 4, block_stride] of the bounds of blocks: `Ranges` of tritonpack/masks/blocks.py, in order.

    Grid (groups of RANGES blocks, cuts). Rows after the last one have the bounds [0, 0).
    """
    cut = tl.program_id(1)
    block = pick(BLOCK, cut)
    _, _, start_ptr, stop_ptr, _, total = pick_side(
        pick(OF_KEYS, cut), key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    number = tl.program_id(0) * RANGES + tl.arange(0, RANGES)
    first_start = tl.full([RANGES], 2**31 - 1, tl.int32)
    last_start = tl.zeros([RANGES], dtype=tl.int32)
    first_stop = tl.full([RANGES], 2**31 - 1, tl.int32)
    last_stop = tl.zeros([RANGES], dtype=tl.int32)
    for step in range(0, block, STEP):
        place = step + tl.arange(0, STEP)[None, :]
        offs = number[:, None] * block + place
        inside = (place < block) & (offs < total)
        start = tl.load(start_ptr + offs, mask=inside, other=0)
        stop = tl.load(stop_ptr + offs, mask=inside, other=0)
        live = start < stop
        first_start = tl.minimum(first_start, tl.min(tl.where(live, start, 2**31 - 1), 1))
        last_start = tl.maximum(last_start, tl.max(start, 1))
        first_stop = tl.minimum(first_stop, tl.min(tl.where(place < block, stop, 2**31 - 1), 1))
        last_stop = tl.maximum(last_stop, tl.max(tl.where(live, stop, 0), 1))
    stored = number < block_stride
    extremes_ptr += 4 * cut * block_stride + number
    tl.store(extremes_ptr, first_start, mask=stored)
    tl.store(extremes_ptr + block_stride, last_start, mask=stored)
    tl.store(extremes_ptr + 2 * block_stride, first_stop, mask=stored)
    tl.store(extremes_ptr + 3 * block_stride, last_stop, mask=stored)


@triton.jit
def tile_extremes(start_ptr, stop_ptr, first, end, ROWS_AT_ONCE: tl.constexpr):
    """The extremes of the bounds of the rows [first, end), as `extremes_kernel` stores them for blocks."""
    first_start = 2**31 - 1
    last_start = 0
    first_stop = 2**31 - 1
    last_stop = 0
    for step in range(first, end, ROWS_AT_ONCE):
        offs = step + tl.arange(0, ROWS_AT_ONCE)
        inside = offs < end
        start = tl.load(start_ptr + offs, mask=inside, other=0)
        stop = tl.load(stop_ptr + offs, mask=inside, other=0)
        live = start < stop
        first_start = tl.minimum(first_start, tl.min(tl.where(live, start, 2**31 - 1), 0))
        last_start = tl.maximum(last_start, tl.max(start, 0))
        first_stop = tl.minimum(first_stop, tl.min(tl.where(inside, stop, 2**31 - 1), 0))
        last_stop = tl.maximum(last_stop, tl.max(tl.where(live, stop, 0), 0))
    return first_start, last_start, first_stop, last_stop


@triton.jit
def compare(extremes_ptr, block_stride, number, blocks, block, first, end, tile):
    """(is_masked, is_full) of the blocks that a tile visits, both False for others: `relation` of masks/blocks.py."""
    first_start, last_start, first_stop, last_stop = tile
    inside = number < blocks
    begin = number * block
    block_end = begin + block
    block_first_start = tl.load(extremes_ptr + number, mask=inside, other=2**31 - 1)
    block_last_start = tl.load(extremes_ptr + block_stride + number, mask=inside, other=0)
    block_first_stop = tl.load(extremes_ptr + 2 * block_stride + number, mask=inside, other=0)
    block_last_stop = tl.load(extremes_ptr + 3 * block_stride + number, mask=inside, other=0)
    visited = (first_start < block_end) & (last_stop > begin) & (block_first_start < end) & (block_last_stop > first)
    full = (last_start <= begin) & (first_stop >= block_end) & (block_last_start <= first) & (block_first_stop >= end)
    return inside & visited & ~full, inside & visited & full


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride", "block_stride"])
def count_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    first_ptr,
    number_ptr,
    extremes_ptr,
    counts_ptr,
    num_queries,
    num_keys,
    stride,
    block_stride,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The numbers of masked and of full blocks that each tile visits [cuts, 2, stride]; grid (stride, cuts)."""
    tile, cut = tl.program_id(0), tl.program_id(1)
    block = pick(BLOCK, cut)
    start_ptr, stop_ptr, _, _, total, columns = pick_side(
        pick(OF_KEYS, cut), key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    first, end = load_tiles(first_ptr + cut * stride, tile, tl.load(number_ptr + cut), total)
    extremes = tile_extremes(start_ptr, stop_ptr, first, end, ROWS_AT_ONCE)
    extremes_ptr += 4 * cut * block_stride
    blocks = tl.where(first < end, tl.cdiv(columns, block), 0)
    masked = 0
    full = 0
    for step in range(0, blocks, BLOCKS):
        number = step + tl.arange(0, BLOCKS)
        is_masked, is_full = compare(extremes_ptr, block_stride, number, blocks, block, first, end, extremes)
        masked += tl.sum(is_masked.to(tl.int32), 0)
        full += tl.sum(is_full.to(tl.int32), 0)
    counts_ptr += 2 * cut * stride + tile
    tl.store(counts_ptr, masked)
    tl.store(counts_ptr + stride, full)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride", "block_stride"])
def fill_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    first_ptr,
    number_ptr,
    extremes_ptr,
    counts_ptr,
    tables_ptr,
    blocks_ptr,
    rooms,
    num_queries,
    num_keys,
    stride,
    block_stride,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """The tables [cuts, stride, 5], and the list of blocks; grid (stride, cuts).

    A tile's place in the table is the number of tiles that visit more blocks, and of those before it that visit as
    many. In the list the tiles of a cut begin at its entry in `rooms`, in the order of their rows.
    """
    tile, cut = tl.program_id(0), tl.program_id(1)
    block = pick(BLOCK, cut)
    start_ptr, stop_ptr, _, _, total, columns = pick_side(
        pick(OF_KEYS, cut), key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    tiles = tl.load(number_ptr + cut)
    first, end = load_tiles(first_ptr + cut * stride, tile, tiles, total)
    counts_ptr += 2 * cut * stride
    masked, full = tl.load(counts_ptr + tile), tl.load(counts_ptr + stride + tile)
    begin = pick(rooms, cut)
    place = 0
    for step in range(0, tiles, OTHERS):
        others = step + tl.arange(0, OTHERS)
        inside = others < tiles
        visited = tl.load(counts_ptr + others, mask=inside, other=0)
        visited += tl.load(counts_ptr + stride + others, mask=inside, other=0)
        before = others < tile
        begin += tl.sum(tl.where(before, visited, 0), 0)
        more = inside & ((visited > masked + full) | (visited == masked + full) & before)
        place += tl.sum(more.to(tl.int32), 0)
    place = tl.where(tile < tiles, place, tile)
    entry = tables_ptr + 5 * (cut * stride + place).to(tl.int64)
    tl.store(entry, first)
    tl.store(entry + 1, end)
    tl.store(entry + 2, begin)
    tl.store(entry + 3, begin + masked)
    tl.store(entry + 4, begin + masked + full)

    extremes = tile_extremes(start_ptr, stop_ptr, first, end, ROWS_AT_ONCE)
    extremes_ptr += 4 * cut * block_stride
    blocks = tl.where(first < end, tl.cdiv(columns, block), 0)
    masked_ptr = blocks_ptr + begin
    full_ptr = masked_ptr + masked
    for step in range(0, blocks, BLOCKS):
        number = step + tl.arange(0, BLOCKS)
        is_masked, is_full = compare(extremes_ptr, block_stride, number, blocks, block, first, end, extremes)
        nth_masked = tl.cumsum(is_masked.to(tl.int32), 0)
        nth_full = tl.cumsum(is_full.to(tl.int32), 0)
        tl.store(masked_ptr + nth_masked - 1, number * block, mask=is_masked)
        tl.store(full_ptr + nth_full - 1, number * block, mask=is_full)
        masked_ptr += tl.max(nth_masked, 0)
        full_ptr += tl.max(nth_full, 0)


def tables_of_trees(
    bounds: Bounds,
    rows: tuple[int, ...],
    longs: tuple[int, ...],
    blocks: tuple[int, ...],
    of_keys: tuple[bool, ...],
    capacities: list[int],
    rooms: list[int],
) -> tuple[list[Tensor], Tensor]:
    """The table of each cut, (capacity, 5) int32, and the list of blocks that they share, (sum of rooms,) int32.

    Args:
        bounds: of a mask of trees with queries and keys.
        rows, longs, blocks, of_keys: of each cut, as in `Cut` of tritonpack/backends/tile_table.py.
        capacities: a bound of the number of tiles of each cut.
        rooms: a bound of the number of blocks that the tiles of each cut visit, a multiple of 16.
    """
    num_queries, num_keys = bounds.key_start.shape[0], bounds.query_start.shape[0]
    stride = triton.cdiv(max(capacities) + 1, 16) * 16  # so that tables begin at multiples of 16 bytes
    lengths = [triton.cdiv(num_queries if keys else num_keys, n) for keys, n in zip(of_keys, blocks, strict=True)]
    block_stride = max(lengths)
    first, number = first_rows(bounds, rows, longs, of_keys, stride, whole=False)
    extremes = first.new_empty(len(rows), 4, block_stride)
    counts, tables = first.new_empty(len(rows), 2, stride), first.new_empty(len(rows), stride, 5)
    listed = first.new_empty(sum(rooms))
    common = {
        "key_start_ptr": bounds.key_start,
        "key_stop_ptr": bounds.key_stop,
        "query_start_ptr": bounds.query_start,
        "query_stop_ptr": bounds.query_stop,
        "extremes_ptr": extremes,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "block_stride": block_stride,
        "BLOCK": blocks,
        "OF_KEYS": of_keys,
    }
    tiles = {
        "first_ptr": first,
        "number_ptr": number,
        "counts_ptr": counts,
        "stride": stride,
        "ROWS_AT_ONCE": ROWS_AT_ONCE,
        "BLOCKS": BLOCKS,
    }
    with torch.cuda.device_of(first):
        extremes_kernel[(triton.cdiv(block_stride, RANGES), len(rows))](RANGES=RANGES, STEP=STEP, **common)
        count_kernel[(stride, len(rows))](**tiles, **common)
        # Multiples of 16, so that Triton compiles one kernel for all of them.
        begins = tuple(sum(rooms[:cut]) for cut in range(len(rooms)))
        fill_kernel[(stride, len(rows))](
            tables_ptr=tables, blocks_ptr=listed, rooms=begins, OTHERS=OTHERS, **tiles, **common
        )
    return [table[:capacity] for table, capacity in zip(tables, capacities, strict=True)], listed
