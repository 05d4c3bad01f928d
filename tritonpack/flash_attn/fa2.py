"""FlashAttention-2's functions, with its parameters and its return values.

- Rows of one length are q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), where
  nheads_k divides nheads. The functions with `varlen` take documents laid end to end, (total, heads, headdim), and
  `cu_seqlens`, (batch + 1,) int32 or int64 on q's device: the begins of the documents and the end of the last. Layers
  that pass the same tensor objects share one mask. Inputs are bfloat16, float16, float32 or float64, headdim is 1 to
  512, and v may have another.
- `softmax_scale` (None: 1 / sqrt(headdim)), `causal` (the diagonal ends in the bottom right corner), `window_size`
  ((left, right), inclusive, -1 without limit), `softcap` (0: none) and `dropout_p` are FlashAttention-2's.
  `alibi_slopes` is (nheads,) or (batch, nheads) float32, with float64 inputs also float64, and has no gradient.
  `max_seqlen` and `deterministic` are ignored, as results are always deterministic; `block_table` isn't supported.
  Only by keyword, and not in FlashAttention-2: `s_aux`, (nheads,) attention sinks, differentiable; `backend`, as in
  `tritonpack.varlen_attention`.
- They return out in the shape of q with the headdim of v; with `return_attn_probs=True`, not with dropout, (out,
  softmax_lse, an empty tensor). softmax_lse is float32, (nheads, total_q) or (batch, nheads, seqlen_q), +inf in rows
  that see nothing, and differentiable. Rows past the last offset, and rows that see nothing, give zeros and get zero
  gradients. ValueError is raised for what doesn't fit or isn't supported.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py, version 2.8.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from tritonpack.backends import Backend
from tritonpack.checks import Window
from tritonpack.flash_attn.adapter import attention, unpacked

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


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None, *,
    s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Result:  # fmt: skip
    """Attention over documents laid end to end: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim)."""
    return _call(locals())


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` of one tensor qkv (batch, seqlen, 3, nheads, headdim), and its other arguments."""
    return flash_attn_func(*unpacked(qkv, 3), *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` of q and one tensor kv (batch, seqlen_k, 2, nheads_k, headdim), and its other arguments."""
    return flash_attn_func(q, *unpacked(kv, 2), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *args: Any, **kwargs: Any
) -> Result:
    """`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim), and its arguments from `dropout_p` on."""
    q, k, v = unpacked(qkv, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_varlen_func` of q and one tensor kv (total_k, 2, nheads_k, headdim), and its other arguments."""
    return flash_attn_varlen_func(q, *unpacked(kv, 2), *args, **kwargs)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ValueError. Caches, for inference, aren't supported, but packages import this function."""
    raise ValueError(
        "flash_attn_with_kvcache isn't supported by tritonpack.flash_attn, which is for training. For a cache that is "
        "written already use tritonpack.flash_attn.fa3.flash_attn_varlen_func with seqused_k, else FlashAttention."
    )


def _call(arguments: dict[str, Any]) -> Result:
    if arguments["return_attn_probs"] and arguments["dropout_p"]:
        raise ValueError(
            "return_attn_probs=True can't be used with dropout_p above 0, because tritonpack has no S_dmask. For the "
            "log-sum-exp use tritonpack.varlen_attention(..., return_lse=True)."
        )
    result = attention(arguments)
    if isinstance(result, Tensor):
        return result
    out, lse = result
    return out, lse.masked_fill(lse.isneginf(), float("inf")), out.new_empty(0)
