"""The tile table: every row is in one tile, long documents begin tiles, the heaviest tiles come first."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, capacity, tile_tables

WINDOWS = [(-1, -1), (16, 0), (0, 0)]


def tile_table(mask: BlockDiagonalMask, rows: int, *, whole_documents: bool = False, **cut: Any) -> Tensor:
    """The table of one cut."""
    (table,) = tile_tables(mask, Cut(rows, **cut), whole_documents=whole_documents)
    return table


def masks(seed: int, lengths: list[int] | None = None) -> list[BlockDiagonalMask]:
    """One batch as masks that know the number of documents, and as masks that don't."""
    rng = random.Random(seed)
    longest = rng.choice((3, 30, 400))
    lengths = [rng.randint(0, longest) for _ in range(rng.randrange(30))] if lengths is None else lengths
    total = sum(lengths) + seed % 3 * 50
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    mask = BlockDiagonalMask.from_cu_seqlens(cu, total_q=total, window=WINDOWS[seed % 3], causal=seed % 2 == 0)
    bare = BlockDiagonalMask(mask.key_start, mask.key_stop, mask.num_keys)
    crossed = BlockDiagonalMask.from_seqlens(lengths, lengths[::-1])
    chunks = BlockDiagonalMask.from_cu_seqlens(cu, total_q=total, chunk_size=17 + 48 * (seed % 2))
    thinned = mask.restrict(None, torch.arange(0, total, 2))
    numbers = torch.arange(1, 15) * torch.randint(0, 3, (3, 14), generator=torch.Generator().manual_seed(seed)).sign()
    padded = BlockDiagonalMask.from_segment_ids(numbers.repeat_interleave(7, dim=1))  # 0 is padding
    return [x for one in (mask, bare, crossed, chunks, thinned, padded) for x in (one, one.transpose())]


@pytest.mark.fast("0-16-16", "3-64-64", "4-8-23", "5-16-64")
@pytest.mark.parametrize(("rows", "long"), [(16, 16), (64, 64), (16, 64), (8, 23)])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_lies_in_one_tile(seed: int, rows: int, long: int) -> None:
    for mask, whole in itertools.product(masks(seed), (False, True)):
        table = tile_table(mask, rows, long=long, whole_documents=whole)
        assert table.shape == (capacity(mask, Cut(rows, long=long), whole), 3)
        tiles = sorted((first, end) for first, end, _ in table.tolist() if first < end)
        assert all(end - first <= rows for first, end in tiles)
        assert [first for first, _ in tiles] + [mask.num_queries] == [0, *(end for _, end in tiles)]


def test_heaviest_tiles_come_first() -> None:
    for mask in (masks(seed)[0] for seed in range(10)):
        tiles = [(first, end) for first, end, _ in tile_table(mask, 32).tolist() if first < end]
        keys = [int(mask.key_stop[end - 1] - mask.key_start[first]) for first, end in tiles]
        assert keys == sorted(keys, reverse=True)


def tiles_of(mask: list[int] | BlockDiagonalMask, rows: int, **keywords: int) -> list[list[int]]:
    mask = BlockDiagonalMask.from_seqlens(mask) if isinstance(mask, list) else mask
    return sorted([first, end] for first, end, _ in tile_table(mask, rows, **keywords).tolist() if first < end)


def test_short_documents_share_and_long_ones_begin_a_tile() -> None:
    """The threshold may exceed a tile's rows, and a run of rows that see nothing counts as a document."""
    assert tiles_of([3, 4, 5, 6], 16) == [[0, 16], [16, 18]]
    assert tiles_of([3, 4, 20, 5, 6], 16) == [[0, 7], [7, 23], [23, 27], [27, 38]]
    whole = [[0, 3], [3, 7], [7, 23], [23, 27], [27, 32], [32, 38]]
    assert tiles_of([3, 4, 20, 5, 6], 16, whole_documents=True) == whole
    assert tiles_of([3, 20, 5, 16], 8, long=20) == [[0, 3], [3, 11], [11, 19], [19, 23], [23, 31], [31, 39], [39, 44]]
    assert tiles_of([3, 20, 5, 16], 8, long=21) == [[0, 8], [8, 16], [16, 24], [24, 32], [32, 40], [40, 44]]
    slack = BlockDiagonalMask.from_cu_seqlens([0, 5], total_q=40)
    assert tiles_of(slack, 16, whole_documents=True) == [[0, 5], [5, 21], [21, 37], [37, 40]]
    fewer_keys = BlockDiagonalMask.from_seqlens([3] * 9, [1] * 9)  # the first two queries of each see nothing
    ends = [(n, n + 2, n + 3) for n in range(0, 27, 3)]
    assert tiles_of(fewer_keys, 8, whole_documents=True) == [[*x] for a, b, c in ends for x in ((a, b), (b, c))]


def test_the_table_is_computed_once() -> None:
    mask = BlockDiagonalMask.from_seqlens([30, 4])
    assert tile_table(mask, 16) is tile_table(mask, 16)
    assert tile_table(mask, 16) is not tile_table(mask, 16, whole_documents=True)
    assert tile_table(BlockDiagonalMask.from_seqlens([]), 16, block=32).shape == (0, 3)
    assert tile_table(BlockDiagonalMask.from_seqlens([5], [0]).transpose(), 16).shape == (0, 3)


@pytest.mark.fast("0-16-any", "2-64-even")
@pytest.mark.parametrize("even", [False, True], ids=["any", "even"])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_that_read_unseen_keys_are_marked(seed: int, block: int, even: bool) -> None:
    for mask in masks(seed):
        unseen = (~mask.to_dense().any(0)).tolist()
        start, stop = mask.key_start.tolist(), mask.key_stop.tolist()
        for first, end, reads_unseen_keys in tile_table(mask, 32, block=block, even=even).tolist():
            if first < end:
                blocks = range(start[first] // 2 * 2 if even else start[first], stop[end - 1], block)
                assert bool(reads_unseen_keys) == any(any(unseen[key : key + block]) for key in blocks)


def test_whole_documents_do_not_depend_on_neighbours() -> None:
    mask = BlockDiagonalMask.from_seqlens([30, 0, 400, 7])
    assert not tile_table(mask, 16, block=32)[:, 2].any()
    mask = BlockDiagonalMask.from_seqlens([30, 50])
    assert tile_table(mask, 16, block=32, whole_documents=True)[:, 2].all()
