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
    return mask_from_offsets(cu, cu if cu_k is None else cu_k, total_q=9, total_k=9, **keywords)


@pytest.fixture
def cu() -> Tensor:
    return torch.tensor([0, 3, 8], dtype=torch.int32)


def test_one_mask_for_the_same_offsets_and_options(cu: Tensor) -> None:
    first, used = build(cu), torch.tensor([1, 2])
    assert first.key_start.tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 8]
    others = ({"causal": False}, {"window": (2, 0)}, {"used_k": used}, {"used_q": used})
    made = [first, *(build(cu, **other) for other in others)]
    for number, one in enumerate(made):
        assert build(cu, **({}, *others)[number]) is one
        assert not any(torch.equal(one.to_dense(), other.to_dense()) for other in made[:number])
    for left in range(3 * masks.MASKS_PER_OFFSETS):
        build(cu, window=(left, 0))
    assert len(masks._kept[cu]) <= masks.MASKS_PER_OFFSETS


def test_all_layers_share_one(cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = masks._build
    monkeypatch.setattr(masks, "_build", lambda *a: built.append(1) or original(*a))
    q = torch.randn(9, 2, 16, requires_grad=True)
    x = q
    for _ in range(3):
        x = checkpoint(lambda x: fa2.flash_attn_varlen_func(x, x, x, cu, cu, causal=True), x, use_reentrant=False)
    x.sum().backward()
    assert len(built) == 1


@pytest.mark.slow
def test_mask_lives_as_long_as_the_offsets() -> None:
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


def test_masks_of_inference_mode_are_not_used_in_training(cu: Tensor) -> None:
    q = torch.randn(9, 2, 16, requires_grad=True)
    with torch.inference_mode():
        of_inference = torch.tensor([0, 3, 8])
        assert build(of_inference) is not build(of_inference)
        fa2.flash_attn_varlen_func(q, q, q, cu, cu)
    fa2.flash_attn_varlen_func(q, q, q, cu, cu).sum().backward()
    assert q.grad is not None


def test_a_capture_neither_keeps_nor_reads(cu: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    before, regular = build(cu), regular_offsets(6, 3, torch.device("cpu"))
    monkeypatch.setattr(masks, "is_capturing", lambda device: True)
    during = build(cu)
    assert during is not before
    assert build(cu) is not during
    assert regular_offsets(6, 3, torch.device("cpu")) is not regular
    monkeypatch.undo()
    assert build(cu) is before
    assert regular_offsets(6, 3, torch.device("cpu")) is regular


def test_traced_masks_are_not_kept(cu: Tensor) -> None:
    mask = build(cu)
    with torch._subclasses.FakeTensorMode():
        regular = regular_offsets(5, 11, torch.device("cpu"))
    assert isinstance(regular, torch._subclasses.FakeTensor)
    assert type(regular_offsets(5, 11, torch.device("cpu"))) is Tensor
    with FlopCounterMode(display=False):
        assert build(cu) is not mask
    assert build(cu) is mask
