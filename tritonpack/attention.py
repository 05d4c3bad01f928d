"""varlen_attention: exact softmax attention over a packed batch, forward and backward."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tritonpack.backends import Backend, resolve_backend
from tritonpack.checks import check_flag
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.ops import autocast, run_attention
from tritonpack.options import make_options

MAX_HEAD_DIM = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# With MKL, the first float32 exponential of a process can be wrong by 1e-4 in the part of one thread, if several
# threads compute it (seen with torch 2.13 in one process of seven). One small call prevents this.
torch.exp(torch.zeros(1, device="cpu"))


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ..., pack_invariant: bool = ..., return_lse: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ..., pack_invariant: bool = ..., return_lse: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockDiagonalMask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    pack_invariant: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each query sees exactly the keys of the mask.

    Rows that see no key (padding, slack) return zeros, get zero gradients, and never change another row. Forward and
    backward are deterministic. Under `torch.autocast` q, k and v are cast to its dtype, as in torch's own attention.

    Args:
        q: (T_q, H, D) float32, float16, bfloat16, or float64 for the backends in torch. D from 1 to 512.
        k: (T_k, H_kv, D), same dtype and device; H_kv divides H, and consecutive H / H_kv query heads share a key
            head.
        v: (T_k, H_kv, D_v), same dtype and device; D_v from 1 to 512.
        mask: the keys of each query, `mask.num_queries == T_q` and `mask.num_keys == T_k`, same device.
        scale: the factor by which scores are multiplied before the softmax; None means 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2; 0.0 means no cap.
        sinks: (H,) floating point, each head's score of a key without a value, which every query sees besides its own
            keys (gpt-oss). Rows that see no key don't see the sink either. Differentiable.
        alibi_slopes: (H,), or (documents, H) for a mask that numbers its documents, float32, with float64 inputs also
            float64: scores lose the slope times the distance of the key from the query's own place, after softcap. Not
            differentiable. Source: Press, Smith and Lewis, ALiBi (arXiv:2108.12409).
        dropout_p: the probability that a pair's weight is dropped; the other weights are divided by 1 - dropout_p.
        dropout_seed: an integer, or an int64 scalar on q's device; the same seed drops the same pairs on every
            backend. None draws a seed from torch's generator.
        pack_invariant: whether results and gradients of a document have the same bits alone and at every place of every
            pack (on a CPU with the same number of threads), and a NaN or an infinity in a document never changes
            another document. Without it, they may change documents in the same tile. It is slower for short documents.
            Not with dropout or trees, nor on the reference backend.
        return_lse: whether to also return the log-sum-exp of each row's scores, sink included.
        backend: "triton" (kernels; a GPU, or Triton's interpreter), "gluon" (experimental: another forward kernel, for
            Hopper GPUs, 16-bit types, D = D_v of 64, 128 or 256, and neither softcap nor sinks, ALiBi or dropout),
            "blocked" (torch, block by block, O(T) memory; reads the mask on the host), "reference" (torch, dense,
            O(T^2) memory) or "auto": triton on a GPU, blocked elsewhere and for float64. A named backend runs or
            raises an error; no other backend replaces it.

    Returns:
        out (T_q, H, D_v) in q's dtype; with `return_lse` also lse (H, T_q) float32 (float64 for float64 inputs),
        natural logarithm, -inf in rows that see nothing. Both are differentiable.

    Raises:
        ValueError: wrong shapes, dtypes, devices or options; the message says what is allowed.
        BackendUnavailableError: (a ValueError) the backend can't run here.

    Source: Dao, FlashAttention-2 (arXiv:2307.08691); the derivation for interval masks is docs/math.md, sections 2, 3
        and 6.
    """
    q, k, v = autocast(q, k, v)
    check_inputs(q, k, v, mask)
    check_flag(return_lse, "return_lse")
    options = make_options(
        q,
        mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        pack_invariant=pack_invariant,
    )
    out, lse = run_attention(q, k, v, mask, options, resolve_backend(backend, q))
    return (out, lse) if return_lse else out


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask) -> None:
    """Raise ValueError unless q, k, v and the mask fit `varlen_attention`."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} must be a torch tensor of shape (tokens, heads, head_dim); got {type(tensor).__name__}. "
                "Convert it, for example with torch.as_tensor."
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor; got {tensor.layout}. Use .to_dense().")
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} must be a tensor of shape (tokens, heads, head_dim); got shape {tuple(tensor.shape)}. Flatten "
                "a batch (B, H, T, D) with .transpose(1, 2).flatten(0, 1)."
            )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must share one dtype of bfloat16, float16, float32, float64; got "
            f"{_join(q.dtype, k.dtype, v.dtype)}. Cast them first."
        )
    if not isinstance(mask, BlockDiagonalMask):
        raise ValueError(
            f"mask must be a tritonpack.BlockDiagonalMask; got {type(mask).__name__}. Build one with "
            "BlockDiagonalMask.from_cu_seqlens or another of its from_ constructors."
        )
    if not q.device == k.device == v.device == mask.device:
        devices = _join(q.device, k.device, v.device, mask.device)
        raise ValueError(f"q, k, v and mask must be on one device; got {devices}. Move them with .to(device).")
    (num_queries, heads, head_dim), (num_keys, kv_heads, _), head_dim_v = q.shape, k.shape, v.shape[2]
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"k and v must have the same numbers of tokens and heads; got {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads; got {heads} and {kv_heads}."
        )
    if head_dim != k.shape[2] or not 1 <= head_dim <= MAX_HEAD_DIM or not 1 <= head_dim_v <= MAX_HEAD_DIM:
        raise ValueError(
            f"q and k must have the same head dimension, v may have another, each from 1 to {MAX_HEAD_DIM}; got "
            f"{head_dim}, {k.shape[2]} and {head_dim_v}."
        )
    if mask.num_queries != num_queries or mask.num_keys != num_keys:
        remedy = "Pass total_q and total_k if the tensors have slack rows past the last document."
        if mask.is_tree:
            remedy = (
                "A mask of trees supports neither a cache nor cross-attention: pass a parent for each row, -2 for "
                "slack."
            )
        raise ValueError(
            f"the mask is for {mask.num_queries} queries and {mask.num_keys} keys, but q has {num_queries} rows and k "
            f"{num_keys}. {remedy}"
        )


def _join(*values: Any) -> str:
    return ", ".join(str(value).replace("torch.", "") for value in values)
