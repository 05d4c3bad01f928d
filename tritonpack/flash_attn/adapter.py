"""Calls with FlashAttention's or torch's arguments, computed by `varlen_attention`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.checks import Window, as_integers, check_flag, describe, is_int, is_length, plain_int
from tritonpack.flash_attn.masks import mask_from_offsets, regular_offsets

# Name of another library -> our names. Arguments without one change no result and are ignored. Names that aren't here
# are ours, too.
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "cu_seq_q": ("cu_seqlens_q",),
    "cu_seq_k": ("cu_seqlens_k",),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "is_causal": ("causal",),
    "softmax_scale": ("scale",),
    "s_aux": ("sinks",),
    "learnable_sink": ("sinks",),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "min_seqlen_k"), ()),
    **dict.fromkeys(("deterministic", "num_splits", "pack_gqa", "sm_margin", "return_lse"), ()),
    **dict.fromkeys(("scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"), ()),
}

# Arguments that tritonpack doesn't support -> what it supports instead.
_ANY_SCORE = "softcap, ALiBi slopes and sinks"
_ANY_MASK = (
    "documents, causal masks and windows, and any mask with one interval of keys per query through "
    "tritonpack.varlen_attention"
)
_PAGES = (
    "keys and values end to end, (total_k, heads, headdim) with cu_seqlens_k, and seqused_k for documents that fill "
    "only a part of their place"
)
REMEDIES = {
    **dict.fromkeys(("aux_scalars", "aux_tensors", "score_mod", "score_mod_bwd"), _ANY_SCORE),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices", "mask_mod"), _ANY_MASK),
    **dict.fromkeys(("block_table", "page_table"), _PAGES),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "bfloat16, float16, float32 and float64"),
    "qv": "the same as one product of torch.cat([q, qv], -1) and torch.cat([k, v], -1), up to 512 wide",
}


def attention(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention over packed rows, or without offsets over a batch of rows of one length.

    Args:
        arguments: the arguments of a function of another library, its `locals()`.

    Returns:
        out in the shape of q with D_v; lse (H, total_q), or (B, H, S_q), -inf in rows that see nothing.

    Raises:
        ValueError: arguments that aren't supported; shapes, devices or options that don't fit.
    """
    ours: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in REMEDIES:
            ours.update(dict.fromkeys(NAMES.get(name, (name,)), value))
        elif value is not None:
            what = f"{name} isn't supported by tritonpack.flash_attn; got {describe(value)}"
            raise ValueError(f"{what}. Supported: {REMEDIES[name]}.")
    for name in ("qkv", "kv"):
        if name in ours:
            ours |= _unpack(ours, name)
    return _attention(**ours)


def _unpack(given: dict[str, Any], name: str) -> dict[str, Tensor]:
    """The parts of a packed tensor: qkv (..., 3, heads, headdim), kv (..., 2, heads, headdim), or FlashAttention-3's
    (batch, seqlen, num_heads_q + 2 * kv_heads, headdim), the heads of q, then of k, then of v."""
    x, count, varlen = given.pop(name), len(name), "cu_seqlens_q" in given
    shape = x.shape if isinstance(x, Tensor) else torch.Size()
    forms = f"({'total' if varlen else 'batch, seqlen'}, {count}, heads, headdim)"
    parts = x.unbind(-3) if len(shape) == (4 if varlen else 5) and shape[-3] == count else None
    if "num_heads_q" in given:
        heads = given.pop("num_heads_q")
        if len(shape) == 4 and is_int(heads) and 0 < heads < shape[2] and (shape[2] - heads) % 2 == 0:
            parts = x.split([heads, *[(shape[2] - heads) // 2] * 2], 2)
        forms += f", or (batch, seqlen, num_heads_q + 2 * kv_heads, headdim) for num_heads_q={heads!r}"
    if parts is None:
        raise ValueError(f"{name} must be {forms}; got {describe(x)}.")
    return dict(zip(name, parts, strict=True))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool,
    window_size: Iterable[Any],
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    check_flag(causal, "causal")  # here and not in the mask, because masks are kept by their options, and 1 == True
    window, chunk = read_window(window_size), 0 if attention_chunk is None else plain_int(attention_chunk)
    if not is_length(chunk):
        raise ValueError(f"attention_chunk must be a positive integer, or 0 for no chunks; got {attention_chunk!r}.")
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, values in (offsets | {"seqused_q": seqused_q, "seqused_k": seqused_k}).items():
        if values is None:
            continue
        if not isinstance(values, Tensor) or values.device != getattr(q, "device", values.device):
            raise ValueError(
                f"{name} must be a one-dimensional int32 or int64 tensor on q's device; got {describe(values)}. Make "
                "one per batch: torch.tensor(..., dtype=torch.int32, device=q.device). Pass it to every layer."
            )
        as_integers(values, name)
    batch = q.shape[:2] if cu_seqlens_q is None and isinstance(q, Tensor) else None
    q, cu_q = _stream(q, cu_seqlens_q, "q")
    v, _ = _stream(v, cu_seqlens_k, "v")
    k, cu_k = _stream(k, cu_seqlens_k, "k")
    slopes, documents = options.get("alibi_slopes"), cu_q.shape[0] - 1
    if isinstance(slopes, Tensor) and slopes.ndim == 2 and slopes.shape[0] != documents:
        raise ValueError(
            f"alibi_slopes must be (heads,) or (documents, heads) with {documents} documents; got {describe(slopes)}."
        )
    mask = mask_from_offsets(
        cu_q, cu_k, q.shape[0], k.shape[0], seqused_q, seqused_k, causal=causal, window=window,
        chunk_size=chunk or None,
    )  # fmt: skip
    out, lse = varlen_attention(q, k, v, mask, softcap=0.0 if softcap is None else softcap, return_lse=True, **options)
    return (out, lse) if batch is None else (out.unflatten(0, batch), lse.unflatten(1, batch).transpose(0, 1))


def read_window(window_size: Iterable[Any]) -> Window:
    """(left, right) with -1 for no limit, from two integers, Nones (no limit) or an integer tensor.

    Raises:
        ValueError: another value, or a side below -1.
    """
    try:
        sides = tuple(window_size)
        flags = getattr(window_size, "dtype", None) == torch.bool or any(isinstance(side, bool) for side in sides)
        left, right = (-1 if side is None else index(side) for side in sides)
        if isinstance(window_size, bytes) or flags or min(left, right) < -1:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            "window_size must be two integers (left, right) of at least -1, where -1 (or None) means no limit; got "
            f"{window_size!r}."
        ) from None
    return left, right


def _stream(x: Tensor, cu: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The rows as one stream, and the offsets of its documents."""
    shape = "(total, heads, headdim)" if cu is not None else "(batch, seqlen, heads, headdim)"
    if not isinstance(x, Tensor) or x.ndim != (4 if cu is None else 3):
        raise ValueError(f"{name} must be {shape}; got {describe(x)}.")
    return (x, cu) if cu is not None else (x.flatten(0, 1), regular_offsets(x.shape[0], x.shape[1], x.device))
