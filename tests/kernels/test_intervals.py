"""The interval kernels, in Triton's interpreter, against the functions in torch, to the bit."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.assertions import assertions, fails
from tests.masks.test_block_diagonal import WINDOWS, random_lengths, random_multimodal_document
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.checks import check_reach
from tritonpack.kernels import intervals, trees
from tritonpack.masks import bounds
from tritonpack.masks.block_diagonal import mask_from_runs
from tritonpack.masks.intervals import WHOLE_DOCUMENT

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SEEDS = range(8)
Build = Callable[[], BlockDiagonalMask]


@pytest.fixture(params=[(8, 16), (32, 8)], ids=str)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of few rows, so that in small masks documents span blocks and blocks hold documents."""
    rows, look = request.param
    for name, value in (("OFFSET_ROWS", rows), ("RUN_ROWS", rows), ("LOOK", look)):
        monkeypatch.setattr(intervals, name, value)


@pytest.fixture
def assert_same(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Build], None]:
    def check(build: Build) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "serve", lambda x: True)
            served = build().validate()
        plain = build()
        assert served.num_keys == plain.num_keys
        for name in ("key_start", "key_stop", "diagonal", "document"):
            ours, theirs = getattr(served, name), getattr(plain, name)
            assert ours.dtype == theirs.dtype == torch.int32
            assert torch.equal(ours, theirs), name
        for name in ("key_start", "key_stop"):  # computed along with the others, unless there are spans
            assert torch.equal(getattr(served.transpose(), name), getattr(plain.transpose(), name)), name

    return check


def random_reach(rng: random.Random) -> dict[str, object]:
    return {
        "causal": rng.random() < 0.5,
        "window": rng.choice(WINDOWS),
        "chunk_size": rng.choice((None, None, 1, 3, 10)),
    }


def random_row(rng: random.Random, tokens: int, longest: int) -> list[int]:
    """Document names, 0 for padding; some documents are long enough to span blocks."""
    names, row = list(range(1, 99)), []
    rng.shuffle(names)
    while len(row) < tokens:
        row += [rng.choice((0, names.pop(), names[-1]))] * rng.randint(1, rng.choice((2, longest)))
    return row[:tokens]


@pytest.mark.parametrize("documents", [0, 1, 2, 5, 8, 9, 40])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.fast("(8, 16)-0-0", "(8, 16)-1-9", "(32, 8)-0-1", "(32, 8)-1-40", "(32, 8)-2-8")
def test_offsets(seed: int, documents: int, assert_same: Callable[[Build], None]) -> None:
    rng = random.Random(100 * documents + seed)
    seqlens, seqlens_k = random_lengths(rng, documents), random_lengths(rng, documents)
    dtype, reach = rng.choice((torch.int32, torch.int64)), random_reach(rng)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(dtype) for lengths in (seqlens, seqlens_k))
    total_q, total_k = sum(seqlens) + rng.choice((0, 20)), sum(seqlens_k) + rng.randint(0, 5)
    assert_same(lambda: BlockDiagonalMask.from_cu_seqlens(cu_q, total_q=total_q, **reach))
    assert_same(lambda: BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, total_q=total_q, total_k=total_k, **reach))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([1, 3], [0, 3], "cu_seqlens must begin with 0"),
        ([0, 3, 2, 4], [0, 1, 2, 3], "cu_seqlens must .* never decrease"),
        ([0] * 30 + [3, 2, 4], [0] * 33, "cu_seqlens must .* never decrease"),  # in a block without rows
        ([0, 5], [0, 6], "cu_seqlens_k must .* end at most at total_k"),
        ([0, 2**33], [0, 4], "cu_seqlens must"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_offsets_are_checked(cu_q: list[int], cu_k: list[int], message: str) -> None:
    with assertions(), fails(message):
        BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, total_q=5, total_k=4)
    with assertions():
        BlockDiagonalMask.from_cu_seqlens([0, 2, 5], [0, 2, 4], total_q=5, total_k=4)


BAD_BOUNDS = {
    "before the keys": ([-1, 0, 0], [1, 1, 1], 3),
    "behind the keys": ([0, 0, 2], [1, 4, 4], 3),
    "ends before it begins": ([0, 2, 2], [1, 1, 3], 3),
    "begins before the row above": ([0, 2, 1], [3, 3, 3], 3),
    "ends before the row above": ([0, 0, 0], [1, 3, 2], 3),
    "in another program": ([0] * 79 + [1, 0], [2] * 81, 2),
    "in a program without keys": ([0] * 79 + [0, 0], [1] * 80 + [2], 1),
    "no keys": ([0, 0], [0, 1], 0),
}


