"""The interval kernels, in Triton's interpreter, against the functions in torch, to the bit."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.assertions import assertions, fails
from tests.masks.random_masks import WINDOWS, random_lengths, random_multimodal_document
from tritonpack import BlockDiagonalMask
from tritonpack.checks import check_reach
from tritonpack.kernels import intervals, trees
from tritonpack.masks import bounds
from tritonpack.masks.block_diagonal import mask_from_intervals
from tritonpack.masks.intervals import WHOLE_DOCUMENT, from_runs

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

Build = Callable[[], BlockDiagonalMask]
BLOCKS = {"8": (8, 16), "32": (32, 8)}  # rows of a program, and rows that it looks back at a time


@pytest.fixture(params=BLOCKS)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of few rows, so that in small masks documents span blocks and blocks hold documents."""
    rows, look = BLOCKS[request.param]
    for name, value in (("OFFSET_ROWS", rows), ("RUN_ROWS", rows), ("LOOK", look)):
        monkeypatch.setattr(intervals, name, value)


def random_reach(rng: random.Random) -> dict[str, Any]:
    chunk_size = rng.choice((None, None, 1, 3, 10))
    return {"causal": rng.random() < 0.5, "window": rng.choice(WINDOWS), "chunk_size": chunk_size}


def random_row(rng: random.Random, tokens: int, longest: int) -> list[int]:
    """Document names, 0 for padding; some documents are long enough to span blocks."""
    names, row = list(range(1, 99)), []
    rng.shuffle(names)
    while len(row) < tokens:
        row += [rng.choice((0, names.pop(), names[-1]))] * rng.randint(1, rng.choice((2, longest)))
    return row[:tokens]


def offsets(rng: random.Random) -> Iterator[Build]:
    documents = rng.choice((0, 1, 2, 5, 8, 9, 40))
    seqlens, seqlens_k = random_lengths(rng, documents), random_lengths(rng, documents)
    dtype, reach = rng.choice((torch.int32, torch.int64)), random_reach(rng)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(dtype) for lengths in (seqlens, seqlens_k))
    total_q, total_k = sum(seqlens) + rng.choice((0, 20)), sum(seqlens_k) + rng.randint(0, 5)
    yield lambda: BlockDiagonalMask.from_cu_seqlens(cu_q, total_q=total_q, **reach)
    yield lambda: BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, total_q=total_q, total_k=total_k, **reach)


def positions(rng: random.Random) -> Iterator[Build]:
    reach, tokens = random_reach(rng), rng.choice((1, 7, 8, 40, 70))
    rows = []
    for _ in range(rng.randint(1, 3)):
        row: list[int] = []
        while len(row) < tokens:
            begin = rng.choice((0, 0, rng.randint(0, 20)))
            row += range(begin, begin + rng.randint(1, rng.choice((3, 60))))
        rows.append(row[:tokens])
    ids = torch.tensor(rows).to(rng.choice((torch.int32, torch.int64)))
    for form in (ids, ids[0], ids.expand(4, *ids.shape), ids.T.contiguous().T, ids[:1].expand(2, tokens)):
        yield partial(BlockDiagonalMask.from_position_ids, form, **reach)
    multimodal = torch.tensor([token for _ in range(4) for token in random_multimodal_document(rng)]).T[:, None]
    yield partial(BlockDiagonalMask.from_position_ids, multimodal, **reach)


def segments(rng: random.Random) -> Iterator[Build]:
    """Segments and padding."""
    reach, tokens = random_reach(rng), rng.choice((1, 7, 8, 40, 70))
    ids, spans = (torch.tensor([random_row(rng, tokens, longest) for _ in range(2)]) for longest in (30, 9))
    yield partial(BlockDiagonalMask.from_segment_ids, ids, **reach)
    yield partial(BlockDiagonalMask.from_segment_ids, ids, spans=spans, **reach)
    edges = torch.tensor([sorted(rng.choices(range(tokens + 1), k=2)) for _ in range(3)])
    padding = (torch.arange(tokens) >= edges[:, :1]) & (torch.arange(tokens) < edges[:, 1:])
    yield partial(BlockDiagonalMask.from_padding_mask, padding, **reach)
    yield partial(BlockDiagonalMask.from_padding_mask, padding.int(), **reach)


