"""The tables of trees: every row in one tile, and a list of exactly the blocks that a tile visits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.masks.forests import forests
from tests.recorded import Recorded
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut
from tritonpack.backends.tree_table import tree_tables
from tritonpack.masks.tree import SLACK
from tritonpack.testing.cases import GROUP, TURNS, parents_of

Tiles = list[tuple[int, int, list[int], list[int]]]
CUTS = Cut(16, 16, 16), Cut(32, 16, 32, of_keys=True)
WINDOWS = st.sampled_from([(-1, -1), (3, 0), (0, 0)])
SIZES = st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([4, 16]), st.sampled_from([16, 32]))


def tiles_of(mask: BlockDiagonalMask, rows: int, block: int, long: int = 0, *, of_keys: bool = False) -> Tiles:
    """The tiles of one cut."""
    (table,), blocks = tree_tables(mask, Cut(rows, block, max(rows, long), of_keys))
    return listed(table, blocks)


def listed(table: Tensor, blocks: Tensor) -> Tiles:
    """The tiles that have rows: first, end, and the first keys of their masked and of their full blocks."""
    rows = [row for row in table.tolist() if row[0] < row[1]]
    return [
        (first, end, blocks[begin:middle].tolist(), blocks[middle:stop].tolist())
        for first, end, begin, middle, stop in rows
    ]


@given(forests(), WINDOWS, SIZES, st.booleans())
@settings(max_examples=30)
def test_lists_hold_every_visible_pair_once(
    parents: tuple[int, ...], window: tuple[int, int], sizes: tuple[int, int, int], transposed: bool
) -> None:
    """Without windows and padding every listed block has a visible pair, and blocks without a hidden one are full."""
    mask = BlockDiagonalMask.from_tree(parents, window=window)
    (rows, block, _), tiles = sizes, tiles_of(mask, *sizes, of_keys=transposed)
    seen = mask.transpose().to_dense() if transposed else mask.to_dense()
    assert sorted(row for first, end, _, _ in tiles for row in range(first, end)) == list(range(len(parents)))
    for first, end, masked, full in tiles:
        assert end - first <= rows
        assert len({*masked, *full}) == len(masked) + len(full)
        assert all(key % block == 0 for key in masked + full)
        columns = torch.zeros(len(parents), dtype=torch.bool)
        for key in masked + full:
            columns[key : key + block] = True
        assert not seen[first:end, ~columns].any()
        for key in full:
            assert key + block <= len(parents)
            assert bool(seen[first:end, key : key + block].all())
        for key in masked if window == (-1, -1) and SLACK not in parents and not transposed else ():
            pairs = seen[first:end, key : key + block]
            assert bool(pairs.any())
            assert not (pairs.all() and key + block <= len(parents)), (first, end, key)


def test_blocks_between_branches_are_skipped() -> None:
    """8 completions of 256 tokens on 512: a tile visits the prompt and its own branch, and nothing between. Tiles with
    most blocks come first."""
    mask = BlockDiagonalMask.from_tree(parents_of([(-1, 512), *[(0, 256)] * 8]))
    tiles = tiles_of(mask, 128, 64)
    visited = [len(masked) + len(full) for _, _, masked, full in tiles]
    assert visited == sorted(visited, reverse=True)
    for first, _end, masked, full in tiles:
        branch = 512 + (first - 512) // 256 * 256 if first >= 512 else 512
        expected = {*range(0, min(first, 512), 64), *range(min(branch, first), first + 128, 64)}
        assert {*masked, *full} == expected, first


def test_tables_share_a_list() -> None:
    mask = BlockDiagonalMask.from_tree(parents_of(GROUP))
    tables, blocks = tree_tables(mask, *CUTS)
    assert listed(tables[0], blocks) == tiles_of(mask, 16, 16)
    assert listed(tables[1], blocks) == tiles_of(mask, 32, 16, of_keys=True)
    assert tree_tables(mask, *CUTS)[1] is blocks


def test_a_device_gets_copies_of_tables_from_the_host() -> None:
    """For a mask that came from host memory the device runs no operator but copies."""
    mask = BlockDiagonalMask.from_tree(parents_of(GROUP, TURNS))
    with Recorded() as recorded:
        moved = mask.to("meta")
        tables, blocks = tree_tables(moved, *CUTS)
    made, joined = tree_tables(mask, *CUTS)
    assert [x.shape for x in (*tables, blocks)] == [x.shape for x in (*made, joined)]
    on_meta = [str(name) for name, _, x in recorded.calls if isinstance(x, Tensor) and x.device.type == "meta"]
    assert on_meta == ["aten._to_copy.default"] * 10  # seven tensors of the mask, three of the tables


def test_a_device_is_not_waited_for() -> None:
    """A mask that was made on a device has tables with room for all blocks. A meta tensor has no value to wait for."""
    mask = BlockDiagonalMask.from_tree(torch.empty(300, dtype=torch.int64, device="meta"), window=(9, 0))
    tables, blocks = tree_tables(mask, *CUTS)
    assert blocks.device.type == "meta"
    assert sum(-(-table.shape[0] * 19 // 16) * 16 for table in tables) == blocks.shape[0]


def test_room_for_all_blocks_changes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockDiagonalMask.from_tree(parents_of(GROUP, TURNS))
    expected = tiles_of(mask, 16, 16)
    monkeypatch.setattr("tritonpack.backends.tree_table.on_host", lambda x: False)
    assert tiles_of(BlockDiagonalMask.from_tree(parents_of(GROUP, TURNS)), 16, 16) == expected
