"""The simulation of the tile table: the area of tiles, on lengths that figures of the docs come from."""

import pytest

from benchmarks.schedule import area
from tests.lengths import distributions
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut

TOKENS = 32768


@pytest.fixture(scope="module")
def flan() -> BlockDiagonalMask:
    return BlockDiagonalMask.from_seqlens(distributions(TOKENS)["flan"])


def test_area_counts_the_pairs_of_visited_blocks() -> None:
    """70 queries in tiles of 64 and 6 visit two blocks of 40 keys each; the tiles begin at key 0."""
    mask = BlockDiagonalMask.from_seqlens([70])
    assert area(mask, Cut(64, 40)) == pytest.approx(2 * 2 * 64 * 40 / (70 * 71 / 2))
    of_keys = area(mask, Cut(64, 40, of_keys=True))
    assert of_keys == pytest.approx((2 + 1) * 64 * 40 / (70 * 71 / 2))  # the last 6 keys are seen by 6 queries


def test_four_heads_a_tile_visit_few_hidden_pairs(flan: BlockDiagonalMask) -> None:
    """Groups of 4 heads, 128 rows by 128 keys, FLAN-like documents."""
    assert area(flan, Cut(32, 128, 128), heads=4) <= 1.6


@pytest.mark.parametrize(("block", "one_head", "four_heads"), [(64, 1.91, 1.34), (128, 2.03, 1.59)])
def test_what_one_head_a_tile_costs_dq(flan: BlockDiagonalMask, block: int, one_head: float, four_heads: float) -> None:
    """The figures of docs/decisions/kernel-forms.md."""
    assert area(flan, Cut(128, block)) == pytest.approx(one_head, abs=0.005)
    assert area(flan, Cut(32, block, 128), heads=4) == pytest.approx(four_heads, abs=0.005)


@pytest.mark.parametrize(
    ("keys", "queries", "expected"), [(128, 64, 1.76), (64, 64, 1.47), (128, 32, 1.62), (64, 32, 1.34)]
)
def test_area_of_tiles_of_keys(flan: BlockDiagonalMask, keys: int, queries: int, expected: float) -> None:
    """The figures of docs/decisions/backward-ladder.md."""
    assert area(flan, Cut(keys, queries, of_keys=True)) == pytest.approx(expected, abs=0.005)
