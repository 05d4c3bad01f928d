"""Calls with FlashAttention's or torch's arguments, computed by `varlen_attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.checks import check_flag, check_reach, describe, holds_numbers, is_int
from tritonpack.flash_attn.masks import mask_from_offsets, regular_offsets

# Names of other libraries -> ours, where they differ.
NAMES = {
    "query": "q", "key": "k", "value": "v", "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k",
    "is_causal": "causal", "softmax_scale": "scale", "s_aux": "sinks", "learnable_sink": "sinks",
}  # fmt: skip
# Arguments that change nothing here.
IGNORED = {
    "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "min_seqlen_k", "deterministic", "num_splits", "pack_gqa",
    "sm_margin", "return_lse", "return_aux", "enable_gqa", "scheduler_metadata", "seqlen_k_per_split",
    "disable_scheduler_metadata",
}  # fmt: skip
# Arguments that tritonpack doesn't support -> what it supports instead.
_SCORES = "softcap, ALiBi slopes and sinks"
_MASKS = "causal masks and windows, and in tritonpack.varlen_attention any mask with one interval of keys per query"
_PAGES = "keys and values end to end with cu_seqlens_k, and FlashAttention-3's seqused_k for places filled in part"
REMEDIES = {
    **dict.fromkeys(("aux_scalars", "aux_tensors", "score_mod", "score_mod_bwd"), _SCORES),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices", "mask_mod"), _MASKS),
    **dict.fromkeys(("block_table", "page_table"), _PAGES),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "bfloat16, float16, float32 and float64"),
    "qv": "the same as one product of torch.cat([q, qv], -1) and torch.cat([k, v], -1), up to 512 wide",
}


def attention(arguments: dict[str, Any]) -> Any:
    """Compute out from the `locals()` of a library's function, or (out, lse) unless `return_attn_probs` is False."""
    ours: dict[str, Any] = {"return_attn_probs": True}
    for name, value in arguments.items():
        if name in REMEDIES and value is not None:
            what = f"{name} isn't supported by tritonpack.flash_attn; got {describe(value)}"
            raise ValueError(f"{what}. Supported: {REMEDIES[name]}.")
        if name not in REMEDIES and name not in IGNORED:
            ours[NAMES.get(name, name)] = value
    return _attention(**ours)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, *,
    causal: bool, window_size: Any, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    attention_chunk: int | None = None, softcap: float | None = 0.0, return_attn_probs: bool, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    check_flag(return_attn_probs, "return_attn_probs")
    if isinstance(window_size, (tuple, list)):
        window_size = tuple(-1 if side is None else side for side in window_size)
    reach: dict[str, Any] = {"causal": causal, "window": window_size, "chunk_size": attention_chunk or None}
    check_reach(**reach)  # here and not in the mask, because masks are kept by their options, and 1 == True
    streams: dict[str, Any] = {}
    for name, x, cu in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k), ("v", v, cu_seqlens_k)):
        shape = ("batch", "seqlen", "heads", "headdim") if cu is None else ("total", "heads", "headdim")
        if not isinstance(x, Tensor) or x.ndim != len(shape):
            raise ValueError(f"{name} must be ({', '.join(shape)}); got {describe(x)}.")
        streams[name] = x.flatten(0, 1) if cu is None else x
    cu_q = regular_offsets(q.shape[0], q.shape[1], q.device) if cu_seqlens_q is None else cu_seqlens_q
    cu_k = regular_offsets(k.shape[0], k.shape[1], k.device) if cu_seqlens_k is None else cu_seqlens_k
    numbers = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    for name, values in numbers.items():
        if values is not None and not (holds_numbers(values) and values.ndim == 1 and values.device == q.device):
            what = f"{name} must be a one-dimensional int32 or int64 tensor on q's device; got {describe(values)}"
            raise ValueError(f"{what}. Make one per batch, and pass it to every layer.")
    slopes, documents = options.get("alibi_slopes"), cu_q.shape[0] - 1
    if isinstance(slopes, Tensor) and slopes.ndim == 2 and slopes.shape[0] != documents:
        raise ValueError(f"alibi_slopes must be (heads,) or ({documents} documents, heads); got {describe(slopes)}.")
    totals = {"total_q": streams["q"].shape[0], "total_k": streams["k"].shape[0]}
    mask = mask_from_offsets(cu_q, cu_k, seqused_q, seqused_k, **totals, **reach)
    out, lse = varlen_attention(**streams, mask=mask, softcap=softcap or 0.0, return_lse=True, **options)
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_attn_probs else out


def unpacked(x: Tensor, count: int, num_heads_q: int | None = None) -> Any:
    """The parts of qkv (..., 3, heads, headdim) or kv (..., 2, heads, headdim), or of FlashAttention-3's qkv."""
    shape = x.shape if isinstance(x, Tensor) else ()
    if is_int(num_heads_q) and len(shape) == 4 and 0 < num_heads_q < shape[2] and (shape[2] - num_heads_q) % 2 == 0:
        return x.split([num_heads_q, *[(shape[2] - num_heads_q) // 2] * 2], 2)
    if len(shape) > 3 and shape[-3] == count:
        return x.unbind(-3)
    raise ValueError(
        f"{'qkv'[-count:]} must be (..., {count}, heads, headdim), or FlashAttention-3's (batch, seqlen, num_heads_q + "
        f"2 * kv_heads, headdim) with num_heads_q; got {describe(x)} and num_heads_q={num_heads_q!r}."
    )
