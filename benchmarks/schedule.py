"""Simulate the gain of the tile table, and count the blocks that trees visit. Nothing here is a measured time.

    python -m benchmarks.schedule [--tokens 32768] [--lengths FILE.json]

The simulation uses the tile tables that the kernels run with. A tile costs 1 for each block of keys that all of its
rows see, 1.45 for each block that needs masking (by the number of instructions on sm_90), and 2 for itself. The cost
of a batch is the sum over its tiles, causal, for one head. The makespan is the time at which the last tile of all heads
ends, if each multiprocessor takes the next tile in the table's order as soon as it is free.

For the tiles of forward (128 x 128: Gluon; 128 x 64: Triton, and Gluon at head dimension 256) it prints the area, which
is the pairs of rows and keys that tiles visit over the visible pairs; the used and the empty entries of the table,
times heads, per multiprocessor; and the makespan if a multiprocessor takes its tiles in rounds, as the Gluon kernel
does, over the makespan above.

For the tiles of the backward it prints the area, too: of dQ by 64 and by 128 keys, with one head in a tile (Gluon)
and with four (Triton), and of dK and dV by 128 keys x 64 queries (Gluon) and 64 keys x 64 and x 32 queries (Triton).

For trees it prints the number of visited blocks over the smallest number of blocks that hold all keys which the rows of
a tile see: for the tiles of forward (16 tokens of 8 heads), of dQ (32 tokens of 4 heads), of one head, and of keys.
"""

from __future__ import annotations

import argparse
import heapq
from pathlib import Path

import torch
from torch import Tensor

from tests.backends.blocks import blocks_of
from tests.lengths import distributions
from tests.trees import path_lengths, tree_batches
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.testing.cases import parents_of

MASKED, TILE = 1.45, 2.0
SLOTS, HEADS = 132, 32


def costs(mask: BlockDiagonalMask, tiles: Tensor, block: int) -> list[float]:
    """The cost of each tile, in the order given."""
    unmasked, masked = blocks_of(mask, tiles, block)
    return (TILE + unmasked + MASKED * masked).tolist()


def makespan(work: list[float], heads: int = HEADS) -> float:
    """The time at which the last multiprocessor ends; the heads of a tile come one after another."""
    free = [0.0] * SLOTS
    for cost in work:
        for _ in range(heads):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


