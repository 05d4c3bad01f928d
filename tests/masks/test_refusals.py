"""Every wrong argument of a mask, with the words that its message must hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks.forests import visible
from tests.trees import mask_of_ends
from tritonpack.masks.block_diagonal import BlockDiagonalMask as Mask

INT32 = torch.zeros(3, dtype=torch.int32)
META_OFFSETS = torch.empty(3, dtype=torch.int32, device="meta")


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "start not int32": (lambda: Mask(torch.zeros(3, dtype=torch.int64), INT32, 3),
     r"key_start must be a one-dimensional int32 tensor; got \(3,\) int64 on cpu"),
    "start a list": (lambda: Mask([0, 1, 2], INT32, 3), r"key_start must be .*; got list \[0, 1, 2\]"),
    "lengths differ": (lambda: Mask(INT32, INT32[:2], 3),
     r"key_stop must hold a number for each of the 3 queries .* got \(2,\)"),
    "devices differ": (lambda: Mask(INT32, INT32.to("meta"), 3), "key_stop must hold .* on cpu; got .*meta"),
    "negative keys": (lambda: Mask(INT32, INT32, -1), r"num_keys must be an integer from 0 .*; got int -1"),
    "documents a text": (lambda: Mask(INT32, INT32, 3, max_documents="2"),
     "max_documents must be an integer from 0 .*; got str '2'"),
    "causal a text": (lambda: Mask.from_seqlens([3], causal="no"), "causal must be True or False; got str 'no'"),
    "lengths whose sum has 65 bits": (lambda: Mask.from_seqlens([2**62] * 4),
     r"seqlens must be at most 2\*\*31 - 1 each; got 4611686018427387904 at index 0"),
    "a device that isn't here": (lambda: Mask.from_seqlens([3], device="cuda:99"),
     "device must be available on this machine, such as 'cpu'; got str 'cuda:99'"),
    "negative length": (lambda: Mask.from_seqlens([3, -2]), "seqlens must not be negative; got -2 at index 1"),
    "lengths on a device": (lambda: Mask.from_seqlens(META_OFFSETS),
     "seqlens lies on meta; .* Pass lengths in host memory, or use from_cu_seqlens"),
    "documents differ": (lambda: Mask.from_seqlens([3, 2], [5]),
     "queries have 2 documents and keys 1; each document needs a length on both sides"),
    "no offsets": (lambda: Mask.from_cu_seqlens([]), "cu_seqlens must hold at least one offset, 0"),
    "offsets begin late": (lambda: Mask.from_cu_seqlens([1, 3]),
     r"cu_seqlens must begin with 0, never decrease, and end at most at total_q = 3; got \[1, 3\]"),
    "offsets decrease": (lambda: Mask.from_cu_seqlens([0, 3, 2, 4]), r"never decrease.*got \[0, 3, 2, 4\]"),
    "offsets past the total": (lambda: Mask.from_cu_seqlens([0, 5], total_q=4), "end at most at total_q = 4"),
    "offsets on a device, no total": (lambda: Mask.from_cu_seqlens(META_OFFSETS),
     "cu_seqlens lies on meta, .* pass total_q"),
    "offsets on two devices": (lambda: Mask.from_cu_seqlens(META_OFFSETS, [0, 1, 2], total_q=2, total_k=2),
     "cu_seqlens is on meta and cu_seqlens_k on cpu; move them together"),
    "lengths too long": (lambda: Mask.from_seqlens([2**30, 2**30]),
     r"total_q must be an integer from 0 to 2\*\*31 - 1; got 2147483648"),
    "window below -1": (lambda: Mask.from_seqlens([3], window=(-2, 0)),
     r"window must be two integers \(left, right\) of at least -1, .*; got \(-2, 0\)"),
    "too few spans": (lambda: Mask.from_seqlens([3], spans=INT32[:2]),
     r"spans must hold an id for each of the 3 tokens, as \(T,\) or \(B, T\), on cpu; got \(2,\) int32 on cpu"),
    "spans on another device": (lambda: Mask.from_seqlens([3], spans=META_OFFSETS),
     "spans must hold .* on cpu; got .* on meta"),
    "negative spans": (lambda: Mask.from_seqlens([3], spans=INT32 - 1),
     r"spans must not be negative: 0 marks ordinary tokens.* pass spans \+ 1"),
    "spans in cross-attention": (lambda: Mask.from_seqlens([3], [3], spans=INT32),
     "need self-attention; leave out the lengths or offsets of the keys"),
    "two rows of positions": (lambda: Mask.from_position_ids(torch.zeros(2, 1, 4, dtype=torch.int64)),
     r"must be \(3, B, T\) or \(4, B, T\); got \(2, 1, 4\)"),
    "bool segments": (lambda: Mask.from_segment_ids(torch.ones(4, dtype=torch.bool)),
     "segment_ids must be an integer tensor .*; got .* bool .* For a padding mask use from_padding_mask"),
    "a segment in pieces": (lambda: Mask.from_segment_ids(torch.tensor([[1, 1], [0, 2]]).repeat(1, 2)),
     r"tokens of a document must be contiguous within their row .*; row 1 is \[0, 2, 0, 2\]; renumber"),
    "padding between tokens": (lambda: Mask.from_padding_mask(torch.tensor([[1, 1, 1], [1, 0, 1]])),
     r"padding between the tokens of a row; row 1 is \[1, 0, 1\]; use from_segment_ids"),
    "float padding mask": (lambda: Mask.from_padding_mask(torch.ones(2, 3)),
     r"attention_mask must be a bool or integer tensor .* got \(2, 3\) float32"),
    "rows descend": (lambda: Mask.from_seqlens([4]).restrict(torch.tensor([2, 1])),
     r"query_rows must ascend strictly within 0\.\.3; got \[2, 1\]"),
    "keys out of range": (lambda: Mask.from_seqlens([4], [2]).restrict(key_positions=torch.tensor([-1, 0])),
     r"key_positions must ascend strictly within 0\.\.1"),
    "rows on another device": (lambda: Mask.from_seqlens([4]).restrict(META_OFFSETS),
     "query_rows is on meta and the mask on cpu; move them together"),
    **{f"bounds {start} {stop}": (lambda of=(start, stop): Mask(*map(int32, of), 3), message)
       for start, stop, message in (
        ([0, 0], [1, 4], r"row 1 of the mask has the keys \[0, 4\); intervals must lie within the 3 keys"),
        ([-1, 0], [1, 2], r"row 0 of the mask has the keys \[-1, 1\); "),
        ([0, 2], [1, 1], r"row 1 of the mask has the keys \[2, 1\); .* end at or after their begin"),
        ([1, 0], [1, 2], r"row 1 .* \[0, 2\); .* neither their begins nor their ends may decrease"),
        ([0, 0], [3, 2], r"row 1 .* \[0, 2\); .* may decrease"),
    )},
    **{f"bounds of keys {name}": (lambda of={name: value}: Mask(
        *map(int32, ([0, 0], [1, 2])), 2, **{"query_start": int32([0, 0]), "query_stop": int32([1, 2])} | of), message)
        for name, value, message in (
        ("query_stop", None, "query_stop must be a one-dimensional int32 tensor; got NoneType"),
        ("query_start", torch.zeros(2), "query_start must be a one-dimensional int32"),
        ("diagonal", int32([0, 1]), "key_places must be a one-dimensional int32 tensor; got NoneType"),
        ("key_places", int32([0, 0, 0]), "key_places must hold a number for each of the 2 keys"),
        ("query_stop", int32([1, 5]), r"key 1 of the mask has the queries \[0, 5\); .* within the 2 queries"),
    )},
    **{f"parents {parents}": (lambda of=parents: Mask.from_tree(of), message) for parents, message in (
        ([-1, 1], r"parents\[1\] is 1: a parent is the place of an earlier token"),
        ([-3], r"parents\[0\] is -3: .* -2 for a token outside every tree"),
        ([-1, 0, 1, 0, 2], r"parents\[4\] is 2: a parent is .* whose subtree hasn't ended"),
        ([-1, -2, 0], r"parents\[2\] is 0: a parent is"),
        ([-2, 0], r"parents\[1\] is 0: a parent is"),
        (torch.tensor([[-1, 0], [0, 0]]), r"parents\[1, 0\] is 0: a parent"),
        ([-1, 0.0], "parents must hold integers"),
        ([[-1, 0], [-1, 0]], "parents must hold integers"),
    )},
    **{f"ends {ends}": (lambda of=ends: mask_of_ends(of), message) for ends, message in (
        ([2, 0], r"ends\[1\] is 0: a subtree ends after its own token"),
        ([3, 2], r"ends\[0\] is 3: a subtree ends after its own token, within its row"),
        ([2, 3, 3], r"ends\[1\] is 3: a subtree ends .* within the subtree that holds it"),
        ([5, 3, 4, 4, 5], r"ends\[2\] is 4: a subtree ends"),
        (torch.tensor([[2, 2], [2, 3]]), r"ends\[1, 1\] is 3: a subtree ends"),
    )},
    **{f"dense {of}": (lambda of=of: Mask.from_seqlens([3]).to_dense(**of), message) for of, message in (
        ({"dtype": torch.float64}, "dtype must be one of torch.bool, .*; got torch.float64. Cast"),
        ({"additive": True}, "dtype must be one of torch.bfloat16, .*; got torch.bool"),
    )},
    **{f"blocks of {size!r}": (lambda of=size: Mask.from_seqlens([3]).to_block_mask(of),
                               "BLOCK_SIZE must be an integer of at least 1, or two")
       for size in (0, 1.5, (4,), (4, 0))},
    "blocks of no keys": (lambda: Mask.from_seqlens([3], [0]).to_block_mask(), "needs queries and keys; this mask has"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_with_its_reason(name: str) -> None:
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()


@given(st.lists(st.integers(-2, 9), max_size=10))
def test_whatever_is_accepted_is_a_forest(parents: list[int]) -> None:
    try:
        mask = Mask.from_tree(parents)
    except ValueError:
        return
    assert torch.equal(mask.to_dense(), visible(tuple(parents)))


@settings(max_examples=300)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=7))
def test_whatever_ends_are_accepted_lie_within_each_other(ends: list[int]) -> None:
    crossing = any(i < j < ends[i] < ends[j] for j in range(len(ends)) for i in range(j))
    if crossing or any(not place <= end <= len(ends) for place, end in enumerate(ends)):
        with pytest.raises(ValueError, match="a subtree"):
            mask_of_ends(ends)
    else:
        mask_of_ends(ends)
