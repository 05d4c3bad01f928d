"""FlashAttention-4's functions (`flash_attn.cute`), with its parameters and its return values.

They differ from FlashAttention-2's: they always return (out, lse), with lse -inf in rows that see nothing; None in a
window means no limit; sinks are `learnable_sink`, (nheads,) and differentiable; `qv` has the place of
FlashAttention-2's first offsets; without offsets rows are a batch, (batch, seqlen, heads, headdim). `num_splits`,
`pack_gqa`, `deterministic`, `min_seqlen_k` and the parameters of schedulers don't change results and are ignored. `qv`,
`gather_kv_indices`, `page_table`, `score_mod`, `mask_mod` and block sparsity aren't supported. `backend`, only by
keyword, is as in `tritonpack.flash_attn`. They raise ValueError for shapes, dtypes, devices or options that don't fit
or aren't supported.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py, commit 0251105.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonpack.flash_attn.adapter import adapted
from tritonpack.flash_attn.core import flash_attention, read_window

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

_COMMON = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
)


def _call(*, window_size: tuple[int | None, int | None], **arguments: Any) -> tuple[Tensor, Tensor]:
    window = read_window(window_size)
    if sorted(side is not None and side < 0 for side in window_size) == [False, True]:
        raise ValueError(  # FlashAttention-4 moves the window
            f"window_size must be (left, right) of at least 0, or None for a side without limit; got {window_size!r}."
        )
    return flash_attention(window_size=window, **arguments)


flash_attn_func = adapted(
    "flash_attn_func",
    f"q, k, v, qv=None, gather_kv_indices=None, {_COMMON}aux_tensors=None, aux_scalars=None, "
    "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, *, backend='auto'",
    _call,
)
"""Attention over a batch of rows of one length.

q is (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k,
headdim_v). Returns out (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q) float32.
"""

flash_attn_varlen_func = adapted(
    "flash_attn_varlen_func",
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, "
    f"seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, {_COMMON}block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False, *, backend='auto'",
    _call,
)
"""Attention over documents laid end to end, or over a batch whose rows count in part.

q is (total_q, nheads, headdim) with `cu_seqlens_q`, else (batch, seqlen_q, nheads, headdim); k and v are (total_k,
nheads_k, headdim or headdim_v) with `cu_seqlens_k`, else (batch, ...). The offsets are (batch + 1,) int32 or int64 on
q's device. `seqused_q` and `seqused_k`, (batch,) integers, say how many rows of each document count, from its first.
`max_seqlen_q` and `max_seqlen_k` aren't needed. Returns out in the shape of q with headdim_v, and lse (nheads, total_q)
or (batch, nheads, seqlen_q) float32.
"""
