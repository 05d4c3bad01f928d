"""The arguments of a call: their names, and the required form of those that tell documents apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import FLOAT_MASKS, MASKS, describe, holds_numbers
from tritonpack.patches.tensor_like import TensorLike

# The arguments that tell documents apart.
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
TREE = "tree_ends"
TELLING = ("attention_mask", "position_ids", "seq_idx", *OFFSETS, TREE)

# The arguments that tell documents apart in an encoder and in a decoder, by the names that `make_packed_batch` reads.
SOURCE = {
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "seq_idx": "seq_idx",
    "cu_seq_lens_q": "cu_seq_lens_k",
}
TARGET = {
    "attention_mask": "decoder_attention_mask",
    "position_ids": "decoder_position_ids",
    "seq_idx": "decoder_seq_idx",
    "cu_seq_lens_q": "cu_seq_lens_q",
}

# The arguments that pass a cache. Since transformers 5.24 "cache" replaces "past_key_values" and "cache_params".
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")

# Set on a cache whose first tokens had positions that a patch counted in each document, not the model along the row.
COUNTED = "tritonpack_counted"

# The arguments that say how a row is packed. They mean nothing for a row with one document.
PACKING = (*OFFSETS, "max_length_q", "max_length_k", "seq_idx", "decoder_seq_idx", TREE)

MASK_FORM = (
    "a two-dimensional tensor of bool, signed integers or floats, 0 for padding and 1, or the number of the document, "
    "for tokens"
)
NUMBER_FORM = "an integer tensor, int32 or int64, with the number of each token's document, of the shape of the tokens"

# What an argument must be, and a check of it.
FORMS = {
    OFFSETS: (
        "a one-dimensional int32 or int64 tensor, the offsets where documents begin in the flattened rows, and last "
        "the number of tokens",
        lambda x: holds_numbers(x) and x.ndim == 1,
    ),
    ("seq_idx", "decoder_seq_idx"): (NUMBER_FORM, holds_numbers),
    (TREE,): (
        "an integer tensor of the shape of the tokens, int32 or int64, the place after the last token below each token "
        "in its row",
        holds_numbers,
    ),
    ("attention_mask", "decoder_attention_mask"): (
        MASK_FORM,
        lambda x: (
            isinstance(x, (TensorLike, dict))
            or (isinstance(x, Tensor) and x.ndim > 1 and x.dtype in (*MASKS, *FLOAT_MASKS))
        ),
    ),
    ("position_ids", "decoder_position_ids"): (
        "an integer tensor of shape (B, T), or (T,) for one row",
        lambda x: isinstance(x, Tensor),
    ),
}


def cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments or the outputs of a call, under any of its names; None without one."""
    return next((value for name, value in values.items() if name in CACHES and value is not None), None)


def is_paged(cache: Any) -> bool:
    """Whether a call belongs to continuous batching, whose cache tells the requests of a row apart."""
    return type(cache).__name__ == "PagedAttentionCache"


def tokens_of(arguments: Mapping[str, Any], side: str = "") -> tuple[Tensor | None, torch.Size]:
    """The tokens of a call and their shape (B, T): ids, or embeddings (B, T, n); None and () if there are none.

    `side` is "decoder_" for the decoder's tokens.
    """
    ids, embeds = arguments.get(f"{side}input_ids"), arguments.get(f"{side}inputs_embeds")
    if ids is not None:
        return ids, ids.shape
    return embeds, torch.Size() if embeds is None else embeds.shape[:-1]


def in_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with position ids (T,) as one row (1, T). Those of continuous batching stay unchanged.

    Arguments that tell documents apart in another form than `FORMS` says are refused.
    """
    if is_paged(arguments.get("cache")):
        return arguments
    for names, (form, has_form) in FORMS.items():
        for name in names:
            value = arguments.get(name)
            if value is not None and not has_form(value):
                raise ValueError(f"{name} must be {form}; got {describe(value)}.")
    positions = ("position_ids", "decoder_position_ids")
    rows = {name: arguments[name][None] for name in positions if getattr(arguments.get(name), "ndim", 0) == 1}
    return {**arguments, **rows}


def refuse_unmade_masks(arguments: Mapping[str, Any]) -> None:
    """Refuse a dict of masks, one for each kind of layer, unless generate() has made them for a patched model."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, dict) and not any(isinstance(one, TensorLike) for one in mask.values()):
        raise ValueError(
            f"attention_mask is a dict of masks ({', '.join(map(repr, mask)) or 'empty'}); a patched model makes the "
            "masks of its layers itself. Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional "
            "mask, or unpatch the model to use masks of your own."
        )
