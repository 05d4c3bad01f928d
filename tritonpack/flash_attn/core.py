"""flash_attention: a call with FlashAttention's arguments, computed by `varlen_attention`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.checks import Window, as_integers, check_flag, describe, is_length, plain_int
from tritonpack.flash_attn.masks import mask_from_offsets, regular_offsets


def flash_attention(
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
    """Attention over packed rows, or without offsets over a batch of rows of one length.

    Args:
        q: (total_q, H, D), or (B, S_q, H, D) without offsets.
        k, v: (total_k, H_kv, D) and (total_k, H_kv, D_v), or (B, S_k, ...) without offsets.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) offsets on q's device.
        causal: whether queries see no later keys.
        window_size: (left, right); -1 or None means no limit.
        seqused_q, seqused_k: (B,) how many rows of each document count.
        attention_chunk: keys per chunk; 0 or None means no chunks.
        softcap: 0 or None means no cap.
        **options: the other options of `varlen_attention`.

    Returns:
        out in the shape of q with D_v; lse (H, total_q), or (B, H, S_q), -inf in rows that see nothing.

    Raises:
        ValueError: shapes, devices or options that don't fit.
    """
    check_flag(causal, "causal")  # here and not in the mask, because masks are kept by their options, and 1 == True
    window, chunk = read_window(window_size), 0 if attention_chunk is None else plain_int(attention_chunk)
    if not is_length(chunk):
        raise ValueError(f"attention_chunk must be a positive integer, or 0 for no chunks; got {attention_chunk!r}.")
    numbers = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, values in {**numbers, "seqused_q": seqused_q, "seqused_k": seqused_k}.items():
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
