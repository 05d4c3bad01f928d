"""Functions that are called as flash_attn_varlen_func is: a right one, and wrong ones that are made of it."""

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


def altered(change: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Return a function with attention's signature that calls `change(attention, **all arguments)`."""
    signature = inspect.signature(attention)

    def function(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        return change(attention, **bound.arguments)

    function.__qualname__, function.__signature__ = name or change.__name__, signature  # type: ignore[attr-defined]
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


def top_left(cu_q: Tensor, cu_k: Tensor, *, causal: bool, window: Any, **rows: int) -> BlockDiagonalMask:
    """A mask whose diagonal begins in the top left corner."""
    mask = BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, causal=causal, window=window, **rows)
    if not causal or torch.equal(cu_q, cu_k):
        return mask
    whole = BlockDiagonalMask.from_cu_seqlens(cu_q, cu_k, causal=False, **rows)
    place = torch.arange(whole.num_queries) - cu_q[whole.document]
    return BlockDiagonalMask(
        whole.key_start, torch.minimum(whole.key_start + place.int() + 1, whole.key_stop), whole.num_keys
    )


def in_slack(x: Tensor, cu: Tensor, value: float) -> Tensor:
    """Another value in the rows past the last document."""
    return torch.where((torch.arange(x.shape[0]) < cu[-1])[:, None, None], x, value)


def noise(x: Tensor) -> Tensor:
    return x * (1 + 1e-7 * torch.rand_like(x))


def as_packed(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))


def written(q: Tensor, result: Any) -> Any:
    q.data[:1] += 1e-6
    return result


def overflowing(result: Any, return_attn_probs: bool) -> Any:
    result = map_out(result, lambda out: torch.where((result[1] > 88).any(0)[:, None, None], NAN, out))
    return result if return_attn_probs else result[0]


def without_empty(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> dict[str, Tensor]:
    if not (cu_seqlens_q.diff().all() and cu_seqlens_k.diff().all()):
        raise RuntimeError("an empty document\nand a second line")
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


# The name of a defect -> a function of attention and its arguments that has it, and the checks that it fails: patterns
# of names, and after "but" those among them that it passes.
DEFECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "ignores_boundaries": (lambda call, cu_seqlens_q, cu_seqlens_k, alibi_slopes=None, **rest: call(
        cu_seqlens_q=cu_seqlens_q[[0, -1]], cu_seqlens_k=cu_seqlens_k[[0, -1]],
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.view(-1, alibi_slopes.shape[-1])[0], **rest),
        "forward/* backward/* inputs/large-scores inputs/slices empty/* isolation/* lse/* dropout/* "
        "but */one-document */window-self empty/all"),
    "window_off_by_one": (lambda call, window_size, **rest: call(
        window_size=tuple(x + (x >= 0) for x in window_size), **rest), "*/window-* */*-window but */window-wide"),
    "top_left": (lambda call, **rest: call(**rest | {"make_mask": top_left}),
                 "*/cross */cross-more-queries */sinks-cross lse/empty-rows but isolation/*"),
    "scale_forgotten": (lambda call, softmax_scale, **rest: call(**rest), "*/scale"),
    "garbage_in_slack": (
        lambda call, **rest: map_out(call(**rest), lambda out: in_slack(out, rest["cu_seqlens_q"], NAN)), "slack/*"),
    "garbage_in_gradients_of_slack": (lambda call, k, **rest: call(
        k=with_gradient(k, lambda dk: in_slack(dk, rest["cu_seqlens_k"], 1e-30)), **rest), "slack/*"),
    # Slack rows reach dq, because 0 * NaN is NaN.
    "slack_leaks": (lambda call, q, **rest: call(
        q=with_gradient(q, lambda dq: dq + 0.0 * rest["v"].detach().sum()), **rest), "slack/*"),
    # Query head h reads key head h % H_kv instead of h // (H / H_kv).
    "head_order": (lambda call, q, k, v, **rest: call(
        q, *(x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v)), **rest), "*/group-of-three inputs/slices"),
    "softcap_ignored": (lambda call, softcap, **rest: call(**rest), "*/softcap*"),
    "low_precision": (lambda call, q, k, v, **rest: map_out(
        call(q.bfloat16(), k.bfloat16(), v.bfloat16(), **rest), lambda out: out.to(q.dtype)),
        "forward/* backward/* inputs/* empty/* lse/* dropout/* but inputs/unchanged empty/all"),
    "noisy": (lambda call, **rest: map_out(call(**rest), noise), "repeat/*"),
    "noisy_gradient": (lambda call, v, **rest: call(v=with_gradient(v, noise), **rest), "repeat/*"),
    "drops_dk": (lambda call, k, **rest: call(k=k.detach(), **rest),
                 "backward/* inputs/* empty/* lse/gradient but inputs/unchanged"),
    "zeros_for_dk": (
        lambda call, k, **rest: call(k=with_gradient(k, torch.zeros_like), **rest), "backward/* inputs/* empty/* "
        "lse/gradient but inputs/unchanged empty/all */one-token-documents */window-self"),
    "raises_on_empty_documents": (lambda call, cu_seqlens_q, cu_seqlens_k, **rest: call(
        **without_empty(cu_seqlens_q, cu_seqlens_k), **rest), "empty/*"),
    "lse_to_the_base_2": (
        lambda call, **rest: map_lse(call(**rest), lambda lse: lse * 1.4426950408889634), "lse/*"),
    "lse_of_nothing_is_nan": (
        lambda call, **rest: map_lse(call(**rest), lambda lse: lse.masked_fill(lse.isinf(), NAN)), "lse/empty-rows"),
    # lse requires a gradient that backward ignores, as in FlashAttention 2.
    "lse_gradient_dropped": (lambda call, **rest: map_lse(
        call(**rest), lambda lse: with_gradient(lse, torch.zeros_like)), "lse/gradient"),
    "writes_to_q": (lambda call, q, **rest: written(q, call(q=q.clone(), **rest)), "inputs/unchanged"),
    "strides_ignored": (lambda call, q, k, v, **rest: call(*map(as_packed, (q, k, v)), **rest), "inputs/slices"),
    "exponentials_overflow": (lambda call, return_attn_probs, **rest: overflowing(
        call(return_attn_probs=True, **rest), return_attn_probs), "inputs/large-scores"),
    "dropout_not_scaled": (lambda call, dropout_p, **rest: map_out(
        call(dropout_p=dropout_p, **rest), lambda out: out * (1 - dropout_p)), "dropout/*"),
    "dropout_ignored": (lambda call, dropout_p, **rest: call(**rest), "dropout/*"),
    "dropout_differs_in_backward": (lambda call, v, **rest: call(
        v=with_gradient(v, lambda dv: dv.roll(1, 0) if rest["dropout_p"] else dv), **rest), "dropout/*"),
    "out_in_float64": (lambda call, **rest: map_out(call(**rest), Tensor.double), "*"),
}  # fmt: skip
WRONG = {name: altered(change, name) for name, (change, _) in DEFECTS.items()}
softcap_ignored = WRONG["softcap_ignored"]