def runs(rng: random.Random) -> Iterator[Build]:
    """Runs begin anywhere, also within padding."""
    shape, generator = (rng.randint(1, 3), rng.choice((1, 8, 50))), torch.Generator().manual_seed(rng.randrange(99))
    starts, live = (torch.rand(shape, generator=generator) < share for share in (0.1, 0.7))
    starts[:, 0] = True
    first = torch.where(starts.flatten(), torch.arange(starts.numel()), 0).cummax(0).values
    live = live.flatten()[first].view(shape)
    yield partial(mask_from_intervals, partial(from_runs, starts, live), check_reach((2, 5), False, None))
    yield partial(mask_from_intervals, partial(from_runs, starts, None), WHOLE_DOCUMENT)


def edges(rng: random.Random) -> Iterator[Build]:
    """No tokens; reaches beyond 32 bits; rows of the same ids, of which some are neighbours in the table."""
    for shape in ((0,), (0, 4), (2, 0), (3, 2, 0)):
        yield partial(BlockDiagonalMask.from_position_ids, torch.zeros(shape, dtype=torch.int64))
    yield partial(BlockDiagonalMask.from_cu_seqlens, [0], total_q=0)
    for size in (2**31 - 1, 2**40):
        yield partial(BlockDiagonalMask.from_seqlens, [5, 3], [2, 7], causal=False, window=(size, size))
        yield partial(BlockDiagonalMask.from_seqlens, [5, 3], causal=False, chunk_size=size)
    yield partial(BlockDiagonalMask.from_segment_ids, torch.tensor([[1, 2, 3]] * 40))


