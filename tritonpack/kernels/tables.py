"""The kernel that builds tile tables: `tile_tables` of tritonpack/backends/tile_table.py computes the same in torch.

One launch builds the tables of all kernels of a call, with a program for each of them. It passes over the rows, a chunk
at a time, and stores the first row of each tile; then it orders the tiles. More programs would have to wait for each
other, by more launches, each of which takes longer to compile than this one to run.

Legend: a cut says how a kernel cuts the queries or the keys into tiles; tuples hold a number for each cut. A stretch
holds one long document, or the shorter ones between two long ones. Its first row begins a tile. `stride` is the room of
a cut's tiles. No length is a compile-time constant.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonpack.kernels.intervals import larger, smaller

WINDOW = 2048  # rows that are read at once: a chunk, and on both sides the rows that decide which documents are long
TILES = 64  # tiles that are ordered at once
OTHERS = 128  # groups of tiles that they are compared with at once
STEP = 32  # rows or keys of each tile that are read at once
WARPS = 16


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
    """True where a document begins at rows `offs`: `document_begins` of masks/bounds.py."""
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


@triton.jit
def load_tiles(first_ptr, tiles, number, total):
    """The rows [first, end) of tiles; from `number` on both are the number of rows."""
    first = tl.load(first_ptr + tiles, mask=tiles < number, other=total)
    end = tl.load(first_ptr + tiles + 1, mask=tiles < number, other=total)
    return first, end


@triton.jit
def order_tiles(
    tiles,
    own,
    start_ptr,
    stop_ptr,
    other_start_ptr,
    other_stop_ptr,
    first_ptr,
    tile_start_ptr,
    tile_stop_ptr,
    tables_ptr,
    number,
    total,
    columns,
    stride,
    rows,
    block,
    is_even,
    GROUPS: tl.constexpr,
    OTHERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Store the entries of some tiles in a table [stride, 3].

    Groups of neighbouring tiles are ordered by the keys of their first tile: the fewest tiles a group, a power of two,
    that leave at most GROUPS groups. A group's place is the number of groups with more keys, and of those before it
    with as many; tiles that fill no group come last. Each tile is compared with all groups.

    A tile reads the keys from the first to the last that its rows see, and up to a block after them. Bounds ascend, so
    if any query sees one of the former keys, a row of the tile sees it. So such a key is unseen exactly if it lies
    between the intervals of two neighbouring rows of the tile. The bounds of the keys after them are loaded, and where
    blocks begin at even keys the bounds of the key before them.
    """
    used = tiles < number
    first, end = load_tiles(first_ptr, tiles, number, total)
    start = tl.load(tile_start_ptr + tiles, mask=used, other=0)
    stop = tl.load(tile_stop_ptr + tiles, mask=used, other=0)

    shift = 0  # a group has 2**shift tiles
    while (number - 1) >> shift >= GROUPS:
        shift += 1
    groups = number >> shift
    group = tiles >> shift
    place = tl.zeros(tiles.shape, dtype=tl.int32)
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

    gaps = tl.zeros(tiles.shape, dtype=tl.int32)
    for step in range(1, tl.where(block > 0, rows, 0), STEP):
        offs = first[:, None] + step + tl.arange(0, STEP)[None, :]
        inside = offs < end[:, None]
        begin = tl.load(start_ptr + offs, mask=inside, other=0)
        before = tl.load(stop_ptr + offs - 1, mask=inside, other=0)
        gaps += tl.sum((begin > before).to(tl.int32), 1)
    even = start - (start & is_even)
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

    entry = tables_ptr + 3 * place.to(tl.int64)
    stored = tiles < stride
    tl.store(entry, first, mask=stored)
    tl.store(entry + 1, end, mask=stored)
    tl.store(entry + 2, reads_unseen.to(tl.int32), mask=stored)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride"])
