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

# Arguments of FlashAttention that tritonpack doesn't support -> what it supports instead.
_PAGES = (
    "keys and values end to end, (total_k, heads, headdim) with cu_seqlens_k, and seqused_k for documents that fill "
    "only a part of their place"
)
_DESCALE = "bfloat16, float16, float32 and float64"
_ANY_MASK = (
    "documents, causal masks and windows, and any mask with one interval of keys per query through "
    "tritonpack.varlen_attention"
)
_ANY_SCORE = "softcap, ALiBi slopes and sinks"
REMEDIES = {
    "aux_scalars": _ANY_SCORE,
    "aux_tensors": _ANY_SCORE,
    "block_sparse_tensors": _ANY_MASK,
    "block_sparse_tensors_bwd": _ANY_MASK,
    "block_table": _PAGES,
    "gather_kv_indices": _ANY_MASK,
    "k_descale": _DESCALE,
    "mask_mod": _ANY_MASK,
    "page_table": _PAGES,
    "q_descale": _DESCALE,
    "qv": "the same as one product of torch.cat([q, qv], -1) and torch.cat([k, v], -1), up to 512 wide",
    "score_mod": _ANY_SCORE,
    "score_mod_bwd": _ANY_SCORE,
    "v_descale": _DESCALE,
}


def refuse(**given: Any) -> None:
    """Raise ValueError for the first argument that isn't None; the message says what is supported instead."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} isn't supported by tritonpack.flash_attn; got {describe(value)}. Supported: {REMEDIES[name]}."
            )


def read_window(window_size: Iterable[Any]) -> Window:
    """(left, right) with -1 for no limit, from two numbers, Nones (no limit) or an integer tensor.

    Raises:
        ValueError: `window_size` isn't two integers of at least -1 or Nones.
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


def read_chunk(attention_chunk: Any) -> int | None:
    """Keys per chunk; None for no chunks.

    Raises:
        ValueError: `attention_chunk` isn't an integer of at least 0.
    """
    attention_chunk = plain_int(attention_chunk)
    if attention_chunk is None:
        return None
    if not is_length(attention_chunk):
        raise ValueError(f"attention_chunk must be a positive integer, or 0 for no chunks; got {attention_chunk!r}.")
    return attention_chunk or None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    causal: bool,
    window: Window,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    max_q: int | Tensor | None = None,
    max_k: int | Tensor | None = None,
    chunk_size: int | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_probabilities: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over packed rows, or without offsets over a batch of rows of one length.

    Args:
        q: (total_q, H, D), or (B, S_q, H, D) without `cu_q`.
        k, v: (total_k, H_kv, D) and (total_k, H_kv, D_v), or (B, S_k, ...) without `cu_k`.
        cu_q, cu_k: (B + 1,) offsets on q's device.
        causal, window, chunk_size, used_q, used_k: as in `mask_from_offsets`.
        max_q, max_k: the longest document. They are only checked, and only if that doesn't wait for a device.
        softcap: 0 or None means no cap.
        return_probabilities: whether to compute the probabilities, for tests.
        **options: the other options of `varlen_attention`.

    Returns:
        out in the shape of q with D_v; lse (H, total_q), or (B, H, S_q), -inf in rows that see nothing; the
        probabilities (B, H, max_q, max_k), negative where dropped, or an empty tensor.

    Raises:
        ValueError: shapes, devices or options that don't fit.
    """
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used_q, "seqused_k": used_k}
    for name, numbers in given.items():
        _check_tensor(numbers, name, q)
    check_flag(causal, "causal")
    _check_longest(cu_q if used_q is None else None, max_q, "max_seqlen_q")
    _check_longest(cu_k if used_k is None else None, max_k, "max_seqlen_k")
    rows, regular = q, cu_q is None
    q, cu_q = _stream(q, cu_q, "q")
    batch = rows.shape[:2] if regular else None
    v, _ = _stream(v, cu_k, "v")
    k, cu_k = _stream(k, cu_k, "k")
    documents = cu_q.shape[0] - 1
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim == 2 and alibi_slopes.shape[0] != documents:
        raise ValueError(
            f"alibi_slopes must be (heads,) or (documents, heads) with {documents} documents; got "
            f"{describe(alibi_slopes)}."
        )
    mask = mask_from_offsets(
        cu_q, cu_k, q.shape[0], k.shape[0], causal=causal, window=window, chunk_size=chunk_size, used_q=used_q,
        used_k=used_k,
    )  # fmt: skip
    options |= {"softcap": 0.0 if softcap is None else softcap, "alibi_slopes": alibi_slopes}
    if return_probabilities and options["dropout_p"]:
        options["dropout_seed"] = torch.randint(2**62, (), device=q.device)
    out, lse = varlen_attention(q, k, v, mask, return_lse=True, **options)
    probabilities = out.new_empty(0)
    if return_probabilities:
        from tritonpack.flash_attn.probabilities import probabilities_of

        probabilities = probabilities_of(q, k, cu_q, cu_k, mask, max_q, max_k, **options)
    if batch is not None:
        out, lse = out.unflatten(0, batch), lse.unflatten(1, batch).transpose(0, 1)
    return out, lse, probabilities


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
    if cu is None or torch.compiler.is_compiling() or cu.device.type != "cpu" or cu.shape[0] < 2:
        return
    actual = int(cu.diff().max())
    if actual > longest:
        raise ValueError(f"{name} is {longest}, but a document has {actual} tokens; pass {actual}, or None.")
