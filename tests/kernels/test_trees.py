"""The kernels of trees, in Triton's interpreter, against the functions in torch, to the bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.assertions import assertions, fails
from tests.masks.forests import forests
from tests.trees import mask_of_ends
from tritonpack import BlockDiagonalMask
from tritonpack.kernels import trees
from tritonpack.masks.tree import SLACK
from tritonpack.testing.cases import parents_of

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BLOCKS = [(16, 2), (8, 4)]  # tokens of a program and of a piece, so that a chunk has 8 or 64
REACHES: list[dict[str, Any]] = [
    {}, {"window": (3, -1)}, {"window": (0, 0)}, {"window": (20, 0)}, {"chunk_size": 4},
    {"window": (2, 0), "chunk_size": 5},
]  # fmt: skip
Build = Callable[[], BlockDiagonalMask]


@contextmanager
def served(blocks: tuple[int, int]) -> Iterator[pytest.MonkeyPatch]:
    """Build masks by the kernels, with blocks of few tokens, so that subtrees span programs and chunks."""
    with assertions() as patch:
        patch.setattr(trees, "ROWS", blocks[0])
        patch.setattr(trees, "PIECE", blocks[1])
        yield patch


def assert_same(build: Build, blocks: tuple[int, int]) -> None:
    with served(blocks):
        ours = build()
    theirs = build()
    for name in ("key_start", "key_stop", "query_start", "query_stop", "diagonal", "document"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        assert found.dtype == expected.dtype == torch.int32
        assert torch.equal(found, expected), name


def ends_of(parents: Tensor) -> Tensor:
    """The ends of (B, T) parents within their rows."""
    begins = torch.arange(len(parents))[:, None] * parents.shape[1]
    return BlockDiagonalMask.from_tree(parents).query_stop.view_as(parents) - begins


CHAIN, COMB = tuple(range(-1, 59)), [(-1, 3), *((i // 2 * 2, 2 if i % 2 else 5) for i in range(12))]
SHAPES = {
    "chain": CHAIN,
    "star": parents_of([(-1, 9), *[(0, 13)] * 4]),
    "comb": parents_of(COMB),
    "bushes": parents_of([(-1, 1), *[(0, 1)] * 30], [(-1, 1), *[(0, 1)] * 20]),
    "ended-by-the-last-token": (*CHAIN[:16], 0),
    "spine": (*CHAIN[:30], *range(29, 0, -1)),  # a chain, and a leaf at each of its tokens, the last token's first
    "spine-of-nodes": parents_of([(-1, 1), *((i, 5) for i in range(6)), *((i, 5) for i in range(6, 0, -1))]),
    "slack-between": (SLACK, -1, 1, 2, 3, 2, SLACK, SLACK, *[-1] * 12, SLACK, -1, *range(21, 50)),
    "roots": (-1,) * 40,
    "slack": (SLACK,) * 20,
    "one": (-1,),
    "one-slack": (SLACK,),
}


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.fast(*(f"{x}-{BLOCKS[0]}" for x in ("comb", "ended-by-the-last-token", "slack-between", "one")))
def test_shapes(name: str, blocks: tuple[int, int]) -> None:
    parents = torch.tensor(SHAPES[name])
    reach = REACHES[len(name) % len(REACHES)]
    assert_same(lambda: BlockDiagonalMask.from_tree(parents, **reach), blocks)
    assert_same(lambda: mask_of_ends(ends_of(parents[None])), blocks)


@settings(max_examples=6)
@given(st.lists(forests(), min_size=1, max_size=3), st.sampled_from(REACHES), st.sampled_from(BLOCKS), st.data())
def test_rows(rows: list[tuple[int, ...]], reach: dict[str, Any], blocks: tuple[int, int], data: st.DataObject) -> None:
    """Rows that begin within blocks, in both integer dtypes; tokens outside of trees also within subtrees."""
    length = min(max(map(len, rows)), 41)
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    parents = torch.tensor([(row + (SLACK,) * length)[:length] for row in rows]).to(dtype)
    assert_same(lambda: BlockDiagonalMask.from_tree(parents, **reach), blocks)
    ends, place = ends_of(parents), torch.arange(length)
    ends = torch.where((ends == place + 1) & (torch.rand(ends.shape) < 0.4), place, ends).to(dtype)
    assert_same(lambda: mask_of_ends(ends, **reach), blocks)


def test_strides_emptiness_and_reach_beyond_32_bits() -> None:
    comb = torch.tensor([SHAPES["comb"], SHAPES["comb"]])
    empty = [torch.zeros(shape, dtype=torch.int64) for shape in ((0,), (0, 4), (2, 0))]
    for values in (comb.T.contiguous().T, comb[:1].expand(2, -1), comb[:, :10], *empty):
        assert_same(partial(BlockDiagonalMask.from_tree, values), BLOCKS[1])
    for values in empty:
        assert_same(partial(mask_of_ends, values), BLOCKS[1])
    for reach in ({"window": (2**31 - 2, 0)}, {"window": (2**40, 0), "chunk_size": 2**31 - 2}, {"chunk_size": 2**40}):
        assert_same(partial(BlockDiagonalMask.from_tree, SHAPES["comb"], **reach), BLOCKS[1])


PARENTS = "parents: each is the place of an earlier token whose subtree holds the token"
ENDS = "ends: a subtree ends after its own token and within its row"


# Another chain, or a row of two, in which one parent is wrong
BAD_PARENTS: list[list[Any]] = [
    *([*CHAIN[:30], wrong] for wrong in (30, 31, -3, 2**32 + 5, 5 - 2**32)),  # itself, later, below slack, in 32 bits 5
    *([*CHAIN[:30], 2, ended] for ended in (20, 3)),  # long ago, and just now
    [-1, -2, 1], [-1, -2, 0], [[-1, 0, 1], [2, 0, 1]],  # slack, before slack, in the row before
]  # fmt: skip
# Ends before their token or past their row; then subtrees that end within others
BAD_ENDS: list[list[Any]] = [
    *([*[40] * 40, wrong] for wrong in (39, 42, 2**32 + 41, 41 - 2**32)),
    [[2, 2], [3, 0]], [[2, 3], [2, 2]],
    [30, 31, *range(3, 32)],  # that of one later program
    [30, 70, *range(3, 71)],  # of two
    [3, 4, 4, 4], [5, *range(2, 4), 70, *range(5, 71)],  # of the same program
    [22, *range(2, 21), 60, *range(22, 61)], [40, *range(2, 21), 60, *range(22, 61)],  # of two programs
    [22, *range(2, 21), 23, 22, 23],  # by one token
    [20, *range(2, 19), 70, *range(19, 71)],  # before a program and in it
]  # fmt: skip
REFUSED = [
    *((BlockDiagonalMask.from_tree, PARENTS, values) for values in BAD_PARENTS),
    *((mask_of_ends, ENDS, values) for values in BAD_ENDS),
]


@pytest.mark.parametrize("blocks", [BLOCKS[0], pytest.param(BLOCKS[1], marks=pytest.mark.slow)], ids=str)
def test_refusals(blocks: tuple[int, int]) -> None:
    for build, message, values in REFUSED:
        with served(blocks), fails(message):
            build(torch.tensor(values))
            pytest.fail(str(values))


@pytest.mark.slow
@settings(max_examples=15)
@given(forests(), st.sampled_from(["parents", "ends"]), st.data())
def test_what_torch_refuses(parents: tuple[int, ...], kind: str, data: st.DataObject) -> None:
    """One changed number: the kernels refuse what torch refuses, and build the same mask of the rest."""
    parents = parents[:50]
    good = torch.tensor([parents])
    values = good if kind == "parents" else ends_of(good)
    place, value = data.draw(st.integers(0, len(parents) - 1)), data.draw(st.integers(-3, len(parents) + 1))
    values[0, place] = value
    build = BlockDiagonalMask.from_tree if kind == "parents" else mask_of_ends
    blocks = data.draw(st.sampled_from(BLOCKS))
    try:
        build(values)
    except ValueError:
        with served(blocks), fails(PARENTS if kind == "parents" else ENDS):
            build(values)
    else:
        assert_same(lambda: build(values), blocks)