@pytest.mark.parametrize("name", BAD_BOUNDS)
@pytest.mark.usefixtures("small_blocks")
def test_given_bounds_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the mask is made, before any kernel reads them, as in host memory."""
    start, stop, num_keys = BAD_BOUNDS[name]
    given = [torch.tensor(bound, dtype=torch.int32) for bound in (start, stop)]
    with pytest.raises(ValueError, match="the mask sees keys"):
        BlockDiagonalMask(*given, num_keys)
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    with assertions(), fails("a mask's intervals must lie within its keys and end at or after their begin, and neith"):
        BlockDiagonalMask(*given, num_keys)


@pytest.mark.usefixtures("small_blocks")
def test_given_bounds_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more queries than keys, more keys than queries, and none of either; and the transpose is kept."""
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    for mask in (
        BlockDiagonalMask.from_seqlens([40, 3], [2, 5]),
        BlockDiagonalMask.from_seqlens([2, 5], [40, 3], causal=False),
        BlockDiagonalMask.from_seqlens([5], [0]),
        BlockDiagonalMask.from_seqlens([0], [5]),
        BlockDiagonalMask.from_seqlens([0]),
    ):
        with assertions():
            given = BlockDiagonalMask(mask.key_start, mask.key_stop, mask.num_keys)
        expected, found = mask.transpose(), given.transpose()
        assert torch.equal(found.key_start, expected.key_start)
        assert torch.equal(found.key_stop, expected.key_stop)


