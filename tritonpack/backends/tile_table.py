"""The tile table: the query rows of each tile, in the order in which programs start.

The mask decides which keys a row sees, so tiles may begin anywhere. But in a tile with rows of two long documents every
block needs masking, and a tile with one short document is mostly empty. So a document as long as a tile begins a tile,
and shorter documents share tiles. Tiles with most keys start first.

A tile `reads_unseen_keys` if its blocks hold keys that no query sees (padding, slack). Those keys may be NaN, so
kernels zero them.

The table is built on the mask's device without waiting for it: the host knows an upper bound of its length, and unused
entries are empty. On GPUs tritonpack/kernels/tables.py builds the same tables in one launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.bounds import document_begins

if TYPE_CHECKING:
    from tritonpack.kernels.tables import Bounds


class TileTables(NamedTuple):
    """The tile tables of a call; None for a table that the call doesn't need.

    Attributes:
        forward, keys, queries: the tables of forward, of dk and dv, and of dq.
        blocks: the blocks that tiles visit: with a mask of trees for all three tables (tree_table.py), in the backend
            "blocked" all blocks.
        plan: the plan that "blocked" has read from `blocks`. Operators, which take only tensors, read it again.
    """

    forward: Tensor | None
    keys: Tensor | None
    queries: Tensor | None
    blocks: Tensor | None = None
    plan: Any = None


NO_TABLES = TileTables(None, None, None)

# Sorting is O(n^2). With more tiles, groups of neighbours are sorted instead. A group then has the same share of all
# work as a single tile in a shorter batch.
MAX_SORTED = 1024


class Cut(NamedTuple):
    """The sizes by which a kernel cuts a mask into tiles, and into blocks on the other side.

    Attributes:
        rows: rows of a tile; queries, or keys with `of_keys`.
        block: rows of a block on the other side. Without trees it decides which tiles read unseen keys; None if the
            kernel doesn't need to know.
        long: documents with at least this many rows begin a tile; None means `rows`. It is more than `rows` if several
            heads share a tile.
        of_keys: whether tiles cut the keys.
        even: whether blocks begin at even rows, for dropout: at a tile's first key, or at the key before it.
    """

    rows: int
    block: int | None = None
    long: int | None = None
    of_keys: bool = False
    even: bool = False

    @property
    def threshold(self) -> int:
        """`long`, or `rows` if it is None."""
        long = self.rows if self.long is None else self.long
        assert long >= self.rows
        return long


def tile_tables(mask: BlockDiagonalMask, *cuts: Cut, whole_documents: bool = False) -> list[Tensor]:
    """Cut all rows into tiles, once for each kernel of a call. The tables are cached with the mask.

    Args:
        mask: a mask without trees.
        cuts: the cut of each kernel.
        whole_documents: whether no tile may hold rows of two documents.

    Returns:
        For each cut (capacity, 3) int32 on the mask's device: the rows [first, end) of each tile, and 1 if it reads
        unseen keys, else 0. Without `block`, and with `whole_documents`, this is 1 in all tiles. Tiles with most keys
        come first (`_order`); unused entries have first = end.
    """

    def build() -> list[Tensor]:
        wanted = [cut._replace(block=None) for cut in cuts] if whole_documents else cuts
        different = tuple(dict.fromkeys(wanted))
        if kernels.serve(mask.key_start) and mask.num_queries and mask.num_keys:
            tables = _by_kernels(mask, different, whole_documents)
        else:
            tables = [_table(mask.transpose() if cut.of_keys else mask, cut, whole_documents) for cut in different]
        return [tables[different.index(cut)] for cut in wanted]

    return mask.cached(("tiles", cuts, whole_documents), build)


def bounds_for_kernels(mask: BlockDiagonalMask, *, exact: bool) -> Bounds:
    """Return the bounds of a mask for the kernels of tritonpack/kernels/tables.py; for `exact` see
    `document_begins`."""
    from tritonpack.kernels.tables import Bounds

    document = mask.document if exact else None
    transposed = mask.transpose()
    return Bounds(
        mask.key_start.contiguous(),
        mask.key_stop.contiguous(),
        transposed.key_start.contiguous(),
        transposed.key_stop.contiguous(),
        document=None if document is None else document.contiguous(),
        tree=mask.is_tree and mask.num_queries == mask.num_keys,
    )


def _by_kernels(mask: BlockDiagonalMask, cuts: tuple[Cut, ...], whole_documents: bool) -> list[Tensor]:
    from tritonpack.kernels.tables import tables_of_intervals

    return tables_of_intervals(
        bounds_for_kernels(mask, exact=whole_documents),
        tuple(cut.rows for cut in cuts),
        tuple(cut.threshold for cut in cuts),
        tuple(cut.block or 0 for cut in cuts),
        tuple(cut.of_keys for cut in cuts),
        tuple(int(cut.even) for cut in cuts),
        [capacity(mask.transpose() if cut.of_keys else mask, cut, whole_documents) for cut in cuts],
        whole=whole_documents,
        groups=MAX_SORTED,
    )


def _table(mask: BlockDiagonalMask, cut: Cut, whole_documents: bool) -> Tensor:
    """Make the table of the queries; pass the transpose for the table of the keys."""
    tiles = cut_rows(mask, cut, whole_documents)
    first, end = tiles[:, 0], tiles[:, 1]
    if mask.num_queries:
        keys = mask.key_stop[(end - 1).clamp(min=0)] - mask.key_start[first.clamp(max=mask.num_queries - 1)]
        tiles = tiles[_order(keys, first < end)]
    unseen = torch.ones_like(first) if cut.block is None else _reads_unseen_keys(mask, tiles, cut.block, cut.even)
    return torch.cat([tiles, unseen[:, None]], dim=1)


def _order(keys: Tensor, used: Tensor) -> Tensor:
    """Order tiles in up to `MAX_SORTED` groups of neighbours, those with most keys in their first tile first. Tiles
    that fill no group, and unused ones, come last. Groups have the smallest possible size that is a power of two."""
    number, place = used.sum(), torch.arange(used.shape[0], device=used.device)
    size = 2 ** (number > MAX_SORTED * 2 ** torch.arange(32, device=used.device)).sum()
    in_group = place < number // size * size
    return torch.where(in_group, keys[place // size * size], -1).argsort(descending=True, stable=True)


def capacity(mask: BlockDiagonalMask, cut: Cut, whole_documents: bool = False) -> int:
    """Return an upper bound of the number of tiles: full ones, and a partial one at the end of each stretch."""
    total = mask.num_queries
    stretches = 2 * (total // cut.threshold) + 1  # a long document begins a stretch, and its end begins another
    if whole_documents:  # all documents, and runs of rows that see no key before and after each
        known = mask.document_source is not None and mask.max_documents is not None
        stretches = 2 * mask.max_documents + 1 if known else total  # type: ignore[operator]
    # One more than needed, because torch.compile makes another graph for a table with a single entry.
    return min(total // cut.rows + stretches + 1, total)


def cut_rows(mask: BlockDiagonalMask, cut: Cut, whole_documents: bool = False) -> Tensor:
    """Return (capacity, 2) int32, the rows [first, end) of each tile in ascending order; unused entries come last."""
    total = mask.num_queries
    if not total:
        return mask.key_start.new_empty(0, 2)
    row = torch.arange(total, device=mask.device, dtype=torch.int32)
    begins = document_begins(mask, exact=whole_documents)
    if not whole_documents:
        begin = torch.where(begins, row, 0).cummax(0).values
        end = torch.where(begins, row, total).flip(0).cummin(0).values.flip(0)  # the next begin at or after a row
        end = torch.cat([end[1:], end.new_full((1,), total)])
        is_long = end - begin >= cut.threshold
        begins &= is_long | torch.cat([is_long.new_zeros(1), is_long[:-1]])
        begins[:1] = True
    stretch = torch.where(begins, row, 0).cummax(0).values
    tiles_so_far = ((row - stretch) % cut.rows == 0).cumsum(0, dtype=torch.int32)
    numbers = torch.arange(1, capacity(mask, cut, whole_documents) + 2, device=mask.device, dtype=torch.int32)
    bounds = torch.searchsorted(tiles_so_far, numbers, out_int32=True)  # `total` for tiles that don't exist
    return torch.stack([bounds[:-1], bounds[1:]], dim=1)


def _reads_unseen_keys(mask: BlockDiagonalMask, tiles: Tensor, block: int, even: bool) -> Tensor:
    """Return (tiles,) int32, 1 for a tile whose blocks, which begin at its first visible key, hold unseen keys."""
    used = tiles[:, 0] < tiles[:, 1]
    first, last = tiles[:, 0].clamp(max=mask.num_queries - 1), (tiles[:, 1] - 1).clamp(min=0)
    start, stop = mask.key_start[first], mask.key_stop[last]
    if even:
        start = start - (start & 1)
    read = (stop - start).clamp(min=0)
    end = (start + (read + block - 1) // block * block).clamp(max=mask.num_keys)
    unseen = _unseen_before(mask)
    return (used & (unseen[end] > unseen[start])).to(torch.int32)


def _unseen_before(mask: BlockDiagonalMask) -> Tensor:
    """Return (num_keys + 1,) int32, the number of unseen keys before each key; cached with the mask."""

    def count() -> Tensor:
        queries = mask.transpose()
        return pad((queries.key_start == queries.key_stop).cumsum(0, dtype=torch.int32), (1, 0))

    return mask.cached("unseen", count)
