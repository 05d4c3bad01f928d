"""FlashAttention-3's functions (`flash_attn_interface`), with its parameters and its return values.

They differ from FlashAttention-2's: there is no dropout and no ALiBi, and `return_attn_probs=True` returns
(out, softmax_lse), with softmax_lse -inf in rows that see nothing. `num_splits`, `pack_gqa`, `sm_margin` and
`deterministic` don't change results and are ignored. `attention_chunk` limits a query to the chunk of its own place,
counted from its document's first key. `seqused_q` and `seqused_k` are (batch,) integers, how many rows of each document
count, from its first; the other rows give zeros, get zero gradients and may hold anything. `qv` and the descale factors
of 8-bit inputs aren't supported. `s_aux` (sinks) and `backend`, only by keyword, are as in `tritonpack.flash_attn`.

Source: https://github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py, commit 0251105.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import check_flag, describe, is_int
from tritonpack.flash_attn.adapter import adapted
from tritonpack.flash_attn.core import flash_attention
from tritonpack.flash_attn.fa2 import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_DESCALE = "q_descale=None, k_descale=None, v_descale=None"
_WINDOW = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_OPTIONS = (
    f"softmax_scale=None, causal=False, qv=None, {_DESCALE}, {_WINDOW}, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False, *, s_aux=None, backend='auto'"
)


def _call(*, return_attn_probs: bool, **arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    check_flag(return_attn_probs, "return_attn_probs")
    out, lse = flash_attention(**arguments)
    return (out, lse) if return_attn_probs else out


def _call_packed(*, qkv: Tensor, num_heads_q: int | None, **arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    shape = qkv.shape if isinstance(qkv, Tensor) else torch.Size()
    heads = num_heads_q if is_int(num_heads_q) else 0
    if len(shape) == 5 and shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif len(shape) == 4 and 0 < heads < shape[2] and (shape[2] - heads) % 2 == 0:
        kv_heads = (shape[2] - heads) // 2
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    else:
        raise ValueError(
            "qkv must be (batch, seqlen, 3, heads, headdim), or (batch, seqlen, num_heads_q + 2 * kv_heads, headdim) "
            f"with num_heads_q; got {describe(qkv)} and num_heads_q={num_heads_q!r}."
        )
    return _call(q=q, k=k, v=v, **arguments)


flash_attn_func = adapted("flash_attn_func", f"q, k, v, {_OPTIONS}", _call)
"""Attention over a batch of rows of one length: q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k,
headdim), v (batch, seqlen_k, nheads_k, headdim_v). Returns out (batch, seqlen_q, nheads, headdim_v), or (out,
softmax_lse (batch, nheads, seqlen_q))."""

flash_attn_qkvpacked_func = adapted(
    "flash_attn_qkvpacked_func",
    f"qkv, softmax_scale=None, causal=False, {_DESCALE}, {_WINDOW}, deterministic=False, num_heads_q=None, "
    "sm_margin=0, return_attn_probs=False, *, s_aux=None, backend='auto'",
    _call_packed,
)
"""`flash_attn_func` of one tensor: (batch, seqlen, 3, nheads, headdim); or (batch, seqlen, num_heads_q + 2 * nheads_k,
headdim), the heads of q, then of k, then of v."""

flash_attn_varlen_func = adapted(
    "flash_attn_varlen_func",
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None, "
    + _OPTIONS,
    _call,
)
"""Attention over documents laid end to end: q (total_q, nheads, headdim), k (total_k, nheads_k, headdim), v (total_k,
nheads_k, headdim_v). Returns out (total_q, nheads, headdim_v), or (out, softmax_lse (nheads, total_q))."""
