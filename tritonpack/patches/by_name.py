"""Models whose attention has our name without having been patched: what they can't do, and their towers.

Such a model gives its layers nothing of ours but the attention function. Where other layers mix tokens along the row
too, or count positions by themselves, attention alone can't keep documents apart. And its parts get the name, too, such
as a tower that turns images into embeddings, which patch() would have left alone.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tritonpack.attention import varlen_attention
from tritonpack.errors import UnsupportedModelError
from tritonpack.mask import BlockDiagonalMask
from tritonpack.patches.families import COUNT_FROM_PADDING, MIXERS, POSITION_TABLES, REFUSED, REFUSED_LAYERS

# What attention would have to do besides, if a tower asked for it; known ones don't.
MORE_THAN_A_TOWER = ("softcap", "s_aux", "sinks", "indices", "position_bias", "block_indices", "sliding_window")

_NEED_A_PATCH = {*MIXERS, *POSITION_TABLES, *REFUSED_LAYERS}


def require_attention_alone(module: nn.Module) -> None:
    """Refuse the attention layer of a family of which attention is but one of the layers that mix documents.

    Raises:
        UnsupportedModelError: with the remedy, patch(), or why there is none.
    """
    home = type(module).__module__
    kind = (home.split(".")[-2:] or [""])[0]  # a part's config has a type of its own
    if why := REFUSED.get(kind):
        raise UnsupportedModelError(f"models of type {kind!r} can't be packed exactly: {why}.")
    if kind.replace("_", "-") in COUNT_FROM_PADDING or kind == "data2vec":
        raise UnsupportedModelError(
            f"models of type {kind!r} count positions from their padding token, position ids from 0. Call "
            "tritonpack.patch(model)."
        )
    if layers := _special_layers(home):
        raise UnsupportedModelError(
            f"{type(module).__name__} has tritonpack's attention by name, but models of its family have other layers "
            f"that must know where documents begin ({', '.join(layers)}). Call tritonpack.patch(model)."
        )


def takes_tokens(module: nn.Module) -> bool:
    """Whether an attention layer belongs to a language model, and not to the tower in front of one that turns images
    or sounds into embeddings: a tower has no vocabulary, and its rows are never packed documents."""
    config = getattr(module, "config", None)
    return config is None or getattr(config, "vocab_size", None) is not None


def attend_in_tower(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, **kwargs: Any
) -> Tensor:
    """Attention of a tower that gives no mask: each row sees all of itself, or, where offsets come along, each image.

    Args:
        query, key, value: (B, H, T, D).
        kwargs: `cu_seq_lens_q` and `cu_seq_lens_k`, where images end, for B of 1; what else attention is given.

    Returns:
        (B, T, H, D_v).
    """
    if unknown := [name for name in MORE_THAN_A_TOWER if kwargs.get(name) is not None]:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for {', '.join(unknown)}, which tritonpack's attention by name doesn't do "
            "for a tower; give its sub-config 'sdpa' or 'eager'."
        )
    offsets_q, offsets_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if offsets_q is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal=False)[0]
    mask = BlockDiagonalMask.from_cu_seqlens(
        offsets_q, offsets_k, causal=False, total_q=query.shape[2], total_k=key.shape[2]
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, mask, scale=scaling, dropout_p=dropout)[None]


@cache
def _special_layers(home: str) -> tuple[str, ...]:
    """The layers among a modeling file's classes that patch() makes something of, by name."""
    return tuple(sorted(_NEED_A_PATCH & set(vars(sys.modules[home]))))
