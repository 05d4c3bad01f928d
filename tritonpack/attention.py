"""varlen_attention: exact softmax attention over a packed batch, forward and backward, on the backend that fits.

Every backend is two functions, and one autograd function serves them all:

    forward(q, k, v, mask, *, scale) -> (out, lse)
    backward(dout, dlse, q, k, v, out, lse, mask, *, scale) -> (dq, dk, dv)
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tritonpack.errors import BackendUnavailableError
from tritonpack.mask import BlockDiagonalMask

Backend = Literal["auto", "triton", "blocked", "reference"]

HEAD_DIMS = range(16, 257)

# Where torch computes with MKL, the first float32 exponential of a process, if spread over several threads, can come
# out 1e-4 off in one thread's share (seen with torch 2.13 in one process of seven). One small call settles it.
torch.exp(torch.zeros(1))

_MODULES = {
    "triton": "tritonpack.kernels.attention",
    "blocked": "tritonpack.blocked",
    "reference": "tritonpack.reference",
}


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float | None = ...,
    return_lse: Literal[False] = ..., backend: Backend = ...,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float | None = ..., return_lse: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockDiagonalMask,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each query sees exactly the keys that the mask gives it.

    Rows that see nothing (padding, slack) come out as zeros, whatever they contain; nothing they contain reaches any
    other row, and their gradients are zeros. Forward and backward are deterministic. Under `torch.autocast` q, k and v
    are cast to its dtype, as torch's own attention does.

    Args:
        q: (T_q, H, D) float32, float16, bfloat16, or float64 where the backend is in torch. D from 16 to 256.
        k: (T_k, H_kv, D), same dtype and device; H_kv divides H, and each key head serves H / H_kv query heads in
            order.
        v: (T_k, H_kv, D), same dtype and device.
        mask: the keys of each query, `mask.num_queries == T_q` and `mask.num_keys == T_k`, same device.
        scale: what scores are multiplied by before the softmax; None means 1 / sqrt(D).
        return_lse: also return the log-sum-exp of each row's scores.
        backend: "triton" (kernels; a GPU, or Triton's interpreter), "blocked" (torch, walks the mask's blocks, O(T)
            memory; reads the mask on the host), "reference" (torch, dense, O(T^2) memory) or "auto": triton on a GPU,
            blocked elsewhere and for float64. A backend asked for by name runs or raises; no other takes its place.

    Returns:
        out (T_q, H, D) in q's dtype; with `return_lse` also lse (H, T_q) float32 (float64 for float64 inputs), natural
        logarithm, -inf in rows that see nothing. Both are differentiable.

    Raises:
        ValueError: shapes, dtypes, devices or a scale that don't fit; the message says what would.
        BackendUnavailableError: (a ValueError) the backend can't run here.

    Source: Dao, FlashAttention-2 (arXiv:2307.08691); the derivation for interval masks is docs/math.md, sections 2 and
        3.
    """
    q, k, v = _autocast(q, k, v)
    scale = _check_inputs(q, k, v, mask, scale)
    out, lse = _Attention.apply(q, k, v, mask, scale, resolve_backend(backend, q))
    return (out, lse) if return_lse else out


def resolve_backend(backend: Backend, q: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` serve inputs like q.

    Raises:
        ValueError: an unknown name.
        BackendUnavailableError: the backend that was named can't run on these inputs.
    """
    if backend == "auto":
        backend = "triton" if q.is_cuda and q.dtype != torch.float64 else "blocked"
    if backend not in _MODULES:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, _MODULES))}; got {backend!r}.")
    if backend == "triton":
        _check_triton(q)
    return import_module(_MODULES[backend])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, scale: float, module: Any) -> Any:
        with _plain_precision(q):
            out, lse = module.forward(q, k, v, mask, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale, ctx.module = mask, scale, module
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        with _plain_precision(q):
            grads = ctx.module.backward(dout, dlse, q, k, v, out, lse, ctx.mask, scale=ctx.scale)
        return *grads, None, None, None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on; float64 stays, as in torch."""

    def cast(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        on = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
        return x.to(torch.get_autocast_dtype(x.device.type)) if on else x

    return tuple(cast(x) for x in tensors)


def _plain_precision(q: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: the backends choose the precision of each product themselves."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, scale: float | None) -> float:
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 3:
            given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{name} must be a tensor of shape (tokens, heads, head_dim); got {given}. Flatten a batch (B, H, T, "
                "D) with "
                ".transpose(1, 2).flatten(0, 1)."
            )
    dtypes = [tensor.dtype for tensor in tensors.values()]
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if len(set(dtypes)) > 1 or dtypes[0] not in allowed:
        raise ValueError(
            f"q, k and v must share one dtype of bfloat16, float16, float32, float64; got {_join(dtypes)}. Cast them "
            "first."
        )
    if not isinstance(mask, BlockDiagonalMask):
        raise ValueError(
            f"mask must be a tritonpack.BlockDiagonalMask; got {type(mask).__name__}. Build one with "
            "BlockDiagonalMask.from_cu_seqlens "
            "or one of its siblings."
        )
    devices = [tensor.device for tensor in tensors.values()] + [mask.device]
    if len(set(devices)) > 1:
        raise ValueError(f"q, k, v and mask must be on one device; got {_join(devices)}.")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {tuple(k.shape)} and {tuple(v.shape)}.")
    heads, kv_heads = q.shape[1], k.shape[1]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads; got {heads} and {kv_heads}."
        )
    if q.shape[2] != k.shape[2] or q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"q, k and v must share a head dimension from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; got {q.shape[2]}, "
            f"{k.shape[2]} "
            f"and {v.shape[2]}."
        )
    if (mask.num_queries, mask.num_keys) != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"the mask is for {mask.num_queries} queries and {mask.num_keys} keys, but q has {q.shape[0]} rows and k "
            f"{k.shape[0]}. Pass "
            "total_q and total_k if the tensors have slack rows past the last document."
        )
    if scale is None:
        return 1.0 / math.sqrt(q.shape[2])
    if isinstance(scale, Tensor) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(
            f"scale must be a positive finite number (not a tensor), or None for 1/sqrt(head_dim); got {scale!r}."
        )
    return float(scale)


def _check_triton(q: Tensor) -> None:
    try:
        from triton import knobs
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend='triton' needs Triton 3.6 or later, which can't be imported here ({error}); install it or use "
            "backend='blocked'."
        ) from error
    if not q.is_cuda and not knobs.runtime.interpret:
        raise BackendUnavailableError(
            f"backend='triton' needs tensors on a GPU; got {q.device}. Use backend='blocked' (or 'auto'), or set "
            "TRITON_INTERPRET=1 "
            "before Python starts to run the kernels in Triton's interpreter."
        )
    if q.dtype == torch.float64:
        raise BackendUnavailableError(
            "backend='triton' takes bfloat16, float16 and float32; got float64. Use backend='blocked' or 'reference'."
        )


def _join(values: list[Any]) -> str:
    return ", ".join(str(value).replace("torch.", "") for value in values)
