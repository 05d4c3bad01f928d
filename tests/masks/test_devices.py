"""Masks on devices: constructors never wait, and a GPU makes the same masks as a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.recorded import Recorded
from tests.trees import mask_of_ends
from tritonpack.checks import require
from tritonpack.masks.block_diagonal import BlockDiagonalMask


def everything(device: str) -> list[BlockDiagonalMask]:
    """A call of each constructor and operation, with tensors on `device`."""
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32).to(device)
    keys = torch.tensor([0, 2, 6, 7]).to(device)
    positions = torch.tensor([[0, 1, 2, 0], [1, 0, 1, 2]]).to(device)
    segments = torch.tensor([[1, 1, 2, 0], [0, 3, 3, 3]]).to(device)
    parents = torch.tensor([[-1, 0, 1, 0], [-2, -1, 1, 1]]).to(device)
    ends = torch.tensor([[4, 4, 2, 4], [3, 2, 3, 3]]).to(device)
    rows = torch.tensor([0, 2, 5]).to(device)
    packed = BlockDiagonalMask.from_cu_seqlens(offsets, total_q=10)
    masks = [
        packed,
        BlockDiagonalMask.from_seqlens([3, 0, 5], [1, 2, 3], device=device),
        BlockDiagonalMask.from_cu_seqlens(offsets, keys, window=(2, 1), causal=False, total_q=8, total_k=9),
        BlockDiagonalMask.from_position_ids(positions, window=(2, 0)),
        BlockDiagonalMask.from_position_ids(positions.expand(3, 2, 4)),
        BlockDiagonalMask.from_position_ids(positions.expand(4, 2, 4)),
        BlockDiagonalMask.from_segment_ids(segments),
        BlockDiagonalMask.from_padding_mask(segments[1:], causal=False),
        packed.restrict(rows, rows),
        BlockDiagonalMask.from_segment_ids(segments, window=(2, 0), chunk_size=3, spans=positions),
        BlockDiagonalMask.from_cu_seqlens(offsets, total_q=8, spans=segments),
        BlockDiagonalMask.from_tree(parents),
        mask_of_ends(ends, window=(1, 0), chunk_size=3),
    ]
    return masks + [mask.transpose() for mask in masks]


def test_constructors_read_no_values() -> None:
    """A meta tensor has no values, so code that reads or copies them, or derives a shape from them, raises."""
    for mask in everything("meta"):
        assert mask.key_start.device.type == mask.key_stop.device.type == "meta"
        assert mask.to_block_mask().kv_indices.device.type == "meta"
        assert mask.to_dense(torch.float16, additive=True).shape == (mask.num_queries, mask.num_keys)


def test_checks_become_assertions_on_the_device() -> None:
    """`require` with tensors that pretend to lie on a GPU."""
    with FakeTensorMode():
        condition = torch.empty((), dtype=torch.bool, device="cuda")
        with Recorded() as recorded:
            require(condition, "a message")
    names = [str(operator) for operator, *_ in recorded.calls]
    assert [name for name in names if "device" not in name] == ["aten._assert_async.msg"]


@pytest.mark.gpu
def test_a_gpu_builds_and_writes_the_same_masks() -> None:
    def masks(device: str) -> list[BlockDiagonalMask]:
        lengths = ([3000, 1, 70, 2000], [1, 31, 600], [64])
        return everything(device) + [BlockDiagonalMask.from_seqlens(one, device=device) for one in lengths]

    for mask, same in zip(masks("cuda"), masks("cpu"), strict=True):
        pairs = [(mask.validate().to_dense(), same.to_dense())]
        for name in ("diagonal", "document"):
            assert (getattr(mask, name) is None) == (getattr(same, name) is None), name
            pairs += [(getattr(mask, name), getattr(same, name))] if getattr(mask, name) is not None else []
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            pairs.append((mask.to_dense(dtype, additive=True), same.to_dense(dtype, additive=True)))
        ours, theirs = mask.to_block_mask(), same.to_block_mask()
        pairs += [(ours.kv_indices, theirs.kv_indices), (ours.full_kv_num_blocks, theirs.full_kv_num_blocks)]
        assert all(torch.equal(found.cpu(), expected) for found, expected in pairs)


@pytest.mark.gpu
def test_a_gpu_does_not_wait() -> None:
    offsets = torch.tensor([0, 300, 300, 800], dtype=torch.int32).to("cuda")
    ids = torch.arange(800, device="cuda") // 100 + 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (
            BlockDiagonalMask.from_cu_seqlens(offsets, total_q=800, chunk_size=64, spans=ids),
            BlockDiagonalMask(ids.int(), ids.int() + 1, 9, document_source=ids.int()),
            BlockDiagonalMask.from_position_ids(ids, spans=ids),
            BlockDiagonalMask.from_segment_ids(ids, window=(9, 0)),
            BlockDiagonalMask.from_tree(ids * 100 - 101),
            mask_of_ends(ids * 100, window=(9, 0)),
        ):
            mask.to_dense(torch.bfloat16, additive=True)
            mask.to_block_mask()
            assert mask.document is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_new_lengths_do_not_recompile() -> None:
    from tritonpack.kernels.dense_mask import dense_mask_kernel
    from tritonpack.kernels.intervals import offsets_kernel, runs_kernel
    from tritonpack.kernels.trees import depths_kernel, parents_kernel, starts_kernel

    kernels = (dense_mask_kernel, offsets_kernel, runs_kernel, parents_kernel, depths_kernel, starts_kernel)
    compiled = []
    for length, window in ((64, -1), (1, 1), (16, 0), (17, 16), (1000, 17), (4096, 2**20)):
        ids = torch.arange(length, device="cuda")
        offsets = torch.arange(0, length + 1, max(length // 3, 1), device="cuda")
        BlockDiagonalMask.from_cu_seqlens(offsets, total_q=length, window=(window, 0)).to_dense()
        BlockDiagonalMask.from_position_ids(ids, window=(window, 0), chunk_size=window + 2)
        BlockDiagonalMask.from_tree(ids - 1, window=(window, 0), chunk_size=window + 2)
        compiled.append(sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values()))
    assert len({*compiled}) == 1
