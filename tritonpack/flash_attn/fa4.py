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

from tritonpack.attention import Backend
from tritonpack.flash_attn.core import flash_attention, read_window
from tritonpack.flash_attn.spelling import spelled

WindowSides = tuple[int | None, int | None]

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def _call(*, window_size: WindowSides, **arguments: Any) -> tuple[Tensor, Tensor]:
    window = read_window(window_size)
    if sorted(side is not None and side < 0 for side in window_size) == [False, True]:
        raise ValueError(  # FlashAttention-4 moves the window
            f"window_size must be (left, right) of at least 0, or None for a side without limit; got {window_size!r}."
        )
    return flash_attention(window_size=window, **arguments)[:2]


@spelled(_call)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSides = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None, return_lse: bool = False, *, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a batch of rows of one length.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k, v: (batch, seqlen_k, nheads_k, headdim), (batch, seqlen_k, nheads_k, headdim_v).
        softmax_scale, ..., backend: see the module.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q) float32.
    """


@spelled(_call)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSides = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False, *, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over documents laid end to end, or over a batch whose rows count in part.

    Args:
        q: (total_q, nheads, headdim) with `cu_seqlens_q`, else (batch, seqlen_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim) and (total_k, nheads_k, headdim_v) with `cu_seqlens_k`, else (batch, ...).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64 on q's device, or None.
        seqused_q, seqused_k: (batch,) integers, how many rows of each document count, from its first.
        max_seqlen_q, max_seqlen_k: not needed.
        softmax_scale, ..., backend: see the module.

    Returns:
        out in the shape of q with headdim_v; lse (nheads, total_q) or (batch, nheads, seqlen_q), float32.
    """
