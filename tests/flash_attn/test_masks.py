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

ROWS = (6, 3, torch.device("cpu"))


def build(cu: Tensor, cu_k: Tensor | None = None, **keywords: Any) -> BlockDiagonalMask:
    keywords = {"causal": True, "window": (-1, -1)} | keywords
    return mask_from_offsets(cu, cu if cu_k is None else cu_k, total_q=9, total_k=9, **keywords)


@pytest.fixture
def cu() -> Tensor:
    return torch.tensor([0, 3, 8], dtype=torch.int32)


def test_one_mask_for_the_same_offsets_and_options(cu: Tensor) -> None:
    assert build(cu).key_start.tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 8]
    used = torch.tensor([1, 2])
    options: list[dict[str, Any]] = [{}, {"causal": False}, {"window": (2, 0)}, {"used_k": used}, {"used_q": used}]
    made = [build(cu, **one) for one in options]
    assert all(build(cu, **one) is mask for one, mask in zip(options, made, strict=True))
    assert len({tuple(mask.to_dense().flatten().tolist()) for mask in made}) == len(made)
    for left in range(3 * masks.MASKS_PER_OFFSETS):
        build(cu, window=(left, 0))
    assert len(masks._kept[cu]) <= masks.MASKS_PER_OFFSETS


def test_all_layers_share_one_which_lives_as_long_as_the_offsets(cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    built, original, before = [], masks._build, len(masks._kept)
    monkeypatch.setattr(masks, "_build", lambda *a: built.append(1) or original(*a))
    x, offsets = torch.randn(9, 2, 16, requires_grad=True), cu.clone()
    for _ in range(3):
        x = checkpoint(fa2.flash_attn_varlen_func, x, x, x, offsets, offsets, use_reentrant=False)
    x.sum().backward()
    assert len(built) == 1
    assert len(masks._kept) == before + 1
    del offsets, x
    gc.collect()
    assert len(masks._kept) == before


WRITES: dict[str, Any] = {
    "in place": lambda cu: cu[1].fill_(5),
    "data": lambda cu: cu.data[1].fill_(5),
    "numpy": lambda cu: cu.numpy().put(1, 5),
    "inference mode": torch.inference_mode()(lambda cu: cu[1].fill_(5)),
    "another storage": lambda cu: setattr(cu, "data", torch.tensor([0, 5, 8], dtype=torch.int32)),
    "another shape": lambda cu: setattr(cu, "data", torch.tensor([0, 5, 8, 8], dtype=torch.int32)),
}


@pytest.mark.parametrize("write", WRITES)
def test_after_a_write(cu: Tensor, write: str) -> None:
    other, used = cu.clone(), torch.tensor([3, 2], dtype=torch.int32)
    build(cu, other)
    build(cu, used_k=used)
    used.data[1] = 4
    assert build(cu, used_k=used).key_stop.tolist() == [1, 2, 3, 3, 4, 5, 6, 7, 8]
    if write != "another shape":  # queries and keys would have other numbers of documents
        WRITES[write](other)
        assert build(cu, other).key_start.tolist() == [0, 0, 0, 5, 5, 5, 5, 5, 8]
    build(cu)
    WRITES[write](cu)
    assert build(cu).key_start.tolist() == [0, 0, 0, 0, 0, 5, 5, 5, 8]


def test_masks_of_inference_mode_train(cu: Tensor) -> None:
    q = torch.randn(9, 2, 16, requires_grad=True)
    with torch.inference_mode():
        of_inference = torch.tensor([0, 3, 8])
        assert build(of_inference) is not build(of_inference)  # whose writes torch doesn't count
        fa2.flash_attn_varlen_func(q, q, q, cu, cu)
    fa2.flash_attn_varlen_func(q, q, q, cu, cu).sum().backward()
    assert q.grad is not None


def test_captures_and_traces_neither_keep_nor_read(cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    before, regular = build(cu), regular_offsets(*ROWS)
    with torch._subclasses.FakeTensorMode():
        assert isinstance(regular_offsets(5, 11, ROWS[2]), torch._subclasses.FakeTensor)
    assert type(regular_offsets(5, 11, ROWS[2])) is Tensor
    with FlopCounterMode(display=False):
        assert build(cu) is not before
    with monkeypatch.context() as patch:
        patch.setattr(masks, "is_capturing", lambda device: True)
        during = build(cu)
        assert build(cu) is not during is not before
        assert regular_offsets(*ROWS) is not regular
    assert build(cu) is before
    assert regular_offsets(*ROWS) is regular
