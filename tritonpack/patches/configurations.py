"""What a model's configuration says of its tokens, and of rotary embeddings that depend on the longest document."""

from __future__ import annotations

from typing import Any

import torch

from tritonpack.checks import require
from tritonpack.patches.packed_batch import PackedBatch

TOKEN_FIELDS = ("_token_id", "_token_ids", "_token_index", "_tokens")  # ends of names of fields that hold token ids
INDICES = ("bos_index", "eos_index", "pad_index", "unk_index", "mask_index")


def special_tokens(config: Any) -> set[int]:
    """Return the ids that a configuration and its parts name."""
    found: set[int] = set()
    for name, value in config.__dict__.items():
        if is_config(value):
            found |= special_tokens(value)
        elif name.endswith(TOKEN_FIELDS) or name in INDICES:
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {token for token in values if type(token) is int and token >= 0}
    return found


def is_config(value: Any) -> bool:
    """Whether the value of a field is a configuration too."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the text model, or the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:  # an encoder's and a decoder's
        return config.get_text_config(decoder=True)


def pad_token_of(config: Any, side: str) -> int | None:
    """Return the padding token of the encoder or of the decoder; each of two models in one has its own."""
    names = ("decoder",) if side == "decoder" else ("encoder", "text_encoder")
    parts = [part for name in names if is_config(part := getattr(config, name, None))]
    found = (getattr(part, "pad_token_id", None) for part in (*parts, text_config(config)))
    return next((token for token in found if token is not None), None)


def is_bidirectional(config: Any) -> bool:
    """Whether a configuration makes a decoder see both directions."""
    return getattr(text_config(config), "use_bidirectional_attention", None) is True


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """How many keys a query of each layer sees, its own included; None for full attention."""
    try:
        window = getattr(config, "sliding_window", None)
    except Exception:  # a configuration with a window for each layer raises
        window = None
    if kinds := getattr(config, "layer_types", None):
        return tuple(window if "sliding" in kind else None for kind in kinds)
    layers = getattr(config, "num_hidden_layers", 0)
    return (window,) * (layers if isinstance(layers, int) else 0)  # LXMERT counts several kinds


def rope_limits(config: Any) -> list[tuple[str, int]]:
    """The types of rotary embeddings that depend on a call's longest document, each with its limit."""
    ropes = getattr(config, "rope_parameters", None)
    if not isinstance(ropes, dict):
        return []
    found = []
    for rope in [kind for kind in ropes.values() if isinstance(kind, dict)] or [ropes]:  # one for each kind of layer
        kind, limit = rope.get("rope_type") or "", getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            own = rope.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None) or limit
        if follows_longest(kind) and limit is not None:
            found.append((kind, limit))
    return found


def follows_longest(kind: str) -> bool:
    """Whether the frequencies of a type of rotary embeddings depend on the longest document of a call."""
    return kind == "longrope" or "dynamic" in kind  # transformers looks for the same word


def require_one_rope(packed_batch: PackedBatch, kind: str, limit: int) -> None:
    """Refuse packed documents whose frequencies would differ from those of each document alone.

    These are documents on both sides of the limit ("longrope"), or several of which one is above it (dynamic).
    """
    starts, live = packed_batch.runs()
    tokens = torch.ones_like(starts) if live is None else live
    documents = starts & tokens
    long = ((packed_batch.positions() == limit) & tokens).sum()  # a document longer than that has one such place
    alike = long == documents.sum() if kind == "longrope" else documents.sum() == 1
    require(
        (long == 0) | alike | (documents.sum(1) <= 1).all(),
        f"this model's rotary embeddings ({kind!r}) change for the whole call when a document has more than {limit} "
        "tokens, so documents packed with a longer one would give other results than alone. Pack documents of up to "
        f"{limit} tokens, and give longer ones calls of their own.",
    )
