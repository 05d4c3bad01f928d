"""Kernels that build masks and tables and write masks out, on the virtual GPU, against their forms in torch."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.test_tree_tables import listed
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.kernels import dense_mask
from tritonpack.testing.cases import parents_of

pytestmark = NEEDS

LENGTHS = {"long": [300, 20, 1, 0, 170], "one": [1], "equal": [64] * 5, "empty": [37, 0, 0, 129, 33]}
# Trees as (parent, tokens) of each node
FORESTS = {"two": [[(-1, 200), (0, 33), (0, 100)], [(-1, 16), (0, 1)]], "deep": [[(-1, 70), (0, 40), (1, 2), (1, 9)]]}
FIELDS = ("key_start", "key_stop", "query_start", "query_stop", "diagonal", "document")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def _positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def _segments(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(1, 1 + len(lengths)), torch.tensor(lengths))[None]


MASKS: dict[str, Callable[[list[int]], BlockDiagonalMask]] = {
    "offsets": lambda n: BlockDiagonalMask.from_cu_seqlens(_offsets(n, torch.int64), total_q=sum(n) + 9),
    "offsets-int32-window": lambda n: BlockDiagonalMask.from_cu_seqlens(
        _offsets(n), total_q=sum(n), causal=False, window=(20, 7)
    ),
    "both-directions": lambda n: BlockDiagonalMask.from_cu_seqlens(_offsets(n), total_q=sum(n), causal=False),
    "offsets-cross": lambda n: BlockDiagonalMask.from_cu_seqlens(
        _offsets(n), _offsets(n[::-1]), total_q=sum(n), total_k=sum(n)
    ),
    "few-keys": lambda n: BlockDiagonalMask.from_cu_seqlens(_offsets(n), _offsets([1] * len(n)), total_q=sum(n),
                                                            total_k=len(n)),
    "no-keys": lambda n: BlockDiagonalMask.from_cu_seqlens(_offsets(n), _offsets([0] * len(n)), total_q=sum(n),
                                                           total_k=0),
    "positions": lambda n: BlockDiagonalMask.from_position_ids(_positions(n)),
    "segments": lambda n: BlockDiagonalMask.from_segment_ids(_segments(n)),
    "padding": lambda n: BlockDiagonalMask.from_padding_mask((_segments(n) > 1).int()),
}  # fmt: skip


def _tensors(mask: BlockDiagonalMask) -> dict[str, Tensor]:
    return {name: value.clone() for name in FIELDS if isinstance(value := getattr(mask, name, None), Tensor)}


def _built(make: Callable[[], BlockDiagonalMask]) -> dict[str, Tensor]:
    """A mask, its transpose, its dense forms and, without trees, tile tables."""
    mask = make()
    found = _tensors(mask) | {f"transposed {name}": x for name, x in _tensors(mask.transpose()).items()}
    for size in ((8, 512), (16, 16)):  # the shipped blocks, and such that lie within intervals
        with mock.patch.multiple(dense_mask, BLOCK_M=size[0], BLOCK_N=size[1]):
            found[f"bool {size}"] = mask.to_dense()
            found |= {f"{dtype} {size}": mask.to_dense(dtype, additive=True) for dtype in DTYPES}
    if mask.query_stop is None:
        tables = tile_tables(mask, Cut(32, 64, 128), Cut(128, of_keys=True))
        found |= {f"table {k}": table for k, table in enumerate(tables)}
    return found


def _compare(make: Callable[[], BlockDiagonalMask], seed: int) -> None:
    expected = _built(make)
    with virtual_gpu("sm_90", seed=seed) as gpu:
        got = _built(make)
    assert gpu.launches.kernels
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype
        assert got[name].stride() == expected[name].stride() or not expected[name].numel()
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.fast("offsets-one", "padding-empty", "few-keys-long", "both-directions-long")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, lengths: str) -> None:
    _compare(lambda: MASKS[name](LENGTHS[lengths]), seed=len(lengths))


@pytest.mark.slow
def test_a_long_tree() -> None:
    """Thousands of subtrees end in the rows of one program."""
    parents = torch.tensor(parents_of([(-1, 10), (0, 4090), (0, 50)]))
    expected = _tensors(BlockDiagonalMask.from_tree(parents))
    with virtual_gpu("sm_90"):
        got = _tensors(BlockDiagonalMask.from_tree(parents))
    assert all(torch.equal(got[name], expected[name]) for name in FIELDS)


@pytest.mark.fast("deep-all")
@pytest.mark.parametrize("window", [-1, 11], ids=["all", "window"])
@pytest.mark.parametrize("forest", FORESTS)
def test_trees(forest: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = torch.tensor(parents_of(*FORESTS[forest]))
    _compare(lambda: BlockDiagonalMask.from_tree(parents, window=(window, 0)), seed=3)

    mask = BlockDiagonalMask.from_tree(parents, window=(window, 0))
    cuts = Cut(32, 64, 128), Cut(128, 64, 128, of_keys=True)
    with virtual_gpu("sm_80", seed=3):
        tables, blocks = tree_tables(replace(mask, trusted=True), *cuts)
    monkeypatch.setattr("tritonpack.backends.tree_table.on_host", lambda x: False)  # room for lists as on a device
    expected, expected_blocks = tree_tables(replace(mask, trusted=True), *cuts)
    for table, other in zip(tables, expected, strict=True):
        assert torch.equal(table, other)
        assert listed(table, blocks) == listed(other, expected_blocks)