def makespan_in_rounds(work: list[float], heads: int = HEADS) -> float:
    """`makespan` if each multiprocessor takes every 132nd tile, in every second round from the other end."""
    ends = [0.0] * SLOTS
    for number, cost in enumerate(cost for cost in work for _ in range(heads)):
        place = number % SLOTS
        ends[SLOTS - 1 - place if number // SLOTS % 2 else place] += cost
    return max(ends)


def area(mask: BlockDiagonalMask, cut: Cut, heads: int = 1) -> float:
    """The pairs of rows and keys that tiles visit over the visible pairs; tiles hold `cut.rows` rows of each head.

    Rows are keys and blocks are queries if `cut.of_keys`.
    """
    assert cut.block is not None
    assert cut.threshold == cut.rows * heads
    (table,) = tile_tables(mask, cut)
    cut_mask = mask.transpose() if cut.of_keys else mask
    unmasked, masked = blocks_of(cut_mask, table[table[:, 0] < table[:, 1]], cut.block)
    visible = (mask.key_stop.long() - mask.key_start.long()).sum()
    return float(cut.rows * cut.block * (unmasked + masked).sum() / visible)


def print_forward(batches: dict[str, list[int]]) -> None:
    print(f"{'batch':8} {'tile':8}  area per visible pair (used and empty entries; makespan in rounds)")
    for name, lengths in batches.items():
        mask, rows = BlockDiagonalMask.from_seqlens(lengths), 128
        for block in (128, 64):
            figures = []
            for heads in (1, 4, 8):
                cut = Cut(rows // heads, block, rows)
                (table,) = tile_tables(mask, cut)
                tiles = table[table[:, 0] < table[:, 1]]
                work, walks = costs(mask, tiles, block), HEADS // heads
                used, empty = (n * walks / SLOTS for n in (len(tiles), len(table) - len(tiles)))
                spans = makespan_in_rounds(work, walks) / makespan(work, walks)
                ratio = area(mask, cut, heads)
                figures.append(f"{heads} head{'s' * (heads > 1)} {ratio:.2f} ({used:.0f} + {empty:.0f}; {spans:.2f})")
            print(f"{name:8} {rows}x{block:<4}  {'; '.join(figures)}", flush=True)


def print_backward(batches: dict[str, list[int]]) -> None:
    print(f"{'batch':8} area per visible pair")
    for name, lengths in batches.items():
        mask = BlockDiagonalMask.from_seqlens(lengths)
        figures = [
            f"dQ {block} keys, {heads} head{'s' * (heads > 1)} {area(mask, Cut(128 // heads, block, 128), heads):.2f}"
            for block in (64, 128)
            for heads in (1, 4)
        ]
        for keys, queries in ((128, 64), (64, 64), (64, 32)):
            figures.append(f"dK and dV {keys}x{queries} {area(mask, Cut(keys, queries, of_keys=True)):.2f}")
        print(f"{name:8} {'; '.join(figures)}", flush=True)


def tilings(mask: BlockDiagonalMask, rows: int) -> dict[str, tuple[Tensor, int]]:
    """The tiles of four ways to cut the rows, and how many heads share a tile.

    flat: without regard to documents. per document: one document per tile, in order. table: the kernels' table for
    tiles of one head. eight heads: the kernels' table for tiles of eight heads.
    """
    total = mask.num_queries
    flat = torch.arange(0, total, rows)
    (whole,) = tile_tables(mask, Cut(rows), whole_documents=True)
    ours, grouped = tile_tables(mask, Cut(rows), Cut(rows // 8, long=rows))
    return {
        "flat": (torch.stack([flat, (flat + rows).clamp(max=total)], 1), 1),
        "per document": (whole[whole[:, 0] < whole[:, 1]].sort(0).values, 1),
        "table": (ours[ours[:, 0] < ours[:, 1]], 1),
        "eight heads": (grouped[grouped[:, 0] < grouped[:, 1]], 8),
    }


def fewest_blocks(mask: BlockDiagonalMask, tiles: Tensor, block: int) -> int:
    """The fewest blocks of `block` keys, wherever they begin, that hold all keys that the rows of each tile see."""
    seen, number = mask.to_dense(), 0
    for first, end in tiles.tolist():
        covered = 0
        for key in seen[first:end].any(0).nonzero().flatten().tolist():
            if key >= covered:
                number, covered = number + 1, key + block
    return number


def print_trees() -> None:
    print(f"{'trees':20} {'tokens':>13}  blocks visited over fewest blocks (masked share of them)")
    for name, trees in tree_batches().items():
        mask = BlockDiagonalMask.from_tree(parents_of(*trees))
        figures = []
        for kind, cut in {
            "forward": Cut(16, 64, 128),
            "dq": Cut(32, 64, 128),
            "one head": Cut(128, 64, 128),
            "keys": Cut(128, 64, 128, of_keys=True),
        }.items():
            (table,), _ = tree_tables(mask, cut)
            table = table[table[:, 0] < table[:, 1]]
            visited, masked = (int((table[:, stop] - table[:, 2]).sum()) for stop in (4, 3))
            fewest = fewest_blocks(mask.transpose() if cut.of_keys else mask, table[:, :2], 64)
            figures.append(f"{kind} {visited / fewest:.2f} ({masked / visited:.2f})")
        alone = sum(sum(path_lengths(nodes)) for nodes in trees)
        print(f"{name:20} {alone:6} {mask.num_queries:6}  {'; '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--lengths", type=Path, help="a JSON list of token counts")
    options = parser.parse_args()
    print(f"{'batch':8} {'tile':8}  cost and makespan relative to one document per tile (tiles per head)")
    batches = distributions(options.tokens, options.lengths)
    batches |= {f"{n} each": [n] * (options.tokens // n) for n in (65, 100, 150)}
    for name, lengths in batches.items():
        mask = BlockDiagonalMask.from_seqlens(lengths)
        for rows, block in ((128, 64), (128, 128)):
            work = {way: (costs(mask, tiles, block), heads) for way, (tiles, heads) in tilings(mask, rows).items()}
            base, base_span = sum(work["per document"][0]), makespan(work["per document"][0])
            figures = "; ".join(
                f"{way} {sum(cost) / heads / base:.2f} {makespan(cost, HEADS // heads) / base_span:.2f} "
                f"({len(cost) / heads:.0f})"
                for way, (cost, heads) in work.items()
            )
            print(f"{name:8} {rows}x{block:<4}  {figures}", flush=True)
    print_forward(batches)
    print_backward(batches)
    print_trees()


if __name__ == "__main__":
    main()
