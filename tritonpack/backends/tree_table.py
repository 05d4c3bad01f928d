"""The tile tables of a mask of trees, and the list of blocks that their tiles visit.

A tile of a tree visits several stretches of keys: the path from its first token to the root, and the tile itself. Its
entry in the table points at a part of a list of blocks: first the blocks that need masking, then the blocks in which
every pair is visible. Blocks begin at multiples of their size (docs/math.md, section 8).

The tables of a mask that was moved from host memory (`BlockDiagonalMask.to`) are built there and copied. The tables of
another mask are built on its device, without waiting for it, with room for all blocks of all tiles; on GPUs by
tritonpack/kernels/tree_tables.py in four launches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.backends.tile_table import Cut, bounds_for_kernels, capacity, cut_rows
from tritonpack.checks import on_host
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.forms import aligned, cut, relation


def tree_tables(mask: BlockDiagonalMask, *cuts: Cut) -> tuple[list[Tensor], Tensor]:
    """Return the tables of several kernels, and the list of blocks that they share. They are cached with the mask.

    Args:
        mask: a mask of trees.
        cuts: the cut of each kernel.

    Returns:
        For each cut (capacity, 5) int32: the rows [first, end) of each tile, then the begin of its masked blocks in the
        list, the begin of its full blocks, and their end. Tiles with most blocks come first; unused entries have
        first = end. And the list, int32: the first row of each block. All are on the mask's device.
    """

    different = tuple(dict.fromkeys(cuts))

    def build() -> tuple[list[Tensor], Tensor]:
        if mask.origin is not None and on_host(mask.origin.key_start):
            tables, blocks = tree_tables(mask.origin, *different)
            return [x.to(mask.device, non_blocking=True) for x in tables], blocks.to(mask.device, non_blocking=True)
        if kernels.serve(mask.key_start) and mask.num_queries and mask.num_keys:
            return _by_kernels(mask, different)
        tables, lists, length = [], [], 0
        for each in different:
            table, blocks = _build(mask.transpose() if each.of_keys else mask, each)
            tables.append(table + pad(table.new_full((3,), length), (2, 0)))
            lists.append(blocks)
            length += blocks.shape[0]
        return tables, torch.cat(lists)

    tables, blocks = mask.cached(("tree tables", different), build)
    return [tables[different.index(each)] for each in cuts], blocks


def _by_kernels(mask: BlockDiagonalMask, cuts: tuple[Cut, ...]) -> tuple[list[Tensor], Tensor]:
    from tritonpack.kernels.tree_tables import tables_of_trees

    sides = [mask.transpose() if each.of_keys else mask for each in cuts]
    rooms = [_room(side, each) for side, each in zip(sides, cuts, strict=True)]
    if sum(rooms) >= 2**31:
        raise ValueError(
            f"the lists of blocks of a mask of trees with {mask.num_queries} tokens need {sum(rooms)} entries, more "
            "than 2**31 - 1, because the mask was built on a device. Build it in host memory and move it: its lists "
            "then hold only visited blocks."
        )
    return tables_of_trees(
        bounds_for_kernels(mask, exact=False),
        tuple(each.rows for each in cuts),
        tuple(each.threshold for each in cuts),
        tuple(each.block or 0 for each in cuts),
        tuple(each.of_keys for each in cuts),
        [capacity(side, each) for side, each in zip(sides, cuts, strict=True)],
        rooms,
    )


def _room(mask: BlockDiagonalMask, how: Cut) -> int:
    """Return the number of pairs of a tile and a block, rounded up to a multiple of 16. A tree without branches visits
    half."""
    assert how.block is not None
    return -(-capacity(mask, how) * -(-mask.num_keys // how.block) // 16) * 16


def _build(mask: BlockDiagonalMask, how: Cut) -> tuple[Tensor, Tensor]:
    assert mask.query_start is not None
    assert mask.query_stop is not None
    assert how.block is not None
    block, tiles = how.block, cut_rows(mask, how)
    if not tiles.shape[0]:
        return tiles.new_empty(0, 5), tiles.new_empty(0)
    keys = aligned(mask.query_start, mask.query_stop, block)
    queries = cut(mask.key_start, mask.key_stop, tiles[:, 0], tiles[:, 1], how.rows)
    visited, full = relation(queries, keys)
    masked = visited & ~full
    counts = torch.stack([masked.sum(1), full.sum(1)], 1)
    ends = counts.flatten().cumsum(0).view(-1, 2)
    bounds = torch.cat([ends[:, :1] - counts[:, :1], ends], 1)  # of each tile's masked and full blocks
    # Pairs of a tile and a block, tile by tile: on the host only visited pairs, because it can read their number.
    if on_host(visited):
        tile, number = visited.nonzero(as_tuple=True)
    else:
        pair = torch.arange(visited.numel(), device=mask.device)
        tile, number = pair // visited.shape[1], pair % visited.shape[1]
    before = counts.cumsum(0) - counts  # masked and full blocks of the tiles before each tile
    is_masked, is_full = masked[tile, number], full[tile, number]
    place = torch.where(
        is_full,
        bounds[tile, 1] + is_full.cumsum(0) - before[tile, 1],
        bounds[tile, 0] + is_masked.cumsum(0) - before[tile, 0],
    )
    length = tile.shape[0] if on_host(visited) else _room(mask, how)
    place = torch.where(is_masked | is_full, place - 1, length)  # the last place takes pairs that aren't visited
    blocks = tiles.new_zeros(length + 1)
    blocks.scatter_(0, place, (number * block).to(torch.int32))
    order = counts.sum(1).argsort(descending=True, stable=True)
    return torch.cat([tiles, bounds.to(torch.int32)], 1)[order], blocks[:-1]
