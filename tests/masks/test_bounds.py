"""What a mask computes once and keeps: never for overwritten bounds, another CUDA stream, or a CUDA graph."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import Backend
from tritonpack.masks import bounds
from tritonpack.masks.streams import Stream, current_stream


def a_mask() -> BlockDiagonalMask:
    """A mask that has all fields, with bounds that torch has counted a write to before."""
    tree = BlockDiagonalMask.from_tree([-1, 0, 1, 0, 3])
    fields = {"document_source": tree.document, "key_places": tree.diagonal.clone()}
    return replace(tree, key_start=tree.key_start.clone().add_(0), **fields)


TENSORS = ("key_start", "key_stop", "diagonal", "document_source", "query_start", "query_stop", "key_places")


FIRST, SECOND = (BlockDiagonalMask.from_seqlens(lengths) for lengths in ([8, 8], [3, 13]))


class TestOverwritten:
    @pytest.mark.parametrize("backend", ["blocked", "reference", pytest.param("triton", marks=pytest.mark.interpreter)])
    def test_attention_refuses(self, backend: Backend) -> None:
        """The bounds, then other documents in the same tensors: dK and dV would follow the old transpose."""
        mask = BlockDiagonalMask(FIRST.key_start.clone(), FIRST.key_stop.clone(), 16)
        x = torch.randn(16, 1, 16, requires_grad=True)
        varlen_attention(x, x, x, mask, backend=backend)
        mask.key_start.copy_(SECOND.key_start)
        mask.key_stop.copy_(SECOND.key_stop)
        with pytest.raises(ValueError, match=r"not be overwritten, but key_start, key_stop of .* Make a new mask"):
            varlen_attention(x, x, x, mask, backend=backend)

    @pytest.mark.parametrize("backend", ["blocked", "reference", pytest.param("triton", marks=pytest.mark.interpreter)])
    @pytest.mark.parametrize("how", ["data", "numpy"])
    @pytest.mark.parametrize("called", [True, False], ids=["called before", "new"])
    def test_attention_refuses_writes_that_torch_does_not_count(self, called: bool, how: str, backend: Backend) -> None:
        """In host memory. The backend "blocked" would write outside of its outputs."""
        mask = BlockDiagonalMask(*(x.clone() for x in (FIRST.key_start, FIRST.key_stop)), 16)
        x = torch.randn(16, 1, 16, requires_grad=True)
        if called:
            varlen_attention(x, x, x, mask, backend=backend)
        if how == "data":
            mask.key_start.data.copy_(SECOND.key_start)
        else:
            mask.key_start.numpy()[:] = SECOND.key_start.numpy()
        with pytest.raises(ValueError, match=r"not be overwritten, but key_start of .* Make a new mask"):
            varlen_attention(x, x, x, mask, backend=backend)

    def test_backward_refuses_writes_that_torch_does_not_count(self) -> None:
        mask = BlockDiagonalMask(*(x.clone() for x in (FIRST.key_start, FIRST.key_stop)), 16)
        x = torch.randn(16, 1, 16, requires_grad=True)
        out = varlen_attention(x, x, x, mask, backend="reference")
        mask.key_start.data.copy_(SECOND.key_start)
        with pytest.raises(ValueError, match="not be overwritten, but key_start of"):
            out.sum().backward()

    @pytest.mark.parametrize("name", TENSORS)
    def test_each_tensor_is_compared(self, name: str) -> None:
        mask = a_mask()
        mask.transpose()
        getattr(mask, name).data[2:].add_(1)
        for use in (mask.transpose, mask.restrict, lambda: mask.to("meta"), mask.for_call):
            with pytest.raises(ValueError, match=f"overwritten, but {name} of this one changed"):
                use()

    def test_tensors_on_a_device_are_not_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each call of each layer would launch more."""
        monkeypatch.setattr(bounds, "on_host", lambda x: False)
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        monkeypatch.setattr(torch, "equal", None)
        mask.for_call()

    @pytest.mark.parametrize("name", TENSORS)
    def test_each_tensor_is_watched(self, name: str) -> None:
        mask = a_mask()
        mask.transpose()
        getattr(mask, name)[2:].add_(0)
        for use in (mask.transpose, mask.restrict, lambda: mask.to("meta"), mask.for_call):
            with pytest.raises(ValueError, match=f"overwritten, but {name} of this one changed"):
                use()

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
    def test_copies_start_anew(self, duplicate) -> None:  # type: ignore[no-untyped-def]
        mask = a_mask()
        mask.transpose()
        copied = duplicate(mask)
        assert copied.transpose() is not mask.transpose()
        for name in TENSORS:
            assert torch.equal(getattr(copied, name), getattr(mask, name))

    def test_kept_values_are_not_pickled(self) -> None:
        mask = a_mask()
        before = len(pickle.dumps(mask))
        mask.transpose()
        assert len(pickle.dumps(mask)) == before

    def test_inference_tensors_are_accepted(self) -> None:
        with torch.inference_mode():
            mask = BlockDiagonalMask.from_seqlens([3, 2])
            assert mask.transpose() is mask.transpose()
        assert not mask.transpose().key_start.is_inference()

    @pytest.mark.parametrize("name", ["from_seqlens", "from_tree", "to"])
    def test_bounds_made_in_inference_mode_count_writes(self, name: str) -> None:
        with torch.inference_mode():
            if name == "to":
                mask = BlockDiagonalMask.from_seqlens([3, 2]).to("meta")
            else:
                mask = BlockDiagonalMask.from_tree([-1, 0]) if name == "from_tree" else a_mask()
            mask.key_stop.clamp_(max=2)
        with pytest.raises(ValueError, match="but key_stop of this one changed"):
            mask.for_call()

    def test_inference_tensors_are_copied(self) -> None:
        """Because torch counts no writes to them, so later ones can't be refused."""
        with torch.inference_mode():
            start, stop = torch.tensor([0, 0, 2], dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
            mask = BlockDiagonalMask(start, stop, 3)
            stop.clamp_(max=2)
        assert mask.key_stop.tolist() == [1, 2, 3]
        assert mask.key_start.is_inference() is mask.key_stop.is_inference() is False
        kept = torch.tensor([0, 1], dtype=torch.int32)
        assert BlockDiagonalMask(kept, kept + 1, 2).key_start is kept


class FakeStream:
    """The stream that masks in host memory seem to be used on."""

    now = Stream(None, False)

    def __call__(self, device: torch.device) -> Stream:
        return self.now


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    fake = FakeStream()
    monkeypatch.setattr(bounds, "current_stream", fake)
    return fake


class TestStreams:
    def test_each_stream_computes_its_own(self, stream: FakeStream) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        stream.now = Stream(1, False)
        first = mask.transpose()
        stream.now = Stream(2, False)
        second = mask.transpose()
        assert second is not first
        assert mask.transpose() is second
        stream.now = Stream(1, False)
        assert mask.transpose() is first

    def test_a_transpose_takes_documents_of_its_own_stream(self, stream: FakeStream) -> None:
        built = []

        def numbers() -> Tensor:
            built.append(stream.now)
            return torch.zeros(5, dtype=torch.int32)

        mask = replace(BlockDiagonalMask.from_seqlens([3, 2]), document_source=numbers)
        for number in (1, 2):
            stream.now = Stream(number, False)
            assert mask.document is not None
            assert mask.transpose().document is not None
        assert built == [Stream(1, False), Stream(2, False)]

    def test_a_capture_keeps_nothing_on_an_older_mask(self, stream: FakeStream) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        before = mask.transpose()
        stream.now = Stream(None, True)
        during = mask.transpose()
        assert during is not before
        assert mask.transpose() is not during
        in_call = mask.for_call()
        assert in_call is not mask
        assert in_call.transpose() is in_call.transpose()
        assert in_call.for_call() is in_call
        stream.now = Stream(None, False)
        assert mask.transpose() is before
        assert mask.for_call() is mask

    def test_a_capture_keeps_on_its_own_mask_until_it_ends(self, stream: FakeStream) -> None:
        stream.now = Stream(None, True)
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        during = mask.transpose()
        assert mask.transpose() is during
        assert mask.for_call() is mask
        stream.now = Stream(None, False)
        assert mask.transpose() is not during

    @pytest.mark.interpreter
    def test_a_call_in_a_capture_computes_the_transpose_once(
        self, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        x = torch.randn(5, 1, 16, requires_grad=True)
        varlen_attention(x, x, x, mask, backend="triton")
        built = []
        transpose = BlockDiagonalMask._transpose
        monkeypatch.setattr(BlockDiagonalMask, "_transpose", lambda self: built.append(1) or transpose(self))
        varlen_attention(x, x, x, mask, backend="triton").sum().backward()
        assert not built
        stream.now = Stream(None, True)
        varlen_attention(x, x, x, mask, backend="triton").sum().backward()
        assert len(built) == 1

    def test_the_stream_of_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert current_stream(torch.device("cuda", 1)) == (71, True)
        assert current_stream(torch.device("cuda")) == (73, True)
        assert current_stream(torch.device("cpu")) == (None, False)


class TestConstructor:
    """Values on a device are checked by an assertion there; here on bounds that seem not to be in host memory."""

    @pytest.mark.parametrize(
        ("start", "stop"),
        [([0, 0, 2], [1, 4, 3]), ([0, 2, 1], [3, 3, 3]), ([-1, 0, 0], [1, 1, 1]), ([0, 1, 1], [1, 0, 1])],
    )
    def test_bounds_on_a_device_are_asserted(
        self, start: list[int], stop: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = [torch.tensor(x, dtype=torch.int32) for x in (start, stop)]
        monkeypatch.setattr(bounds, "on_host", lambda x: False)
        for size in (3, 4):
            good = torch.zeros(size, dtype=torch.int32)
            BlockDiagonalMask(good, good + 1, 3)
        with pytest.raises(ValueError, match=r"lie within the 3 keys .* neither their begins nor their ends may decr"):
            BlockDiagonalMask(*wrong, 3)

    def test_bounds_of_a_tree_on_a_device_are_asserted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mask = a_mask()
        assert mask.query_stop is not None
        monkeypatch.setattr(bounds, "on_host", lambda x: False)
        replace(mask)
        with pytest.raises(
            ValueError, match=r"lie within the 5 queries and end at or after their begin. mask.validate"
        ):
            replace(mask, query_stop=mask.query_stop + 1)

    def test_no_bounds_and_no_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        BlockDiagonalMask(*torch.empty(2, 4, dtype=torch.int32, device="meta"), 4)
        monkeypatch.setattr(bounds, "on_host", lambda x: False)
        BlockDiagonalMask(*torch.empty(2, 0, dtype=torch.int32), 0)
