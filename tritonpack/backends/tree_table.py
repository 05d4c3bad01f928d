"""The tile tables of a mask of trees, and the list of the blocks that their tiles visit.

A tile of a tree visits several stretches of keys: the path from its first token to the root, and the tile itself. Its
entry in the table names a part of a list, in which the blocks lie one after the other: first those that need masking,
then those of which every pair is visible. Blocks begin at multiples of their size (docs/math.md, section 8).

Everything is built on the mask's device, without waiting for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.backends.tile_table import cut_rows
from tritonpack.checks import on_host
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.blocks import aligned, cut, relation


class Cut(NamedTuple):
    """How a kernel cuts a mask into tiles and blocks.

    Attributes:
        rows: rows of a tile, of queries, or of keys if `of_keys`.
        block: rows of a block on the other side.
        long: as in `tile_table`; at least `rows`.
        of_keys: whether tiles cut the keys.
    """

    rows: int
    block: int
    long: int
    of_keys: bool = False


def tree_tables(mask: BlockDiagonalMask, *cuts: Cut) -> tuple[list[Tensor], Tensor]:
    """The tables of several kernels, and the list of blocks that they share; kept with the mask.

    Args:
        mask: a mask of trees.
        cuts: how each kernel cuts it.

    Returns:
        For each cut (capacity, 5) int32: of each tile the rows [first, end), and the parts [2, 3) and [3, 4) of the
        list that hold its masked and its full blocks; tiles with most blocks first, unused entries have first = end.
        And the list, int32: the first row of each block. All lie on the mask's device.
    """

    def build() -> tuple[list[Tensor], Tensor]:
        tables, lists, length = [], [], 0
        for each in cuts:
            table, blocks = _build(mask.transpose() if each.of_keys else mask, each.rows, each.block, each.long)
            tables.append(table + pad(table.new_full((3,), length), (2, 0)))
            lists.append(blocks)
            length += blocks.shape[0]
        return tables, torch.cat(lists)

    return mask.cached(("tree tables", cuts), build)


def _build(mask: BlockDiagonalMask, rows: int, block: int, long: int) -> tuple[Tensor, Tensor]:
    assert mask.query_start is not None
    assert mask.query_stop is not None
    tiles = cut_rows(mask, rows, long)
    if not tiles.shape[0]:
        return tiles.new_empty(0, 5), tiles.new_empty(0)
    keys = aligned(mask.query_start, mask.query_stop, block)
    queries = cut(mask.key_start, mask.key_stop, tiles[:, 0], tiles[:, 1], rows)
    visited, full = relation(queries, keys)
    masked = visited & ~full
    ends = torch.stack([masked.sum(1), full.sum(1)], 1).flatten().cumsum(0).view(-1, 2)
    bounds = torch.cat([pad(ends[:-1, 1:], (0, 0, 1, 0)), ends], 1)  # of each tile's masked and full blocks
    # On an accelerator the host doesn't know how many blocks are visited.
    length = int(ends[-1, 1]) if on_host(ends) else visited.numel()
    place = torch.where(full, bounds[:, 1:2] + full.cumsum(1), bounds[:, :1] + masked.cumsum(1)) - 1
    place = torch.where(visited, place, length)  # one more place takes what isn't visited
    blocks = tiles.new_zeros(length + 1)
    blocks.scatter_(0, place.flatten(), keys.first.to(torch.int32).expand_as(place).flatten())
    order = (bounds[:, 2] - bounds[:, 0]).argsort(descending=True, stable=True)
    return torch.cat([tiles, bounds.to(torch.int32)], 1)[order], blocks
