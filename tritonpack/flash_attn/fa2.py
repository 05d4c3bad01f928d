"""FlashAttention-2's functions, with its parameters and its return values.

- Rows of one length are q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), where
  nheads_k divides nheads. The functions with `varlen` take documents laid end to end, (total, heads, headdim), and
  `cu_seqlens`, (batch + 1,) int32 or int64 on q's device: the begins of the documents and the end of the last. Layers
  that pass the same tensor objects share one mask. `max_seqlen` is ignored. Packed tensors are qkv (..., 3, nheads,
  headdim) and kv (..., 2, nheads_k, headdim).
- `dropout_p`, `softmax_scale` (None: 1 / sqrt(headdim)), `causal` (the diagonal ends in the bottom right corner),
  `window_size` ((left, right), inclusive, -1 without limit) and `softcap` (0: none) are FlashAttention-2's. A side
  below -1 and a softcap below 0 are refused.
- `alibi_slopes` is (nheads,) or (batch, nheads) float32, with float64 inputs also float64, and has no gradient.
- `deterministic` is ignored: results are always deterministic. `block_table` (pages) isn't supported.
- They return out, (batch, seqlen_q, nheads, headdim of v) or (total_q, nheads, headdim of v). With
  `return_attn_probs=True`, which can't be used with dropout, they return (out, softmax_lse, an empty tensor).
  softmax_lse is float32, (nheads, total_q) or (batch, nheads, seqlen_q), +inf in rows that see nothing, and
  differentiable.
- Only by keyword, and not in FlashAttention-2: `s_aux`, (nheads,) attention sinks, differentiable; `seqused_q` and
  `seqused_k`, (batch,) how many rows of each document count; `backend`, as in `tritonpack.varlen_attention`.
- Rows past the last offset, and rows that see nothing, give zeros and get zero gradients.
- Inputs are bfloat16, float16, float32 or float64. Head dimensions are from 1 to 512; v may have another than q and k.
- They raise ValueError for shapes, dtypes, devices or options that don't fit or aren't supported.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py, version 2.8.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from tritonpack.backends import Backend
from tritonpack.checks import Window, check_flag, is_number
from tritonpack.flash_attn.adapter import attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:  # fmt: skip
    """Attention over a batch of rows of one length. The module describes the parameters."""
    return _call(locals())


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:  # fmt: skip
    """`flash_attn_func` of one tensor qkv (batch, seqlen, 3, nheads, headdim)."""
    return _call(locals())


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:  # fmt: skip
    """`flash_attn_func` of q and one tensor kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    return _call(locals())


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None, *,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:  # fmt: skip
    """Attention over documents laid end to end: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim)."""
    return _call(locals())


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim)."""
    return _call(locals())


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of q and one tensor kv (total_k, 2, nheads_k, headdim)."""
    return _call(locals())


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """Not supported: attention that writes to a cache, for inference. It exists so that packages can import it.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "flash_attn_with_kvcache isn't supported by tritonpack.flash_attn, which is for training. Use "
        "flash_attn_varlen_func with seqused_k for a cache that is written already, or FlashAttention for inference."
    )


def _call(arguments: dict[str, Any]) -> Result:
    with_lse, dropout_p = check_flag(arguments.pop("return_attn_probs"), "return_attn_probs"), arguments["dropout_p"]
    if with_lse and is_number(dropout_p) and 0 < dropout_p < 1:
        raise ValueError(
            "return_attn_probs=True can't be used with dropout_p above 0: tritonpack has no S_dmask, the probabilities "
            "with the pattern of dropout. For the log-sum-exp use tritonpack.varlen_attention(..., return_lse=True)."
        )
    out, lse = attention(arguments)
    return (out, lse.masked_fill(lse.isneginf(), float("inf")), out.new_empty(0)) if with_lse else out
