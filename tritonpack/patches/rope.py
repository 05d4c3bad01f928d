"""Rotary embeddings whose frequencies depend on the longest document of a call."""

from __future__ import annotations

from typing import Any

import torch

from tritonpack.checks import require
from tritonpack.patches.packed_batch import PackedBatch


def rope_kinds(rope: Any) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings, one dict for each kind of layer."""
    if not isinstance(rope, dict):
        return []
    inner = [kind for kind in rope.values() if isinstance(kind, dict)]
    return inner or [rope]


def rope_limits(config: Any) -> list[tuple[str, int]]:
    """The types of rotary embeddings that depend on a call's longest document, each with its limit."""
    found = []
    for rope in rope_kinds(getattr(config, "rope_parameters", None)):
        kind, limit = rope.get("rope_type") or "", getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            own = rope.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None) or limit
        if follows_longest(kind) and limit is not None:
            found.append((kind, limit))
    return found


def follows_longest(kind: str) -> bool:
    """Whether the frequencies of a type of rotary embeddings depend on the longest document of a call."""
    return kind == "longrope" or is_dynamic(kind)


def is_dynamic(kind: str) -> bool:
    """Whether rotary embeddings of a type change with the longest document. transformers tests the same word."""
    return "dynamic" in kind


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
