"""The functions that transformers calls by our names: one makes the mask of a kind of layer, the others are attention.

If a model has one of the names and isn't patched, its calls are refused. Towers are the parts of a model that turn
images or sounds into embeddings. A model that is loaded with our name has it in all of its parts, and `patch` does not
change towers, so their attention runs here, too.
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
from tritonpack.patches.families import UNLIKE_BY_SDPA, WITHIN_TOKENS
from tritonpack.patches.guards import require_masks_kept
from tritonpack.patches.layers.positions import TEMPERATURES, temperature
from tritonpack.patches.mask_spec import CAUSAL, read_mask_spec
from tritonpack.patches.modules import models_in
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving, added
from tritonpack.patches.parse_inputs import NOT_PATCHED, OpenMask, OpenMaskError

NO_WEIGHTS = "output_attentions=True: tritonpack's attention has no weights; unpatch the model."

# The name of the attention in a patched model's configuration, for each attention that runs.
NAMES = {"tritonpack": "tritonpack", **{one: f"tritonpack_{one}" for one in ("sdpa", "eager", "dense")}}


def takes_sdpa(module: PreTrainedModel) -> bool:
    """Whether transformers' sdpa computes all of a module's attention.

    It has no softcap. Newer versions of transformers say so; older ones drop the softcap without a word.
    """
    return bool(module._supports_sdpa) and not getattr(module.config, "attn_logit_softcapping", None)


def use_eager_if_sdpa_differs(model: nn.Module) -> None:
    """Let modules of a model run by eager attention where sdpa drops a softcap or a mask in some transformers.

    Call it for a model whose documents alone are what packed documents are compared with.
    """
    for module in models_in(model):
        differs = not takes_sdpa(module) or module.config.model_type in UNLIKE_BY_SDPA
        if differs and module.config._attn_implementation_internal == "sdpa":
            module.config._attn_implementation_internal = "eager"


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Any = None, local_size: int | None = None,
    dtype: torch.dtype = torch.float32, config: Any = None, device: torch.device | str = "cpu", **flags: Any,
) -> Any:  # fmt: skip
    """transformers' mask function: makes the `attention_mask` of all layers of one kind."""
    mask: PackedBatch | IntervalMask | OpenMask | Tensor | None = attention_mask
    if isinstance(mask, OpenMask):
        return mask
    if not isinstance(mask, IntervalMask):
        plain = mask_function is causal_mask_function
        spec = CAUSAL if plain else read_mask_spec(mask_function, local_size, config, flags, q_length)
        if not isinstance(mask, PackedBatch):
            shape = torch.Size((batch_size, 1, q_length, kv_length))
            # A static cache changes its offset in place before layers claim the mask.
            offset = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
            return OpenMask(mask, shape, offset, kv_offset, spec, torch.device(device))
        mask = mask.interval_mask(kv_length, q_offset, kv_offset, spec)
    return mask.dense(dtype) if mask.serving.attention == "dense" else mask


def interval_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: query (B, H, T, D), key (B, H_kv, K, D) and value (B, H_kv, K, D_v)
    -> (B, T, H, D_v) and no weights.

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
                f"{type(module).__name__} combines a mask of its own with softcap or blocks, which tritonpack doesn't "
                "support; unpatch the model."
            )
        query, position_bias = _tuned(module, query, position_bias, attention_mask)
        dense = _dense(module, attention_mask, key, torch.bool, kwargs)
        return dense_attention_forward(query, key, value, dense, indices, position_bias, sinks, dropout, scaling), None
    mask = attention_mask
    if not isinstance(mask, IntervalMask) or mask.shape[3] != key.shape[2]:
        mask = _claimed(module, mask, key, kwargs)
    batch, heads, length, _ = query.shape
    if mask.shape[0] != batch or mask.shape[2] != length:
        raise ValueError(
            f"the mask is for {mask.shape[0]} rows of {mask.shape[2]} queries but attention got {batch} rows of "
            f"{length}: {type(module).__name__} changes its queries between mask and attention, which tritonpack "
            "doesn't support; unpatch the model."
        )
    if type(module).__name__ in TEMPERATURES:
        query, _ = _tuned(module, query, None, mask)
    out = mask.attention(
        query.transpose(1, 2).flatten(0, 1), key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1),
        scale=scaling, softcap=softcap or 0.0, sinks=None if sinks is None else sinks.flatten(), dropout_p=dropout,
    )  # fmt: skip
    return out.reshape(batch, length, heads, value.shape[3]), None


def attend_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa, with the dense mask of the documents."""
    indices, bias = kwargs.pop("indices", None), kwargs.pop("position_bias", None)
    query, bias = _tuned(module, query, bias, attention_mask)
    mask = _dense(module, attention_mask, key, torch.bool, kwargs)
    if indices is None and bias is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    return dense_attention_forward(query, key, value, mask, indices, bias, None, dropout, scaling), None


def attend_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, with the dense mask of the documents."""
    own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    indices, bias = kwargs.pop("indices", None), kwargs.pop("position_bias", None)
    if type(module).__name__ in WITHIN_TOKENS:
        return own(module, query, key, value, None, **kwargs)
    query, bias = _tuned(module, query, bias, attention_mask)
    mask = _dense(module, attention_mask, key, query.dtype, kwargs)
    if indices is not None:
        mask = mask.masked_fill(~_chosen(indices, mask), torch.finfo(mask.dtype).min)
    if bias is not None:
        kwargs["position_bias"] = bias
    return own(module, query, key, value, mask, **kwargs)


