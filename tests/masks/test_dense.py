"""Dense masks: their values, and the softmax of scores with an additive mask."""

import random

import pytest
import torch

from tests.masks.test_block_diagonal import SEEDS, random_intervals
from tritonpack import BlockDiagonalMask

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_forms_have_the_same_pairs(seed: int) -> None:
    mask = random_intervals(random.Random(seed), 70)
    pairs = [
        [start <= j < stop for j in range(mask.num_keys)]
        for start, stop in zip(mask.key_start.tolist(), mask.key_stop.tolist(), strict=True)
    ]
    expected = torch.tensor(pairs, dtype=torch.bool).view(mask.num_queries, mask.num_keys)
    assert torch.equal(mask.to_dense(), expected)
    for dtype in FLOATS:
        ones, added = mask.to_dense(dtype), mask.to_dense(dtype, additive=True)
        assert ones.dtype == added.dtype == dtype
        assert torch.equal(ones, expected.to(dtype))
        assert torch.equal(added == 0, expected)
        assert (added[~expected] == torch.finfo(dtype).min).all()
    words = mask.to_bits()
    assert words.dtype == torch.int32
    assert words.shape == (mask.num_queries, -(-mask.num_keys // 32))
    keys = torch.arange(words.shape[1] * 32)
    unpacked = (words[:, keys // 32] >> (keys % 32)) & 1
    assert torch.equal(unpacked[:, : mask.num_keys].bool(), expected)
    assert not unpacked[:, mask.num_keys :].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_of_an_additive_mask(dtype: torch.dtype) -> None:
    """Rows that see nothing give no NaN, and in other rows hidden keys have the weight 0."""
    mask = BlockDiagonalMask.from_cu_seqlens([0, 5, 9], total_q=12)
    scores = torch.randn(12, 12).to(dtype) * 50
    weights = (scores + mask.to_dense(dtype, additive=True)).softmax(-1)
    assert weights.isfinite().all()
    expected = scores.masked_fill(~mask.to_dense(), float("-inf")).softmax(-1)
    assert torch.equal(weights[:9], expected[:9])


def test_torchs_attention_takes_both_kinds() -> None:
    mask = BlockDiagonalMask.from_seqlens([4, 7])
    q, k, v = torch.randn(3, 1, 2, 11, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    one, other = (attend(q, k, v, attn_mask=m) for m in (mask.to_dense(), mask.to_dense(q.dtype, additive=True)))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 130])
def test_rows_begin_at_16_bytes(num_keys: int) -> None:
    mask = BlockDiagonalMask.from_seqlens([num_keys])
    for dense in (mask.to_dense(), *map(mask.to_dense, FLOATS), mask.to_bits()):
        assert dense.stride(0) * dense.element_size() % 16 == 0
        assert dense.stride(1) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float64}, "dtype must be one of torch.bool, .*; got torch.float64. Write the mask as bool"),
        ({"dtype": torch.int32}, "dtype must be one of"),
        ({"additive": True}, "an additive mask needs a floating-point dtype"),
    ],
)
def test_bad_forms_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDiagonalMask.from_seqlens([3]).to_dense(**arguments)
