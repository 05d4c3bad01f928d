"""The kernels that build the tables of trees, in Triton's interpreter, against the functions in torch, to the bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.backends.test_tree_table import listed
from tests.kernels.test_tables import served
from tests.masks.forests import forests
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut
from tritonpack.backends.tree_table import tree_tables
from tritonpack.kernels import tables
from tritonpack.kernels import tree_tables as tree_kernels
from tritonpack.testing.cases import TURNS, parents_of

pytestmark = pytest.mark.interpreter

CUTS = (Cut(8, 4, 8), Cut(4, 16, 8), Cut(16, 8, 16, of_keys=True), Cut(8, 4, 8))
TREES = {
    "turns": parents_of([(parent, 1 + tokens // 2) for parent, tokens in TURNS]),
    "leaves-of-one": parents_of([(-1, 5), *[(0, 1)] * 20]) + (-2,) * 7,
    "comb": parents_of([(-1, 9), (0, 2), (0, 9), (2, 1), (2, 9), (4, 3), (4, 9)], [(-1, 1)], [(-1, 30)]),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs see few rows, tiles and blocks at a time."""
    monkeypatch.setattr(tables, "WINDOW", 64)
    for name, value in (("RANGES", 4), ("STEP", 8), ("ROWS_AT_ONCE", 4), ("BLOCKS", 4), ("OTHERS", 8)):
        monkeypatch.setattr(tree_kernels, name, value)


def assert_same(mask: BlockDiagonalMask, *cuts: Cut) -> None:
    """Compare tables and lists; torch builds them with the same room as the kernels."""
    with pytest.MonkeyPatch.context() as patch, served(patch):
        made, blocks = tree_tables(replace(mask, trusted=True), *cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tritonpack.backends.tree_table.on_host", lambda x: False)
        expected, room = tree_tables(replace(mask, trusted=True), *cuts)
    assert blocks.dtype == torch.int32
    assert blocks.shape == room.shape
    for cut, ours, theirs in zip(cuts, made, expected, strict=True):
        assert torch.equal(ours, theirs), cut
        assert listed(ours, blocks) == listed(theirs, room), cut


@pytest.mark.parametrize("window", [(-1, -1), (7, 0)], ids=["whole", "window"])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.fast("leaves-of-one-whole")
@pytest.mark.usefixtures("small_blocks")
def test_tables_of_trees(name: str, window: tuple[int, int]) -> None:
    assert_same(BlockDiagonalMask.from_tree(TREES[name], window=window), *CUTS)


@pytest.mark.usefixtures("small_blocks")
def test_tables_of_a_shard() -> None:
    """Some of the rows and keys; both sides have other lengths, or the same."""
    mask = BlockDiagonalMask.from_tree(TREES["comb"])
    rows, keys = torch.arange(0, 70, 3), torch.arange(5, 60, 2)
    for part in (mask.restrict(rows), mask.restrict(rows, keys), mask.restrict(keys, keys)):
        assert_same(part, *CUTS[1:3])


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(forests(), st.sampled_from([(-1, -1), (3, 0)]), st.sampled_from(CUTS))
@pytest.mark.usefixtures("small_blocks")
def test_tables_of_random_trees(parents: tuple[int, ...], window: tuple[int, int], cut: Cut) -> None:
    assert_same(BlockDiagonalMask.from_tree(parents, window=window), cut)


def test_blocks_of_the_shipped_size() -> None:
    assert_same(BlockDiagonalMask.from_tree(parents_of([(-1, 150), *[(0, 70)] * 4])), Cut(32, 64, 128))


def test_lists_beyond_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockDiagonalMask.from_tree(TREES["comb"])
    monkeypatch.setattr("tritonpack.backends.tree_table._room", lambda mask, cut: 2**30)
    with served(monkeypatch), pytest.raises(ValueError, match="need 2147483648 entries"):
        tree_tables(mask, Cut(8, 4), Cut(4, 8))
