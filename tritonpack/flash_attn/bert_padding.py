"""Padded rows to a packed stream and back, with the names of `flash_attn.bert_padding`, in differentiable torch.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/bert_padding.py, version 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.checks import MASKS, describe, require

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
    """The tokens of a padded batch as one stream; waits for the device, which counts them.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or integers, 1 for tokens and 0 for padding.
        unused_mask: (batch, seqlen), 1 for padding that is kept but doesn't count.

    Returns:
        hidden_states (total, ...); the indices (total,) of its rows in the flattened batch; cu_seqlens (batch + 1,)
        int32; the length of the longest row, an integer; and the tokens of each row that count, (batch,) int32.

    Raises:
        ValueError: other shapes, dtypes or numbers.
    """
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim < 2:
        raise ValueError(f"hidden_states must be a tensor (batch, seqlen, ...); got {describe(hidden_states)}.")
    shape, masks = hidden_states.shape[:2], [attention_mask, *([] if unused_mask is None else [unused_mask])]
    if not all(isinstance(mask, Tensor) and mask.shape == shape and mask.dtype in MASKS for mask in masks):
        given = " and ".join(map(describe, masks))
        raise ValueError(f"attention_mask and unused_mask must be bool or integer {tuple(shape)}; got {given}.")
    numbers = torch.stack([mask.to(torch.int64) for mask in masks])
    kept = numbers.sum(0)
    require(
        (numbers >= 0).all() & (kept <= 1).all(),
        "attention_mask must hold 0 and 1, and unused_mask may be 1 where it holds 0. Other numbers tell no documents "
        "apart here; lay documents end to end and pass their cu_seqlens instead.",
    )
    lengths, indices = kept.sum(-1, dtype=torch.int32), kept.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if lengths.numel() else 0,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) of a stream (total, ...) from `unpad_input`, with zeros for padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
