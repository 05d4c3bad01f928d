"""FlashAttention-2's functions, with its parameters and its return values.

- Rows of one length are q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), where
  nheads_k divides nheads. The functions with `varlen` take documents laid end to end, (total, heads, headdim), and
  `cu_seqlens`, (batch + 1,) int32 or int64 on q's device: the begins of the documents and the end of the last. Layers
  that pass the same tensor objects share one mask. `max_seqlen` isn't needed; an integer is checked if the offsets lie
  in host memory. Packed tensors are qkv (..., 3, nheads, headdim) and kv (..., 2, nheads_k, headdim).
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

from tritonpack.checks import check_flag, is_number
from tritonpack.flash_attn.adapter import adapted
from tritonpack.flash_attn.core import flash_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None"
_OURS, _USED = "s_aux=None, backend='auto'", "seqused_q=None, seqused_k=None"


def _call(*, return_attn_probs: bool, **arguments: Any) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    for name, count in (("qkv", 3), ("kv", 2)):
        if name in arguments:
            parts = _unpacked(arguments.pop(name), name, count, 4 if "cu_seqlens_q" in arguments else 5)
            arguments.update(zip("qkv"[-count:], parts, strict=True))
    check_flag(return_attn_probs, "return_attn_probs")
    if return_attn_probs and is_number(arguments["dropout_p"]) and 0 < arguments["dropout_p"] < 1:
        raise ValueError(
            "return_attn_probs=True can't be used with dropout_p above 0: tritonpack has no S_dmask, the probabilities "
            "with the pattern of dropout. For the log-sum-exp use tritonpack.varlen_attention(..., return_lse=True)."
        )
    out, lse = flash_attention(**arguments)
    return (out, lse.masked_fill(lse.isneginf(), float("inf")), out.new_empty(0)) if return_attn_probs else out


def _unpacked(x: Any, name: str, count: int, ndim: int) -> tuple[Tensor, ...]:
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != count:
        shape = f"({'total' if ndim == 4 else 'batch, seqlen'}, {count}, heads, headdim)"
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be {shape}; got {given}.")
    return x.unbind(-3)


flash_attn_func = adapted("flash_attn_func", f"q, k, v, {_OPTIONS}, *, {_OURS}", _call)
"""Attention over a batch of rows of one length."""

flash_attn_qkvpacked_func = adapted("flash_attn_qkvpacked_func", f"qkv, {_OPTIONS}, *, {_OURS}", _call)
"""`flash_attn_func` of one tensor qkv (batch, seqlen, 3, nheads, headdim)."""

flash_attn_kvpacked_func = adapted("flash_attn_kvpacked_func", f"q, kv, {_OPTIONS}, *, {_OURS}", _call)
"""`flash_attn_func` of q and one tensor kv (batch, seqlen_k, 2, nheads_k, headdim)."""

flash_attn_varlen_func = adapted(
    "flash_attn_varlen_func", f"q, k, v, {_OFFSETS}, {_OPTIONS}, block_table=None, *, {_USED}, {_OURS}", _call
)
"""Attention over documents laid end to end: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim)."""

flash_attn_varlen_qkvpacked_func = adapted(
    "flash_attn_varlen_qkvpacked_func", f"qkv, cu_seqlens, max_seqlen=None, {_OPTIONS}, *, {_OURS}", _call
)
"""`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim)."""

flash_attn_varlen_kvpacked_func = adapted(
    "flash_attn_varlen_kvpacked_func", f"q, kv, {_OFFSETS}, {_OPTIONS}, *, {_USED}, {_OURS}", _call
)
"""`flash_attn_varlen_func` of q and one tensor kv (total_k, 2, nheads_k, headdim)."""


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """Not supported: attention that writes to a cache, for inference. It exists so that packages can import it.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "flash_attn_with_kvcache isn't supported by tritonpack.flash_attn, which is for training. Use "
        "flash_attn_varlen_func with seqused_k for a cache that is written already, or FlashAttention for inference."
    )
