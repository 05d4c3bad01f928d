"""The arguments of a call: their names, the required form of those that tell documents apart, and near misses."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
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

OFFSETS_FORM = (
    "a one-dimensional int32 or int64 tensor, the offsets where documents begin in the flattened rows, and last the "
    "number of tokens"
)
TREE_FORM = (
    "an integer tensor of the shape of the tokens, int32 or int64, the place after the last token below each token in "
    "its row"
)
POSITIONS_FORM = "an integer tensor of shape (B, T), or (T,) for one row"

# What the arguments that tell documents apart must be.
FORMS = {
    **dict.fromkeys(OFFSETS, OFFSETS_FORM),
    **dict.fromkeys(("seq_idx", "decoder_seq_idx"), NUMBER_FORM),
    TREE: TREE_FORM,
    **dict.fromkeys(("attention_mask", "decoder_attention_mask"), MASK_FORM),
    **dict.fromkeys(("position_ids", "decoder_position_ids"), POSITIONS_FORM),
}


def cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments or the outputs of a call, under any of its names; None without one."""
    for name, value in values.items():
        if name in CACHES and value is not None:
            return value
    return None


def tokens_of(arguments: Mapping[str, Any], side: str = "") -> tuple[Tensor | None, torch.Size]:
    """The tokens of a call and their shape (B, T): ids, or embeddings (B, T, n); None and () if there are none.

    `side` is "decoder_" for the decoder's tokens.
    """
    ids, embeds = arguments.get(f"{side}input_ids"), arguments.get(f"{side}inputs_embeds")
    if ids is not None:
        return ids, ids.shape
    return embeds, torch.Size() if embeds is None else embeds.shape[:-1]


def in_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with position ids (T,) as one row (1, T).

    Arguments that tell documents apart in another form than `FORMS` says are refused.
    """
    for name, form in FORMS.items():
        value = arguments.get(name)
        if value is None:
            continue
        if form is MASK_FORM:
            tensor = isinstance(value, Tensor) and value.ndim > 1 and value.dtype in (*MASKS, *FLOAT_MASKS)
            fits = tensor or isinstance(value, (TensorLike, dict))
        elif form is POSITIONS_FORM:
            fits = isinstance(value, Tensor)
            if fits and value.ndim == 1:
                arguments[name] = value[None]
        else:
            fits = holds_numbers(value) and (form is not OFFSETS_FORM or value.ndim == 1)
        if not fits:
            raise ValueError(f"{name} must be {form}; got {describe(value)}.")
    return arguments


# Names that other libraries use, and misspellings: the argument to pass instead.
MEANT = {
    r"((cu|max|cumulative|packed)_?)?(seq(uence)?|doc(ument)?|segment)s?_?(len(gth)?|offset|start)s?(_[qk])?"
    r"|((cumulative|input)_)?lengths|offsets|((seq(uence)?|doc(ument)?|segment)_)?boundaries|packed_seq_params"
    r"|num_(seq(uence)?|doc(ument)?|segment)s": "cu_seq_lens_q",
    r"(token_)?(seq(uence)?|doc(ument)?|segment)s?_?(id|idx|index|indice|number)(e?s)?|documents|segments"
    r"|(sample|batch|pack|example|group|episode)_ids": "seq_idx",
    r"pos(i?tion)?s?_?(id|idx|index|indice)(e?s)?|((seq(uence)?|doc(ument)?|segment)_)?pos(ition)?s?": "position_ids",
    r"(sub)?tree_?(ends?|parents?|out|mask|ids)|parents?(_ids)?|tout": "tree_ends",
    r"(att?e?nt?io?n|attn|padding|key_padding|segment|doc(ument)?|block|packing|packed|eod)_?masks?": "attention_mask",
}


@cache
def meant_by(name: str) -> str | None:
    """The argument that a name is probably meant for; None for a name that is read, and for an unrelated name."""
    if name in TELLING:
        return None
    return next((meant for pattern, meant in MEANT.items() if re.fullmatch(pattern, name.lower())), None)


def require_read(arguments: Mapping[str, Any], known: Collection[str], model: str) -> None:
    """Refuse arguments that tell documents apart in a way that nothing reads.

    Args:
        arguments: a call's arguments by name; those that are None are ignored.
        known: the names in the model's own signature.
        model: the name of the model's class.
    """
    for name, value in arguments.items():
        if value is not None and name not in known and (meant := meant_by(name)):
            raise ValueError(
                f"{model} was called with {name!r}, which nothing reads, so documents would not be told apart by it. "
                f"Pass {meant}, {FORMS[meant]}, or leave {name!r} out."
            )
    if arguments.get("cu_seq_lens_k") is not None and arguments.get("cu_seq_lens_q") is None:
        raise ValueError(
            f"{model} was called with 'cu_seq_lens_k' alone, which tells no documents apart. Pass cu_seq_lens_q, "
            f"{FORMS['cu_seq_lens_q']}."
        )
    mask = arguments.get("attention_mask")
    if isinstance(mask, dict) and not any(isinstance(one, TensorLike) for one in mask.values()):
        raise ValueError(
            f"attention_mask is a dict of masks ({', '.join(map(repr, mask)) or 'empty'}); a patched model makes the "
            "masks of its layers itself. Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional "
            "mask, or unpatch the model to use masks of your own."
        )
