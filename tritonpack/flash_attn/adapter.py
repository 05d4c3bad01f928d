"""Arguments of another library's function under our names."""

from __future__ import annotations

from typing import Any

from tritonpack.checks import describe

# Name of another library -> our names. Arguments without one change no result and are ignored. Names that aren't here
# are ours, too.
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "cu_seq_q": ("cu_seqlens_q",),
    "cu_seq_k": ("cu_seqlens_k",),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "is_causal": ("causal",),
    "softmax_scale": ("scale",),
    "s_aux": ("sinks",),
    "learnable_sink": ("sinks",),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "min_seqlen_k"), ()),
    **dict.fromkeys(("deterministic", "num_splits", "pack_gqa", "sm_margin", "return_lse"), ()),
    **dict.fromkeys(("scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"), ()),
}

# Arguments that tritonpack doesn't support -> what it supports instead.
_ANY_SCORE = "softcap, ALiBi slopes and sinks"
_ANY_MASK = (
    "documents, causal masks and windows, and any mask with one interval of keys per query through "
    "tritonpack.varlen_attention"
)
_PAGES = (
    "keys and values end to end, (total_k, heads, headdim) with cu_seqlens_k, and seqused_k for documents that fill "
    "only a part of their place"
)
REMEDIES = {
    **dict.fromkeys(("aux_scalars", "aux_tensors", "score_mod", "score_mod_bwd"), _ANY_SCORE),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices", "mask_mod"), _ANY_MASK),
    **dict.fromkeys(("block_table", "page_table"), _PAGES),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "bfloat16, float16, float32 and float64"),
    "qv": "the same as one product of torch.cat([q, qv], -1) and torch.cat([k, v], -1), up to 512 wide",
}


def to_ours(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function, its `locals()`, under the names of `core.flash_attention`.

    Raises:
        ValueError: an argument that isn't supported is given.
    """
    ours = {}
    for name, value in arguments.items():
        if name not in REMEDIES:
            ours.update(dict.fromkeys(NAMES.get(name, (name,)), value))
        elif value is not None:
            what = f"{name} isn't supported by tritonpack.flash_attn; got {describe(value)}"
            raise ValueError(f"{what}. Supported: {REMEDIES[name]}.")
    return ours
