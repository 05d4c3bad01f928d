"""Objects in place of a mask: passed on unchanged, and a tensor when a model computes with them."""

import pytest
import torch

import tritonpack
from tritonpack.patches.mask_spec import CAUSAL
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving

LENGTHS = (3, 2)
SERVING = Serving("tritonpack", "reference")


def packed_batch(padding: int = 0) -> PackedBatch:
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, padding) if n])[None]
    mask = torch.tensor([[1] * sum(LENGTHS) + [0] * padding], dtype=torch.int32)
    return PackedBatch(mask, positions, None, positions.shape, positions.device, SERVING)


def interval_mask() -> IntervalMask:
    return packed_batch().interval_mask(5, 0, 0, CAUSAL)


BOOL = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()[None, None]


def test_passing_on_makes_no_tensor() -> None:
    mask = interval_mask()
    for same in (mask.to("cpu"), mask.contiguous(), mask[:, :, :, :5], mask[:, :, -5:, :], mask.to(torch.bool)):
        assert same is mask
    assert (mask.shape, mask.ndim, mask.dim(), mask.size(-1), len(mask)) == ((1, 1, 5, 5), 4, 4, 5, 1)
    assert mask.dtype == torch.bool
    both = packed_batch()
    assert both.to(device="cpu", dtype=torch.bool) is both
    assert both[:, -5:] is both


def test_computing_makes_a_tensor() -> None:
    mask = interval_mask()
    assert torch.equal(mask.to_tensor(), BOOL)
    for got in (mask[:, 0], mask.squeeze(1), torch.squeeze(mask, 1)):
        assert torch.equal(got, BOOL[:, 0])
    assert torch.equal(~mask, ~BOOL)
    assert torch.equal(mask & torch.ones(5, 5, dtype=torch.bool), BOOL)
    assert torch.equal(torch.where(mask, 1.0, 0.0), BOOL.float())
    assert torch.equal(mask == 1, BOOL)
    assert torch.equal(mask.float(), BOOL.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_adding_to_scores_adds_an_additive_mask(dtype: torch.dtype) -> None:
    scores = torch.randn(1, 2, 5, 5).to(dtype)
    expected = scores.masked_fill(~BOOL, -torch.inf).softmax(-1)
    mask = interval_mask()
    for added in (scores + mask, mask + scores, torch.add(scores, mask), scores.clone().__iadd__(mask)):
        assert added.dtype == dtype
        assert torch.equal(added.softmax(-1), expected)


def test_tokens_are_counted_per_document() -> None:
    """Models that make positions of their mask compute ((mask.cumsum(-1) - 1) * mask)."""
    both = packed_batch(padding=2)
    assert ((both.cumsum(dim=-1) - 1) * both).tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert both.to_tensor().tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert (1 - both).tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def test_padding_sees_itself_in_a_dense_mask() -> None:
    mask = packed_batch(padding=2).interval_mask(7, 0, 0, CAUSAL)
    assert mask.mask.to_dense()[5:].sum() == 0
    assert mask.to_tensor()[0, 0, 5:].int().tolist() == [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]


def test_unknown_attributes_raise() -> None:
    with pytest.raises(AttributeError):
        interval_mask().nonsense  # noqa: B018


def test_attention_of_layers_that_differ() -> None:
    """Arguments are checked once for layers that are alike, and again for any other."""
    mask, options = interval_mask(), {"scale": None, "softcap": 0.0}
    generator = torch.Generator().manual_seed(0)
    q, wide = (torch.randn(5, 2, n, generator=generator) for n in (8, 16))
    for inputs, changes in (
        ((q, q, q), {}),
        ((q, q, q), {}),
        ((q, q[:, :1], q[:, :1]), {}),
        ((wide, wide, q), {}),
        ((q.bfloat16(), q.bfloat16(), q.bfloat16()), {}),
        ((q, q, q), {"scale": 0.7}),
        ((q, q, q), {"scale": 0.7, "softcap": 3.0}),
        ((q, q, q), {"sinks": q[0, :, 0]}),
    ):
        expected = tritonpack.varlen_attention(*inputs, mask.mask, backend="reference", **changes)
        assert torch.equal(mask.attention(*inputs, **options | changes), expected)
    for inputs, changes, said in (
        ((q, q, q.double()), {}, "must share one dtype"),
        ((q, wide, q), {}, "the same head dimension"),
        ((q, q, q), {"scale": -1.0}, "scale must be"),
    ):
        mask.attention(q, q, q, **options)
        with pytest.raises(ValueError, match=said):
            mask.attention(*inputs, **options | changes)
