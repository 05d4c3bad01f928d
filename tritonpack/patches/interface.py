"""The two functions that transformers calls: one makes the mask of a kind of layer, the other attends.

Both are registered under one name. A model whose attention has that name without having been patched is refused: its
packing would be lost before it reaches the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from tritonpack.attention import varlen_attention
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.families import UNSUPPORTED_ARGUMENTS
from tritonpack.patches.packing import IntervalMask, Packing, cached_mask, first_tokens

NAME = "tritonpack"


def register() -> None:
    """Make the name known to transformers; no model uses it before it is patched."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Packing | IntervalMask | Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> IntervalMask:
    """transformers' mask function: what every layer of one kind gets as `attention_mask`."""
    if use_vmap or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedModelError(
            "this model lays a mask of its own over causal attention, which tritonpack doesn't support yet; unpatch it."
        )
    if isinstance(attention_mask, IntervalMask):
        return attention_mask
    if isinstance(attention_mask, Packing):
        return attention_mask.interval_mask(kv_length, q_offset, kv_offset, local_size)
    # generate() with a cache of fixed size prepares the mask before it calls the model: a padded batch, never a packed
    # one. Its backend stays open until a patched decoder claims it.
    rows = (torch.arange(q_length, device=device) + q_offset).expand(batch_size, q_length)
    begin = torch.zeros((batch_size, 1), dtype=torch.long, device=rows.device)
    if attention_mask is not None:
        begin = first_tokens(attention_mask)[:, None]
    window = (-1 if local_size is None else local_size - 1, 0)
    mask = cached_mask(rows, begin, kv_length, kv_offset, window)
    return IntervalMask(mask, torch.Size((batch_size, 1, q_length, kv_length)), backend=None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: IntervalMask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (B, H, T, D), key and value (B, H_kv, K, D) -> (B, T, H, D) and no
    weights.

    The mask is the truth: windows, causality and documents are in it already.
    """
    if not isinstance(attention_mask, IntervalMask):
        given = "no mask" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise ValueError(
            f"a patched model's layer got {given} where it needs the packed one. Four-dimensional attention masks "
            "aren't supported: mark "
            "documents by position_ids (or cu_seq_lens_q, seq_idx, a two-dimensional mask), and call the model, not "
            "its layers."
        )
    if attention_mask.backend is None:
        raise ValueError(
            "this model's attention is named 'tritonpack' but the model isn't patched (it may share its config object "
            "with one that "
            "is), so packed documents would not be told apart. Call tritonpack.patch(model), or give it a config of "
            "its own."
        )
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout} isn't supported yet; set model.config.attention_dropout = 0.0 before "
            "building the model, or "
            "call model.eval()."
        )
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if unsupported or kwargs.get("output_attentions"):
        raise UnsupportedModelError(
            f"attention asks for {', '.join(unsupported) or 'output_attentions'}, which tritonpack doesn't support "
            "yet; unpatch the model."
        )
    batch, _, length, _ = query.shape
    if attention_mask.shape[0] != batch or attention_mask.shape[2:] != (length, key.shape[2]):
        raise ValueError(
            f"the mask is for {tuple(attention_mask.shape)} (batch, 1, queries, keys) but attention got {batch} rows "
            f"of {length} queries and "
            f"{key.shape[2]} keys; this model changes its keys between mask and attention, which tritonpack doesn't "
            "support."
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    mask = attention_mask.mask.to(q.device) if attention_mask.device != q.device else attention_mask.mask
    out = varlen_attention(q, k, v, mask, scale=scaling, backend=attention_mask.backend)  # type: ignore[call-overload]
    return out.unflatten(0, (batch, length)), None