def dense_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, indices: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, dropout: float, scaling: float | None,
) -> Tensor:  # fmt: skip
    """torch's attention, O(T^2) memory, for models that add a mask or a bias of their own to the documents' mask.

    Args:
        mask: (B, 1 or H, T, K) bool, or floating point to be added to scores.
        indices: (B, T, top-k) the keys that an indexer chose, among those of the mask.
        bias: (B, H, T, K), added to scores.
        sinks: (H,) or (B, H, T, 1), the score of a key without a value, for each head or for each query.
    """
    if indices is not None:
        chosen = _chosen(indices, mask)
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


def _chosen(indices: Tensor, mask: Tensor) -> Tensor:
    """(B, 1, T, K) bool: the keys that an indexer chose, from their (B, T, top-k) places, -1 for none."""
    chosen = torch.zeros((*indices.shape[:2], mask.shape[-1]), dtype=torch.bool, device=mask.device)
    return chosen.scatter_(-1, indices.long().clamp(min=0), indices >= 0)[:, None]


def _tuned(module: nn.Module, query: Tensor, bias: Tensor | None, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Queries, and the bias that belongs to them, scaled by their place in the document instead of the row."""
    tuning = temperature(module, mask) if isinstance(mask, IntervalMask) else None
    if tuning is None:
        return query, bias
    return (query * tuning).to(query.dtype), None if bias is None else (bias * tuning).to(bias.dtype)


def _dense(module: nn.Module, mask: Any, key: Tensor, dtype: torch.dtype, arguments: dict[str, Any]) -> Tensor:
    """The mask as a tensor: bool, or additive of another dtype. The model may have made a tensor of it already."""
    if not isinstance(mask, Tensor):
        return _claimed(module, mask, key, arguments).dense(dtype)
    return mask if mask.dtype != torch.bool or dtype == torch.bool else added(mask, dtype)


def _claimed(module: nn.Module, mask: Any, key: Tensor, arguments: dict[str, Any]) -> IntervalMask:
    """The mask of the documents for a layer's keys (B, H_kv, K, D), also of a call whose documents are known only now.

    That is a call whose mask generate() has made, or of a model that has our name and isn't patched.
    """
    if isinstance(mask, IntervalMask):
        found = mask.for_keys(key.shape[2])
    elif not isinstance(mask, OpenMask):
        require_masks_kept(module)
        given = "no mask" if mask is None else f"a {type(mask).__name__}"
        raise ValueError(
            f"a patched model's layer got {given} where it needs the packed one. Four-dimensional attention masks "
            "aren't supported: mark documents by position_ids (or cu_seq_lens_q, seq_idx, a two-dimensional mask), and "
            "call the model, not its layers."
        )
    elif takes_tokens(module) and mask.claimed is None:
        raise OpenMaskError(f"the attention of {type(module).__name__} {NOT_PATCHED}")
    else:
        found = mask.claim(arguments, Serving("tritonpack", "auto"))
    if found.shape[3] != key.shape[2]:
        raise ValueError(
            f"the mask is for {found.shape[2]} queries and {found.shape[3]} keys but attention got {key.shape[2]} "
            f"keys: {type(module).__name__} changes its keys between mask and attention. Layers that run several times "
            "may write to one cache: pass use_cache=False. Otherwise unpatch the model."
        )
    return found


# The attention function of each of our names.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    NAMES["tritonpack"]: interval_attention_forward,
    NAMES["sdpa"]: attend_sdpa,
    NAMES["eager"]: attend_eager,
    NAMES["dense"]: attend_sdpa,
}


# Options of attention that no known tower uses; a tower that does is refused.
MORE_THAN_A_TOWER = ("softcap", "s_aux", "sinks", "indices", "position_bias", "block_indices", "sliding_window")


def takes_tokens(module: nn.Module) -> bool:
    """Whether an attention layer attends among tokens of text, which may be packed documents.

    A tower has no vocabulary. A few layers of language models attend among the states of one token.
    """
    config = getattr(module, "config", None)
    of_text = config is None or getattr(config, "vocab_size", None) is not None
    return of_text and type(module).__name__ not in WITHIN_TOKENS


def attend_in_tower(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, **kwargs: Any
) -> Tensor:
    """Attention of a tower that gives no mask: query, key and value (B, H, T, D) -> (B, T, H, D_v).

    A query sees its whole row, or its image if the call says by `cu_seq_lens_q` and `cu_seq_lens_k` where images end.
    """
    if unknown := [name for name in MORE_THAN_A_TOWER if kwargs.get(name) is not None]:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for {', '.join(unknown)}, which tritonpack's attention doesn't compute for "
            "a tower. Give its sub-config attn_implementation='sdpa' or 'eager'."
        )
    offsets_q, offsets_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if offsets_q is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal=False)[0]
    mask = BlockDiagonalMask.from_cu_seqlens(
        offsets_q, offsets_k, causal=False, total_q=query.shape[2], total_k=key.shape[2]
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, mask, scale=scaling, dropout_p=dropout)[None]
