"""The mask function and the attention functions that transformers calls under tritonpack's names.

Calls of a model that has one of the names and isn't patched are refused. Towers are the parts of a model that make
embeddings of images or sounds. A model that is loaded with attn_implementation='tritonpack' has this name in all of its
parts, also in towers, which `patch` doesn't change. So the attention of towers runs here, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from tritonpack.attention import varlen_attention
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.patches.families import SDPA_DROPS_MASK, WITHIN_TOKENS
from tritonpack.patches.guards import require_masks_kept
from tritonpack.patches.layers.positions import TEMPERATURES, temperature
from tritonpack.patches.mask_spec import CAUSAL, read_mask_spec
from tritonpack.patches.modules import models_in
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving, as_addend
from tritonpack.patches.parse_inputs import NOT_PATCHED, LazyMask, LazyMaskError

NO_WEIGHTS = "output_attentions=True: tritonpack's attention returns no weights; unpatch the model to get them."

# The name of the attention in a patched model's configuration, for each attention that runs.
NAMES = {"tritonpack": "tritonpack", **{name: f"tritonpack_{name}" for name in ("sdpa", "eager", "dense")}}


def takes_sdpa(module: PreTrainedModel) -> bool:
    """Return whether transformers' sdpa computes all of a module's attention.

    sdpa has no softcap. Newer versions of transformers refuse it; older ones drop the softcap without a warning.
    """
    return bool(module._supports_sdpa) and not getattr(module.config, "attn_logit_softcapping", None)


def use_eager_if_sdpa_differs(model: nn.Module) -> None:
    """Set eager attention in modules for which sdpa drops a softcap or a mask in some versions of transformers.

    Call it for the unpatched model that gives the expected results of a proof.
    """
    for module in models_in(model):
        differs = not takes_sdpa(module) or module.config.model_type in SDPA_DROPS_MASK
        if differs and module.config._attn_implementation_internal == "sdpa":
            module.config._attn_implementation_internal = "eager"


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Any = None, local_size: int | None = None,
    dtype: torch.dtype = torch.float32, config: Any = None, device: torch.device | str = "cpu", **flags: Any,
) -> Any:  # fmt: skip
    """Make the `attention_mask` of all layers of one kind; called by transformers as its mask function."""
    mask: PackedBatch | IntervalMask | LazyMask | Tensor | None = attention_mask
    if isinstance(mask, LazyMask):
        return mask
    if not isinstance(mask, IntervalMask):
        plain = mask_function is causal_mask_function
        spec = CAUSAL if plain else read_mask_spec(mask_function, local_size, config, flags, q_length)
        if not isinstance(mask, PackedBatch):
            shape = torch.Size((batch_size, 1, q_length, kv_length))
            # A static cache changes its offset in place before layers resolve the mask.
            offset = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
            return LazyMask(mask, shape, offset, kv_offset, spec, torch.device(device))
        mask = mask.interval_mask(kv_length, q_offset, kv_offset, spec)
    return mask.dense(dtype) if mask.serving.attention == "dense" else mask


def interval_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: query (B, H, T, D), key (B, H_kv, K, D) and value (B, H_kv, K, D_v)
    -> (B, T, H, D_v) and None for weights.

    Causality, window and documents come from the mask alone. If `attention_mask` is a tensor, the model has computed it
    from that mask.
    """
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(NO_WEIGHTS)
    if attention_mask is None and not takes_tokens(module):
        return attend_in_tower(module, query, key, value, dropout, scaling, **kwargs), None
    softcap, indices, position_bias = kwargs.get("softcap"), kwargs.get("indices"), kwargs.get("position_bias")
    sinks = kwargs.get("sinks")
    sinks = kwargs.get("s_aux") if sinks is None else sinks
    if isinstance(attention_mask, Tensor) or indices is not None or position_bias is not None:
        if softcap or kwargs.get("block_indices") is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} combines its own mask with softcap or blocks, which tritonpack doesn't "
                "support; unpatch the model."
            )
        query, position_bias = _scale_by_place(module, query, position_bias, attention_mask)
        dense = _dense(module, attention_mask, key, torch.bool, kwargs)
        return dense_attention_forward(query, key, value, dense, indices, position_bias, sinks, dropout, scaling), None
    mask = attention_mask
    if not isinstance(mask, IntervalMask) or mask.shape[3] != key.shape[2]:
        mask = _interval_mask_for(module, mask, key, kwargs)
    batch, heads, length, _ = query.shape
    if mask.shape[0] != batch or mask.shape[2] != length:
        raise ValueError(
            f"the mask is for {mask.shape[0]} rows of {mask.shape[2]} queries, but attention got {batch} rows of "
            f"{length}: {type(module).__name__} changes the number of queries after its mask is made, which tritonpack "
            "doesn't support; unpatch the model."
        )
    if type(module).__name__ in TEMPERATURES:
        query, _ = _scale_by_place(module, query, None, mask)
    out = mask.attention(
        query.transpose(1, 2).flatten(0, 1), key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1),
        scale=scaling, softcap=softcap or 0.0, sinks=None if sinks is None else sinks.flatten(), dropout_p=dropout,
    )  # fmt: skip
    return out.reshape(batch, length, heads, value.shape[3]), None


