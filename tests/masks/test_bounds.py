"""What a mask copies, and what it computes once and keeps: never for overwritten bounds, never from a CUDA graph."""

import pickle
from dataclasses import replace

import pytest
import torch

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import Backend
from tritonpack.masks import bounds
from tritonpack.masks.bounds import OF_KEYS, OF_QUERIES, is_capturing


def a_mask() -> BlockDiagonalMask:
    """A mask that has all fields, with bounds that torch has counted a write to before."""
    tree = BlockDiagonalMask.from_tree([-1, 0, 1, 0, 3])
    fields = {"document_source": tree.document, "key_places": tree.diagonal.clone()}
    return replace(tree, key_start=tree.key_start.clone().add_(0), **fields)


@pytest.mark.parametrize("backend", ["blocked", "reference", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_attention_refuses_overwritten_bounds(backend: Backend) -> None:
    """The bounds, then other documents in the same tensors: dK and dV would follow the old transpose."""
    first, second = (BlockDiagonalMask.from_seqlens(lengths) for lengths in ([8, 8], [3, 13]))
    mask = BlockDiagonalMask(first.key_start, first.key_stop, 16)
    x = torch.randn(16, 1, 16, requires_grad=True)
    varlen_attention(x, x, x, mask, backend=backend)
    mask.key_start.copy_(second.key_start)
    mask.key_stop.copy_(second.key_stop)
    with pytest.raises(ValueError, match=r"not be overwritten, but key_start of .* Make a new mask"):
        varlen_attention(x, x, x, mask, backend=backend)


@pytest.mark.parametrize("name", OF_QUERIES + OF_KEYS)
def test_given_tensors_are_copied_and_own_ones_watched(name: str) -> None:
    """So a buffer can be written again for the next batch, also in ways that torch doesn't count."""
    mask = a_mask()
    given = getattr(mask, name).clone()
    copied, transpose = replace(mask, **{name: given}), mask.transpose()
    given.data[2:].add_(1)
    assert torch.equal(getattr(copied, name), getattr(mask, name))
    assert torch.equal(copied.transpose().key_start, transpose.key_start)
    assert getattr(replace(mask, trusted=True), name) is getattr(mask, name)  # no launch on a GPU
    getattr(mask, name)[2:].add_(0)
    for use in (mask.transpose, mask.restrict, lambda: mask.to("meta"), mask.check_unwritten):
        with pytest.raises(ValueError, match=f"overwritten, but {name} of this one changed"):
            use()


def test_kept_values_are_not_pickled() -> None:
    mask = a_mask()
    before = len(pickle.dumps(mask))
    assert mask.transpose() is mask.transpose()
    assert len(pickle.dumps(mask)) == before
    assert pickle.loads(pickle.dumps(mask)).transpose() is not mask.transpose()


@pytest.mark.parametrize("name", ["from_seqlens", "from_tree", "to", "given"])
def test_inference_mode(name: str) -> None:
    """torch counts no writes to inference tensors, and saves none for backward. So a mask has none."""
    with torch.inference_mode():
        start, stop = torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.int32)
        mask = BlockDiagonalMask(start, stop, 3) if name == "given" else BlockDiagonalMask.from_seqlens([3])
        stop.clamp_(max=2)
        mask = BlockDiagonalMask.from_tree([-1, 0, 1]) if name == "from_tree" else mask
        assert mask.key_stop.tolist() == [1, 2, 3]
        mask = mask.to("meta") if name == "to" else mask
        assert mask.transpose() is mask.transpose()
        assert not any(x.is_inference() for x in (mask.key_start, mask.key_stop, mask.transpose().key_start))
        mask.key_stop.clamp_(max=2)
    with pytest.raises(ValueError, match="but key_stop of this one changed"):
        mask.check_unwritten()


@pytest.mark.parametrize("within", [False, True])
def test_a_mask_made_before_a_capture_keeps_nothing_of_the_graph(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's values don't exist before its replay; a mask that is made in the capture keeps them."""
    capturing = within
    monkeypatch.setattr(bounds, "is_capturing", lambda device: capturing)
    mask = BlockDiagonalMask.from_seqlens([3, 2])
    capturing = True
    during = mask.transpose()
    assert (mask.transpose() is during) == within
    capturing = False
    after = mask.transpose()
    assert (after is during) == within
    capturing = True
    assert mask.transpose() is after


def test_only_cuda_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_capturing(torch.device("cpu"))
    assert is_capturing(torch.device("cuda", 1))


def test_bounds_on_a_device_are_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values there are checked by an assertion; here on bounds that seem not to be in host memory."""
    monkeypatch.setattr(bounds, "on_host", lambda x: False)
    BlockDiagonalMask(*torch.empty(2, 4, dtype=torch.int32, device="meta"), 4)
    for size in (0, 3, 4):
        good = torch.zeros(size, dtype=torch.int32)
        BlockDiagonalMask(good, good + 1, 3)
    wrong = [([0, 0, 2], [1, 4, 3]), ([0, 2, 1], [3, 3, 3]), ([-1, 0, 0], [1, 1, 1]), ([0, 1, 1], [1, 0, 1])]
    for start, stop in torch.tensor(wrong, dtype=torch.int32):
        with pytest.raises(ValueError, match=r"lie within the 3 keys .* neither their begins nor their ends may decr"):
            BlockDiagonalMask(start, stop, 3)
    mask = a_mask()
    with pytest.raises(ValueError, match=r"lie within the 5 queries and end at or after their begin. mask.validate"):
        replace(mask, query_stop=mask.query_stop + 1)  # type: ignore[operator]
