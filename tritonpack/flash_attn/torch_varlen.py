"""torch's `torch.nn.attention.varlen.varlen_attn`, with its parameters and its return values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonpack.checks import check_flag, is_int
from tritonpack.flash_attn.adapter import adapted
from tritonpack.flash_attn.core import flash_attention


def _call(
    *, q: Tensor, k: Tensor, causal: bool, return_aux: Any, enable_gqa: bool | None, num_splits: Any, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ValueError(f"return_aux must be torch's AuxRequest, or None; got {return_aux!r:.100}.")
    if enable_gqa is not None:
        check_flag(enable_gqa, "enable_gqa")
    many = all(isinstance(x, Tensor) and x.ndim == 3 for x in (q, k))  # others are refused below
    if enable_gqa is False and many and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}; pass enable_gqa=True to share each key head among "
            "several query heads."
        )
    if num_splits is not None and not is_int(num_splits):
        raise ValueError(f"num_splits must be an integer, or None; got {num_splits!r:.100}.")
    causal = check_flag(causal, "is_causal")
    out, lse = flash_attention(q, k, causal=causal, pack_invariant=num_splits == 1, **arguments)
    return (out, lse) if return_aux is not None and return_aux.lse else out


torch_varlen_attn = adapted(
    "torch_varlen_attn",
    "query, key, value, cu_seq_q, cu_seq_k, max_q=None, max_k=None, is_causal=False, *, return_aux=None, scale=None, "
    "window_size=(-1, -1), enable_gqa=None, seqused_k=None, block_table=None, num_splits=None, backend='auto'",
    _call,
    num_splits=("num_splits",),
)
"""Attention over documents laid end to end, with the parameters of torch 2.10 and later.

Args:
    query: (T_q, H, D).
    key, value: (T_k, H_kv, D), (T_k, H_kv, D_v).
    cu_seq_q, cu_seq_k: (documents + 1,) int32 or int64 on the query's device.
    max_q, max_k: not needed.
    is_causal: the same as window_size=(-1, 0), for torch 2.10.
    return_aux: torch's AuxRequest, or another object with `lse`, which says whether to return lse, too.
    window_size: (left, right), inclusive, -1 without limit; (-1, 0) is causal.
    enable_gqa: False refuses fewer heads in key and value than in query, as torch does by default.
    seqused_k: (documents,) how many keys of each document count; unlike in torch, with gradients.
    num_splits: 1 gives a document the same bits in every batch.
    scale, backend: as in `tritonpack.varlen_attention`; `block_table` isn't supported.

Returns out (T_q, H, D_v), or (out, lse (H, T_q) float32, -inf in rows that see nothing). Raises ValueError for shapes,
dtypes, devices or options that don't fit or aren't supported. Source: torch/nn/attention/varlen.py.
"""