KINDS = {kind.__name__: kind for kind in (offsets, positions, segments, runs, edges)}
CASES = [(kind, seed) for kind in KINDS for seed in range(8 if kind != "edges" else 1)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
@pytest.mark.fast("8-offsets-0", "32-offsets-1", "8-positions-0", "8-segments-1", "32-runs-0", "32-edges-0")
@pytest.mark.usefixtures("small_blocks")
def test_masks_are_those_of_torch(kind: str, seed: int) -> None:
    for build in KINDS[kind](random.Random(seed)):
        with assertions():
            served = build().validate()
        plain = build()
        assert served.num_keys == plain.num_keys
        for name in ("key_start", "key_stop", "diagonal", "document"):
            ours, theirs = getattr(served, name), getattr(plain, name)
            assert ours.dtype == theirs.dtype == torch.int32
            assert torch.equal(ours, theirs), name
        for name in ("key_start", "key_stop"):  # computed along with the others, unless there are spans
            assert torch.equal(getattr(served.transpose(), name), getattr(plain.transpose(), name)), name


def from_bounds(start: list[int], stop: list[int], num_keys: int) -> BlockDiagonalMask:
    return BlockDiagonalMask(*(torch.tensor(bound, dtype=torch.int32) for bound in (start, stop)), num_keys)


TREE = BlockDiagonalMask.from_tree([-1, *[0] * 299])


def from_tree_bounds(name: str, row: int) -> BlockDiagonalMask:
    wrong = getattr(TREE, name).clone()
    wrong[row] = -1 if name.endswith("start") else 301
    return replace(TREE, **{name: wrong})


def from_segments(*rows: list[int]) -> BlockDiagonalMask:
    return BlockDiagonalMask.from_segment_ids(torch.tensor(rows))


def from_padding(*rows: list[int], dtype: torch.dtype = torch.int64) -> BlockDiagonalMask:
    return BlockDiagonalMask.from_padding_mask(torch.tensor(rows).to(dtype))


from_offsets = partial(BlockDiagonalMask.from_cu_seqlens, total_q=5, total_k=4)
MONOTONE = "a mask's intervals must lie within its keys and end at or after their begin, and neith"
TREES = "a tree's intervals must lie within its keys and within its queries, and end at or after"
# Builder, words of its refusal, and what it refuses
REFUSED: list[tuple[Callable[..., BlockDiagonalMask], str, list[tuple[Any, ...]]]] = [
    (from_offsets, "cu_seqlens must begin with 0", [([1, 3], [0, 3])]),
    (from_offsets, "cu_seqlens must .* never decrease",
     [([0, 3, 2, 4], [0, 1, 2, 3]), ([0] * 30 + [3, 2, 4], [0] * 33)]),  # the latter in a block without rows
    (from_offsets, "cu_seqlens_k must .* end at most at total_k", [([0, 5], [0, 6])]),
    (from_offsets, "cu_seqlens must", [([0, 2**33], [0, 4])]),
    (from_bounds, MONOTONE, [
        ([-1, 0, 0], [1, 1, 1], 3), ([0, 0, 2], [1, 4, 4], 3),  # before and behind the keys
        ([0, 2, 2], [1, 1, 3], 3),  # ends before it begins
        ([0, 2, 1], [3, 3, 3], 3), ([0, 0, 0], [1, 3, 2], 3),  # begins or ends before the row above
        ([0] * 79 + [1, 0], [2] * 81, 2),  # in another program
        ([0] * 79 + [0, 0], [1] * 80 + [2], 1), ([0, 0], [0, 1], 0),  # without keys
    ]),
    (from_tree_bounds, TREES,
     [(name, row) for name in ("key_start", "key_stop", "query_start", "query_stop") for row in (0, 299)]),
    (from_segments, "segment_ids must not be negative, and", [
        ([1, 1, -1, -1],), ([7, 7, 2, 7],), ([3, 0, 3, 3],), ([5, *range(100, 180), 5],), ([1, 2, 3], [2, 4, 2]),
        ([1, 2**40 + 1, 2**33 + 1, 2**40 + 1],),  # equal below 2**32
    ]),
    (from_padding, "attention_mask has padding between the tokens of a row",
     [([0, 1, 1, 0], [1, 0, 1, 0]), ([1, *[0] * 60, 2],)]),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message", "given"), REFUSED)
@pytest.mark.usefixtures("small_blocks")
def test_refusals(
    build: Callable[..., BlockDiagonalMask], message: str, given: list[tuple[Any, ...]], monkeypatch: Any
) -> None:
    """When the mask is made, before any kernel reads it, as in host memory."""
    assert 299 < 300 > trees.ROWS
    for arguments in given:
        with pytest.raises(ValueError, match=r"cu_seqlens|mask sees keys|of the mask has|segment_ids|attention_mask"):
            build(*arguments)
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    for arguments in given:
        with assertions(), fails(message):
            build(*arguments)


@pytest.mark.usefixtures("small_blocks")
def test_given_bounds_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more queries than keys, more keys than queries, and none of either; and the transpose is kept."""
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    sizes: list[Any] = [([40, 3], [2, 5]), ([2, 5], [40, 3]), ([5], [0]), ([0], [5]), ([0],)]
    for mask in (BlockDiagonalMask.from_seqlens(*lengths, causal=len(lengths) > 1) for lengths in sizes):
        with assertions():
            given = BlockDiagonalMask(mask.key_start, mask.key_stop, mask.num_keys)
        for name in ("key_start", "key_stop"):
            assert torch.equal(getattr(given.transpose(), name), getattr(mask.transpose(), name))
    with assertions():
        replace(TREE)
        from_padding([0, 1, -2, 3], [1, 1, 0, 0])
        from_padding([0, 1, 1, 1], [1, 1, 0, 0], dtype=torch.bool)


@pytest.mark.usefixtures("small_blocks")
def test_without_assertions_each_run_of_an_id_is_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD GPUs; `validate` doesn't see it (docs/troubleshooting.md)."""
    monkeypatch.setitem(intervals.ASSERTIONS, "debug", False)
    with assertions():
        mask = from_segments([7, 7, 2, 7]).validate()
    runs = BlockDiagonalMask.from_seqlens([2, 1, 1])
    assert torch.equal(mask.key_start, runs.key_start)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.fast("8-0", "32-1")
@pytest.mark.usefixtures("small_blocks")
def test_segment_ids_are_refused_as_in_torch(seed: int) -> None:
    rng, outcomes = random.Random(seed), set()
    for number in range(8):
        ids: Tensor = torch.tensor([random_row(rng, 12, 9) for _ in range(2)])
        if number % 2:
            ids[1, -1] = ids[1, rng.randrange(5)] = 7
        ids *= rng.choice((1, 32, 2**35))  # multiples share entries of the table
        try:
            BlockDiagonalMask.from_segment_ids(ids)
            expected: Any = nullcontext()
        except ValueError:
            expected = fails(".* must be contiguous")
        outcomes.add(type(expected))
        with assertions(), expected:
            BlockDiagonalMask.from_segment_ids(ids)
    assert len(outcomes) == 2
