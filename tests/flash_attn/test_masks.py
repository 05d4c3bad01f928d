"""The cache of masks: layers with the same offsets share one, and an outdated mask is never used."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tritonpack import BlockDiagonalMask
from tritonpack.flash_attn import fa2, masks
from tritonpack.flash_attn.masks import mask_from_offsets, regular_offsets


def build(cu: Tensor, cu_k: Tensor | None = None, **keywords: Any) -> BlockDiagonalMask:
    keywords = {"causal": True, "window": (-1, -1)} | keywords
    return mask_from_offsets(cu, cu if cu_k is None else cu_k, 9, 9, **keywords)


@pytest.fixture
def cu() -> Tensor:
    return torch.tensor([0, 3, 8], dtype=torch.int32)


class TestShared:
    def test_one_mask_for_the_same_offsets(self, cu: Tensor) -> None:
        assert build(cu) is build(cu)
        assert build(cu).key_start.tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 8]

    def test_all_layers_share_one(self, cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        built = []
        original = masks._build
        monkeypatch.setattr(masks, "_build", lambda *a: built.append(1) or original(*a))
        q = torch.randn(9, 2, 16, requires_grad=True)
        x = q
        for _ in range(3):
            x = checkpoint(lambda x: fa2.flash_attn_varlen_func(x, x, x, cu, cu, causal=True), x, use_reentrant=False)
        x.sum().backward()
        assert len(built) == 1

    @pytest.mark.parametrize(
        "other", [{"causal": False}, {"window": (2, 0)}, {"used_k": torch.tensor([1, 2])}], ids=str
    )
    def test_other_options_get_another_mask(self, cu: Tensor, other: dict[str, Any]) -> None:
        first = build(cu)
        second = build(cu, **other)
        assert first is not second
        assert not torch.equal(first.to_dense(), second.to_dense())
        assert build(cu) is first
        assert build(cu, **other) is second

    def test_used_queries_and_used_keys_get_other_masks(self, cu: Tensor) -> None:
        used = torch.tensor([1, 2])
        as_queries, as_keys = build(cu, used_q=used), build(cu, used_k=used)
        assert not torch.equal(as_queries.to_dense(), as_keys.to_dense())

    def test_regular_offsets_are_shared(self) -> None:
        device = torch.device("cpu")
        assert regular_offsets(3, 5, device) is regular_offsets(3, 5, device)
        assert regular_offsets(3, 5, device).tolist() == [0, 5, 10, 15]
        with torch.inference_mode():
            inside = regular_offsets(4, 7, device)
        assert not inside.is_inference()

    def test_number_is_bounded(self, cu: Tensor) -> None:
        for left in range(3 * masks.MASKS_PER_OFFSETS):
            build(cu, window=(left, 0))
        assert len(masks._kept[cu]) == masks.MASKS_PER_OFFSETS

    @pytest.mark.slow
    def test_mask_lives_as_long_as_the_offsets(self) -> None:
        gc.collect()
        before = len(masks._kept)
        offsets = torch.tensor([0, 9])
        build(offsets)
        assert len(masks._kept) == before + 1
        del offsets
        gc.collect()
        assert len(masks._kept) == before


def write_data(cu: Tensor) -> None:
    cu.data[1] = 5


def write_in_inference_mode(cu: Tensor) -> None:
    with torch.inference_mode():
        cu[1] = 5


WRITES = {
    "in place": lambda cu: cu[1].fill_(5),
    "data": write_data,
    "numpy": lambda cu: cu.numpy().put(1, 5),
    "another storage": lambda cu: setattr(cu, "data", torch.tensor([0, 5, 8], dtype=torch.int32)),
    "another shape": lambda cu: setattr(cu, "data", torch.tensor([0, 5, 8, 8], dtype=torch.int32)),
    "inference mode": write_in_inference_mode,
}


class TestNeverOutdated:
    @pytest.mark.parametrize("write", WRITES)
    def test_after_a_write(self, cu: Tensor, write: str) -> None:
        build(cu)
        WRITES[write](cu)
        assert build(cu).key_start.tolist() == [0, 0, 0, 0, 0, 5, 5, 5, 8]

    @pytest.mark.parametrize("write", ["in place", "data", "numpy", "another storage"])
    def test_after_a_write_to_the_other_tensors(self, cu: Tensor, write: str) -> None:
        other = cu.clone()
        build(cu, other)
        WRITES[write](other)
        assert build(cu, other).key_start.tolist() == [0, 0, 0, 5, 5, 5, 5, 5, 8]
        used = torch.tensor([3, 2], dtype=torch.int32)
        build(cu, used_k=used)
        used.data[1] = 4
        assert build(cu, used_k=used).key_stop.tolist() == [1, 2, 3, 3, 4, 5, 6, 7, 8]

    def test_new_tensor_with_the_id_of_a_freed_one(self, cu: Tensor) -> None:
        for first in range(1, 8):
            other = torch.tensor([0, first, 8], dtype=torch.int32)
            assert build(cu, other).key_start[3] == first

    def test_identity_and_version_decide_on_a_gpu(self, cu: Tensor) -> None:
        """On a GPU a new object, or a write that torch counts, gives a new mask, whatever the values."""
        other = cu.clone()
        first = build(cu, other)
        assert build(cu, other) is first
        assert build(cu, cu.clone()) is not first
        second = build(cu, other)
        cu.add_(0)
        assert build(cu, other) is not second

    def test_a_view_is_another_tensor(self, cu: Tensor) -> None:
        first = build(cu)
        assert build(cu.view(-1)) is not first

    def test_inference_tensors_are_not_kept(self) -> None:
        with torch.inference_mode():
            cu = torch.tensor([0, 3, 8])
            assert build(cu) is not build(cu)

    def test_masks_of_inference_mode_are_not_used_in_training(self, cu: Tensor) -> None:
        q = torch.randn(9, 2, 16, requires_grad=True)
        with torch.inference_mode():
            fa2.flash_attn_varlen_func(q, q, q, cu, cu)
        fa2.flash_attn_varlen_func(q, q, q, cu, cu).sum().backward()
        assert q.grad is not None

    def test_a_capture_neither_keeps_nor_reads(self, cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        before, regular = build(cu), regular_offsets(6, 3, torch.device("cpu"))
        monkeypatch.setattr(masks, "is_capturing", lambda device: True)
        during = build(cu)
        assert during is not before
        assert build(cu) is not during
        assert regular_offsets(6, 3, torch.device("cpu")) is not regular
        monkeypatch.undo()
        assert build(cu) is before
        assert regular_offsets(6, 3, torch.device("cpu")) is regular

    def test_traced_masks_are_not_kept(self, cu: Tensor) -> None:
        mask = build(cu)
        with torch._subclasses.FakeTensorMode():
            regular = regular_offsets(5, 11, torch.device("cpu"))
        assert isinstance(regular, torch._subclasses.FakeTensor)
        assert type(regular_offsets(5, 11, torch.device("cpu"))) is Tensor
        with FlopCounterMode(display=False):
            assert build(cu) is not mask
        assert build(cu) is mask
