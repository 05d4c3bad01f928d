"""Reads configurations of models: special tokens, windows, rotary embeddings that depend on the longest document."""

from __future__ import annotations

from typing import Any

import torch

from tritonpack.checks import require
from tritonpack.patches.packed_batch import PackedBatch

TOKEN_FIELDS = ("_token_id", "_token_ids", "_token_index", "_tokens")  # ends of names of fields that hold token ids
INDICES = ("bos_index", "eos_index", "pad_index", "unk_index", "mask_index")


def special_tokens(config: Any) -> set[int]:
    """Return the token ids in the fields of a configuration and its parts."""
    tokens: set[int] = set()
    for name, value in config.__dict__.items():
        if is_config(value):
            tokens |= special_tokens(value)
        elif name.endswith(TOKEN_FIELDS) or name in INDICES:
            values = value if isinstance(value, (list, tuple)) else [value]
            tokens |= {token for token in values if type(token) is int and token >= 0}
    return tokens


def is_config(value: Any) -> bool:
    """Return whether the value of a field is a configuration."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the text model, or the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:  # an encoder and a decoder
        return config.get_text_config(decoder=True)


def pad_token_of(config: Any, side: str) -> int | None:
    """Return the padding token of the encoder or of the decoder; each may have its own."""
    names = ("decoder",) if side == "decoder" else ("encoder", "text_encoder")
    parts = [part for name in names if is_config(part := getattr(config, name, None))]
    tokens = (getattr(part, "pad_token_id", None) for part in (*parts, text_config(config)))
    return next((token for token in tokens if token is not None), None)


def is_bidirectional(config: Any) -> bool:
    """Return whether a configuration lets a decoder see both directions."""
    return getattr(text_config(config), "use_bidirectional_attention", None) is True


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the window of each layer: the number of keys of a query, its own included; None for full attention."""
    try:
        window = getattr(config, "sliding_window", None)
    except Exception:  # a configuration with a window for each layer raises
        window = None
    if kinds := getattr(config, "layer_types", None):
        return tuple(window if "sliding" in kind else None for kind in kinds)
    layers = getattr(config, "num_hidden_layers", 0)
    return (window,) * (layers if isinstance(layers, int) else 0)  # LXMERT counts several kinds


def rope_limits(config: Any) -> list[tuple[str, int]]:
    """Return the types of rotary embeddings that depend on a call's longest document, each with its limit."""
    ropes = getattr(config, "rope_parameters", None)
    if not isinstance(ropes, dict):
        return []
    limits = []
    for rope in [kind for kind in ropes.values() if isinstance(kind, dict)] or [ropes]:  # one for each kind of layer
        kind, limit = rope.get("rope_type") or "", getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            own = rope.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None) or limit
        if follows_longest(kind) and limit is not None:
            limits.append((kind, limit))
    return limits


def follows_longest(kind: str) -> bool:
    """Return whether the frequencies of a type of rotary embeddings depend on the longest document of a call."""
    return kind == "longrope" or "dynamic" in kind  # transformers tests for the same word


def require_one_rope(packed_batch: PackedBatch, kind: str, limit: int) -> None:
    """Refuse packed documents whose frequencies would differ from the frequencies of each document alone.

    With "longrope", this is a call with documents on both sides of the limit. With "dynamic", it is a call with several
    documents, one of them above the limit.
    """
    starts, live = packed_batch.runs()
    tokens = torch.ones_like(starts) if live is None else live
    documents = starts & tokens
    long = ((packed_batch.positions() == limit) & tokens).sum()  # a longer document has one such position
    alike = long == documents.sum() if kind == "longrope" else documents.sum() == 1
    require(
        (long == 0) | alike | (documents.sum(1) <= 1).all(),
        f"this model's rotary embeddings ({kind!r}) change for the whole call if a document has more than {limit} "
        "tokens, so documents packed with a longer one would give other results than alone. Pack documents of up to "
        f"{limit} tokens, and run longer ones in separate calls.",
    )