@pytest.mark.parametrize("name", ["key_start", "key_stop", "query_start", "query_stop"])
@pytest.mark.parametrize("row", [0, 299])
def test_given_bounds_of_a_tree_are_checked(name: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockDiagonalMask.from_tree([-1, *[0] * 299])
    assert row < 300 > trees.ROWS
    wrong = getattr(mask, name).clone()
    wrong[row] = -1 if name.endswith("start") else 301
    with pytest.raises(ValueError, match="of the mask has"):
        replace(mask, **{name: wrong})
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    with assertions():
        replace(mask)
    with assertions(), fails("a tree's intervals must lie within its keys and within its queries, and end at or after"):
        replace(mask, **{name: wrong})


BAD_SEGMENTS = {
    "negative": [[1, 1, -1, -1]],
    "in two pieces": [[7, 7, 2, 7]],
    "apart by padding": [[3, 0, 3, 3]],
    "in other programs": [[5, *range(100, 180), 5]],
    "in the second row": [[1, 2, 3], [2, 4, 2]],
    "equal below 2**32": [[1, 2**40 + 1, 2**33 + 1, 2**40 + 1]],
}


@pytest.mark.parametrize("name", BAD_SEGMENTS)
@pytest.mark.usefixtures("small_blocks")
def test_segment_ids_are_checked(name: str) -> None:
    with assertions(), fails("segment_ids must not be negative, and"):
        BlockDiagonalMask.from_segment_ids(torch.tensor(BAD_SEGMENTS[name]))


@pytest.mark.usefixtures("small_blocks")
def test_without_assertions_each_run_of_an_id_is_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD GPUs; `validate` doesn't see it (docs/troubleshooting.md)."""
    monkeypatch.setitem(intervals.ASSERTIONS, "debug", False)
    ids = torch.tensor(BAD_SEGMENTS["in two pieces"])
    with assertions():
        mask = BlockDiagonalMask.from_segment_ids(ids).validate()
    runs = BlockDiagonalMask.from_seqlens(ids.unique_consecutive(return_counts=True)[1].tolist())
    assert torch.equal(mask.key_start, runs.key_start)
    assert torch.equal(mask.key_stop, runs.key_stop)
    with pytest.raises(ValueError, match="contiguous"):
        BlockDiagonalMask.from_segment_ids(ids)


@pytest.mark.usefixtures("small_blocks")
def test_rows_may_have_the_same_ids() -> None:
    """Also where their entries in the table are neighbours, as some of these are."""
    ids = torch.tensor([[1, 2, 3]] * 40)
    with assertions():
        mask = BlockDiagonalMask.from_segment_ids(ids)
    assert torch.equal(mask.key_start, torch.arange(120, dtype=torch.int32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.fast("(8, 16)-0", "(32, 8)-1")
@pytest.mark.usefixtures("small_blocks")
def test_segment_ids_are_refused_as_in_torch(seed: int) -> None:
    rng, outcomes = random.Random(seed), set()
    for number in range(8):
        ids = torch.tensor([random_row(rng, 12, 9) for _ in range(2)])
        if number % 2:
            ids[1, -1] = ids[1, rng.randrange(5)] = 7
        ids *= rng.choice((1, 32, 2**35))  # multiples share entries of the table
        try:
            BlockDiagonalMask.from_segment_ids(ids)
        except ValueError:
            with assertions(), fails(".* must be contiguous"):
                BlockDiagonalMask.from_segment_ids(ids)
            outcomes.add("refused")
        else:
            with assertions():
                BlockDiagonalMask.from_segment_ids(ids)
            outcomes.add("taken")
    assert outcomes == {"refused", "taken"}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_padding_masks_are_checked(dtype: torch.dtype) -> None:
    with assertions(), fails("attention_mask has padding between the tokens of a row"):
        BlockDiagonalMask.from_padding_mask(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]).to(dtype))
    with assertions(), fails("attention_mask has padding between the tokens of a row"):
        BlockDiagonalMask.from_padding_mask(torch.tensor([[1, *[0] * 60, 2]]).to(dtype))
    with assertions():
        BlockDiagonalMask.from_padding_mask(torch.tensor([[0, 1, -2, 3], [1, 1, 0, 0]]).to(dtype))


@pytest.mark.parametrize("seed", SEEDS)
def test_position_ids(seed: int, assert_same: Callable[[Build], None]) -> None:
    rng = random.Random(seed)
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
        assert_same(lambda form=form: BlockDiagonalMask.from_position_ids(form, **reach))


@pytest.mark.parametrize("seed", SEEDS)
def test_multimodal_position_ids(seed: int, assert_same: Callable[[Build], None]) -> None:
    rng = random.Random(seed)
    tokens = [token for _ in range(4) for token in random_multimodal_document(rng)]
    ids = torch.tensor(tokens).T[:, None]
    assert_same(lambda: BlockDiagonalMask.from_position_ids(ids, **random_reach(random.Random(seed))))


@pytest.mark.parametrize("seed", SEEDS)
def test_segment_ids_and_padding(seed: int, assert_same: Callable[[Build], None]) -> None:
    rng = random.Random(seed)
    reach, tokens = random_reach(rng), rng.choice((1, 7, 8, 40, 70))
    ids = torch.tensor([random_row(rng, tokens, 30) for _ in range(rng.randint(1, 3))])
    assert_same(lambda: BlockDiagonalMask.from_segment_ids(ids, **reach))
    edges = torch.tensor([sorted(rng.choices(range(tokens + 1), k=2)) for _ in range(3)])
    place = torch.arange(tokens)
    padding = (place >= edges[:, :1]) & (place < edges[:, 1:])
    assert_same(lambda: BlockDiagonalMask.from_padding_mask(padding, **reach))
    assert_same(lambda: BlockDiagonalMask.from_padding_mask(padding.int(), **reach))
    spans = torch.tensor([random_row(rng, tokens, 9) for _ in range(len(ids))])
    assert_same(lambda: BlockDiagonalMask.from_segment_ids(ids, spans=spans, **reach))


@pytest.mark.parametrize("seed", SEEDS)
def test_runs(seed: int, assert_same: Callable[[Build], None]) -> None:
    """Runs begin anywhere, also within padding."""
    rng = random.Random(seed)
    shape = (rng.randint(1, 3), rng.choice((1, 8, 50)))
    starts = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.1
    starts[:, 0] = True
    live = torch.rand(shape, generator=torch.Generator().manual_seed(-seed)) < 0.7
    live = live.flatten()[torch.where(starts.flatten(), torch.arange(starts.numel()), 0).cummax(0).values].view(shape)
    assert_same(lambda: mask_from_runs(starts, live, check_reach((2, 5), False, None)))
    assert_same(lambda: mask_from_runs(starts, None, WHOLE_DOCUMENT))


def test_no_tokens(assert_same: Callable[[Build], None]) -> None:
    for shape in ((0,), (0, 4), (2, 0), (3, 2, 0)):
        assert_same(lambda shape=shape: BlockDiagonalMask.from_position_ids(torch.zeros(shape, dtype=torch.int64)))
    assert_same(lambda: BlockDiagonalMask.from_cu_seqlens([0], total_q=0))


def test_reach_beyond_32_bits(assert_same: Callable[[Build], None]) -> None:
    for window in ((2**31 - 1, 2**31 - 1), (2**40, 2**40)):
        assert_same(lambda window=window: BlockDiagonalMask.from_seqlens([5, 3], [2, 7], causal=False, window=window))
        assert_same(lambda window=window: BlockDiagonalMask.from_seqlens([5, 3], chunk_size=window[0], causal=False))
