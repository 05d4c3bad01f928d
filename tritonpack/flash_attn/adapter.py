"""Functions with another library's signature, which is text here, computed by `flash_attention` with our names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
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
    "max_q": ("max_seqlen_q",),
    "max_k": ("max_seqlen_k",),
    "max_seqlen": ("max_seqlen_q", "max_seqlen_k"),
    "is_causal": ("causal",),
    "softmax_scale": ("scale",),
    "s_aux": ("sinks",),
    "learnable_sink": ("sinks",),
    **dict.fromkeys(("deterministic", "num_splits", "pack_gqa", "sm_margin", "min_seqlen_k", "return_lse"), ()),
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


def adapted(name: str, parameters: str, call: Callable[..., Any], **names: tuple[str, ...]) -> Callable[..., Any]:
    """A function with these parameters, whose arguments `call` gets under our names.

    Args:
        name: of the function.
        parameters: as in a definition, such as "q, k, v, softmax_scale=None, *, backend='auto'".
        call: computes the result.
        **names: our names of single arguments, where they differ from `NAMES`.

    Raises:
        TypeError: Python's own, for missing and unknown arguments.
        ValueError: an argument that isn't supported is given.
    """
    names = NAMES | names
    theirs = inspect.signature(eval(f"lambda {parameters}: None")).parameters
    bind = eval(f"lambda {parameters}: dict({', '.join(f'{one}={one}' for one in theirs)})")
    bind.__name__ = bind.__qualname__ = name
    bind.__module__, bind.__doc__ = call.__module__, f"{name}({parameters})\n\n{call.__globals__['__doc__']}"

    @wraps(bind)
    def function(*args: Any, **keywords: Any) -> Any:
        ours = {}
        for one, value in bind(*args, **keywords).items():
            if one not in REMEDIES:
                ours.update(dict.fromkeys(names.get(one, (one,)), value))
            elif value is not None:
                what = f"{one} isn't supported by tritonpack.flash_attn; got {describe(value)}"
                raise ValueError(f"{what}. Supported: {REMEDIES[one]}.")
        return call(**ours)

    return function
