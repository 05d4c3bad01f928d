"""Errors of the interval mask, and that its constructors never wait for an accelerator."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tritonpack.checks import require
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.block_diagonal import BlockDiagonalMask as Mask

INT32 = torch.zeros(3, dtype=torch.int32)
META_OFFSETS = torch.empty(3, dtype=torch.int32, device="meta")

BAD: dict[str, tuple[Callable[[], object], str]] = {
    "start not int32": (lambda: Mask(torch.zeros(3, dtype=torch.int64), INT32, 3),
     r"key_start must be a one-dimensional int32 tensor; got \(3,\) int64 on cpu"),
    "stop not flat": (lambda: Mask(INT32, INT32[None], 3), r"key_stop must be .*; got \(1, 3\) int32"),
    "start a list": (lambda: Mask([0, 1, 2], INT32, 3), r"key_start must be .*; got list \[0, 1, 2\]"),
    "lengths differ": (lambda: Mask(INT32, INT32[:2], 3),
     r"key_stop must hold a number for each of the 3 queries .* got \(2,\)"),
    "devices differ": (lambda: Mask(INT32, INT32.to("meta"), 3), "key_stop must hold .* on cpu; got .*meta"),
    "negative keys": (lambda: Mask(INT32, INT32, -1), r"num_keys must be an integer from 0 .*; got int -1"),
    "a float of keys": (lambda: Mask(INT32, INT32, 4.0), "num_keys must be an integer .*; got float 4.0"),
    "true for keys": (lambda: Mask(INT32, INT32, True), "num_keys must be an integer .*; got bool True"),
    "no number of keys": (lambda: Mask(INT32, INT32, None), "num_keys must be an .* got NoneType None"),
    "negative starts": (lambda: Mask(INT32 - 1, INT32, 3), r"row 0 of the mask sees keys \[-1, 0\)"),
    "documents a text": (lambda: Mask(INT32, INT32, 3, max_documents="2"),
     "max_documents must be an integer of at least 0, or None; got '2'"),
    "a source of numbers": (lambda: Mask(INT32, INT32, 3, document_source=[0, 1, 2]),
     "document_source must be a one-dimensional int32 tensor"),
    "causal a text": (lambda: Mask.from_seqlens([3], causal="no"), "causal must be True or False; got str 'no'"),
    "true for a length": (lambda: Mask.from_seqlens([True, 2]), r"must hold integers; got \[True, 2\]"),
    "a text of lengths": (lambda: Mask.from_seqlens("32"), "seqlens must hold integers; got '32'"),
    "bytes of lengths": (lambda: Mask.from_seqlens(b"32"), "seqlens must hold integers; got b'32'"),
    "a number for lengths": (lambda: Mask.from_seqlens(3), "seqlens must hold integers; got 3"),
    "an iterator of texts": (lambda: Mask.from_seqlens(iter(["3"])), r"seqlens must hold integers; got \['3'\]"),
    "a set of lengths": (lambda: Mask.from_seqlens({3}), r"seqlens must hold integers; got \{3\}"),
    "a huge length": (lambda: Mask.from_seqlens([2**70]), r"integers of up to 63 bits; got \[1180591"),
    "lengths whose sum has 65 bits": (lambda: Mask.from_seqlens([2**62] * 4),
     r"seqlens must be at most 2\*\*31 - 1 each; got 4611686018427387904 at index 0"),
    "a device that isn't here": (lambda: Mask.from_seqlens([3], device="cuda:99"),
     "device must be one that is here, such as 'cpu'; got str 'cuda:99'"),
    "no such device": (lambda: Mask.from_seqlens([3], device="gpu"),
     "device must be a torch.device, or the name .* got str 'gpu', which torch doesn't know"),
    "a move to no device": (lambda: Mask.from_seqlens([3]).to(torch.float32),
     "device must be a torch.device, .* got dtype torch.float32"),
    "total a list": (lambda: Mask.from_cu_seqlens([0, 2], total_q=[2]), r"total_q must be .*; got \[2\]"),
    "64 unsigned bits": (lambda: Mask.from_segment_ids(INT32.to(torch.uint64)),
     "segment_ids must be an integer tensor .* int32 or int64; got .*uint64"),
    "negative length": (lambda: Mask.from_seqlens([3, -2]), "seqlens must not be negative; got -2 at index 1"),
    "negative key length": (lambda: Mask.from_seqlens([3], [-1]), "seqlens_k must not be negative; got -1"),
    "float lengths": (lambda: Mask.from_seqlens([3, 2.5]), r"seqlens must hold integers; got \[3, 2.5\]"),
    "float tensor": (lambda: Mask.from_seqlens(torch.ones(2)), r"int32 or int64 tensor; got \(2,\) float32"),
    "lengths on a device": (lambda: Mask.from_seqlens(META_OFFSETS),
     "seqlens lies on meta; .* Pass lengths in host memory, or use from_cu_seqlens"),
    "documents differ": (lambda: Mask.from_seqlens([3, 2], [5]),
     "queries have 2 documents and keys 1; each document needs a length on both sides"),
    "no offsets": (lambda: Mask.from_cu_seqlens([]), "cu_seqlens must hold at least one offset, 0"),
    "offsets begin late": (lambda: Mask.from_cu_seqlens([1, 3]),
     r"cu_seqlens must begin with 0, never decrease, and end at most at total_q = 3; got \[1, 3\]"),
    "offsets decrease": (lambda: Mask.from_cu_seqlens([0, 3, 2, 4]), r"never decrease.*got \[0, 3, 2, 4\]"),
    "offsets past the total": (lambda: Mask.from_cu_seqlens([0, 5], total_q=4), "end at most at total_q = 4"),
    "key offsets past the total": (lambda: Mask.from_cu_seqlens([0, 5], [0, 6], total_k=4),
     "cu_seqlens_k .* end at most at total_k = 4"),
    "offsets on a device, no total": (lambda: Mask.from_cu_seqlens(META_OFFSETS),
     "cu_seqlens lies on meta, .* pass total_q"),
    "offsets on two devices": (lambda: Mask.from_cu_seqlens(META_OFFSETS, [0, 1, 2], total_q=2, total_k=2),
     "cu_seqlens is on meta and cu_seqlens_k on cpu; move them together"),
    "total negative": (lambda: Mask.from_cu_seqlens([0], total_q=-1), r"0 to 2\*\*31 - 1; got -1"),
    "total too large": (lambda: Mask.from_cu_seqlens([0], total_q=2**31), "got 2147483648"),
    "lengths too long": (lambda: Mask.from_seqlens([2**30, 2**30]),
     r"total_q must be an integer from 0 to 2\*\*31 - 1; got 2147483648"),
    "total a float": (lambda: Mask.from_cu_seqlens([0, 2], total_q=2.0), "total_q must be an integer .* 2.0"),
    "window below -1": (lambda: Mask.from_seqlens([3], window=(-2, 0)),
     r"window must be two integers \(left, right\) of at least -1, .*; got \(-2, 0\)"),
    "window of one": (lambda: Mask.from_seqlens([3], window=(4,)), r"window must be two integers .*\(4,\)",),
    "window a number": (lambda: Mask.from_seqlens([3], window=4), "window must be two integers .* got 4"),
    "window of floats": (lambda: Mask.from_seqlens([3], window=(1.0, 0)), r"got \(1.0, 0\)"),
    "chunk of none": (lambda: Mask.from_seqlens([3], chunk_size=0), "chunk_size must be .* 1, .*; got 0"),
    "chunk a float": (lambda: Mask.from_seqlens([3], chunk_size=2.0), "chunk_size must be .*; got 2.0"),
    "too few spans": (lambda: Mask.from_seqlens([3], spans=INT32[:2]),
     r"spans must hold an id for each of the 3 tokens, as \(T,\) or \(B, T\), on cpu; got \(2,\) int32 on cpu"),
    "spans on another device": (lambda: Mask.from_seqlens([3], spans=META_OFFSETS),
     "spans must hold .* on cpu; got .* on meta"),
    "bool spans": (lambda: Mask.from_seqlens([3], spans=INT32.bool()),
     "spans must be an integer tensor .*; got .* bool"),
    "a list of spans": (lambda: Mask.from_seqlens([3], spans=[0, 1, 1]), "spans must be an integer tensor"),
    "negative spans": (lambda: Mask.from_seqlens([3], spans=INT32 - 1),
     r"spans must not be negative: 0 marks ordinary tokens.* pass spans \+ 1"),
    "spans in cross-attention": (lambda: Mask.from_seqlens([3], [3], spans=INT32),
     "need self-attention, .*; leave out the lengths or offsets of the keys"),
    "float positions": (lambda: Mask.from_position_ids(torch.zeros(4)),
     r"position_ids must be an integer tensor of shape \(T,\) or \(B, T\), int32 or int64; got \(4,\) float32"),
    "two rows of positions": (lambda: Mask.from_position_ids(torch.zeros(2, 1, 4, dtype=torch.int64)),
     r"must be \(3, B, T\) or \(4, B, T\); got \(2, 1, 4\)"),
    "positions of four dimensions": (lambda: Mask.from_position_ids(torch.zeros(3, 1, 1, 4, dtype=torch.int64)),
     r"position_ids must be an integer tensor .* got \(3, 1, 1, 4\)"),
    "bool segments": (lambda: Mask.from_segment_ids(torch.ones(4, dtype=torch.bool)),
     "segment_ids must be an integer tensor .*; got .* bool .* For a padding mask use from_padding_mask"),
    "negative segments": (lambda: Mask.from_segment_ids(torch.tensor([1, -1])), "must not be negative"),
    "a segment in pieces": (lambda: Mask.from_segment_ids(torch.tensor([[1, 1], [0, 2]]).repeat(1, 2)),
     r"tokens of a document must be contiguous within their row .*; row 1 is \[0, 2, 0, 2\]; renumber"),
    "padding between tokens": (lambda: Mask.from_padding_mask(torch.tensor([[1, 1, 1], [1, 0, 1]])),
     r"padding between the tokens of a row; .*; row 1 is \[1, 0, 1\]; .* use from_segment_ids"),
    "float padding mask": (lambda: Mask.from_padding_mask(torch.ones(2, 3)),
     r"attention_mask must be a bool or integer tensor .* got \(2, 3\) float32"),
    "a 4D padding mask": (lambda: Mask.from_padding_mask(torch.ones(1, 1, 3, 3, dtype=torch.bool)),
     r"attention_mask must be .* got \(1, 1, 3, 3\) bool"),
    "rows descend": (lambda: Mask.from_seqlens([4]).restrict(torch.tensor([2, 1])),
     r"query_rows must ascend strictly within 0\.\.3; got \[2, 1\]"),
    "rows repeat": (lambda: Mask.from_seqlens([4]).restrict(torch.tensor([1, 1])), "query_rows must ascend"),
    "rows out of range": (lambda: Mask.from_seqlens([4]).restrict(torch.tensor([4])), r"within 0\.\.3"),
    "keys out of range": (lambda: Mask.from_seqlens([4], [2]).restrict(key_positions=torch.tensor([-1, 0])),
     r"key_positions must ascend strictly within 0\.\.1"),
    "rows on another device": (lambda: Mask.from_seqlens([4]).restrict(META_OFFSETS),
     "query_rows is on meta and the mask on cpu; move them together"),
    "rows of floats": (lambda: Mask.from_seqlens([4]).restrict(torch.tensor([1.0])),
     r"query_rows must be a one-dimensional int32 or int64 tensor; got \(1,\) float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_with_its_reason(name: str) -> None:
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()


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
        BlockDiagonalMask.from_tree_ends(ends, window=(1, 0), chunk_size=3),
    ]
    return masks + [mask.transpose() for mask in masks]


class TestNothingWaits:
    """A constructor that reads a value on an accelerator would stop the host until the device has finished."""

    def test_constructors_read_no_values(self) -> None:
        """A meta tensor has no values, so code that reads or copies them, or derives a shape from them, raises."""
        for mask in everything("meta"):
            assert mask.key_start.device.type == mask.key_stop.device.type == "meta"

    def test_reading_a_meta_tensor_raises(self) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2], device="meta")
        start = mask.key_start
        reads: tuple[Callable[[], object], ...] = (
            mask.validate, start.tolist, start.nonzero, start.cpu, start.any().__bool__, lambda: start[start > 0],
        )  # fmt: skip
        for read in reads:
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()

    def test_checks_become_assertions_on_the_device(self) -> None:
        """`require` with tensors that pretend to lie on a GPU."""
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with FakeTensorMode():
            condition = torch.empty((), dtype=torch.bool, device="cuda")
            with Watch():
                require(condition, "a message")
        assert [name for name in seen if "device" not in name] == ["aten._assert_async.msg"]

    @pytest.mark.gpu
    def test_a_gpu_builds_the_same_masks(self) -> None:
        for mask, same in zip(everything("cuda"), everything("cpu"), strict=True):
            assert torch.equal(mask.validate().to_dense().cpu(), same.to_dense())
            for name in ("diagonal", "document"):
                found, expected = getattr(mask, name), getattr(same, name)
                assert found is expected is None or torch.equal(found.cpu(), expected), name

    @pytest.mark.gpu
    def test_a_gpu_writes_the_same_masks(self) -> None:
        for lengths in ([3000, 1, 70, 2000], [1, 31, 600], [64]):
            mask, same = (BlockDiagonalMask.from_seqlens(lengths, device=device) for device in ("cuda", "cpu"))
            assert torch.equal(mask.to_bits().cpu(), same.to_bits())
            assert torch.equal(mask.to_dense().cpu(), same.to_dense())
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                ours, theirs = (m.to_dense(dtype, additive=True) for m in (mask, same))
                assert torch.equal(ours.cpu(), theirs)
            ours, theirs = mask.to_block_mask(), same.to_block_mask()
            assert torch.equal(ours.kv_indices.cpu(), theirs.kv_indices)
            assert torch.equal(ours.full_kv_num_blocks.cpu(), theirs.full_kv_num_blocks)

    @pytest.mark.gpu
    def test_a_gpu_does_not_wait(self) -> None:
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
                BlockDiagonalMask.from_tree_ends(ids * 100, window=(9, 0)),
            ):
                mask.to_dense(torch.bfloat16, additive=True)
                mask.to_bits()
                mask.to_block_mask()
                assert mask.document is not None
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_new_lengths_do_not_recompile(self) -> None:
        from tritonpack.kernels.dense_mask import dense_mask_kernel
        from tritonpack.kernels.intervals import offsets_kernel, runs_kernel
        from tritonpack.kernels.trees import depths_kernel, parents_kernel, starts_kernel

        def compiled() -> int:
            kernels = (dense_mask_kernel, offsets_kernel, runs_kernel, parents_kernel, depths_kernel, starts_kernel)
            return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

        def build(length: int, window: int) -> None:
            ids = torch.arange(length, device="cuda")
            offsets = torch.arange(0, length + 1, max(length // 3, 1), device="cuda")
            BlockDiagonalMask.from_cu_seqlens(offsets, total_q=length, window=(window, 0)).to_dense()
            BlockDiagonalMask.from_position_ids(ids, window=(window, 0), chunk_size=window + 2)
            BlockDiagonalMask.from_tree(ids - 1, window=(window, 0), chunk_size=window + 2)

        build(64, -1)
        before = compiled()
        for length, window in ((1, 1), (16, 0), (17, 16), (1000, 17), (4096, 2**20)):
            build(length, window)
        assert compiled() == before


@pytest.mark.parametrize("once", [iter, lambda values: (n for n in values), lambda values: map(int, values)])
def test_lengths_and_offsets_may_come_from_an_iterator(once: Callable[[list[int]], list[int]]) -> None:
    expected = BlockDiagonalMask.from_seqlens([3, 5], [2, 4])
    lengths = BlockDiagonalMask.from_seqlens(once([3, 5]), once([2, 4]))
    offsets = BlockDiagonalMask.from_cu_seqlens(once([0, 3, 8]), once([0, 2, 6]))
    for mask in (lengths, offsets):
        assert torch.equal(mask.to_dense(), expected.to_dense())
