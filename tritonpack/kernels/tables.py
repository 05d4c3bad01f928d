"""The kernels that build tile tables: `tile_tables` of tritonpack/backends/tile_table.py computes the same in torch.

Three launches build the tables of all kernels of a call. The rows are cut into chunks, one for each program. The first
launch finds the tiles that begin in each chunk, as far as the chunk's own rows tell. The second one knows from these
numbers where the tiles of a chunk lie in the table, and stores their first rows. The third one orders the tiles.

Legend: a cut says how a kernel cuts the queries or the keys into tiles; the second axis of every grid holds the cuts,
and tuples hold a number for each cut. A stretch holds one long document, or the shorter ones between two long ones.
Its first row begins a tile. `stride` is the room of a cut's tiles. No length is a compile-time constant.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonpack.kernels.intervals import larger, smaller

WINDOW = 1024  # rows that a program reads: its chunk, and on both sides the rows that decide which documents are long
SUMMARIES = 128  # chunks whose numbers are added at once
TILES = 16  # tiles that a program orders; few, so that all programs run at the same time
OTHERS = 512  # groups of tiles that they are compared with at once; many, because each step waits for memory
STEP = 32  # rows or keys of each tile that are read at once
WARPS = 8


class Bounds(NamedTuple):
    """The bounds of a mask and of its transpose, and the numbers of the documents where they decide.

    `document` (num_queries,) int32 holds these numbers, or is None. `tree` says whether a row that doesn't see the key
    of the row above begins a document.
    """

    key_start: Tensor
    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor
    document: Tensor | None
    tree: bool


@triton.jit
def pick(values, number):
    """The entry of a tuple at an index that is known at run time."""
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(number == i, values[i], value)
    return value


@triton.jit
def pick_side(of_keys, key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys):
    """The bounds of the side that is cut into tiles, the bounds of the other side, and the lengths of both."""
    start_ptr, stop_ptr, other_start_ptr, other_stop_ptr = key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr
    total, columns = num_queries, num_keys
    if of_keys:
        start_ptr, stop_ptr = query_start_ptr, query_stop_ptr
        other_start_ptr, other_stop_ptr = key_start_ptr, key_stop_ptr
        total, columns = num_keys, num_queries
    return start_ptr, stop_ptr, other_start_ptr, other_stop_ptr, total, columns


@triton.jit
def load_begins(start_ptr, stop_ptr, other_stop_ptr, document_ptr, of_keys, offs, total, columns, TREE: tl.constexpr):
    """True where a document begins at rows `offs`: `document_begins` of backends/tile_table.py."""
    inside = (offs >= 0) & (offs < total)
    above = inside & (offs > 0)
    start = tl.load(start_ptr + offs, mask=inside, other=0)
    stop = tl.load(stop_ptr + offs, mask=inside, other=0)
    start_above = tl.load(start_ptr + offs - 1, mask=above, other=0)
    stop_above = tl.load(stop_ptr + offs - 1, mask=above, other=0)
    live = start < stop
    live_above = start_above < stop_above
    if document_ptr is None:
        differs = start >= stop_above
        if TREE:
            differs = differs | (tl.load(other_stop_ptr + offs - 1, mask=above, other=0) <= offs)
    else:
        # A key belongs to the document of the first query that sees it.
        query = tl.where(of_keys, tl.minimum(start, columns - 1), offs)
        query_above = tl.where(of_keys, tl.minimum(start_above, columns - 1), offs - 1)
        number = tl.load(document_ptr + query, mask=inside, other=0)
        differs = number != tl.load(document_ptr + query_above, mask=above, other=0)
    return inside & ((offs == 0) | (live != live_above) | differs & (live | live_above))


@triton.jit
def load_chunk(
    chunk,
    long,
    start_ptr,
    stop_ptr,
    other_stop_ptr,
    document_ptr,
    of_keys,
    total,
    columns,
    TREE: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The rows around a chunk [WINDOW], which of them belong to it, and at which of these a stretch begins.

    A document is long if no other one begins within `long` rows, so HALO rows on both sides of the chunk decide. HALO
    is 0 if every document is a stretch.
    """
    CHUNK: tl.constexpr = WINDOW - 2 * HALO
    offs = chunk * CHUNK - HALO + tl.arange(0, WINDOW)
    own = (offs >= chunk * CHUNK) & (offs < tl.minimum(chunk * CHUNK + CHUNK, total))
    begins = load_begins(start_ptr, stop_ptr, other_stop_ptr, document_ptr, of_keys, offs, total, columns, TREE)
    if HALO > 0:
        before = load_begins(start_ptr, stop_ptr, other_stop_ptr, document_ptr, of_keys, offs - 1, total, columns, TREE)
        after = load_begins(start_ptr, stop_ptr, other_stop_ptr, document_ptr, of_keys, offs + 1, total, columns, TREE)
        previous = tl.associative_scan(tl.where(before, offs - 1, -1), 0, larger)
        following = tl.where(after | (offs + 1 == total), offs + 1, 2**31 - 1)
        following = tl.associative_scan(following, 0, smaller, reverse=True)
        begins = begins & ((following - offs >= long) | (offs - previous >= long) | (offs == 0))
    return offs, own, begins & own


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_chunks"])
def chunks_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    document_ptr,
    chunks_ptr,
    num_queries,
    num_keys,
    num_chunks,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    OF_KEYS: tl.constexpr,
    TREE: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Three numbers of each chunk, [cuts, 3, chunks]; grid (chunks, cuts).

    The first and the last row at which a stretch begins, 2**31 - 1 and -1 if there is none, and the number of tiles
    that begin from this first row on.
    """
    chunk, cut = tl.program_id(0), tl.program_id(1)
    of_keys, rows = pick(OF_KEYS, cut), pick(ROWS, cut)
    start_ptr, stop_ptr, _, other_stop_ptr, total, columns = pick_side(
        of_keys, key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    offs, own, begins = load_chunk(
        chunk,
        pick(LONG, cut),
        start_ptr,
        stop_ptr,
        other_stop_ptr,
        document_ptr,
        of_keys,
        total,
        columns,
        TREE,
        HALO,
        WINDOW,
    )
    stretch = tl.associative_scan(tl.where(begins, offs, -1), 0, larger)
    tiles = own & (stretch >= 0) & ((offs - stretch) % rows == 0)
    chunk_ptr = chunks_ptr + 3 * cut * num_chunks + chunk
    tl.store(chunk_ptr, tl.min(tl.where(begins, offs, 2**31 - 1), 0))
    tl.store(chunk_ptr + num_chunks, tl.max(stretch, 0))
    tl.store(chunk_ptr + 2 * num_chunks, tl.sum(tiles.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_chunks", "stride"])
def begins_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    document_ptr,
    chunks_ptr,
    first_ptr,
    number_ptr,
    tile_start_ptr,
    tile_stop_ptr,
    num_queries,
    num_keys,
    num_chunks,
    stride,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    OF_KEYS: tl.constexpr,
    TREE: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
    SUMMARIES: tl.constexpr,
):
    """Write the first row of each tile, then the number of rows, [cuts, stride], and the number of tiles [cuts].

    `tile_start` and `tile_stop` [cuts, stride], unless they are None, get the first key of each tile's first row and
    the end of the keys of its last row. Grid (chunks, cuts). A program adds up the tiles of the chunks before its own:
    the tiles that the chunk counted, and the tiles before its first stretch, in a stretch that began in an earlier
    chunk.
    """
    CHUNK: tl.constexpr = WINDOW - 2 * HALO
    chunk, cut = tl.program_id(0), tl.program_id(1)
    of_keys, rows = pick(OF_KEYS, cut), pick(ROWS, cut)
    start_ptr, stop_ptr, _, other_stop_ptr, total, columns = pick_side(
        of_keys, key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    if chunk * CHUNK >= total:
        return
    chunks_ptr += 3 * cut * num_chunks
    current = -1  # the begin of the stretch that the chunk's first row continues
    place = 0
    for step in range(0, chunk, SUMMARIES):
        others = step + tl.arange(0, SUMMARIES)
        counted = others < chunk
        last = tl.load(chunks_ptr + num_chunks + others - 1, mask=(others > 0) & (others <= chunk), other=-1)
        stretch = tl.maximum(tl.associative_scan(last, 0, larger), current)
        begin = others * CHUNK
        end = tl.load(chunks_ptr + others, mask=counted, other=0)
        end = tl.minimum(end, begin + CHUNK)
        tiles = tl.load(chunks_ptr + 2 * num_chunks + others, mask=counted, other=0)
        tiles += tl.where(counted, tl.cdiv(end - stretch, rows) - tl.cdiv(begin - stretch, rows), 0)
        place += tl.sum(tiles, 0)
        last = tl.load(chunks_ptr + num_chunks + others, mask=counted, other=-1)
        current = tl.maximum(current, tl.max(last, 0))

    offs, own, begins = load_chunk(
        chunk,
        pick(LONG, cut),
        start_ptr,
        stop_ptr,
        other_stop_ptr,
        document_ptr,
        of_keys,
        total,
        columns,
        TREE,
        HALO,
        WINDOW,
    )
    stretch = tl.maximum(tl.associative_scan(tl.where(begins, offs, -1), 0, larger), current)
    tiles = own & ((offs - stretch) % rows == 0)
    ordinal = place + tl.cumsum(tiles.to(tl.int32), 0)
    number = tl.max(ordinal, 0)
    first_ptr += cut * stride.to(tl.int64)
    tl.store(first_ptr + ordinal - 1, offs, mask=tiles)
    is_last = (chunk + 1) * CHUNK >= total
    tl.store(first_ptr + number, total, mask=is_last)
    tl.store(number_ptr + cut, number, mask=is_last)
    if tile_start_ptr is not None:
        tile_start_ptr += cut * stride.to(tl.int64)
        tile_stop_ptr += cut * stride.to(tl.int64)
        tl.store(tile_start_ptr + ordinal - 1, tl.load(start_ptr + offs, mask=tiles, other=0), mask=tiles)
        follows = tiles & (offs > 0)  # the row above is the last row of a tile
        tl.store(tile_stop_ptr + ordinal - 2, tl.load(stop_ptr + offs - 1, mask=follows, other=0), mask=follows)
        tl.store(tile_stop_ptr + number - 1, tl.load(stop_ptr + total - 1), mask=is_last)


@triton.jit
def load_tiles(first_ptr, tiles, number, total):
    """The rows [first, end) of tiles; from `number` on both are the number of rows."""
    first = tl.load(first_ptr + tiles, mask=tiles < number, other=total)
    end = tl.load(first_ptr + tiles + 1, mask=tiles < number, other=total)
    return first, end


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride"])
def order_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    first_ptr,
    number_ptr,
    tile_start_ptr,
    tile_stop_ptr,
    tables_ptr,
    num_queries,
    num_keys,
    stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    OTHERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The tables [cuts, stride, 3]; grid (blocks of TILES, cuts).

    Groups of neighbouring tiles are ordered by the keys of their first tile: the fewest tiles a group, a power of two,
    that leave at most GROUPS groups. A group's place is the number of groups with more keys, and of those before it
    with as many; tiles that fill no group come last. Each tile is compared with all groups.

    A tile reads the keys from the first to the last that its rows see, and up to a block after them. Bounds ascend, so
    if any query sees one of the former keys, a row of the tile sees it. So such a key is unseen exactly if it lies
    between the intervals of two neighbouring rows of the tile. The bounds of the keys after them are loaded, and where
    blocks begin at even keys the bounds of the key before them.
    """
    cut = tl.program_id(1)
    rows, block = pick(ROWS, cut), pick(BLOCK, cut)
    start_ptr, stop_ptr, other_start_ptr, other_stop_ptr, total, columns = pick_side(
        pick(OF_KEYS, cut), key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    first_ptr += cut * stride.to(tl.int64)
    tile_start_ptr += cut * stride.to(tl.int64)
    tile_stop_ptr += cut * stride.to(tl.int64)
    number = tl.load(number_ptr + cut)
    own = tl.program_id(0) * TILES
    tiles = own + tl.arange(0, TILES)
    used = tiles < number
    first, end = load_tiles(first_ptr, tiles, number, total)
    start = tl.load(tile_start_ptr + tiles, mask=used, other=0)
    stop = tl.load(tile_stop_ptr + tiles, mask=used, other=0)

    shift = 0  # a group has 2**shift tiles
    while (number - 1) >> shift >= GROUPS:
        shift += 1
    groups = number >> shift
    group = tiles >> shift
    place = tl.zeros([TILES], dtype=tl.int32)
    keys = tl.load(tile_stop_ptr + (group << shift), mask=used, other=0)
    keys -= tl.load(tile_start_ptr + (group << shift), mask=used, other=0)
    for step in range(0, tl.where(own >> shift < groups, groups, 0), OTHERS):
        others = step + tl.arange(0, OTHERS)
        other_start = tl.load(tile_start_ptr + (others << shift), mask=others < groups, other=1)  # -1 after the groups
        other_keys = tl.load(tile_stop_ptr + (others << shift), mask=others < groups, other=0) - other_start
        other_keys += (others < own >> shift).to(tl.int32)  # among groups with as many keys the earlier ones come first
        place += tl.sum((other_keys[None, :] > keys[:, None]).to(tl.int32), 1)
    in_group = tiles - (group << shift)
    as_many = (keys[None, :] == keys[:, None]) & (group[None, :] < group[:, None]) & (in_group == 0)[None, :]
    place += tl.sum(as_many.to(tl.int32), 1)
    place = tl.where(group < groups, (place << shift) + in_group, tiles)

    gaps = tl.zeros([TILES], dtype=tl.int32)
    for step in range(1, tl.where(block > 0, rows, 0), STEP):
        offs = first[:, None] + step + tl.arange(0, STEP)[None, :]
        inside = offs < end[:, None]
        begin = tl.load(start_ptr + offs, mask=inside, other=0)
        before = tl.load(stop_ptr + offs - 1, mask=inside, other=0)
        gaps += tl.sum((begin > before).to(tl.int32), 1)
    even = start - (start & pick(EVEN, cut))
    even_start = tl.load(other_start_ptr + even, mask=even < start, other=0)
    even_stop = tl.load(other_stop_ptr + even, mask=even < start, other=1)
    gaps += (even_start == even_stop).to(tl.int32)
    limit = tl.minimum(even.to(tl.int64) + tl.cdiv(stop - even, tl.maximum(block, 1)).to(tl.int64) * block, columns)
    for step in range(0, block, STEP):
        offs = stop[:, None] + step + tl.arange(0, STEP)[None, :]
        inside = offs < limit[:, None]
        begin = tl.load(other_start_ptr + offs, mask=inside, other=0)
        unseen = inside & (begin == tl.load(other_stop_ptr + offs, mask=inside, other=0))
        gaps += tl.sum(unseen.to(tl.int32), 1)
    reads_unseen = (gaps > 0) | (block == 0)

    entry = tables_ptr + 3 * (cut * stride.to(tl.int64) + place)
    stored = tiles < stride
    tl.store(entry, first, mask=stored)
    tl.store(entry + 1, end, mask=stored)
    tl.store(entry + 2, reads_unseen.to(tl.int32), mask=stored)


def first_rows(
    bounds: Bounds,
    rows: tuple[int, ...],
    longs: tuple[int, ...],
    of_keys: tuple[bool, ...],
    stride: int,
    *,
    whole: bool,
    ends: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The first row of each tile, then the number of rows, (cuts, stride), and the number of tiles, (cuts,), all int32.

    Args:
        bounds: of a mask with queries and keys.
        rows, longs, of_keys: of each cut, as in `Cut` of tritonpack/backends/tile_table.py.
        stride: more than the number of tiles that any cut can have.
        whole: whether no tile may hold rows of two documents.
        ends: two tensors (cuts, stride) int32 that get the first key of each tile's first row, and the end of the keys
            of its last row.
    """
    num_queries, num_keys = bounds.key_start.shape[0], bounds.query_start.shape[0]
    halo = 0 if whole else max(longs)
    window = max(WINDOW, triton.next_power_of_2(4 * halo))
    num_chunks = triton.cdiv(max(num_keys if keys else num_queries for keys in of_keys), window - 2 * halo)
    new_empty = bounds.key_start.new_empty
    chunks, first, number = new_empty(len(rows), 3, num_chunks), new_empty(len(rows), stride), new_empty(len(rows))
    arguments = {
        "key_start_ptr": bounds.key_start,
        "key_stop_ptr": bounds.key_stop,
        "query_start_ptr": bounds.query_start,
        "query_stop_ptr": bounds.query_stop,
        "document_ptr": bounds.document,
        "chunks_ptr": chunks,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "num_chunks": num_chunks,
        "ROWS": rows,
        "LONG": longs,
        "OF_KEYS": of_keys,
        "TREE": bounds.tree,
        "HALO": halo,
        "WINDOW": window,
        "num_warps": WARPS,
    }
    with torch.cuda.device_of(first):
        chunks_kernel[(num_chunks, len(rows))](**arguments)
        begins_kernel[(num_chunks, len(rows))](
            first_ptr=first,
            number_ptr=number,
            tile_start_ptr=None if ends is None else ends[0],
            tile_stop_ptr=None if ends is None else ends[1],
            stride=stride,
            SUMMARIES=SUMMARIES,
            **arguments,
        )
    return first, number


def tables_of_intervals(
    bounds: Bounds,
    rows: tuple[int, ...],
    longs: tuple[int, ...],
    blocks: tuple[int, ...],
    of_keys: tuple[bool, ...],
    evens: tuple[int, ...],
    capacities: list[int],
    *,
    whole: bool,
    groups: int,
) -> list[Tensor]:
    """The tile table of each cut, (capacity, 3) int32.

    Args:
        bounds: of a mask without trees that has queries and keys.
        rows, longs, blocks, of_keys, evens: of each cut, as in `Cut` of tritonpack/backends/tile_table.py; 0 for no
            block, 1 for even.
        capacities: a bound of the number of tiles of each cut.
        whole: whether no tile may hold rows of two documents.
        groups: the largest number of groups of tiles that are ordered.
    """
    stride = triton.cdiv(max(capacities) + 1, 16) * 16  # so that tables begin at multiples of 16 bytes
    ends = bounds.key_start.new_empty(len(rows), stride), bounds.key_start.new_empty(len(rows), stride)
    first, number = first_rows(bounds, rows, longs, of_keys, stride, whole=whole, ends=ends)
    tables = first.new_empty(len(rows), stride, 3)
    with torch.cuda.device_of(first):
        order_kernel[(triton.cdiv(stride, TILES), len(rows))](
            key_start_ptr=bounds.key_start,
            key_stop_ptr=bounds.key_stop,
            query_start_ptr=bounds.query_start,
            query_stop_ptr=bounds.query_stop,
            first_ptr=first,
            number_ptr=number,
            tile_start_ptr=ends[0],
            tile_stop_ptr=ends[1],
            tables_ptr=tables,
            num_queries=bounds.key_start.shape[0],
            num_keys=bounds.query_start.shape[0],
            stride=stride,
            ROWS=rows,
            BLOCK=blocks,
            OF_KEYS=of_keys,
            EVEN=evens,
            GROUPS=groups,
            TILES=TILES,
            OTHERS=OTHERS,
            STEP=STEP,
            num_warps=WARPS,
        )
    return [table[:capacity] for table, capacity in zip(tables, capacities, strict=True)]
