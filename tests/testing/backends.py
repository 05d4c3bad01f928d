"""Functions that are called as flash_attn_varlen_func is: a right one, and wrong ones that are made of it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention

NAN = float("nan")


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, s_aux: Tensor | None = None,
    make_mask: Callable[..., BlockDiagonalMask] = BlockDiagonalMask.from_cu_seqlens,
) -> Any:  # fmt: skip
    """FlashAttention 2's function with sinks, on the blocked backend."""
    rows = {"total_q": q.shape[0], "total_k": k.shape[0]}
    mask = make_mask(cu_seqlens_q, cu_seqlens_k, causal=causal, window=window_size, **rows)
    out, lse = varlen_attention(
        q, k, v, mask, scale=softmax_scale, softcap=softcap, sinks=s_aux, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, return_lse=True, backend="blocked",
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def altered(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with attention's signature that calls `change(attention, **all arguments)`."""
    signature = inspect.signature(attention)

    @functools.wraps(change)
    def function(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        return change(attention, **bound.arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def map_out(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace out in a result, which may have an lse."""
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)


def map_lse(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (result[0], change(result[1]), *result[2:]) if isinstance(result, tuple) else result


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with a gradient that is changed."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(change)
    return x


@altered
def ignores_boundaries(call: Any, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> Any:
    return call(cu_seqlens_q=cu_seqlens_q[[0, -1]], cu_seqlens_k=cu_seqlens_k[[0, -1]], **rest)


@altered
def window_off_by_one(call: Any, window_size: Any, **rest: Any) -> Any:
    return call(window_size=tuple(side + (side >= 0) for side in window_size), **rest)


@altered
def top_left(call: Any, **rest: Any) -> Any:
    def make_mask(cu_q: Tensor, cu_k: Tensor, *, causal: bool, window: Any, **rows: int) -> BlockDiagonalMask:
        mask = BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, causal=causal, window=window, **rows)
        if not causal or torch.equal(cu_q, cu_k):
            return mask
        whole = BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, causal=False, **rows)
        place = torch.arange(whole.num_queries) - cu_q[whole.document]
        stop = torch.minimum(whole.key_start + place.int() + 1, whole.key_stop)
        return BlockDiagonalMask(whole.key_start, stop, whole.num_keys)

    return call(**rest | {"make_mask": make_mask})


@altered
def scale_forgotten(call: Any, softmax_scale: Any, **rest: Any) -> Any:
    return call(**rest)


@altered
def garbage_in_slack(call: Any, cu_seqlens_q: Tensor, **rest: Any) -> Any:
    def spoil(out: Tensor) -> Tensor:
        live = torch.arange(out.shape[0]) < cu_seqlens_q[-1]
        return torch.where(live[:, None, None], out, NAN)

    return map_out(call(cu_seqlens_q=cu_seqlens_q, **rest), spoil)


@altered
def garbage_in_gradients_of_slack(call: Any, k: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> Any:
    live = torch.arange(k.shape[0]) < cu_seqlens_k[-1]
    k = with_gradient(k, lambda dk: torch.where(live[:, None, None], dk, 1e-30))
    return call(k=k, cu_seqlens_k=cu_seqlens_k, **rest)


@altered
def slack_leaks(call: Any, q: Tensor, cu_seqlens_q: Tensor, **rest: Any) -> Any:
    """Slack rows reach dq, because 0 * NaN is NaN."""
    q = with_gradient(q, lambda dq: dq + 0.0 * rest["v"].detach().sum())
    return call(q=q, cu_seqlens_q=cu_seqlens_q, **rest)


@altered
def head_order(call: Any, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    """Query head h reads key head h % H_kv instead of h // (H / H_kv)."""
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))
    return call(q=q, k=k, v=v, **rest)


@altered
def softcap_ignored(call: Any, softcap: Any, **rest: Any) -> Any:
    return call(**rest)


@altered
def low_precision(call: Any, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    result = call(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16(), **rest)
    return map_out(result, lambda out: out.to(q.dtype))


@altered
def noisy(call: Any, **rest: Any) -> Any:
    return map_out(call(**rest), lambda out: out * (1 + 1e-7 * torch.rand_like(out)))


@altered
def noisy_gradient(call: Any, v: Tensor, **rest: Any) -> Any:
    return call(v=with_gradient(v, lambda dv: dv * (1 + 1e-7 * torch.rand_like(dv))), **rest)


@altered
def drops_dk(call: Any, k: Tensor, **rest: Any) -> Any:
    return call(k=k.detach(), **rest)


@altered
def zeros_for_dk(call: Any, k: Tensor, **rest: Any) -> Any:
    return call(k=with_gradient(k, torch.zeros_like), **rest)


@altered
def raises_on_empty_documents(call: Any, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> Any:
    if not (cu_seqlens_q.diff().all() and cu_seqlens_k.diff().all()):
        raise RuntimeError("an empty document\nand a second line")
    return call(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **rest)


@altered
def lse_to_the_base_2(call: Any, **rest: Any) -> Any:
    return map_lse(call(**rest), lambda lse: lse * 1.4426950408889634)


@altered
def lse_of_nothing_is_nan(call: Any, **rest: Any) -> Any:
    return map_lse(call(**rest), lambda lse: lse.masked_fill(lse.isinf(), NAN))


@altered
def lse_gradient_dropped(call: Any, **rest: Any) -> Any:
    """lse requires a gradient that backward ignores, as in FlashAttention 2."""
    return map_lse(call(**rest), lambda lse: with_gradient(lse, torch.zeros_like))


@altered
def writes_to_q(call: Any, q: Tensor, **rest: Any) -> Any:
    result = call(q=q.clone(), **rest)
    q.data[:1] += 1e-6
    return result


@altered
def strides_ignored(call: Any, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    def packed(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))

    return call(q=packed(q), k=packed(k), v=packed(v), **rest)


@altered
def exponentials_overflow(call: Any, **rest: Any) -> Any:
    result = call(**rest | {"return_attn_probs": True})
    result = map_out(result, lambda out: torch.where((result[1] > 88).any(0)[:, None, None], NAN, out))
    return result if rest["return_attn_probs"] else result[0]


@altered
def dropout_not_scaled(call: Any, dropout_p: float, **rest: Any) -> Any:
    return map_out(call(dropout_p=dropout_p, **rest), lambda out: out * (1 - dropout_p))


@altered
def dropout_ignored(call: Any, dropout_p: float, **rest: Any) -> Any:
    return call(**rest)


@altered
def dropout_differs_in_backward(call: Any, **rest: Any) -> Any:
    return call(**rest | {"v": with_gradient(rest["v"], lambda dv: dv.roll(1, 0) if rest["dropout_p"] else dv)})


@altered
def out_in_float64(call: Any, **rest: Any) -> Any:
    return map_out(call(**rest), Tensor.double)
