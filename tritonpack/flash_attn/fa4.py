"""FlashAttention-4's functions (`flash_attn.cute`), with its parameters and its return values.

Shapes, options and errors are as in `tritonpack.flash_attn.fa2`. But they always return (out, lse), with lse -inf in
rows that see nothing; None in a window means no limit; sinks are `learnable_sink`, (nheads,) and differentiable; `qv`
has the place of FlashAttention-2's first offsets. `seqused_q` and `seqused_k` are as in FlashAttention-3. `num_splits`,
`pack_gqa`, `deterministic`, `min_seqlen_k` and the parameters of schedulers change no result and are ignored. `qv`,
`gather_kv_indices`, `page_table`, `score_mod`, `mask_mod` and block sparsity aren't supported.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py, commit 0251105.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonpack.backends import Backend
from tritonpack.flash_attn.adapter import attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: None = None, gather_kv_indices: None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
    learnable_sink: Tensor | None = None, softcap: float | None = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, score_mod: None = None, score_mod_bwd: None = None,
    mask_mod: None = None, aux_tensors: None = None, aux_scalars: None = None, block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None, return_lse: bool = False, *, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a batch of rows of one length."""
    return _call(locals())


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: None = None, page_table: None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (None, None), learnable_sink: Tensor | None = None, softcap: float | None = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, score_mod: None = None,
    score_mod_bwd: None = None, mask_mod: None = None, block_sparse_tensors: None = None, aux_tensors: None = None,
    aux_scalars: None = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False, *, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over documents laid end to end. Without `cu_seqlens_q` q is (batch, seqlen_q, nheads, headdim), without
    `cu_seqlens_k` k and v are (batch, seqlen_k, nheads_k, headdim)."""
    return _call(locals())


def _call(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    sides = arguments["window_size"]  # FlashAttention-4 moves a window with a single -1
    if isinstance(sides, (tuple, list)) and any(isinstance(x, int) and x < 0 for x in sides) and set(sides) != {-1}:
        raise ValueError(f"window_size must be two sides of at least 0, or None for no limit; got {sides!r}.")
    return attention(arguments)
