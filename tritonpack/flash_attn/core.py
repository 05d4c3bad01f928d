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
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
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
        max_seqlen_q, max_seqlen_k: the longest document. They are checked if that doesn't wait for a device.
        attention_chunk: keys per chunk; 0 or None means no chunks.
        softcap: 0 or None means no cap.
        **options: the other options of `varlen_attention`.

    Returns:
        out in the shape of q with D_v; lse (H, total_q), or (B, H, S_q), -inf in rows that see nothing.

    Raises:
        ValueError: shapes, devices or options that don't fit.
    """
    window, chunk = read_window(window_size), 0 if attention_chunk is None else plain_int(attention_chunk)
    if not is_length(chunk):
        raise ValueError(f"attention_chunk must be a positive integer, or 0 for no chunks; got {attention_chunk!r}.")
    numbers = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, values in {**numbers, "seqused_q": seqused_q, "seqused_k": seqused_k}.items():
        _check_tensor(values, name, q)
    check_flag(causal, "causal")
    _check_longest(cu_seqlens_q if seqused_q is None else None, max_seqlen_q, "max_seqlen_q")
    _check_longest(cu_seqlens_k if seqused_k is None else None, max_seqlen_k, "max_seqlen_k")
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
        cu_q, cu_k, q.shape[0], k.shape[0], seqused_q, seqused_k, causal=causal, window=window, chunk_size=chunk or None
    )
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
        if isinstance(window_size, (str, bytes)) or len(sides) != 2 or flags:
            raise TypeError
        left, right = (-1 if side is None else index(side) for side in sides)
        if min(left, right) < -1:
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


def _check_tensor(numbers: Any, name: str, q: Any) -> None:
    """Raise unless offsets or used lengths are None or an integer tensor on q's device."""
    if numbers is None:
        return
    if not isinstance(numbers, Tensor):
        raise ValueError(
            f"{name} must be a one-dimensional int32 or int64 tensor on q's device; got {describe(numbers)}. Make "
            "one per batch: torch.tensor(..., dtype=torch.int32, device=q.device). Pass it to every layer."
        )
    as_integers(numbers, name)
    if isinstance(q, Tensor) and numbers.device != q.device:
        raise ValueError(f"{name} is on {numbers.device} and q on {q.device}; move them together.")


def _check_longest(cu: Tensor | None, longest: Any, name: str) -> None:
    """Raise if a document is longer than `longest`; offsets on an accelerator aren't read."""
    if longest is None or isinstance(longest, torch.SymInt):
        return
    if isinstance(longest, Tensor) and longest.numel() == 1 and longest.dtype in (torch.int32, torch.int64):
        return  # reading it may wait for a device
    longest = plain_int(longest)
    if not is_length(longest):
        raise ValueError(f"{name} must be an integer of at least 0, an integer tensor or None; got {longest!r:.100}.")
    if cu is not None and not torch.compiler.is_compiling() and cu.device.type == "cpu" and cu.shape[0] > 1:
        actual = int(cu.diff().max())
        if actual > longest:
            raise ValueError(f"{name} is {longest}, but a document has {actual} tokens; pass {actual}, or None.")
