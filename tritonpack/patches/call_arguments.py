"""The form in which a call's arguments tell documents apart: checked before anything reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import describe
from tritonpack.patches.tensor_like import TensorLike

OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
NUMBERS = ("seq_idx", "decoder_seq_idx")
POSITIONS = ("position_ids", "decoder_position_ids")
MASKS = ("attention_mask", "decoder_attention_mask")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_paged(cache: Any) -> bool:
    """Whether a call is one of continuous batching, whose cache tells the requests of a row apart."""
    return type(cache).__name__ == "PagedAttentionCache"


def in_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with position ids of one row, (T,), as (1, T). Continuous batching has forms of its own.

    Raises:
        ValueError: what tells documents apart is no tensor, or not one of integers.
    """
    if is_paged(arguments.get("cache")):
        return arguments
    for name in OFFSETS:
        value = arguments.get(name)
        if value is not None and not (
            isinstance(value, Tensor) and value.ndim == 1 and value.dtype in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{name} must be a one-dimensional int32 or int64 tensor, the offsets where documents begin in the "
                f"flattened rows, and last the number of tokens; got {describe(value)}."
            )
    for name in NUMBERS:
        value = arguments.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.dtype in INTEGERS):
            raise ValueError(
                f"{name} must be an integer tensor with the number of each token's document, of the shape of the "
                f"tokens; got {describe(value)}."
            )
    for name in MASKS:
        value = arguments.get(name)
        if value is not None and not isinstance(value, (Tensor, TensorLike, dict)):
            raise ValueError(
                f"{name} must be a two-dimensional tensor, 0 for padding and 1, or the number of the document, for "
                f"tokens; got {describe(value)}."
            )
    for name in POSITIONS:
        value = arguments.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(
                f"{name} must be an integer tensor of shape (B, T), or (T,) for one row; got {describe(value)}."
            )
    rows = {name: arguments[name][None] for name in POSITIONS if getattr(arguments.get(name), "ndim", 0) == 1}
    return {**arguments, **rows}


def refuse_unmade_masks(arguments: dict[str, Any]) -> None:
    """Refuse masks by kind of layer that weren't made for a patched model, as generate() makes them."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, dict) and not any(isinstance(one, TensorLike) for one in mask.values()):
        raise ValueError(
            f"attention_mask is a dict of masks ({', '.join(map(repr, mask)) or 'empty'}); a patched model makes the "
            "masks of its layers itself. Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional "
            "mask, or unpatch the model to use masks of your own."
        )
