"""The kernels that build tile tables, in Triton's interpreter, against the functions in torch, to the bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from tests.backends.test_tile_table import masks
from tests.trees import mask_of_ends
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.backends import tile_table
from tritonpack.backends import triton as triton_backend
from tritonpack.backends.tile_table import Cut, TileTables, tile_tables
from tritonpack.kernels import tables
from tritonpack.masks import bounds
from tritonpack.options import make_options
from tritonpack.testing.cases import parents_of

pytestmark = pytest.mark.interpreter

WITHOUT_WORK = ("empty", "new_empty", "unbind", "slice", "view", "detach", "unsqueeze", "select", "alias", "lift_fresh")
CUTS = (
    Cut(16, 16), Cut(4, 8, 12, even=True), Cut(8, of_keys=True), Cut(16, 40, 16, of_keys=True, even=True),
    Cut(3, 1, 5), Cut(3, 2, 5, even=True),
)  # fmt: skip
LENGTHS = ([3, 0, 70, 1, 1, 12, 4], [15, 16, 17, 4, 4, 30], [90, 2, 40], [1] * 30 + [20], [9, 11, 12, 13, 8] * 2, [])


class Recorded(TorchDispatchMode):
    """Adds the names of operators that launch or copy something to a list."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).split(".")[1] not in WITHOUT_WORK:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, and of the operators that run within `Recorded`."""
    names: list[str] = []
    run = InterpretedFunction.run

    def recording(self: InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
        names.append(self.fn.__name__)
        with _disable_current_modes():  # the interpreter's own operators aren't recorded
            return run(self, *arguments, **keywords)

    monkeypatch.setattr(InterpretedFunction, "run", recording)
    return names


@pytest.fixture(params=[(64, 32, 128, 8), (128, 128, 32, 16)], ids=["64", "128"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and tiles are read at once, so that stretches and comparisons cross them."""
    for name, value in zip(("WINDOW", "TILES", "OTHERS", "STEP"), request.param, strict=True):
        monkeypatch.setattr(tables, name, value)


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "serve", lambda x: True)
        yield


def assert_same(mask: BlockDiagonalMask, *cuts: Cut, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the tables of the kernels with those of torch, and the transpose with it."""
    with served(monkeypatch):
        copy = replace(mask, trusted=True)
        made = tile_tables(copy, *cuts, whole_documents=whole)
        transposed = copy.transpose()
    for name in ("key_start", "key_stop"):
        assert torch.equal(getattr(transposed, name), getattr(mask.transpose(), name)), name
    for cut, ours, theirs in zip(cuts, made, tile_tables(mask, *cuts, whole_documents=whole), strict=True):
        assert ours.dtype == theirs.dtype == torch.int32
        assert ours.is_contiguous()
        assert ours.data_ptr() % 16 == 0
        assert torch.equal(ours, theirs), cut


MIXED, SHARED = BlockDiagonalMask.from_seqlens([90, 2, 40, 13, 13, 13, 60, 1, 1]), [37, 5, 40, 1, 1, 30, 23]


def parts() -> list[BlockDiagonalMask]:
    """Rows and keys of one rank, with gaps; the documents have numbers."""
    mask = BlockDiagonalMask.from_seqlens(SHARED)
    rows, keys = torch.arange(3, 130, 2), torch.cat([torch.arange(30), torch.arange(60, 110)])
    return [mask.restrict(rows), mask.restrict(rows, keys), mask.restrict(None, keys)]


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.fast("128-3-shared", "128-5-whole")
@pytest.mark.usefixtures("small_chunks")
def test_tables_of_packed_batches(seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents short and long, windows, chunks, slack, padding, other lengths of keys, some of the keys."""
    for number, mask in enumerate(masks(seed, LENGTHS[seed])[seed % 2 :: 2]):  # masks, or their transposes
        cuts = CUTS[number % 6], CUTS[(number + 1 + seed) % 6]
        assert_same(mask, *cuts, whole=whole, monkeypatch=monkeypatch)


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("most", [1, 2, 4, 13, 16])
@pytest.mark.fast("128-13-shared", "128-16-whole")
@pytest.mark.usefixtures("small_chunks")
def test_groups_of_tiles_and_parts_of_masks(most: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of neighbours, also of more tiles than a program has, and tiles that fill no group."""
    monkeypatch.setattr(tile_table, "MAX_SORTED", most)
    for mask in (replace(MIXED), *parts()):  # a mask keeps its tables
        assert_same(mask, *CUTS, whole=whole, monkeypatch=monkeypatch)


def test_chunks_of_the_shipped_size_and_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockDiagonalMask.from_cu_seqlens([0, 700, 830, 831, 840], total_q=900)
    assert_same(mask, Cut(32, 64, 128), Cut(128, of_keys=True), whole=False, monkeypatch=monkeypatch)
    monkeypatch.setattr(tables, "WINDOW", 16)
    for lengths, cut, whole in (
        ([100, 3, 3, 3, 30, 2, 21], Cut(4, 8), False),
        ([3] * 50, Cut(16, 16), False),  # unused entries
        ([1] * 90, Cut(1, 1), True),  # more tiles than a program compares
    ):
        assert_same(BlockDiagonalMask.from_seqlens(lengths), cut, whole=whole, monkeypatch=monkeypatch)


def plan(mask: BlockDiagonalMask, *, backward: bool = True, pack_invariant: bool = False) -> TileTables:
    q, k = torch.empty(mask.num_queries, 4, 32), torch.empty(mask.num_keys, 2, 32)
    options = make_options(q, mask, pack_invariant=pack_invariant)
    return triton_backend.plan_tiles(q, k, k, mask, options, backward=backward)


IDS = torch.arange(90) % 31
KEY_START = torch.tensor([0, 0, 1, 3, 3], dtype=torch.int32)
TREE = BlockDiagonalMask.from_tree(parents_of([(-1, 30), (0, 20), (0, 14)]))
OF_TREES = ["depths_kernel", "starts_kernel"]
NUMBERED = [f"aten.{name}" for name in ("eq.Tensor", "cumsum.default", "sub.Tensor", "clamp.default")]
COPY = "aten.clone.default"
# What is built, and the operations of its constructor
BUILDERS: dict[str, tuple[Callable[[], BlockDiagonalMask], list[str]]] = {
    "offsets": (partial(BlockDiagonalMask.from_cu_seqlens, torch.tensor([0, 40, 90]), total_q=95), ["offsets_kernel"]),
    "position ids": (partial(BlockDiagonalMask.from_position_ids, IDS, window=(9, 0)), ["runs_kernel"]),
    "segment ids": (
        partial(BlockDiagonalMask.from_segment_ids, IDS.eq(0).cumsum(0)), ["aten.new_zeros.default", "runs_kernel"],
    ),
    "bounds": (lambda: BlockDiagonalMask(KEY_START, KEY_START, 4), [COPY, COPY, "transpose_kernel"]),
    "ends": (partial(mask_of_ends, TREE.query_stop[None].clone()), ["ends_kernel", *OF_TREES]),
    "bounds of a tree": (lambda: replace(TREE), [*[COPY] * 6, "check_kernel"]),
}  # fmt: skip
TABLES = ["tables_kernel"]
TREE_TABLES = ["tables_kernel", "extremes_kernel", "count_kernel", "fill_kernel"]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let bounds seem to lie on a GPU, so that kernels check them."""
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    with served(monkeypatch):
        yield


PLANS: dict[str, dict[str, bool]] = {
    "forward": {"backward": False}, "backward": {"backward": True}, "invariant": {"pack_invariant": True},
}  # fmt: skip


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.fast(
    "offsets-backward", "position ids-invariant", "segment ids-backward", "bounds-forward", "ends-forward"
)
@pytest.mark.usefixtures("on_a_device")
def test_operations_from_the_constructor_to_the_tables(name: str, how: str, operations: list[str]) -> None:
    """At most two kernels, the transpose and all assertions counted in; seven in a mask of trees. None waits, and only
    given bounds are copied. With pack_invariant documents get numbers from ids."""
    build, expected = BUILDERS[name]
    with Recorded(operations):
        mask = build()
        if how == "invariant" and mask.is_tree:
            pytest.skip("refused")
        plan(mask, **PLANS[how])
    numbered = NUMBERED if how == "invariant" and "runs_kernel" in expected else []
    assert operations == [*expected, *numbered, *(TREE_TABLES if mask.is_tree else TABLES)]
    assert sum(not name.startswith("aten.") for name in operations) <= (7 if mask.is_tree else 2)


@pytest.mark.usefixtures("on_a_device")
def test_operations_for_a_copy(operations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy without a check builds its transpose when it is needed."""
    mask = BUILDERS["offsets"][0]()
    operations.clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with Recorded(operations):
        plan(replace(mask, trusted=True), backward=True)
    assert operations == ["transpose_kernel", *TABLES]
