"""torch's `torch.nn.attention.varlen.varlen_attn`, with its parameters and its return values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonpack.backends import Backend
from tritonpack.checks import Window
from tritonpack.flash_attn.adapter import attention


def torch_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int | None = None,
    max_k: int | None = None, is_causal: bool = False, *, return_aux: Any = None, scale: float | None = None,
    window_size: Window = (-1, -1), enable_gqa: bool | None = None, seqused_k: Tensor | None = None,
    block_table: None = None, num_splits: int | None = None, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over documents laid end to end, with the parameters of torch 2.10 and later.

    Args:
        query, key, value: (T_q, H, D), (T_k, H_kv, D), (T_k, H_kv, D_v).
        cu_seq_q, cu_seq_k: (documents + 1,) int32 or int64 on the query's device.
        max_q, max_k: ignored.
        is_causal: the same as window_size=(-1, 0), for torch 2.10.
        return_aux: torch's AuxRequest, or another object with `lse`, which says whether to return lse, too.
        scale, backend: as in `tritonpack.varlen_attention`.
        window_size: (left, right), inclusive, -1 without limit; (-1, 0) is causal.
        enable_gqa: False refuses fewer heads in key and value than in query, as torch does by default.
        seqused_k: (documents,) how many keys of each document count; unlike in torch, with gradients.
        block_table: not supported.
        num_splits: 1 gives a document the same bits in every batch.

    Returns:
        out (T_q, H, D_v), or (out, lse (H, T_q) float32, -inf in rows that see nothing).

    Raises:
        ValueError: shapes, dtypes, devices or options that don't fit or aren't supported.

    Source: torch/nn/attention/varlen.py.
    """
    arguments = {**locals(), "pack_invariant": num_splits == 1}
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ValueError(f"return_aux must be torch's AuxRequest, or None; got {return_aux!r:.100}.")
    result = attention({**arguments, "return_attn_probs": return_aux is not None and bool(return_aux.lse)})
    if enable_gqa is False and query.shape[1] != key.shape[1]:
        what = f"query has {query.shape[1]} heads and key {key.shape[1]}"
        raise ValueError(f"{what}; pass enable_gqa=True to share each key head among several query heads.")
    return result
