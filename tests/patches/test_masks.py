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

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskSpec, overlay_intervals, read_mask_spec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving

SERVING = Serving("tritonpack", "reference")
LENGTHS = (7, 1, 3, 11)
TOTAL = sum(LENGTHS)


def positions() -> Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


def packed_batch(**changes: Any) -> PackedBatch:
    fields = {
        "attention_mask": None, "position_ids": positions(), "boundaries": None, "tokens": torch.Size((1, TOTAL)),
        "device": torch.device("cpu"), "serving": SERVING,
    }  # fmt: skip
    return PackedBatch(**{**fields, **changes})


def dense(function: Callable[..., Tensor]) -> Tensor:
    """(T, T) bool, a mask function between all tokens of a row, limited to documents."""
    rows, keys = torch.arange(TOTAL)[:, None], torch.arange(TOTAL)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    zero = torch.zeros((), dtype=torch.long)
    return function(zero, zero, rows, keys) & (document[:, None] == document)


def blocks() -> Tensor:
    """Images of four, two and three tokens. One of them runs from one document into the next."""
    ids = torch.full((1, TOTAL), -1)
    ids[0, 2:6], ids[0, 9:13], ids[0, 15:18] = 0, 1, 2
    return ids


OVERLAYS = {
    "causal": stock.causal_mask_function,
    "both ways": stock.bidirectional_mask_function,
    "window": stock.sliding_window_causal_mask_function(4),
    "window both ways": stock.sliding_window_bidirectional_mask_function(3),
    "images": stock.or_masks(stock.causal_mask_function, stock.blockwise_overlay(blocks())),
    "images in a window": stock.or_masks(
        stock.sliding_window_causal_mask_function(3), stock.blockwise_overlay(blocks())
    ),
    "all": stock.or_masks(stock.causal_mask_function, lambda *_: torch.tensor(True)),
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_bisection_equals_the_mask_function(name: str) -> None:
    mask = packed_batch().interval_mask(TOTAL, 0, 0, replace(WHOLE_DOCUMENT, overlay=OVERLAYS[name])).mask.validate()
    assert torch.equal(mask.to_dense(), dense(OVERLAYS[name]))


@pytest.mark.parametrize(
    ("name", "size", "flags", "spec"),
    [
        ("causal", None, {"allow_is_causal_skip": False}, CAUSAL),
        ("both ways", None, {"allow_is_bidirectional_skip": True}, WHOLE_DOCUMENT),
        ("window", 4, {"allow_is_causal_skip": True}, MaskSpec.of((3, 0))),
        ("window both ways", 3, {"allow_is_bidirectional_skip": True}, MaskSpec.of((3, 3))),
    ],
)
def test_plain_masks_are_read_without_bisection(name: str, size: int | None, flags: Any, spec: MaskSpec) -> None:
    found = read_mask_spec(OVERLAYS[name], size, object(), flags, TOTAL)
    assert found == spec
    assert torch.equal(packed_batch().interval_mask(TOTAL, 0, 0, found).mask.to_dense(), dense(OVERLAYS[name]))


def test_a_composed_window_is_bisected() -> None:
    """transformers does not allow to skip the mask of a model that composes its own."""
    assert read_mask_spec(OVERLAYS["images in a window"], 3, object(), {"allow_is_causal_skip": False}, TOTAL).overlay


def test_a_window_that_the_function_does_not_have_is_refused() -> None:
    """A later transformers may pass a size with another meaning and allow to skip the mask."""
    for name, size in (("window", 5), ("window", 3), ("all", 4), ("images", 4)):
        with pytest.raises(ValueError, match="isn't the window"):
            read_mask_spec(OVERLAYS[name], size, object(), {"allow_is_causal_skip": True}, TOTAL)


@pytest.mark.parametrize("flags", [{"use_vmap": True}, {"allow_is_causal_skip": False}])
def test_chunks_under_a_mask_of_the_model_are_refused(flags: dict[str, bool]) -> None:
    """For example images that see all of themselves. Chunks count from the beginning of a document, images do not."""
    config = SimpleNamespace(attention_chunk_size=4)
    chunks = stock.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(UnsupportedModelError, match="chunks, a window, or one of them"):
        read_mask_spec(stock.or_masks(chunks, stock.blockwise_overlay(blocks())), 4, config, flags, TOTAL)
    assert read_mask_spec(chunks, 4, config, {"allow_is_causal_skip": True}, TOTAL) == MaskSpec.of((-1, 0), 4)
    assert read_mask_spec(chunks, 4, config, {"allow_is_causal_skip": False}, 1) == MaskSpec.of((-1, 0), 4)


def test_one_number_for_two_images_is_refused() -> None:
    ids = torch.full((1, TOTAL), -1)
    ids[0, 12:14] = ids[0, 18:20] = 0
    overlay = stock.or_masks(stock.causal_mask_function, stock.blockwise_overlay(ids))
    with pytest.raises(ValueError, match="aren't one interval"):
        packed_batch().interval_mask(TOTAL, 0, 0, replace(WHOLE_DOCUMENT, overlay=overlay))


def test_padding_sees_nothing() -> None:
    rows = torch.arange(5)[None]
    begin, end = torch.tensor([[0, 0, 2, 2, 2]]), torch.tensor([[2, 2, 2, 2, 2]])
    start, stop = overlay_intervals(OVERLAYS["both ways"], rows, begin, end, 5)
    assert (stop - start).tolist() == [[2, 2, 0, 0, 0]]


# Objects in place of a mask


def two_documents(padding: int = 0) -> PackedBatch:
    positions = torch.cat([torch.arange(n) for n in (3, 2, padding) if n])[None]
    mask = torch.tensor([[1] * 5 + [0] * padding], dtype=torch.int32)
    return PackedBatch(mask, positions, None, positions.shape, positions.device, SERVING)


def interval_mask() -> IntervalMask:
    return two_documents().interval_mask(5, 0, 0, CAUSAL)


BOOL = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()[None, None]


def test_passing_on_makes_no_tensor() -> None:
    mask = interval_mask()
    for same in (mask.to("cpu"), mask.contiguous(), mask[:, :, :, :5], mask[:, :, -5:, :], mask.to(torch.bool)):
        assert same is mask
    assert (mask.shape, mask.ndim, mask.dim(), mask.size(-1), len(mask)) == ((1, 1, 5, 5), 4, 4, 5, 1)
    assert mask.dtype == torch.bool
    both = two_documents()
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
    both = two_documents(padding=2)
    assert ((both.cumsum(dim=-1) - 1) * both).tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert both.to_tensor().tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert (1 - both).tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def test_padding_sees_itself_in_a_dense_mask() -> None:
    mask = two_documents(padding=2).interval_mask(7, 0, 0, CAUSAL)
    assert mask.mask.to_dense()[5:].sum() == 0
    assert mask.to_tensor()[0, 0, 5:].int().tolist() == [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]


def test_unknown_attributes_raise() -> None:
    with pytest.raises(AttributeError):
        interval_mask().nonsense  # noqa: B018
