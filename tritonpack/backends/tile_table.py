"""Where tiles begin: at every long document, across runs of short ones; the heaviest tiles come first.

Who sees whom is the mask's business, so tiles may begin anywhere. A tile that straddles two long documents has no block
that all of its rows see, and one that holds a short document alone is mostly empty; so a document as long as a tile
begins one, and shorter ones share. (Where several heads share a tile, "as long" counts its rows, of which a document
then fills more than one tile's.) Tiles that come across keys that nothing sees, which may hold anything (padding,
slack), are marked as exposed. The table is built where the mask lies, without waiting for it: its length is a bound
that the host knows, and entries to spare are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.masks.block_diagonal import BlockDiagonalMask


class TileTables(NamedTuple):
    """The tile tables of a call: forward's, that of dk and dv, and dq's; None for what the call doesn't need."""

    forward: Tensor | None
    keys: Tensor | None
    queries: Tensor | None


NO_TABLES = TileTables(None, None, None)


def tile_table(
    mask: BlockDiagonalMask,
    rows: int,
    *,
    long: int | None = None,
    block: int | None = None,
    whole_documents: bool = False,
) -> Tensor:
    """The tiles of at most `rows` consecutive query rows that cover all queries once.

    Args:
        mask: whose rows are to be tiled; its transpose to tile the keys.
        rows: of a tile.
        long: so many rows make a document long, at least `rows`; None means `rows`.
        block: keys that a program reads at a time, from the first that the tile sees; None if it doesn't matter which
            tiles are exposed.
        whole_documents: no tile holds rows of two documents, so that none depends on the document's neighbours.

    Returns:
        (capacity, 3) int32 on the mask's device: the rows [first, end) of each tile, and whether it is exposed: 0 if
        some query sees every key that it reads, else 1. Without `block`, or where tiles mustn't depend on neighbours,
        all are. Tiles with most keys to visit come first; the rest holds first = end. Computed once for a mask and kept
        with it.
    """
    long = rows if long is None else long
    assert long >= rows
    block = None if whole_documents else block

    def table() -> Tensor:
        tiles = _tiles(mask, rows, long, whole_documents)
        exposed = torch.ones_like(tiles[:, 0]) if block is None else _exposed(mask, tiles, block)
        return torch.cat([tiles, exposed[:, None]], dim=1)

    return mask.cached(("tiles", rows, long, block, whole_documents), table)


def capacity(mask: BlockDiagonalMask, rows: int, long: int, whole_documents: bool) -> int:
    """How many tiles there may be: the full ones, and one that isn't at the end of each stretch between beginnings."""
    total = mask.num_queries
    stretches = 2 * (total // long) + 1  # a long document begins a stretch and ends one
    if whole_documents:  # every document, and every run of rows that see nothing, before and after each
        known = mask.document_source is not None and mask.max_documents is not None
        stretches = 2 * mask.max_documents + 1 if known else total  # type: ignore[operator]
    # One more than needed: torch.compile makes a graph of its own for a table that may have a single entry.
    return min(total // rows + stretches + 1, total)


def _tiles(mask: BlockDiagonalMask, rows: int, long: int, whole_documents: bool) -> Tensor:
    """(capacity, 2) int32: the rows of each tile, in the table's order; kept with the mask."""
    key = ("rows of tiles", rows, long, whole_documents)
    return mask.cached(key, lambda: _cut(mask, rows, long, whole_documents))


def _cut(mask: BlockDiagonalMask, rows: int, long: int, whole_documents: bool) -> Tensor:
    total = mask.num_queries
    if not total:
        return mask.key_start.new_empty(0, 2)
    row = torch.arange(total, device=mask.device, dtype=torch.int32)
    begins = document_begins(mask, exact=whole_documents)
    if not whole_documents:
        begin = torch.where(begins, row, 0).cummax(0).values
        end = torch.where(begins, row, total).flip(0).cummin(0).values.flip(0)  # the next beginning at or after a row
        end = torch.cat([end[1:], end.new_full((1,), total)])
        alone = end - begin >= long
        begins &= alone | torch.cat([alone.new_zeros(1), alone[:-1]])
        begins[:1] = True
    stretch = torch.where(begins, row, 0).cummax(0).values
    tiles_so_far = ((row - stretch) % rows == 0).cumsum(0, dtype=torch.int32)
    numbers = torch.arange(1, capacity(mask, rows, long, whole_documents) + 2, device=mask.device, dtype=torch.int32)
    bounds = torch.searchsorted(tiles_so_far, numbers, out_int32=True)  # of tiles that don't exist: total
    first, end = bounds[:-1], bounds[1:]
    keys = mask.key_stop[(end - 1).clamp(min=0)] - mask.key_start[first.clamp(max=total - 1)]
    order = torch.where(first < end, keys, -1).argsort(descending=True, stable=True)
    return torch.stack([first, end], dim=1)[order]


def _exposed(mask: BlockDiagonalMask, tiles: Tensor, block: int) -> Tensor:
    """Whether tiles read keys that no query sees, in whole blocks from the first key that they see, (tiles,) int32."""
    first, last = tiles[:, 0].clamp(max=mask.num_queries - 1), (tiles[:, 1] - 1).clamp(min=0)
    start, stop = mask.key_start[first], mask.key_stop[last]
    read = (stop - start).clamp(min=0)
    end = (start + (read + block - 1) // block * block).clamp(max=mask.num_keys)
    unseen = _unseen_before(mask)
    return (unseen[end] > unseen[start]).to(torch.int32)


def _unseen_before(mask: BlockDiagonalMask) -> Tensor:
    """(num_keys + 1,) int32, how many of the keys before each are seen by no query; kept with the mask."""

    def count() -> Tensor:
        queries = mask.transpose()
        return pad((queries.key_start == queries.key_stop).cumsum(0, dtype=torch.int32), (1, 0))

    return mask.cached("unseen", count)


def document_begins(mask: BlockDiagonalMask, *, exact: bool = False) -> Tensor:
    """Rows where a document begins, or a run of rows that see nothing.

    A row that has no key in common with the row above begins a document, as far as tiles are concerned. Where a tile
    must hold the whole of one, documents go by their numbers, if the mask has them.
    """
    start, stop = mask.key_start, mask.key_stop
    live = start < stop
    differs = start[1:] >= stop[:-1]
    if exact and mask.document is not None:
        differs = mask.document[1:] != mask.document[:-1]
    differs = differs & (live[1:] | live[:-1])
    return torch.cat([live.new_ones(1), differs | (live[1:] != live[:-1])])
