"""Mask functions as intervals, beside the masks that transformers makes of them; objects in place of a mask, which are
passed on unchanged, and are a tensor when a model computes with them."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as stock

import tritonpack
from tritonpack import UnsupportedModelError
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskSpec, read_mask_spec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving

LENGTHS = (7, 1, 3, 11)
TOTAL = sum(LENGTHS)


def packed_batch(lengths: tuple[int, ...] = LENGTHS, padding: int = 0) -> PackedBatch:
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding) if n])[None]
    mask = torch.tensor([[1] * sum(lengths) + [0] * padding], dtype=torch.int32) if padding else None
    return PackedBatch(mask, positions, None, positions.shape, positions.device, Serving("tritonpack", "reference"))


def dense(function: Callable[..., Tensor]) -> Tensor:
    """(T, T) bool, a mask function between all tokens of a row, limited to documents."""
    rows, keys = torch.arange(TOTAL)[:, None], torch.arange(TOTAL)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    zero = torch.zeros((), dtype=torch.long)
    return function(zero, zero, rows, keys) & (document[:, None] == document)


def blocks(*spans: tuple[int, int, int]) -> Callable[..., Tensor]:
    """Images by their number, from a token to another, beside a causal mask."""
    ids = torch.full((1, TOTAL), -1)
    for number, begin, end in spans:
        ids[0, begin:end] = number
    return stock.blockwise_overlay(ids)


IMAGES = blocks((0, 2, 6), (1, 9, 13), (2, 15, 18))  # one of them runs from one document into the next
OVERLAYS = {
    "causal": stock.causal_mask_function,
    "both ways": stock.bidirectional_mask_function,
    "window": stock.sliding_window_causal_mask_function(4),
    "window both ways": stock.sliding_window_bidirectional_mask_function(3),
    "images": stock.or_masks(stock.causal_mask_function, IMAGES),
    "images in a window": stock.or_masks(stock.sliding_window_causal_mask_function(3), IMAGES),
    "all": stock.or_masks(stock.causal_mask_function, lambda *_: torch.tensor(True)),
}
# The window that transformers passes, whether it allows to skip the mask, and what is read then without bisection.
PLAIN: dict[str, tuple[int | None, dict[str, bool], MaskSpec]] = {
    "causal": (None, {"allow_is_causal_skip": False}, CAUSAL),
    "both ways": (None, {"allow_is_bidirectional_skip": True}, WHOLE_DOCUMENT),
    "window": (4, {"allow_is_causal_skip": True}, MaskSpec.of((3, 0))),
    "window both ways": (3, {"allow_is_bidirectional_skip": True}, MaskSpec.of((3, 3))),
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_intervals_equal_the_mask_function(name: str) -> None:
    specs = [replace(WHOLE_DOCUMENT, overlay=OVERLAYS[name])]
    if name in PLAIN:
        size, flags, expected = PLAIN[name]
        specs.append(read_mask_spec(OVERLAYS[name], size, object(), flags, TOTAL))
        assert specs[-1] == expected
    for spec in specs:
        mask = packed_batch().interval_mask(TOTAL, 0, 0, spec).mask.validate()
        assert torch.equal(mask.to_dense(), dense(OVERLAYS[name]))


def test_masks_of_models_that_compose_their_own() -> None:
    """transformers doesn't allow to skip them. A later transformers may pass a size with another meaning."""
    assert read_mask_spec(OVERLAYS["images in a window"], 3, object(), {"allow_is_causal_skip": False}, TOTAL).overlay
    for name, size in (("window", 5), ("window", 3), ("all", 4), ("images", 4)):
        with pytest.raises(ValueError, match="isn't the window"):
            read_mask_spec(OVERLAYS[name], size, object(), {"allow_is_causal_skip": True}, TOTAL)
    overlay = stock.or_masks(stock.causal_mask_function, blocks((0, 12, 14), (0, 18, 20)))
    with pytest.raises(ValueError, match="aren't one interval"):
        packed_batch().interval_mask(TOTAL, 0, 0, replace(WHOLE_DOCUMENT, overlay=overlay))