def attend_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention by transformers' sdpa with the dense mask of the documents."""
    indices, bias = kwargs.pop("indices", None), kwargs.pop("position_bias", None)
    query, bias = _scale_by_place(module, query, bias, attention_mask)
    mask = _dense(module, attention_mask, key, torch.bool, kwargs)
    if indices is None and bias is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    return dense_attention_forward(query, key, value, mask, indices, bias, None, dropout, scaling), None


def attend_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention by the model's own eager function with the dense mask of the documents."""
    own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    indices, bias = kwargs.pop("indices", None), kwargs.pop("position_bias", None)
    if type(module).__name__ in WITHIN_TOKENS:
        return own(module, query, key, value, None, **kwargs)
    query, bias = _scale_by_place(module, query, bias, attention_mask)
    mask = _dense(module, attention_mask, key, query.dtype, kwargs)
    if indices is not None:
        mask = mask.masked_fill(~_index_mask(indices, mask), torch.finfo(mask.dtype).min)
    if bias is not None:
        kwargs["position_bias"] = bias
    return own(module, query, key, value, mask, **kwargs)


def dense_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, indices: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, dropout: float, scaling: float | None,
) -> Tensor:  # fmt: skip
    """Attention by torch, O(T^2) memory, for models that add their own mask or bias to the documents' mask.

    Args:
        mask: (B, 1 or H, T, K) bool, or floating point to be added to scores.
        indices: (B, T, top-k), the keys that an indexer chose among the visible ones.
        bias: (B, H, T, K), added to scores.
        sinks: (H,) or (B, H, T, 1), the score of a key without a value, for each head or for each query.
    """
    if indices is not None:
        chosen = _index_mask(indices, mask)
        mask = mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -math.inf)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
    if sinks is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
        column = sinks if sinks.ndim == 4 else sinks.view(1, -1, 1, 1)
        column = column.to(query.dtype).expand(query.shape[0], -1, query.shape[2], -1)
        mask = torch.cat([mask.expand(-1, query.shape[1], -1, -1), column], dim=-1)
        key, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    attention = nn.functional.scaled_dot_product_attention
    out = attention(query, key, value, mask, dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous()


def _index_mask(indices: Tensor, mask: Tensor) -> Tensor:
    """Return (B, 1, T, K) bool, True for the keys that an indexer chose by their (B, T, top-k) places, -1 for none."""
    chosen = torch.zeros((*indices.shape[:2], mask.shape[-1]), dtype=torch.bool, device=mask.device)
    return chosen.scatter_(-1, indices.long().clamp(min=0), indices >= 0)[:, None]


def _scale_by_place(module: nn.Module, query: Tensor, bias: Tensor | None, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Scale queries and their bias by the place in the document instead of the place in the row."""
    scale = temperature(module, mask) if isinstance(mask, IntervalMask) else None
    if scale is None:
        return query, bias
    return (query * scale).to(query.dtype), None if bias is None else (bias * scale).to(bias.dtype)


def _dense(module: nn.Module, mask: Any, key: Tensor, dtype: torch.dtype, arguments: dict[str, Any]) -> Tensor:
    """Return the mask as a tensor: bool, or additive in another dtype. The model may already have made a tensor of
    it."""
    if not isinstance(mask, Tensor):
        return _interval_mask_for(module, mask, key, arguments).dense(dtype)
    return mask if mask.dtype != torch.bool or dtype == torch.bool else as_addend(mask, dtype)


def _interval_mask_for(module: nn.Module, mask: Any, key: Tensor, arguments: dict[str, Any]) -> IntervalMask:
    """Return the mask of the documents for a layer's keys (B, H_kv, K, D); resolve it if it is pending.

    It is pending if generate() has made it, or if the model has our name and isn't patched.
    """
    if isinstance(mask, IntervalMask):
        interval_mask = mask.for_keys(key.shape[2])
    elif not isinstance(mask, LazyMask):
        require_masks_kept(module)
        got = "no mask" if mask is None else f"a {type(mask).__name__}"
        raise ValueError(
            f"a layer of a patched model got {got} instead of the mask of the documents. Four-dimensional attention "
            "masks aren't supported: mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask, "
            "and call the model, not its layers."
        )
    elif takes_tokens(module) and mask.resolved is None:
        raise LazyMaskError(f"the attention of {type(module).__name__} {NOT_PATCHED}")
    else:
        interval_mask = mask.resolve(arguments, Serving("tritonpack", "auto"))
    if interval_mask.shape[3] != key.shape[2]:
        raise ValueError(
            f"the mask is for {interval_mask.shape[2]} queries and {interval_mask.shape[3]} keys, but attention got "
            f"{key.shape[2]} keys: {type(module).__name__} changes the number of keys after its mask is made. If a "
            "layer runs several times and writes to one cache, pass use_cache=False. Otherwise unpatch the model."
        )
    return interval_mask


# The attention function of each name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    NAMES["tritonpack"]: interval_attention_forward,
    NAMES["sdpa"]: attend_sdpa,
    NAMES["eager"]: attend_eager,
    NAMES["dense"]: attend_sdpa,
}

# Options of attention that no known tower uses; a tower that uses one is refused.
NOT_IN_TOWERS = ("softcap", "s_aux", "sinks", "indices", "position_bias", "block_indices", "sliding_window")


def takes_tokens(module: nn.Module) -> bool:
    """Return whether an attention layer attends among tokens of text, which may be packed documents.

    A tower has no vocabulary. A few layers of language models attend among the states of one token.
    """
    config = getattr(module, "config", None)
    of_text = config is None or getattr(config, "vocab_size", None) is not None
    return of_text and type(module).__name__ not in WITHIN_TOKENS


def attend_in_tower(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, **kwargs: Any
) -> Tensor:
    """Attention of a tower without a mask: query, key and value (B, H, T, D) -> (B, T, H, D_v).

    A query sees its whole row, or its image if `cu_seq_lens_q` and `cu_seq_lens_k` give the bounds of images.
    """
    if unknown := [name for name in NOT_IN_TOWERS if kwargs.get(name) is not None]:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)}, which tritonpack's attention doesn't support in "
            "towers of images or sounds. Set attn_implementation='sdpa' or 'eager' for its sub-config."
        )
    offsets_q, offsets_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if offsets_q is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal=False)[0]
    mask = BlockDiagonalMask.from_cu_seqlens(
        offsets_q, offsets_k, causal=False, total_q=query.shape[2], total_k=key.shape[2]
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, mask, scale=scaling, dropout_p=dropout)[None]
