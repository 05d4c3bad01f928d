"""FlashAttention-2's functions, with its parameters and its return values.

In all of them:

- `dropout_p`, `softmax_scale` (None: 1 / sqrt(headdim)), `causal` (the diagonal ends in the bottom right corner),
  `window_size` ((left, right), inclusive, -1 without limit) and `softcap` (0: none) are FlashAttention-2's. A side
  below -1 and a softcap below 0 are refused.
- `alibi_slopes` is (nheads,) or (batch, nheads) float32, with float64 inputs also float64, and has no gradient.
- `deterministic` is ignored: results are always deterministic.
- `return_attn_probs=True` returns (out, softmax_lse, S_dmask). softmax_lse is float32, (nheads, total_q) or (batch,
  nheads, seqlen_q), +inf in rows that see nothing, and differentiable. S_dmask is for tests: with dropout (batch,
  nheads, max_seqlen_q, max_seqlen_k), each pair's probability, negative where it was dropped; empty without.
- Only by keyword, and not in FlashAttention-2: `s_aux`, (nheads,) attention sinks, differentiable; `seqused_q` and
  `seqused_k`, (batch,) how many rows of each document count; `backend`, as in `tritonpack.varlen_attention`.
- Rows past the last offset, and rows that see nothing, give zeros and get zero gradients.
- Inputs are bfloat16, float16, float32 or float64. Head dimensions are from 1 to 512; v may have another than q and k.
- They raise ValueError for shapes, dtypes, devices or options that don't fit or aren't supported (paged caches).

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py, version 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from tritonpack.attention import Backend
from tritonpack.checks import check_flag, is_number
from tritonpack.flash_attn.core import flash_attention
from tritonpack.flash_attn.spelling import spelled

Returned = Tensor | tuple[Tensor, Tensor, Tensor]
WindowSize = Sequence[int] | Tensor

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _call(*, return_attn_probs: bool, dropout_p: float, **arguments: Any) -> Returned:
    for name, count in (("qkv", 3), ("kv", 2)):
        if name in arguments:
            parts = _unpacked(arguments.pop(name), name, count, 4 if "cu_seqlens_q" in arguments else 5)
            arguments.update(zip("qkv"[-count:], parts, strict=True))
    check_flag(return_attn_probs, "return_attn_probs")
    want = return_attn_probs and is_number(dropout_p) and dropout_p > 0
    out, lse, probabilities = flash_attention(return_probabilities=want, dropout_p=dropout_p, **arguments)
    return (out, lse.masked_fill(lse.isneginf(), float("inf")), probabilities) if return_attn_probs else out


def _unpacked(x: Any, name: str, count: int, ndim: int) -> tuple[Tensor, ...]:
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != count:
        shape = f"({'total' if ndim == 4 else 'batch, seqlen'}, {count}, heads, headdim)"
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be {shape}; got {given}.")
    return x.unbind(-3)


@spelled(_call)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Returned:  # fmt: skip
    """Attention over a batch of rows of one length.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k, v: (batch, seqlen_k, nheads_k, headdim); nheads_k divides nheads.
        dropout_p, ..., backend: see the module.

    Returns:
        out (batch, seqlen_q, nheads, headdim of v), or (out, softmax_lse, S_dmask).
    """


@spelled(_call)
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Returned:  # fmt: skip
    """`flash_attn_func` of one tensor qkv (batch, seqlen, 3, nheads, headdim)."""


@spelled(_call)
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    backend: Backend = "auto",
) -> Returned:  # fmt: skip
    """`flash_attn_func` of q and one tensor kv (batch, seqlen_k, 2, nheads_k, headdim)."""


@spelled(_call)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None, *, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Returned:  # fmt: skip
    """Attention over documents laid end to end.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim); nheads_k divides nheads.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64 on q's device, the begins of the documents and the end
            of the last. Layers that pass the same tensor objects share one mask.
        max_seqlen_q, max_seqlen_k: not needed. An integer is checked if the offsets lie in host memory.
        block_table: not supported.
        dropout_p, ..., backend: see the module.

    Returns:
        out (total_q, nheads, headdim of v), or (out, softmax_lse, S_dmask).
    """


@spelled(_call)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Returned:  # fmt: skip
    """`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim)."""


@spelled(_call)
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, s_aux: Tensor | None = None, backend: Backend = "auto",
) -> Returned:  # fmt: skip
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