def test_chunks() -> None:
    """They count from the beginning of a document, and images that see all of themselves don't."""
    config = SimpleNamespace(attention_chunk_size=4)
    chunks = stock.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    for flags, total in (({"allow_is_causal_skip": True}, TOTAL), ({"allow_is_causal_skip": False}, 1)):
        assert read_mask_spec(chunks, 4, config, flags, total) == MaskSpec.of((-1, 0), 4)
    for flags in ({"use_vmap": True}, {"allow_is_causal_skip": False}):
        with pytest.raises(UnsupportedModelError, match="chunks, a window, or one of them"):
            read_mask_spec(stock.or_masks(chunks, IMAGES), 4, config, flags, TOTAL)


BOOL = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()[None, None]


def interval_mask() -> IntervalMask:
    return packed_batch((3, 2)).interval_mask(5, 0, 0, CAUSAL)


def test_passing_on_makes_no_tensor() -> None:
    mask, both = interval_mask(), packed_batch((3, 2))
    for same in (mask.to("cpu"), mask.contiguous(), mask[:, :, :, :5], mask[:, :, -5:, :], mask.to(torch.bool)):
        assert same is mask
    assert both.to(device="cpu", dtype=torch.bool) is both[:, -5:] is both
    assert (mask.shape, mask.ndim, mask.dim(), mask.size(-1), len(mask)) == ((1, 1, 5, 5), 4, 4, 5, 1)
    with pytest.raises(AttributeError):
        mask.nonsense  # noqa: B018


# What models compute with a mask, and with its tensor.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "index": lambda mask: mask[:, 0],
    "squeeze": lambda mask: torch.squeeze(mask, 1),
    "not": lambda mask: ~mask,
    "and": lambda mask: mask & torch.ones(5, 5, dtype=torch.bool),
    "where": lambda mask: torch.where(mask, 1.0, 0.0),
    "equal": lambda mask: mask == 1,
    "float": lambda mask: mask.float(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computing_makes_a_tensor(name: str) -> None:
    assert torch.equal(COMPUTED[name](interval_mask()), COMPUTED[name](BOOL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_adding_to_scores_adds_an_additive_mask(dtype: torch.dtype) -> None:
    scores, mask = torch.randn(1, 2, 5, 5).to(dtype), interval_mask()
    expected = scores.masked_fill(~BOOL, -torch.inf).softmax(-1)
    for added in (scores + mask, mask + scores, torch.add(scores, mask), scores.clone().__iadd__(mask)):
        assert added.dtype == dtype
        assert torch.equal(added.softmax(-1), expected)


def test_attention_of_layers_that_differ() -> None:
    """Arguments are checked once for layers that are alike, and again for any other."""
    mask, options = interval_mask(), {"scale": None, "softcap": 0.0}
    q, wide = (torch.randn(5, 2, n) for n in (8, 16))
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
    for inputs, changes, words in (
        ((q, q, q.double()), {}, "must share one dtype"),
        ((q, wide, q), {}, "the same head dimension"),
        ((q, q, q), {"scale": -1.0}, "scale must be"),
    ):
        mask.attention(q, q, q, **options)
        with pytest.raises(ValueError, match=words):
            mask.attention(*inputs, **options | changes)


def test_padding() -> None:
    """Models that make positions of their mask compute ((mask.cumsum(-1) - 1) * mask). Padding sees itself."""
    both = packed_batch((3, 2), padding=2)
    assert ((both.cumsum(dim=-1) - 1) * both).tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert (1 - both).tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    mask = both.interval_mask(7, 0, 0, CAUSAL)
    assert mask.mask.to_dense()[5:].sum() == 0
    assert mask.to_tensor()[0, 0, 5:].int().tolist() == [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