def tables_kernel(
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    document_ptr,
    first_ptr,
    number_ptr,
    ends_ptr,
    tables_ptr,
    num_queries,
    num_keys,
    stride,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    EVEN: tl.constexpr,
    TREE: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    OTHERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The first row of each tile, then the number of rows, [cuts, stride], the number of tiles [cuts], and the tables
    [cuts, stride, 3], unless `tables` is None; grid (cuts,).

    `ends` [cuts, 2, stride] gets the first key of each tile's first row and the end of the keys of its last row.
    """
    CHUNK: tl.constexpr = WINDOW - 2 * HALO
    cut = tl.program_id(0)
    of_keys, rows = pick(OF_KEYS, cut), pick(ROWS, cut)
    start_ptr, stop_ptr, other_start_ptr, other_stop_ptr, total, columns = pick_side(
        of_keys, key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys
    )
    first_ptr += cut * stride.to(tl.int64)
    if tables_ptr is not None:
        tile_start_ptr = ends_ptr + 2 * cut * stride.to(tl.int64)
        tile_stop_ptr = tile_start_ptr + stride
    number = 0  # of the tiles so far
    current = 0  # the first row of the stretch so far
    for chunk in range(tl.cdiv(total, CHUNK)):
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
        place = number + tl.cumsum(tiles.to(tl.int32), 0) - 1
        tl.store(first_ptr + place, offs, mask=tiles)
        if tables_ptr is not None:
            tl.store(tile_start_ptr + place, tl.load(start_ptr + offs, mask=tiles, other=0), mask=tiles)
            follows = tiles & (offs > 0)  # the row above is the last row of a tile
            tl.store(tile_stop_ptr + place - 1, tl.load(stop_ptr + offs - 1, mask=follows, other=0), mask=follows)
        number = tl.max(place, 0) + 1
        current = tl.max(stretch, 0)
    tl.store(first_ptr + number, total)
    tl.store(number_ptr + cut, number)
    if tables_ptr is not None:
        tl.store(tile_stop_ptr + number - 1, tl.load(stop_ptr + total - 1))
        tl.debug_barrier()
        tables_ptr += 3 * cut * stride.to(tl.int64)
        for own_tiles in range(0, stride, TILES):
            order_tiles(
                own_tiles + tl.arange(0, TILES),
                own_tiles,
                start_ptr,
                stop_ptr,
                other_start_ptr,
                other_stop_ptr,
                first_ptr,
                tile_start_ptr,
                tile_stop_ptr,
                tables_ptr,
                number,
                total,
                columns,
                stride,
                rows,
                pick(BLOCK, cut),
                pick(EVEN, cut),
                GROUPS,
                OTHERS,
                STEP,
            )


def first_rows(
    bounds: Bounds,
    rows: tuple[int, ...],
    longs: tuple[int, ...],
    of_keys: tuple[bool, ...],
    stride: int,
    *,
    whole: bool,
    **order: Any,
) -> tuple[Tensor, Tensor]:
    """The first row of each tile, then the number of rows, (cuts, stride), and the number of tiles, (cuts,), all int32.

    Args:
        bounds: of a mask with queries and keys.
        rows, longs, of_keys: of each cut, as in `Cut` of tritonpack/backends/tile_table.py.
        stride: more than the number of tiles that any cut can have.
        whole: whether no tile may hold rows of two documents.
        order: arguments of the kernel that order the tiles and build their tables.
    """
    halo = 0 if whole else max(longs)
    first, number = bounds.key_start.new_empty(len(rows), stride), bounds.key_start.new_empty(len(rows))
    without_tables = {"ends_ptr": None, "tables_ptr": None, "BLOCK": None, "EVEN": None, "GROUPS": None}
    with torch.cuda.device_of(first):
        tables_kernel[(len(rows),)](
            key_start_ptr=bounds.key_start,
            key_stop_ptr=bounds.key_stop,
            query_start_ptr=bounds.query_start,
            query_stop_ptr=bounds.query_stop,
            document_ptr=bounds.document,
            first_ptr=first,
            number_ptr=number,
            num_queries=bounds.key_start.shape[0],
            num_keys=bounds.query_start.shape[0],
            stride=stride,
            ROWS=rows,
            LONG=longs,
            OF_KEYS=of_keys,
            TREE=bounds.tree,
            HALO=halo,
            WINDOW=max(WINDOW, triton.next_power_of_2(4 * halo)),
            TILES=TILES,
            OTHERS=OTHERS,
            STEP=STEP,
            num_warps=WARPS,
            **(without_tables | order),
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
    ends, tables = (bounds.key_start.new_empty(len(rows), stride, n) for n in (2, 3))
    order = {"ends_ptr": ends, "tables_ptr": tables, "BLOCK": blocks, "EVEN": evens, "GROUPS": groups}
    first_rows(bounds, rows, longs, of_keys, stride, whole=whole, **order)
    return [table[:capacity] for table, capacity in zip(tables, capacities, strict=True)]
