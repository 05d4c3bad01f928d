"""Attention without documents that has our name: of towers, and among the states of one token.

Towers are the parts of a model that turn images or sounds into embeddings. A model that is loaded with our name has it
in all of its parts. `patch` does not change towers, so their attention runs here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tritonpack.attention import varlen_attention
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.patches.families import WITHIN_TOKENS

# Options of attention that no known tower uses; a tower that does is refused.
MORE_THAN_A_TOWER = ("softcap", "s_aux", "sinks", "indices", "position_bias", "block_indices", "sliding_window")


def takes_tokens(module: nn.Module) -> bool:
    """Whether an attention layer attends among tokens of text, which may be packed documents.

    A tower has no vocabulary. A few layers of language models attend among the states of one token.
    """
    config = getattr(module, "config", None)
    of_text = config is None or getattr(config, "vocab_size", None) is not None
    return of_text and not attends_within_tokens(module)


def attends_within_tokens(module: nn.Module) -> bool:
    """Whether an attention layer attends among the states of one token, which needs no mask."""
    return type(module).__name__ in WITHIN_TOKENS


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
