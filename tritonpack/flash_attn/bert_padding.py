"""Padded rows to a packed stream and back, as `flash_attn.bert_padding` names it. Ordinary torch; differentiable.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/bert_padding.py, version 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of `input` (rows, ...) at `indices` (n,): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` (n, ...) in the rows `indices` (n,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch as one stream; waits for the device, for their number.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or integers, 1 for tokens.
        unused_mask: (batch, seqlen), 1 for places that are kept but don't count.

    Returns:
        hidden_states (total, ...); the indices (total,) of its rows in the flattened batch; cu_seqlens (batch + 1,)
        int32; the longest row, an integer; and how many tokens of each row count, (batch,) int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if lengths.numel() else 0,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The batch (batch, seqlen, ...) that `unpad_input` made (total, ...) of, with zeros for padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
