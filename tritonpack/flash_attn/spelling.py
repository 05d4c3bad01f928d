"""Functions with another library's signature, computed by `flash_attention` with our names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tritonpack.checks import describe

P = ParamSpec("P")
R = TypeVar("R")

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


def spelled(call: Callable[..., Any], **names: tuple[str, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of a signature with an empty body; `call` gets its arguments under our names.

    Args:
        call: computes the result.
        **names: our names of single arguments, where they differ from `NAMES`.

    Raises:
        ValueError: an argument that isn't supported is given.
    """
    names = NAMES | names

    def decorate(signature: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(signature).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        order = tuple(parameters)

        @wraps(signature)
        def function(*args: P.args, **keywords: P.kwargs) -> R:
            signature(*args, **keywords)  # Python's errors for missing and unknown arguments
            given = {**defaults, **dict(zip(order, args, strict=False)), **keywords}
            ours = {}
            for name, value in given.items():
                if name not in REMEDIES:
                    ours.update(dict.fromkeys(names.get(name, (name,)), value))
                elif value is not None:
                    what = f"{name} isn't supported by tritonpack.flash_attn; got {describe(value)}"
                    raise ValueError(f"{what}. Supported: {REMEDIES[name]}.")
            return call(**ours)

        return function

    return decorate


def from_text(name: str, arguments: str, doc: str, call: Callable[..., Any], **names: tuple[str, ...]) -> Any:
    """`spelled` for a signature that is given as text, such as "q, k, v, softmax_scale=None, *, backend='auto'"."""
    signature = eval(f"lambda {arguments}: None")
    signature.__name__ = signature.__qualname__ = name
    signature.__module__, signature.__doc__ = call.__module__, f"{name}({arguments})\n\n{doc}"
    return spelled(call, **names)(signature)
