"""FlashAttention-3's functions (`flash_attn_interface`), with its parameters and its return values.

Shapes, options and errors are as in `tritonpack.flash_attn.fa2`, `s_aux` and `backend` included. But there is no
dropout and no ALiBi, and `return_attn_probs=True` returns (out, softmax_lse), with softmax_lse -inf in rows that see
nothing. `attention_chunk` limits a query to the chunk of its own place, counted from its document's first key.
`seqused_q` and `seqused_k` are (batch,) integers, how many rows of each document count, from its first; the other rows
give zeros, get zero gradients and may hold anything. `num_splits`, `pack_gqa`, `sm_margin` and `deterministic` change
no result and are ignored. `qv` and the descale factors of 8-bit inputs aren't supported.

Source: https://github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py, commit 0251105.
"""

from __future__ import annotations

from torch import Tensor

from tritonpack.backends import Backend
from tritonpack.checks import Window
from tritonpack.flash_attn.adapter import attention, unpacked
from tritonpack.flash_attn.fa2 import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: None = None,
    q_descale: None = None, k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:  # fmt: skip
    """Attention over a batch of rows of one length."""
    return attention(locals())


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: None = None,
    k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Result:  # fmt: skip
    """`flash_attn_func` of one tensor (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q + 2 *
    nheads_k, headdim): the heads of q, then of k, then of v."""
    arguments = locals()
    parts = unpacked(arguments.pop("qkv"), 3, arguments.pop("num_heads_q"))
    return attention(dict(zip("qkv", parts, strict=True)) | arguments)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: None = None, q_descale: None = None,
    k_descale: None = None, v_descale: None = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False, *, s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Result:  # fmt: skip
    """Attention over documents laid end to end."""
    return attention(locals())
